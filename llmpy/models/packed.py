"""The tensors of packed weights (GPTQ, AWQ, SqueezeLLM, pack-quantized): their shapes, and why tensors do not fit together.

The core joins tensors that fit into one tensor NAME.weight. Names: a module is the part before the endings, such as
"model.layers.0.mlp.up_proj".
"""

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..errors import CheckpointError, UnsupportedError
from .program import Tensors

FLOATS = ("float32", "float16", "bfloat16")
Options = Mapping[str, object]
Read = Callable[[str], bytes]


@dataclass(frozen=True)
class Way:
    """The names and shapes of one way to pack weights.

    Attributes:
        numbers: Ending of the name of the packed numbers.
        scales: The same for the scales.
        zeros: The same for the zeros.
        order: The same for the group of each column.
        shape: The same for the tensor with rows and columns; "": the numbers' shape gives them.
        needs_zeros: Whether the zeros must exist.
        refused: Endings of tensors that the core does not join.
    """

    numbers: str
    scales: str
    zeros: str
    order: str
    shape: str = ""
    needs_zeros: bool = True
    refused: tuple[str, ...] = ()

    @property
    def endings(self) -> tuple[str, ...]:
        """All endings."""
        return tuple(filter(None, (self.numbers, self.scales, self.zeros, self.order, self.shape)))


COLUMNS = Way(".qweight", ".scales", ".qzeros", ".g_idx")
"""GPTQ and AWQ: all tensors are transposed."""
ROWS = Way(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", needs_zeros=False)
"""compressed-tensors, format pack-quantized."""
TABLES = Way(
    ".qweight", ".lookup_table", "", "", needs_zeros=False,
    refused=(".rows", ".cols", ".vals", ".full_rows", ".full_row_indices"),
)  # fmt: skip
"""SqueezeLLM: 16 values for each row in place of scales; sparse weights beside them are refused."""


def modules_of(way: Way, tensors: Tensors) -> list[str]:
    """The modules with packed numbers."""
    return [name.removesuffix(way.numbers) for name in tensors if name.endswith(way.numbers)]


def check(way: Way, scheme: str, options_of: Callable[[str], Options], tensors: Tensors, read: Read) -> None:
    """Checks the tensors of all packed weights.

    Args:
        way: How the scheme packs weights.
        scheme: The `quant_method`. Words of numbers go along the rows of the weight in AWQ.
        options_of: A module's `bits`, `group_size`, and where zeros are optional `symmetric`.
        tensors: The checkpoint's tensors.
        read: Reads a tensor's bytes.

    Raises:
        UnsupportedError: an order of columns, or a group, that the core does not join.
        CheckpointError: a tensor is missing, or has another type or shape.
    """
    modules = modules_of(way, tensors)
    for module in modules:
        _check_module(way, scheme, module, options_of(module), tensors, read)
    for name, (_, _, file) in tensors.items():
        ending = next((ending for ending in way.endings if name.endswith(ending)), None)
        stem = name.removesuffix(ending or "")
        if ending and ending != ".weight_scale" and f"{stem}{way.numbers}" not in tensors:
            fail(name, file, f"wanted a tensor {stem}{way.numbers} that it belongs to, have none", scheme)


def _check_module(way: Way, scheme: str, module: str, options: Options, tensors: Tensors, read: Read) -> None:
    numbers = f"{module}{way.numbers}"
    needs_zeros = way.needs_zeros or options.get("symmetric") is False
    wanted = [way.numbers, way.scales, *([way.zeros] if needs_zeros else []), *([way.shape] if way.shape else [])]
    for ending in wanted:
        if f"{module}{ending}" not in tensors:
            fail(numbers, tensors[numbers][2], f"wanted a tensor {module}{ending} beside it, have none", scheme)
    for ending in way.refused:
        if f"{module}{ending}" in tensors:
            why = "sparse outliers are not supported; use a checkpoint that is dense only"
            refuse(f"{module}{ending}", tensors, scheme, why)
    for ending in filter(None, (way.numbers, way.scales, way.zeros, way.order)):
        name = f"{module}{ending}"
        types = {way.scales: FLOATS, way.order: ("int32", "int64")}.get(ending, ("int32",))
        if name in tensors and tensors[name][0] not in types:
            fail(name, tensors[name][2], f"wanted type {' or '.join(types)}, have {tensors[name][0]}", scheme)
    for ending, shape in _shapes(way, scheme, module, options, tensors, read).items():
        name = f"{module}{ending}"
        if name in tensors and tensors[name][1] != shape:
            have = list(tensors[name][1])
            fail(name, tensors[name][2], f"wanted a shape of {list(shape)} by quantization_config, have {have}", scheme)
    if f"{module}.weight" not in tensors:
        _explain_order(way, scheme, module, tensors, read)


def _shapes(way: Way, scheme: str, module: str, options: Options, tensors: Tensors, read: Read) -> dict[str, tuple[int, ...]]:
    """The shapes that a module's tensors must have, by ending."""
    name = f"{module}{way.numbers}"
    stored = tensors[name][1]
    if len(stored) != 2:
        fail(name, tensors[name][2], f"wanted 2 dimensions, have {len(stored)}", scheme)
    if way == TABLES:
        return {way.scales: (stored[1], 16)}
    bits, group = (_number(options, key, scheme, module) for key in ("bits", "group_size"))
    per_word = 32 // bits
    if way.shape:
        rows, cols = _stated_shape(f"{module}{way.shape}", scheme, tensors, read)
    elif scheme == "awq":
        rows, cols = stored[1] * per_word, stored[0]
    else:
        rows, cols = stored[1], stored[0] * per_word
    groups = 1 if group == -1 else -(-cols // group)
    shapes = {way.scales: (rows, groups), way.zeros: (-(-rows // per_word), groups)}
    if way.shape:
        return {way.numbers: (rows, -(-cols // per_word)), **shapes, way.order: (cols,)}
    return {**{ending: shape[::-1] for ending, shape in shapes.items()}, way.order: (cols,)}


def _number(options: Options, key: str, scheme: str, module: str) -> int:
    value = options.get(key)
    if not isinstance(value, int):
        raise UnsupportedError(f"quantization_config ({scheme}): {key} of {module} is {value!r}; wanted an integer")
    return value


def _stated_shape(name: str, scheme: str, tensors: Tensors, read: Read) -> tuple[int, int]:
    """The rows and columns of a tensor such as weight_shape."""
    dtype, shape, file = tensors[name]
    if dtype not in ("int32", "int64") or shape != (2,):
        fail(name, file, f"wanted 2 integers, have {dtype} {list(shape)}", scheme)
    rows, cols = array("i" if dtype == "int32" else "q", read(name))
    if rows < 1 or cols < 1:
        fail(name, file, f"wanted rows and columns, have {rows} and {cols}", scheme)
    return rows, cols


def _explain_order(way: Way, scheme: str, module: str, tensors: Tensors, read: Read) -> NoReturn:
    """Raises the error for tensors that fit but were not joined."""
    name, numbers, scales = (f"{module}{ending}" for ending in (way.order, way.numbers, way.scales))
    if name not in tensors:
        fail(numbers, tensors[numbers][2], "wanted tensors that form one matrix", scheme)
    dtype, _, file = tensors[name]
    groups, n = array("i" if dtype == "int32" else "q", read(name)), tensors[scales][1][1 if way.shape else 0]
    if min(groups, default=0) < 0 or max(groups, default=0) >= n:
        fail(name, file, f"wanted groups from 0 to {n - 1}, have {min(groups)} to {max(groups)}", scheme)
    why = "act-order (desc_act or actorder) with groups of unlike numbers of columns is not supported"
    refuse(name, tensors, scheme, f"{why}; use a checkpoint with desc_act=false or actorder 'weight', or GGUF")


def matches(pattern: str, module: str) -> bool:
    """Whether a target of compressed-tensors names a module: "re:" and a regular expression, or the name or its end."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise UnsupportedError(f"quantization_config: wanted a regular expression, have {pattern[3:]!r}: {error}") from None
    return module == pattern or module.endswith(f".{pattern}")


def fail(name: str, file: str, why: str, scheme: str = "") -> NoReturn:
    """Raises a CheckpointError about a tensor, of a scheme or, without one, of a cache."""
    of = f" ({scheme})" if scheme else ""
    raise CheckpointError(f"{file}: tensor {name}{of}: {why}", file=file, tensor=name)


def refuse(name: str, tensors: Tensors, scheme: str, why: str) -> NoReturn:
    """Raises an UnsupportedError about a tensor of a scheme."""
    raise UnsupportedError(f"{tensors[name][2]}: tensor {name} ({scheme}): {why}")
