"""The tensors of bitsandbytes: 4-bit numbers with tables, and 8-bit numbers; why tensors do not fit together.

The core joins tensors that fit into one tensor NAME of type nf4, fp4 or int8_g128 (csrc/program/tables.c, companions.c).
"""

import json
import math
from typing import NoReturn

from ..errors import UnsupportedError
from .packed import Options, fail, refuse
from .program import Reader, Tensors

_SCHEME = "bitsandbytes"
_STATE = f".quant_state.{_SCHEME}__"
PATTERNS = (
    "*.weight.absmax", "*.weight.quant_map", "*.weight.nested_absmax", "*.weight.nested_quant_map", f"*.weight{_STATE}*",
    "*.SCB", "*.weight_format",
)  # fmt: skip
"""Names of tensors that belong to a quantised weight."""
BLOCK, NESTED = 64, 256
_STORED = ("nf4", "fp4", "int8_g128", "uint8", "int8")


def check_options(scheme: Options, where: str) -> None:
    """The options of quant_method "bitsandbytes"."""
    if scheme.get("load_in_8bit"):
        return
    kind = scheme.get("bnb_4bit_quant_type", "fp4")
    storage = scheme.get("bnb_4bit_quant_storage") or "uint8"
    for option, value, wanted in (
        ("bnb_4bit_quant_type", kind, ("nf4", "fp4")), ("bnb_4bit_quant_storage", storage, ("uint8",)),
    ):  # fmt: skip
        if value not in wanted:
            raise UnsupportedError(f"{where}: {option} {value!r} is not supported; wanted {' or '.join(map(repr, wanted))}")


def check(reader: Reader) -> None:
    """Raises the error for the first weight that the core has not joined with its scales."""
    tensors = reader.tensors()
    for name, (dtype, shape, file) in tensors.items():
        if name.endswith(".weight") and dtype == "uint8":
            _explain(name, shape, file, tensors, reader)
        if name.endswith(".weight") and dtype == "int8":
            scale = f"{name.removesuffix('weight')}SCB"
            have = f"{tensors[scale][0]} {list(tensors[scale][1])}" if scale in tensors else "none"
            _fail(scale if scale in tensors else name, file, f"wanted a tensor {scale}, float32 {list(shape[:1])}, have {have}")
        weight = name.partition(".weight.")[0] + ".weight" if ".weight." in name else name.removesuffix("SCB") + "weight"
        if name.endswith((".weight.absmax", ".SCB")) and (weight not in tensors or tensors[weight][0] not in _STORED):
            _fail(name, file, f"wanted a quantised weight {weight} that it scales, have none")


def _explain(name: str, shape: tuple[int, ...], file: str, tensors: Tensors, reader: Reader) -> NoReturn:
    found = [each for each in tensors if each.startswith(f"{name}{_STATE}")]
    if not found:
        _fail(name, file, f"wanted a tensor {name}{_STATE}nf4 or ...fp4 beside it, have none")
    (text, kind) = found[0], found[0].removeprefix(f"{name}{_STATE}")
    try:
        state = json.loads(reader.read(text))
        rows, cols = state["shape"]
        block, nested_block = state["blocksize"], state.get("nested_blocksize", NESTED)
        n = rows * cols
    except (ValueError, KeyError, TypeError, AttributeError):
        _fail(text, tensors[text][2], "wanted JSON with shape [rows, columns] and blocksize")
    if kind not in ("nf4", "fp4") or (block, nested_block) != (BLOCK, NESTED) or cols % BLOCK:
        why = (
            f"wanted nf4 or fp4 in blocks of {BLOCK}, nested {NESTED}, and columns that are a multiple of {BLOCK}; "
            f"have {kind} of {rows} x {cols} numbers in blocks of {block}, nested {nested_block}"
        )
        refuse(name, tensors, _SCHEME, why)
    n_scales = n // BLOCK
    is_nested = f"{name}.nested_absmax" in tensors
    wanted = {".absmax": ("uint8" if is_nested else "float32", (n_scales,)), ".quant_map": ("float32", (16,))}
    if is_nested:
        wanted |= {".nested_absmax": ("float32", (-(-n_scales // NESTED),)), ".nested_quant_map": ("float32", (NESTED,))}
    for ending, (dtype, size) in wanted.items():
        each = f"{name}{ending}"
        if each not in tensors:
            _fail(name, file, f"wanted a tensor {each} beside it, have none")
        if tensors[each][:2] != (dtype, size):
            _fail(each, tensors[each][2], f"wanted {dtype} {list(size)}, have {tensors[each][0]} {list(tensors[each][1])}")
    if math.prod(shape) != n // 2:
        _fail(name, file, f"wanted {n // 2} bytes for {rows} x {cols} numbers, have {list(shape)}")
    _fail(f"{name}.quant_map", file, f"wanted the 16 values of {kind}, have others")


def _fail(name: str, file: str, why: str) -> NoReturn:
    fail(name, file, why, _SCHEME)
