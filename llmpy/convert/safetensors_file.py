"""Writes safetensors files, one tensor in memory at a time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import UnsupportedError

TYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "f8_e4m3": ("F8_E4M3", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""Types of tensors: the format's names, and bytes of an element."""
_ALIGNMENT = 8


class Tensor(NamedTuple):
    """The type and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def write(path: Path, tensors: Mapping[str, Tensor], groups: Mapping[str, Callable[[], Mapping[str, bytes]]]) -> None:
    """Writes a file.

    Args:
        path: The new file.
        tensors: All tensors, by name.
        groups: Functions that make the bytes of some tensors, by name; together of all tensors. One result is in memory at
            once.

    Raises:
        UnsupportedError: a type that the format does not have.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in TYPES:
            raise UnsupportedError(f"tensor {name}: type {dtype} cannot be written to safetensors; wanted {', '.join(TYPES)}")
        kind, item = TYPES[dtype]
        places[name] = end, end + int(np.prod(shape, dtype=np.int64)) * item
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": list(places[name])}
        end = places[name][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data = file.tell()
        for make in groups.values():
            for name, values in make().items():
                first, last = places[name]
                assert len(values) == last - first, name
                file.seek(data + first)
                file.write(values)
        file.truncate(data + end)
