"""Writes a model as a GGUF file with matrices of one type, one tensor in memory at a time; needs the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from ..models.quantise import NARROW
from . import k_quants
from .gguf_model import DirectorySource, FileSource

if TYPE_CHECKING:
    from ..hub import ModelFiles


def write(files: ModelFiles, out: Path, kind: str) -> None:
    """Writes a copy of a model whose matrices have one type.

    Args:
        files: A GGUF file, whose parts become one file, or a directory of a family of gguf_model.py.
        out: The new file.
        kind: The type's name.

    Raises:
        CheckpointError: a value is a NaN or an infinity.
        UnsupportedError: another family, the gguf package is not installed, it cannot make the type, or the columns of a matrix
            are no multiple of the type's block.
    """
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(f"convert --to gguf-{kind} needs the gguf package: pip install gguf") from None
    _type(gguf, kind)
    source: FileSource | DirectorySource = FileSource(files) if files.kind == "gguf" else DirectorySource(files)
    floats = gguf.GGMLQuantizationType.F32
    shapes = source.shapes
    types = {
        name: _type(gguf, _kind_of(kind, shape[-1])) if name in source.matrices else floats for name, shape in shapes.items()
    }
    for name, shape in shapes.items():
        block = gguf.GGML_QUANT_SIZES[types[name]][0]
        if shape[-1] % block:
            raise UnsupportedError(
                f"convert --to gguf-{kind}: tensor {name}: {kind} needs columns in multiples of {block}, have {shape[-1]}"
            )
    writer = gguf.GGUFWriter(out, source.architecture)
    try:
        source.put_keys(gguf, writer)
        for name, shape in shapes.items():
            bytes_shape = gguf.quant_shape_to_byte_shape(shape, types[name])
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in shapes:
            values = source.values(name)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{files.name}: tensor {name}: wanted finite values, have others", tensor=name)
            try:
                writer.write_tensor_data(_quantise(gguf, values, types[name]))
            except ValueError as error:
                raise CheckpointError(f"{files.name}: tensor {name}: {error}", tensor=name) from error
    except BaseException:
        writer.close()
        out.unlink(missing_ok=True)
        raise
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
    return NARROW.get(kind, kind) if columns % k_quants.BLOCK else kind


def _quantise(gguf: Any, values: np.ndarray, stored: Any) -> np.ndarray:
    """The bytes of a matrix in a type; raises NotImplementedError."""
    kind = stored.name.lower()
    rounded = k_quants.quantise(values, kind) if kind in k_quants.TYPES else gguf.quantize(values, stored)
    return rounded.view(np.uint8)
