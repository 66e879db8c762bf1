"""Rounds the matrices of a GGUF file to another type, one tensor in memory at a time; needs the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from ..models import load, open_checkpoint
from ..models.quantise import LINEARS, matrices_of
from . import k_quants

if TYPE_CHECKING:
    from ..hub import ModelFiles


def write(files: ModelFiles, out: Path, kind: str) -> None:
    """Writes a copy of a GGUF model whose matrices have one type.

    Args:
        files: The model; its parts become one file.
        out: The new file.
        kind: The type's name.

    Raises:
        UnsupportedError: the model is no GGUF file, the gguf package is not installed, it cannot make the type, or the columns
            of a matrix are no multiple of the type's block.
    """
    if files.kind != "gguf":
        raise UnsupportedError(
            f"convert --to gguf-{kind}: {files.name} is no GGUF file; convert it with llama.cpp's convert_hf_to_gguf.py first"
        )
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(f"convert --to gguf-{kind} needs the gguf package: pip install gguf") from None
    checkpoint = open_checkpoint(files)
    matrices = matrices_of(load(files, checkpoint).spec, (*LINEARS, "embed", "logits"))
    chosen = {part.source for weight in matrices for part in weight["parts"]}
    _type(gguf, kind)
    floats = gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(out, str(checkpoint.metadata["general.architecture"]))
    _copy_keys(gguf, files.weights[0], writer)
    shapes = {name: shape for name, (_, shape, _) in checkpoint.tensors().items()}
    types = {name: _type(gguf, _kind_of(kind, shape[-1])) if name in chosen else floats for name, shape in shapes.items()}
    try:
        for name, shape in shapes.items():
            block = gguf.GGML_QUANT_SIZES[types[name]][0]
            if shape[-1] % block:
                raise UnsupportedError(
                    f"convert --to gguf-{kind}: tensor {name}: {kind} needs columns in multiples of {block}, have {shape[-1]}"
                )
            bytes_shape = gguf.quant_shape_to_byte_shape(shape, types[name])
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape in shapes.items():
            values = np.frombuffer(checkpoint.read_float32(name), np.float32).reshape(shape)
            writer.write_tensor_data(_quantise(gguf, values, types[name]))
    finally:
        writer.close()


def _type(gguf: Any, kind: str) -> Any:
    """The type of a name; raises for those that cannot be made."""
    stored = getattr(gguf.GGMLQuantizationType, kind.upper(), None)
    try:
        if stored is None:
            raise NotImplementedError
        _quantise(gguf, np.zeros((1, gguf.GGML_QUANT_SIZES[stored][0]), np.float32), stored)
    except NotImplementedError:
        reason = "there is no such type" if stored is None else "neither llmpy nor gguf-py quantises to it"
        raise UnsupportedError(
            f"convert --to gguf-{kind}: {reason}; "
            "wanted f32, f16, bf16, q8_0, q6_k, q5_k, q4_k, q2_k, q5_1, q5_0, q4_1, q4_0, tq1_0, tq2_0 or mxfp4"
        ) from None
    return stored


def _kind_of(kind: str, columns: int) -> str:
    """The type of a matrix: a narrower block where a K type's 256 columns do not fit."""
    return k_quants.NARROW.get(kind, kind) if columns % k_quants.BLOCK else kind


def _quantise(gguf: Any, values: np.ndarray, stored: Any) -> np.ndarray:
    """The bytes of a matrix in a type; raises NotImplementedError."""
    kind = stored.name.lower()
    rounded = k_quants.quantise(values, kind) if kind in k_quants.TYPES else gguf.quantize(values, stored)
    return rounded.view(np.uint8)


def _copy_keys(gguf: Any, path: Path, writer: Any) -> None:
    """Copies the metadata, except for the keys of the container and of split files."""
    for key, field in gguf.GGUFReader(path).fields.items():
        if key.startswith(("GGUF.", "split.")) or key in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
