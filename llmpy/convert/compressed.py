"""Writes compressed-tensors checkpoints, with the numbers and scales of quantisation at load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import ConfigError, UnsupportedError
from ..models import load, open_checkpoint
from ..models.quantise import OWN
from .safetensors_file import Tensor
from .safetensors_file import write as write_file

if TYPE_CHECKING:
    from .. import _core
    from ..hub import ModelFiles
    from ..models import Spec

INDEX = "model.safetensors.index.json"
HEADER_BYTES = 4
"""Of a block: a float32 scale; for 4 bits the zero is in its lowest byte."""
Blocks = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
Parts = dict[str, bytes]
Shapes = dict[str, Tensor]


class Format(NamedTuple):
    """How a stored type is written.

    Attributes:
        name: The format's name in the configuration.
        bits: Of a number.
        block: Numbers in a block of the stored type.
        weights: Further fields of the scheme of weights.
        inputs: The scheme of activations; None: floats.
        shapes: The tensors of a weight by ending, from its rows and columns.
        parts: The bytes of these tensors, from blocks, rows and columns.
    """

    name: str
    bits: int
    block: int
    weights: Mapping[str, object]
    inputs: Mapping[str, object] | None
    shapes: Callable[[Format, int, int], Shapes]
    parts: Callable[[Format, Blocks, int, int], Parts]


# ---- FP8: e4m3 with a scale for each row


def _row_shapes(_format: Format, rows: int, cols: int) -> Shapes:
    return {".weight": Tensor("f8_e4m3", (rows, cols)), ".weight_scale": Tensor("float32", (rows, 1))}


def _row_parts(_format: Format, blocks: Blocks, rows: int, cols: int) -> Parts:
    numbers = blocks[:, :, HEADER_BYTES:].reshape(rows, -1)[:, :cols]
    return {".weight": numbers.tobytes(), ".weight_scale": blocks[:, 0, :HEADER_BYTES].tobytes()}


# ---- integers, several to a word, with a scale and for 4 bits a zero for each block


def _packed_shapes(format: Format, rows: int, cols: int) -> Shapes:
    per_word, groups = 32 // format.bits, -(-cols // format.block)
    shapes = {
        ".weight_packed": Tensor("int32", (rows, -(-cols // per_word))),
        ".weight_scale": Tensor("bfloat16" if format.bits == 4 else "float32", (rows, groups)),
        ".weight_shape": Tensor("int64", (2,)),
    }
    zeros = {".weight_zero_point": Tensor("int32", (-(-rows // per_word), groups))}
    return shapes | zeros if format.bits == 4 else shapes


def _packed_parts(format: Format, blocks: Blocks, rows: int, cols: int) -> Parts:
    words = -(-cols // (32 // format.bits))
    numbers = blocks[:, :, HEADER_BYTES:].reshape(rows, -1) ^ np.uint8(0x80 if format.bits == 8 else 0)
    headers = blocks[:, :, :HEADER_BYTES]
    parts = {
        ".weight_packed": np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % 4)])[:, : 4 * words].tobytes(),
        ".weight_scale": (headers[:, :, 2:] if format.bits == 4 else headers).tobytes(),
        ".weight_shape": np.array([rows, cols], "<i8").tobytes(),
    }
    return parts | {".weight_zero_point": _zeros(headers[:, :, 0])} if format.bits == 4 else parts


def _zeros(zeros: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> bytes:
    """Packs the zeros of 8 rows into a word, the first row in the lowest bits."""
    words = np.pad(zeros, [(0, -len(zeros) % 8), (0, 0)]).reshape(-1, 8, zeros.shape[1]).astype("<u4")
    packed = np.zeros((len(words), zeros.shape[1]), "<u4")
    for i in range(8):
        packed |= words[:, i] << np.uint32(4 * i)
    return packed.tobytes()


_FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS = {
    "fp8": Format("float-quantized", 8, 128, {"type": "float", "strategy": "channel", "symmetric": True}, _FP8_INPUTS,
                  _row_shapes, _row_parts),
    "int8_g128": Format("pack-quantized", 8, 128, {"type": "int", "strategy": "group", "symmetric": True, "group_size": 128},
                        None, _packed_shapes, _packed_parts),
    "int4_g128": Format("pack-quantized", 4, 128, {"type": "int", "strategy": "group", "symmetric": False, "group_size": 128},
                        None, _packed_shapes, _packed_parts),
    "int4_g32": Format("pack-quantized", 4, 32, {"type": "int", "strategy": "group", "symmetric": False, "group_size": 32},
                       None, _packed_shapes, _packed_parts),
}  # fmt: skip
"""The formats by stored type."""


# ---- the checkpoint


def write(files: ModelFiles, out: Path, scheme: str) -> None:
    """Writes a quantised copy of a checkpoint of floats: the shards of the source, config.json and all other small files.

    Args:
        files: The checkpoint.
        out: The new directory.
        scheme: One of OWN.

    Raises:
        ConfigError: the checkpoint is quantised already.
        UnsupportedError: a GGUF file, or a weight that the format cannot hold.
    """
    if files.kind == "gguf" or files.directory is None:
        raise UnsupportedError(f"convert --to {scheme}: {files.name} is a GGUF file; wanted a directory with safetensors")
    checkpoint = open_checkpoint(files)
    spec = load(files, checkpoint, quantization=scheme).spec
    stored = OWN[scheme]
    chosen = _chosen(spec, checkpoint, scheme)
    out.mkdir(parents=True)
    names: dict[str, str] = {}
    for shard in files.weights:
        names |= dict.fromkeys(_write_shard(checkpoint, shard, out / shard.name, chosen, stored), shard.name)
    for each in files.directory.iterdir():
        if _is_kept(each):
            shutil.copyfile(each, out / each.name)
    if len(files.weights) > 1:
        size = sum((out / shard.name).stat().st_size for shard in files.weights)
        _write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))})
    ignored = _linears(checkpoint) - {_module(name) for name in chosen} | {"lm_head"}
    _write_json(out / "config.json", {**files.config, "quantization_config": _configuration(FORMATS[stored], sorted(ignored))})


def _chosen(spec: Spec, checkpoint: _core.Checkpoint, scheme: str) -> set[str]:
    """The tensors that are quantised at load."""
    tensors = checkpoint.tensors()
    parts = [(weight, part) for weight in spec["weights"] for part in weight["parts"]]
    chosen = {part.source for weight, part in parts if weight.get("quantised")}
    others = {part.source for weight, part in parts if not weight.get("quantised")}
    for weight, part in parts:
        if not weight.get("quantised"):
            continue
        shape, is_split = tensors[part.source][1], part.source in others
        if len(shape) != 2 or part.transposed or is_split or not part.source.endswith(".weight"):
            why = "partly a float" if is_split else "transposed" if part.transposed else f"a tensor of {len(shape)} dimensions"
            raise UnsupportedError(
                f"convert --to {scheme}: tensor {part.source} is {why}, which compressed-tensors cannot hold; load the model "
                f"with quantization={scheme!r} instead"
            )
    if not chosen:
        raise ConfigError(f"convert --to {scheme}: the model has no linears of floats to quantise", option="to", value=scheme)
    return chosen


def _write_shard(checkpoint: _core.Checkpoint, shard: Path, to: Path, chosen: set[str], stored: str) -> list[str]:
    """Writes the tensors of one file and returns their names."""
    shapes: Shapes = {}
    groups: dict[str, Callable[[], Parts]] = {}
    for name, (dtype, shape, file) in checkpoint.tensors().items():
        if Path(file) != shard:
            continue
        groups[name] = partial(_bytes_of, checkpoint, name, shape, stored if name in chosen else "")
        if name in chosen:
            format = FORMATS[stored]
            shapes |= {f"{_module(name)}{end}": each for end, each in format.shapes(format, shape[0], shape[1]).items()}
        else:
            shapes[name] = Tensor(dtype, shape)
    write_file(to, shapes, groups)
    return list(shapes)


def _bytes_of(checkpoint: _core.Checkpoint, name: str, shape: tuple[int, ...], stored: str) -> Parts:
    """The bytes of the tensors that replace one tensor."""
    if not stored:
        return {name: checkpoint.read(name)}
    format, (rows, cols) = FORMATS[stored], shape
    block_bytes = HEADER_BYTES + format.block * format.bits // 8
    blocks = np.frombuffer(checkpoint.read_rounded(name, stored), np.uint8).reshape(rows, -1, block_bytes)
    return {f"{_module(name)}{ending}": values for ending, values in format.parts(format, blocks, rows, cols).items()}


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _linears(checkpoint: _core.Checkpoint) -> set[str]:
    """The modules with a matrix; some of them may be no linears."""
    return {
        _module(name) for name, (_, shape, _) in checkpoint.tensors().items() if len(shape) == 2 and name.endswith(".weight")
    }


def _is_kept(path: Path) -> bool:
    """Whether a file of the source is copied: tokenizer, templates, licence; no weights and no index."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
    return path.is_file() and path.name != "config.json" and not path.name.startswith(".") and not path.name.endswith(weights)


def _configuration(format: Format, ignored: list[str]) -> dict[str, object]:
    """The `quantization_config` of a format."""
    weights = {"num_bits": format.bits, "dynamic": False, **format.weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": format.inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format.name, "quantization_status": "compressed",
        "kv_cache_scheme": None, "ignore": ignored, "config_groups": {"group_0": group},
    }  # fmt: skip


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
