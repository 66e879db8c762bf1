"""A program as plain data, and what writes it: values, operations and weights under numbers."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NoReturn, TypedDict

import numpy as np

from ..errors import CheckpointError
from .config import ModelConfig
from .pieces import Part, Piece, flat, whole
from .rope import Floats, Rope

Operands = TypedDict("Operands", {"in": list[int], "out": list[int], "weights": list[int], "u": list[int], "f": list[float]})


class Weight(TypedDict):
    """A matrix [rows, cols] of parts below each other, or a vector of parts, or (no parts) of float32 values as bytes."""

    kind: str
    rows: int
    cols: int
    parts: list[Part]
    offset: float
    values: bytes | None


class RopeSpec(TypedDict):
    """A rotary embedding, its float32 frequencies as bytes."""

    inv_freq: bytes
    magnitude: float
    interleaved: bool


class Spec(TypedDict):
    """A program as plain data: the argument of `_core.Model` and of `interpret.run`.

    values are (width, of, offset), of = -1 for a value of its own; layers are (n_heads, n_kv_heads, head_dim, window);
    states are (pieces, floats of one) of what a recurrent operation keeps for every sequence;
    ignored are patterns of names that a checkpoint may hold without a weight here; reordered says that the file has rows in
    another order than the checkpoints that updates come from.
    """

    values: list[tuple[int, int, int]]
    ops: list[tuple[str, Operands]]
    weights: list[Weight]
    ropes: list[RopeSpec]
    layers: list[tuple[int, int, int, int]]
    states: list[tuple[int, int]]
    vocab_size: int
    architecture: str
    ignored: list[str]
    reordered: bool


Tensors = Mapping[str, tuple[str, tuple[int, ...], str]]  # name -> dtype, shape, file


IDENTITY = 9  # the activation that makes a product of `gated`


class Value:
    """Rows of activations inside a program. `a + b` adds two of equal width, `a * b` multiplies them."""

    def __init__(self, model: "Writer", index: int, width: int) -> None:
        self.model, self.index, self.width = model, index, width

    def __add__(self, other: "Value") -> "Value":
        self.model.expect("add", "", self, other)
        if other.width != self.width:
            self.model.refuse("add", "", f"wanted equal widths, have {self.width} and {other.width}")
        return self.model.emit("add", [self, other], self.width)

    def __mul__(self, other: "Value") -> "Value":
        self.model.expect("product", "", self, other)
        if other.width != self.width:
            self.model.refuse("product", "", f"wanted equal widths, have {self.width} and {other.width}")
        return self.model.emit("gated", [self, other], self.width, u=[IDENTITY])


class Writer:
    """The part of a `Model` that writes and checks; architecture functions rarely have need of it.

    Args:
        config: The configuration; head_dim is taken from it where a row is seen as heads.
        tensors: The checkpoint's tensors: name to (dtype, shape, file); None: shapes are not checked.
        to_source: Name in the file for a Hugging Face name.
        file: Path of the checkpoint, for messages.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors | None, to_source: Callable[[str], str], file: str) -> None:
        self.config, self.head_dim = config, config.head_dim
        self._tensors, self._to_source, self._file = tensors, to_source, file
        self.is_gguf = to_source is not str
        """Whether the tensors are a GGUF file's."""
        self._ropes: dict[tuple[bytes, float, bool], int] = {}
        self._matrices: dict[tuple[Piece, ...], int] = {}
        self._embeddings: dict[str, int] = {}
        self._used: dict[str, set[int]] = {}  # tensors of the file: the first rows of their pieces
        self._ignored: list[str] = []
        self.spec: Spec = {
            "values": [],
            "ops": [],
            "weights": [],
            "ropes": [],
            "layers": [],
            "states": [],
            "vocab_size": config.vocab_size,
            "architecture": config.architecture,
            "ignored": [],
            "reordered": False,
        }

    def leave_out(self, name: str) -> None:
        """Says that the checkpoint may hold NAME.weight and NAME.bias without use."""
        for kind in ("weight", "bias"):
            self._used.setdefault(self._to_source(f"{name}.{kind}"), set())

    def constant(self, values: Sequence[float] | Floats) -> int:
        """A vector of values that are no tensor of the checkpoint, as a weight of `emit`: slopes of ALiBi, for example."""
        weight: Weight = {
            "kind": "vector", "rows": len(values), "cols": 1, "parts": [], "offset": 0.0,
            "values": np.asarray(values, np.float32).tobytes(),
        }  # fmt: skip
        self.spec["weights"].append(weight)
        return len(self.spec["weights"]) - 1

    def ignore(self, *patterns: str) -> None:
        """Patterns of tensors that the checkpoint may hold without use, as those of `architecture`."""
        self._ignored += patterns

    def refuse(self, op: str, name: str, problem: str) -> NoReturn:
        """CheckpointError: the architecture function and the configuration do not fit together."""
        where = f"{op} {name}".strip(" .")
        raise CheckpointError(f"{self.config.file}: {where} of {self.config.architecture}: {problem}", file=self._file)

    def expect(self, op: str, name: str, *values: Value) -> None:
        """Refuses what is no value of this program."""
        for value in values:
            if not isinstance(value, Value):
                self.refuse(op, name, f"wanted a value, have {type(value).__name__}")
            if value.model is not self:
                self.refuse(op, name, "the value belongs to another program")

    def heads(self, op: str, name: str, x: Value) -> int:
        """How many heads a row is."""
        if x.width % self.head_dim:
            self.refuse(op, name, f"wanted a row of heads of {self.head_dim}, have {x.width}")
        return x.width // self.head_dim

    def value(self, width: int, of: int = -1, offset: int = 0) -> Value:
        """A new value, or columns of another."""
        self.spec["values"].append((width, of, offset))
        return Value(self, len(self.spec["values"]) - 1, width)

    def emit(
        self,
        op: str,
        inputs: Sequence[Value],
        width: int,
        *,
        weights: Sequence[int] = (),
        u: Sequence[int] = (),
        f: Sequence[float] = (),
        scratch: int = 0,
    ) -> Value:
        """Writes an operation with one output, and with so many columns of scratch."""
        out = self.value(width)
        operands: Operands = {
            "in": [x.index for x in inputs],
            "out": [out.index, self.value(scratch).index] if scratch else [out.index],
            "weights": list(weights),
            "u": list(u),
            "f": list(f),
        }
        self.spec["ops"].append((op, operands))
        return out

    def emit_pair(self, op: str, a: Value, b: Value, *, u: Sequence[int]) -> tuple[Value, Value]:
        """Writes an operation that gives both of its inputs anew."""
        outs = self.value(a.width), self.value(b.width)
        operands: Operands = {
            "in": [a.index, b.index],
            "out": [out.index for out in outs],
            "weights": [],
            "u": list(u),
            "f": [],
        }
        self.spec["ops"].append((op, operands))
        return outs

    def state_layer(self, pieces: int, floats: int) -> int:
        """The number of a new recurrent state: so many pieces for every sequence, each of so many floats that stay together."""
        self.spec["states"].append((pieces, floats))
        return len(self.spec["states"]) - 1

    def rope_index(self, rope: Rope) -> int:
        """The number of a rope; equal ones are one."""
        key = (rope.inv_freq.tobytes(), float(rope.magnitude), rope.interleaved)
        if key not in self._ropes:
            self._ropes[key] = len(self.spec["ropes"])
            self.spec["ropes"].append({"inv_freq": key[0], "magnitude": key[1], "interleaved": key[2]})
        return self._ropes[key]

    def matrix(self, op: str, pieces: Sequence[Piece | tuple[str, int]], cols: int) -> int:
        """A weight of pieces, or modules NAME.weight [rows, cols], below each other; the same ones twice are one weight."""
        key = tuple(p if isinstance(p, Piece) else whole(f"{p[0]}.weight", p[1], cols) for p in pieces)
        if key not in self._matrices:
            self._matrices[key] = len(self.spec["weights"])
            self._add("matrix", [self._part(op, piece) for piece in key], cols)
        return self._matrices[key]

    def n_dims(self, name: str) -> int:
        """How many dimensions a tensor has in the checkpoint, 2 where there is none."""
        found = (self._tensors or {}).get(self._to_source(name))
        return 2 if found is None else len(found[1])

    def scalar_shape(self, name: str, n_dims: int) -> tuple[int, ...]:
        """The shape of one element as the checkpoint has it: [1] or []; without a checkpoint of so many dimensions."""
        found = (self._tensors or {}).get(self._to_source(name))
        return (1,) * (n_dims if found is None else len(found[1]))

    def vector(
        self, op: str, pieces: Sequence[Piece | tuple[str, int] | tuple[str, tuple[int, ...]]], offset: float = 0.0
    ) -> int:
        """A weight of pieces, whole tensors NAME [n], or of any other shape, whose elements are taken as they lie."""
        whole_ones = [p if isinstance(p, Piece) else flat(*p) for p in pieces]
        self._add("vector", [self._part(op, piece) for piece in whole_ones], 1, offset)
        return len(self.spec["weights"]) - 1

    def flat(self, op: str, name: str, shape: tuple[int, ...]) -> int:
        """A weight of one tensor of any shape, element after element; `name` is the tensor's whole name."""
        return self.vector(op, [(name, shape)])

    def _add(self, kind: str, parts: list[Part], cols: int, offset: float = 0.0) -> None:
        rows = sum(part.rows for part in parts)
        weight: Weight = {
            "kind": kind, "rows": rows, "cols": cols, "parts": parts, "offset": offset, "values": None
        }  # fmt: skip
        self.spec["weights"].append(weight)

    def _part(self, op: str, piece: Piece) -> Part:
        """A part of a weight, its tensor's shape compared with the checkpoint's."""
        shape, source = piece.shape, self._to_source(piece.name)
        if min([*shape, piece.rows]) < 1:
            self.refuse(op, piece.name, f"wanted sizes of at least 1, have {list(shape)}")
        if self._tensors is not None:
            if source not in self._tensors:
                raise CheckpointError(
                    f"{self._file}: tensor {source}, needed by {op} of {self.config.architecture}: "
                    f"wanted {list(shape)}, have nothing; hf_overrides can correct the configuration",
                    file=self._file,
                    tensor=source,
                )
            _, have, file = self._tensors[source]
            if self.is_gguf and shape == (1, *have):  # such files have no leading ones
                shape = tuple(have)
            if tuple(have) != shape:
                raise CheckpointError(
                    f"{file}: tensor {source}, used by {op} of {self.config.architecture}: "
                    f"wanted {list(shape)}, have {list(have)}; hf_overrides can correct the configuration",
                    file=file,
                    tensor=source,
                )
        inner = piece.rows if piece.inner is None else piece.inner
        stride = max(piece.stride, inner)
        if piece.base in self._used.setdefault(source, set()):
            self.refuse(op, piece.name, "the tensor is used already")
        self._used[source].add(piece.base)
        return Part(piece.name, source, piece.rows, shape, piece.base, inner, stride, piece.transposed)

    def finish(self, ignore: Sequence[str]) -> Spec:
        """The complete program; CheckpointError for a tensor that it does not use and no pattern ignores."""
        last = self.spec["ops"][-1][0] if self.spec["ops"] else "nothing"
        if last != "states":
            self.refuse("logits", "", f"wanted as the last operation, have {last}")
        ignore = (*ignore, *self._ignored)
        for source, (_, shape, file) in (self._tensors or {}).items():
            if source not in self._used and not any(fnmatchcase(source, pattern) for pattern in ignore):
                raise CheckpointError(
                    f"{file}: tensor {source} {list(shape)} has no place in {self.config.architecture}; "
                    "hf_overrides can correct the configuration, ignore= of the architecture can name it",
                    file=file,
                    tensor=source,
                )
        self.spec["ignored"] += ignore
        return self.spec
