"""Rules of sums, products, norms, activations, and of the angles of rotary embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..models.blocks import ACTIVATIONS
from . import columns as kinds
from .columns import (
    Activated,
    Centred,
    Columns,
    Embedded,
    Lazy,
    Mean,
    MeanSquare,
    Normed,
    Ones,
    Parameter,
    Positions,
    Square,
    Trig,
    columns_of,
)
from .refusal import refuse
from .walk import FORCES, Walk, rule, told


def _number(x: object) -> float | None:
    """The number that a value is, also as a tensor of one element; None: it is none."""
    if isinstance(x, torch.Tensor) and x.numel() == 1:
        return float(x)
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None


# ---- sums and products -----------------------------------------------------------------------------------------------------


@rule("mul", "mul_")
def _mul(walk: Walk, node: Any, a: object, b: object) -> object:
    for x, other in ((a, b), (b, a)):
        if (number := _number(other)) is not None:
            return _times(walk, node, x, number)
        if isinstance(other, Ones):
            return x
        if (found := _special_product(walk, node, x, other)) is not None:
            return found
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Activated) and x.factor == 1 and isinstance(other, Columns | Lazy):
            return _gated(walk, node, x, other)
    if not (isinstance(a, Columns | Lazy) and isinstance(b, Columns | Lazy)):
        refuse(node, f"{told(a)} times {told(b)}")
    values = [walk.value(node, _spread(walk, node, x)) for x in (a, b)]
    return columns_of((values[0] * values[1]).index, walk.shape(node))


def _special_product(walk: Walk, node: Any, x: object, other: object) -> object | None:
    """x times other where they complete a formula; None: they do not."""
    if isinstance(other, MeanSquare) and other.is_root:
        if other.eps is None:
            refuse(node, "a norm without an eps")
        if other.is_centred and isinstance(x, Centred) and x.x is other.x:
            return Normed(x.x, True, other.eps)
        if not other.is_centred and x is other.x:
            return Normed(x, False, other.eps)
        refuse(node, "the reciprocal root of the mean square of other values")
    if isinstance(x, Normed) and isinstance(other, Parameter):
        return _norm(walk, node, x, [other])
    if isinstance(x, Positions) and isinstance(other, torch.Tensor):
        return _angle(node, x, other.double().numpy().reshape(walk.shape(node)))
    if isinstance(x, Columns | Lazy) and isinstance(other, Trig) and other.kind != kinds.PLAIN:
        rows = walk.force(node, x)
        if rows.is_turned:
            refuse(node, "a rotation of a rotation")
        return rows.turned(other)
    if isinstance(x, Columns | Lazy) and isinstance(other, Parameter):
        return _scaled_by_weight(walk, node, x, other)
    if isinstance(x, Columns | Lazy) and isinstance(other, torch.Tensor):
        return walk.force(node, x).times(other.double().numpy())
    return None


def _gated(walk: Walk, node: Any, gate: Activated, up: Columns | Lazy) -> Columns:
    """act(gate) * up; a gate of one column serves all columns."""
    rows = walk.force(node, up)
    narrow = gate.x if gate.x.terms[0].source.size == 1 else _spread(walk, node, gate.x)
    wide = _spread(walk, node, rows)
    made = walk.m.gated(walk.value(node, narrow), walk.value(node, wide), gate.act)
    return columns_of(made.index, walk.shape(node))


def _spread(walk: Walk, node: Any, x: object) -> Columns:
    """Columns in the shape of the node's result."""
    shape = walk.shape(node)
    return walk.force(node, x).map(lambda array: np.broadcast_to(array, shape))


def _scaled_by_weight(walk: Walk, node: Any, x: object, weight: Parameter) -> Columns:
    """x times a vector of the checkpoint."""
    shape = walk.shape(node)
    value = walk.value(node, x)
    if weight.size != shape[-1] or shape[-1] != value.width:
        refuse(node, f"{value.width} columns times {weight.name} {list(weight.shape)}")
    made = walk.m.emit("act", [value], value.width, weights=[walk.vector(node, "act", weight)], act="scale")
    return columns_of(made.index, shape)


def _times(walk: Walk, node: Any, x: object, factor: float) -> object:
    if isinstance(x, Trig):
        is_angle = x.kind == kinds.PLAIN
        return replace(x, frequency=x.frequency * factor) if is_angle else replace(x, magnitude=x.magnitude * factor)
    if isinstance(x, Parameter):
        return replace(x, offset=x.offset * factor, factor=x.factor * factor)
    if isinstance(x, Embedded):
        return replace(x, scale=x.scale * factor)
    if isinstance(x, Activated):
        return replace(x, factor=x.factor * factor)
    if isinstance(x, Positions | Ones) and factor == 1:
        return x
    if not isinstance(x, Columns | Lazy):
        refuse(node, f"{told(x)} times a number")
    return walk.force(node, x).times(factor)


@rule("div", "div_")
def _div(walk: Walk, node: Any, a: object, b: object, **given: object) -> object:
    number = _number(b)
    if number is None or number == 0 or given:
        refuse(node, f"{told(a)} divided by {told(b)}")
    return _times(walk, node, a, 1 / number)


@rule("neg")
def _neg(walk: Walk, node: Any, x: object) -> object:
    return _times(walk, node, x, -1.0)


@rule("add", "add_")
def _add(walk: Walk, node: Any, a: object, b: object, alpha: float = 1) -> object:
    if alpha != 1:
        b = _times(walk, node, b, alpha)
    for x, other in ((a, b), (b, a)):
        if (number := _number(other)) is not None:
            return _plus_number(node, x, number)
    return _sum(walk, node, a, b)


@rule("sub", "sub_")
def _sub(walk: Walk, node: Any, a: object, b: object, alpha: float = 1) -> object:
    if isinstance(b, Mean) and b.x is a and alpha == 1:
        return Centred(a)
    number = _number(b)
    return _plus_number(node, a, -alpha * number) if number is not None else _add(walk, node, a, b, -alpha)


@rule("rsub")
def _rsub(walk: Walk, node: Any, a: object, b: object, alpha: float = 1) -> object:
    return _sub(walk, node, b, a, alpha)


def _plus_number(node: Any, x: object, number: float) -> object:
    if isinstance(x, Positions) and number == int(number):
        return Positions(x.first + int(number))
    if isinstance(x, Parameter):
        return replace(x, offset=x.offset + number)
    if isinstance(x, MeanSquare) and x.eps is None:
        return replace(x, eps=number)
    if number == 0:
        return x
    refuse(node, f"{told(x)} plus a number")


def _sum(walk: Walk, node: Any, a: object, b: object) -> object:
    if not (isinstance(a, Columns | Lazy) and isinstance(b, Columns | Lazy)):
        refuse(node, f"{told(a)} plus {told(b)}")
    rows = [walk.force(node, x) for x in (a, b)]
    if all(x.is_turned for x in rows):
        return Columns([*rows[0].terms, *rows[1].terms])
    values = [walk.value(node, _spread(walk, node, x)) for x in rows]
    return columns_of((values[0] + values[1]).index, walk.shape(node))


# ---- norms -----------------------------------------------------------------------------------------------------------------


@rule("pow")
def _pow(walk: Walk, node: Any, x: object, exponent: float) -> object:
    if exponent == 2:
        return Square(x.x, True) if isinstance(x, Centred) else Square(x, False)
    if exponent == -0.5:
        return _rsqrt(walk, node, x)
    refuse(node, f"{told(x)} to the power {exponent}")


@rule("square")
def _square(walk: Walk, node: Any, x: object) -> object:
    return _pow(walk, node, x, 2)


@rule("mean")
def _mean(walk: Walk, node: Any, x: object, dims: list[int] | None = None, keepdim: bool = False, **given: object) -> object:
    n_dims = len(node.args[0].meta["val"].shape)
    if dims is None or [dim % n_dims for dim in dims] != [n_dims - 1] or not keepdim:
        refuse(node, "a mean over other dimensions than the last")
    return MeanSquare(x.x, x.is_centred) if isinstance(x, Square) else Mean(x)


@rule("rsqrt")
def _rsqrt(walk: Walk, node: Any, x: object) -> object:
    if not isinstance(x, MeanSquare) or x.is_root:
        refuse(node, f"the reciprocal root of {told(x)}")
    return replace(x, is_root=True)


def _norm(walk: Walk, node: Any, x: Normed, weights: list[Parameter]) -> Columns:
    """A norm over the last dimension with its weight, and a bias if there are two."""
    rows = walk.force(node, x.x)
    value, size = walk.value(node, rows), rows.shape[-1]
    op = "layer_norm" if x.is_centred else "rms_norm"
    for weight in weights:
        if weight.size not in (size, value.width):
            refuse(node, f"{weight.name}: wanted {size} or {value.width} elements, have {weight.size}")
    numbers = [walk.vector(node, op, weight) for weight in weights]
    made = walk.m.emit(op, [value], value.width, weights=numbers, n_heads=value.width // size, eps=x.eps)
    return columns_of(made.index, rows.shape)


@rule("layer_norm")
def _layer_norm(
    walk: Walk,
    node: Any,
    x: object,
    shape: list[int],
    weight: object = None,
    bias: object = None,
    eps: float = 1e-5,
    *rest: object,
) -> object:
    given = [each for each in (weight, bias) if each is not None]
    if len(shape) != 1 or not all(isinstance(each, Parameter) for each in given) or (weight is None and bias is not None):
        refuse(node, "a norm of this form")
    return _norm(walk, node, Normed(x, True, eps), given)  # type: ignore[arg-type]


@rule("rms_norm")
def _rms_norm(walk: Walk, node: Any, x: object, shape: list[int], weight: object = None, eps: float | None = None) -> object:
    if len(shape) != 1 or eps is None or not isinstance(weight, Parameter | None):
        refuse(node, "a norm of this form")
    return Normed(x, False, eps) if weight is None else _norm(walk, node, Normed(x, False, eps), [weight])


# ---- activations -----------------------------------------------------------------------------------------------------------


@rule("silu", "relu", "tanh", "sigmoid", "silu_", "relu_", "sigmoid_")
def _plain_act(walk: Walk, node: Any, x: object) -> object:
    return _act(walk, node, x, str(node.target).split(".")[1].rstrip("_"))


@rule("gelu")
def _gelu(walk: Walk, node: Any, x: object, approximate: str = "none") -> object:
    return _act(walk, node, x, "gelu_new" if approximate == "tanh" else "gelu")


@rule("llmpy.act")
def _act(walk: Walk, node: Any, x: object, act: str) -> object:
    if act not in ACTIVATIONS:
        refuse(node, f"the activation {act}")
    return Activated(walk.force(node, x), act)


# ---- angles ----------------------------------------------------------------------------------------------------------------


@rule("matmul", "bmm")
def _matmul(walk: Walk, node: Any, a: object, b: object) -> object:
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Positions) and isinstance(other, torch.Tensor) and other.numel() == int(np.prod(walk.shape(node))):
            return _angle(node, x, other.double().numpy().reshape(walk.shape(node)))
    if isinstance(b, Parameter):
        return walk.linear(node, a, replace(b, is_transposed=not b.is_transposed))
    refuse(node, f"the product of {told(a)} and {told(b)}")


def _angle(node: Any, x: Positions, frequency: Any) -> Trig:
    if x.first:
        refuse(node, "angles of shifted positions")
    return Trig(frequency)


@rule("cos", "sin")
def _cos(walk: Walk, node: Any, x: object) -> object:
    if not isinstance(x, Trig) or x.kind != kinds.PLAIN:
        refuse(node, f"cos or sin of {told(x)}")
    return replace(x, kind=kinds.COS if str(node.target).startswith("aten.cos") else kinds.SIN)


# ---- what unfinished formulas are ------------------------------------------------------------------------------------------


def _force_act(walk: Walk, node: Any, x: Activated) -> Columns:
    return columns_of(walk.m.act(walk.value(node, x.x), x.act).index, x.x.shape).times(x.factor)


def _force_norm(walk: Walk, node: Any, x: Normed) -> Columns:
    return _norm(walk, node, x, [])


def _force_square(walk: Walk, node: Any, x: Square) -> Columns:
    if x.is_centred:
        refuse(node, "the square of centred values")
    rows = walk.force(node, x.x)
    value = walk.value(node, rows)
    return columns_of((value * value).index, rows.shape)


FORCES.update({Activated: _force_act, Normed: _force_norm, Square: _force_square})
