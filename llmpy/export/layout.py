"""Rules of operations that move columns: they compute nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .columns import Array, Columns, Lazy, Mask, Ones, Parameter, Parts, Positions, Symbol, Term, Trig
from .refusal import refuse
from .walk import Walk, rule, told


def moved(walk: Walk, node: Any, x: object, change: Any) -> object:
    """A value after a layout operation, given as a function of arrays."""
    if isinstance(x, Lazy):
        x = walk.force(node, x)
    if isinstance(x, Columns | Trig):
        return x.map(change)
    if isinstance(x, Positions | Ones | Mask | str):
        return x
    refuse(node, f"a layout operation on {told(x)}")


@rule("to", "alias", "contiguous", "type_as", "detach", "clone", "lift_fresh_copy", "dropout", "detach_", "float", "expand_as")
def _same(walk: Walk, node: Any, x: object, *rest: object, **given: object) -> object:
    return x


@rule("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "unflatten")
def _view(walk: Walk, node: Any, x: object, *rest: object, **given: object) -> object:
    shape = walk.shape(node)
    if isinstance(x, Parameter):
        if x.size != int(np.prod(shape)) or sum(size > 1 for size in x.shape) > 1:
            refuse(node, f"{x.name} in another shape")
        return x
    return moved(walk, node, x, lambda array: array.reshape(shape))


@rule("expand")
def _expand(walk: Walk, node: Any, x: object, *rest: object) -> object:
    shape = walk.shape(node)
    if isinstance(x, Parameter) and x.size == int(np.prod(shape)):
        return x
    return moved(walk, node, x, lambda array: np.broadcast_to(array, shape))


@rule("transpose", "swapaxes")
def _transpose(walk: Walk, node: Any, x: object, a: int, b: int) -> object:
    if isinstance(x, Parameter):
        return _turned_matrix(node, x)
    return moved(walk, node, x, lambda array: np.swapaxes(array, a, b))


@rule("t")
def _t(walk: Walk, node: Any, x: object) -> object:
    return _turned_matrix(node, x)


def _turned_matrix(node: Any, x: object) -> Parameter:
    if not isinstance(x, Parameter) or len(x.shape) != 2:
        refuse(node, f"the transpose of {told(x)}")
    return replace(x, is_transposed=not x.is_transposed)


@rule("permute")
def _permute(walk: Walk, node: Any, x: object, order: list[int]) -> object:
    return moved(walk, node, x, lambda array: np.transpose(array, order))


@rule("slice")
def _slice(
    walk: Walk, node: Any, x: object, dim: int = 0, start: object = None, end: object = None, step: int = 1
) -> object:
    shape, own = node.args[0].meta["val"].shape, node.meta["val"].shape
    dim %= len(shape)
    if isinstance(start, Symbol) or isinstance(end, Symbol) or not isinstance(shape[dim], int):
        if str(shape[dim]) != str(own[dim]) or isinstance(start, Symbol) or step != 1:
            refuse(node, "some of the rows")
        return x
    if isinstance(x, Parameter):
        refuse(node, f"a part of {x.name}")
    own_range = slice(start, end if not isinstance(end, int) or end < 1 << 40 else None, step)
    return moved(walk, node, x, lambda array: array[(slice(None),) * dim + (own_range,)])


@rule("chunk", "split", "split_with_sizes", "tensor_split")
def _split(walk: Walk, node: Any, x: object, sizes: object, dim: int = 0) -> Parts:
    parts = [tensor.shape[dim] for tensor in node.meta["val"]]
    if not all(isinstance(size, int) for size in parts):
        refuse(node, "some of the rows")
    ends = np.cumsum([0, *parts])
    return Parts(_taken(walk, node, x, range(ends[i], ends[i + 1]), dim) for i in range(len(parts)))


@rule("unbind")
def _unbind(walk: Walk, node: Any, x: object, dim: int = 0) -> Parts:
    return Parts(_taken(walk, node, x, i, dim) for i in range(len(node.meta["val"])))


@rule("getitem")
def _getitem(walk: Walk, node: Any, x: object, number: int) -> object:
    if not isinstance(x, Parts | list):
        refuse(node, f"a part of {told(x)}")
    return x[number]


@rule("select")
def _select(walk: Walk, node: Any, x: object, dim: int, index: int) -> object:
    if not isinstance(node.args[0].meta["val"].shape[dim], int):
        refuse(node, "one of the rows")
    return _taken(walk, node, x, index, dim)


def _taken(walk: Walk, node: Any, x: object, index: int | range, dim: int) -> object:
    """Elements of one dimension."""
    return moved(walk, node, x, lambda array: np.take(array, index, dim))


@rule("repeat_interleave")
def _repeat_interleave(walk: Walk, node: Any, x: object, repeats: int, dim: int | None = None, **given: object) -> object:
    return moved(walk, node, x, lambda array: np.repeat(array, repeats, dim))


@rule("cat")
def _cat(walk: Walk, node: Any, parts: list[object], dim: int = 0) -> object:
    return _joined(walk, node, parts, dim, np.concatenate)


@rule("stack")
def _stack(walk: Walk, node: Any, parts: list[object], dim: int = 0) -> object:
    return _joined(walk, node, parts, dim, np.stack)


def _joined(walk: Walk, node: Any, parts: list[object], dim: int, join: Any) -> object:
    """Parts side by side, as concatenate or stack joins arrays."""
    if all(isinstance(part, Trig) for part in parts):
        first = parts[0]
        assert isinstance(first, Trig)
        if any(part.kind != first.kind or part.magnitude != first.magnitude for part in parts):  # type: ignore[attr-defined]
            refuse(node, "angles beside cosines")
        return replace(first, frequency=join([part.frequency for part in parts], dim))  # type: ignore[attr-defined]
    rows = [walk.force(node, part) for part in parts if not _is_empty(part)]
    terms = [
        Term(*(join([_array(part, i, field) for part in rows], dim) for field in ("factor", "source", "frequency", "turn")))
        for i in range(max(len(part.terms) for part in rows))
    ]
    return Columns(terms)


def _is_empty(part: object) -> bool:
    return (isinstance(part, Columns) and 0 in part.shape) or (isinstance(part, torch.Tensor) and part.numel() == 0)


def _array(part: Columns, number: int, field: str) -> Array:
    """An array of a term; of a term that this part does not have: no summand."""
    if number < len(part.terms):
        return np.asarray(getattr(part.terms[number], field))
    like = np.asarray(getattr(part.terms[0], field))
    return np.full_like(like, -1) if field == "source" else np.zeros_like(like)
