"""The file of a converted program: JSON, without code and without weights. No torch is needed to read it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..errors import CheckpointError, InvalidRequestError, UnsupportedError
from ..models.blocks import Model
from ..models.config import ModelConfig
from ..models.pieces import Piece
from ..models.program import Operands, Value, Weight
from ..models.registry import COMPUTED_BUFFERS, Architecture

FORMAT = 1
LARGEST = 64 << 20  # bytes of a file
MOST = 1_000_000  # operations, values or weights
_MOST_ROWS = (1 << 31) - 1

# Fields of a configuration that the engine reads beside the program, under the names that all families share.
FIELDS = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")


_NO_MEANING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash")


def config_key(raw: Mapping[str, object]) -> str:
    """A digest of the fields of config.json that a program depends on."""
    fields = {name: value for name, value in raw.items() if name not in _NO_MEANING}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def digest_of(contents: Mapping[str, object]) -> str:
    """A digest of all contents of a file but the digest."""
    rest = {name: value for name, value in contents.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fields_of(config: Any) -> dict[str, object]:
    """The fields that the engine reads, from a configuration object of transformers."""
    fields: dict[str, object] = {name: getattr(config, name, None) for name in FIELDS}
    for name in ("head_dim", "rope_parameters"):
        fields[name] = getattr(config, name, None)
    try:
        longest = ModelConfig({**fields, "architectures": [""]}, "config.json").max_position_embeddings
    except UnsupportedError:  # ropes of unknown layer types, whose frequencies the program has
        longest = int(config.max_position_embeddings)
    head_dim = fields["head_dim"] or int(config.hidden_size) // int(config.num_attention_heads)
    return {**fields, "max_position_embeddings": longest, "head_dim": head_dim, "rope_parameters": {}, "rope_scaling": {}}


def written(m: Model, config: Any, ignored: list[str], prefix: str) -> dict[str, object]:
    """A program as the contents of a file.

    Args:
        m: The program.
        config: transformers' configuration object.
        ignored: Tensors that checkpoints may hold although the program does not use them.
        prefix: Name of the base model within the class; checkpoints of the base model alone lack it.
    """
    spec = m.spec
    operations = {number: op for op, operands in reversed(spec["ops"]) for number in operands["weights"]}
    return {
        "format": FORMAT,
        "architecture": spec["architecture"],
        "fields": fields_of(config.get_text_config()),
        "ignored": ignored,
        "prefix": prefix,
        "values": spec["values"],
        "operations": [[op, operands] for op, operands in spec["ops"] if op != "states"],
        "weights": [_weight(each, operations.get(i, "")) for i, each in enumerate(spec["weights"])],
        "ropes": [{**rope, "inv_freq": rope["inv_freq"].hex()} for rope in spec["ropes"]],
        "layers": spec["layers"],
        "vocab_size": spec["vocab_size"],
        "states": spec["ops"][-1][1]["in"][0],
    }


def _weight(weight: Weight, operation: str) -> dict[str, object]:
    if weight["values"] is not None:
        return {"values": weight["values"].hex()}
    pieces = [[p.name, list(p.shape), p.rows, p.base, p.inner, p.stride, p.transposed] for p in weight["parts"]]
    made = {"kind": weight["kind"], "cols": weight["cols"], "pieces": pieces, "operation": operation}
    return {**made, "offset": weight["offset"]} if weight["offset"] else made


def read(path: Path, raw: Mapping[str, object] | None = None) -> Architecture:
    """A converted program as a registered architecture.

    Args:
        path: The file.
        raw: The fields of the config.json that the program has to be of; None: they are not compared.

    Raises:
        CheckpointError: the file is damaged or changed, or it is the program of another config.json.
        UnsupportedError: another version of llmpy wrote it.
    """
    size = path.stat().st_size
    if size > LARGEST:
        raise CheckpointError(f"{path}: wanted a program of at most {LARGEST} bytes, have {size}", file=str(path))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it is no object")
        if found.get("format") != FORMAT:
            raise UnsupportedError(f"{path}: wanted format {FORMAT}, have {found.get('format')!r}; convert the model again")
        if "digest" in found and found["digest"] != digest_of(found):
            raise ValueError("its contents have changed since it was written (a file without its digest is not compared)")
        program = Program(found, str(path))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: it is no converted program: {type(error).__name__}: {error}", file=str(path)) from error
    if raw is not None:
        program.check(raw)
    return Architecture(program.build, ignore=(*COMPUTED_BUFFERS, *program.ignored), fixed=program.fields)


class Program:
    """The contents of a file, checked.

    Args:
        found: The contents.
        file: Its path, for messages.
    """

    def __init__(self, found: Mapping[str, Any], file: str) -> None:
        self.file, self.architecture = file, str(found["architecture"])
        self.fields: dict[str, object] = dict(found["fields"])
        self.ignored = [str(name) for name in found["ignored"]]
        self.prefix, self.key = str(found["prefix"]), found.get("config_key")
        self.vocab_size, self.states = _whole(found["vocab_size"]), _whole(found["states"])
        self.values = [(_whole(width), _whole(of), _whole(offset)) for width, of, offset in found["values"]]
        self.ops: list[tuple[str, Operands]] = [(str(op), _operands(operands)) for op, operands in found["operations"]]
        self.weights = [_Stored(each) for each in found["weights"]]
        self.layers = [tuple(map(_whole, layer)) for layer in found["layers"]]
        self.ropes = [
            {
                "inv_freq": bytes.fromhex(rope["inv_freq"]), "magnitude": _finite(rope["magnitude"]),
                "interleaved": bool(rope["interleaved"]),
            }
            for rope in found["ropes"]
        ]  # fmt: skip
        if max(len(self.values), len(self.ops), len(self.weights)) > MOST:
            raise ValueError(f"wanted at most {MOST} operations, values and weights")
        if not 0 <= self.states < len(self.values) or any(len(layer) != 4 for layer in self.layers):
            raise ValueError("a number of a value or a layer is wrong")

    def check(self, raw: Mapping[str, object]) -> None:
        """CheckpointError if this is the program of another config.json. Programs of configuration objects have no key."""
        name = ModelConfig(dict(raw), "config.json").architecture
        problem = "" if self.key in (None, config_key(raw)) else "the program of another config.json (or of other hf_overrides)"
        if name != self.architecture:
            problem = f"wanted the program of {name}, have that of {self.architecture}"
        if problem:
            raise CheckpointError(f"{self.file}: {problem}; llmpy export MODEL -o FILE.json writes this one's", file=self.file)

    def build(self, cfg: ModelConfig, m: Model) -> None:
        """The architecture function: writes the program; every tensor is compared with the checkpoint."""
        cfg.counts_rope_scaling = True
        stem = ""
        if self.prefix and (first := self._first_of(self.prefix)):
            stem = m.stem(f"{self.prefix}.", first)
        cut = f"{self.prefix}." if self.prefix and stem == "" else ""
        spec: Any = m.spec
        for weight in self.weights:
            weight.write(m, cut)
        added: dict[str, Any] = {"values": self.values, "ops": self.ops, "layers": self.layers, "ropes": self.ropes}
        for name, rows in added.items():
            spec[name].extend(rows)
        spec["vocab_size"] = self.vocab_size
        m.generates = True
        m.states(Value(m, self.states, self.values[self.states][0]))
        try:
            _core.plan(m.spec, 0, False, 1)  # checks every operation
        except (InvalidRequestError, ValueError, TypeError, OverflowError) as error:
            raise CheckpointError(f"{self.file}: it is no program that can run: {error}", file=self.file) from error

    def _first_of(self, prefix: str) -> str:
        """Name of a module with a weight below a prefix, without the prefix."""
        names = (piece.name for weight in self.weights for piece in weight.pieces)
        own = (name for name in names if name.startswith(f"{prefix}.") and name.endswith(".weight"))
        return next(own, "").removeprefix(f"{prefix}.").removesuffix(".weight")


class _Stored:
    """A weight of a file."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.values = np.frombuffer(bytes.fromhex(found["values"]), np.float32) if "values" in found else None
        self.kind, self.op = str(found.get("kind", "vector")), str(found.get("operation", ""))
        self.cols, self.offset = _whole(found.get("cols", 1)), _finite(found.get("offset", 0.0))
        self.pieces = [_piece(*each) for each in found.get("pieces", ())]
        if self.kind not in ("matrix", "vector") or (self.values is None and not self.pieces):
            raise ValueError(f"a weight of kind {self.kind!r} with {len(self.pieces)} pieces")

    def write(self, m: Model, cut: str) -> None:
        """Adds the weight to a program; `cut` is the beginning of names that the checkpoint lacks."""
        pieces = [piece._replace(name=piece.name.removeprefix(cut)) for piece in self.pieces]
        if self.values is not None:
            m.constant(self.values)
        elif self.kind == "matrix":
            m.matrix(self.op, pieces, self.cols)
        else:
            m.vector(self.op, pieces, self.offset)


def _piece(
    name: object, shape: list[object], rows: object, base: object, inner: object, stride: object, transposed: object
) -> Piece:
    """A piece of a weight of a file."""
    numbers = (_whole(rows), _whole(base), _whole(inner), _whole(stride))
    return Piece(str(name), tuple(map(_whole, shape)), *numbers, bool(transposed))


def _whole(x: object) -> int:
    """A whole number of a file."""
    if not isinstance(x, int) or not -1 <= x <= _MOST_ROWS:
        raise ValueError(f"wanted a whole number from -1 to {_MOST_ROWS}, have {x!r:.40}")
    return x


def _finite(x: object) -> float:
    """A finite number of a file."""
    if not isinstance(x, int | float) or not math.isfinite(x):
        raise ValueError(f"wanted a finite number, have {x!r:.40}")
    return float(x)


def _operands(found: Mapping[str, Any]) -> Operands:
    attributes = dict(found["attributes"])
    for value in attributes.values():
        if not isinstance(value, str):
            _finite(value)
    return {
        "in": list(map(_whole, found["in"])), "out": list(map(_whole, found["out"])),
        "weights": list(map(_whole, found["weights"])),
        "attributes": attributes,
    }  # fmt: skip
