"""Rules of embeddings, linears and the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..models.program import Value
from .columns import WIDEST, Activated, Columns, Embedded, Ones, Parameter, Positions, Symbol, columns_of
from .mixture import router
from .refusal import refuse
from .walk import FORCES, PENDING, Walk, rule, told


@rule("arange")
def _arange(walk: Walk, node: Any, *given: object, **options: object) -> Positions:
    first, *rest = given
    if rest and not (isinstance(first, int) and isinstance(rest[0], Symbol) and len(rest) == 1):
        refuse(node, "positions with a step")
    return Positions(int(first) if rest and isinstance(first, int) else 0)


@rule("cumsum")
def _cumsum(walk: Walk, node: Any, x: object, dim: int, **options: object) -> Positions:
    if not isinstance(x, Ones) or dim % 2 != 1:
        refuse(node, f"the running sum of {told(x)}")
    return Positions(1)


@rule("ones", "ones_like", "new_ones")
def _ones(walk: Walk, node: Any, *given: object, **options: object) -> Ones:
    return Ones()


@rule("empty")
def _empty(walk: Walk, node: Any, *given: object, **options: object) -> None:
    return None


@rule("embedding")
def _embedding(walk: Walk, node: Any, weight: object, index: object, *rest: object) -> Embedded:
    if not isinstance(weight, Parameter) or not (isinstance(index, Positions) or index == "input_ids"):
        refuse(node, f"rows of {told(weight)} by {told(index)}")
    return Embedded(weight, index if isinstance(index, Positions) else None, walk.shape(node))


def _force_embedding(walk: Walk, node: Any, x: Embedded) -> Columns:
    rows, width = x.matrix.shape
    pieces = walk.names.matrix(x.matrix, np.arange(rows))
    assert pieces is not None
    weights = [walk.m.matrix("embed", pieces, width)]
    given: dict[str, Any] = {"source": "tokens"}
    if x.positions is not None:
        given = {"source": "positions", "first_row": x.positions.first}
    made = walk.m.emit("embed", [], width, weights=weights, scale=x.scale, **given)
    return columns_of(made.index, (*x.shape[:-1], width))


FORCES[Embedded] = _force_embedding


@rule("linear")
def _linear(walk: Walk, node: Any, x: object, weight: object, bias: object = None) -> object:
    if node in walk.routers:
        return router(walk, node, x, weight, bias)
    return walk.linear(node, x, weight, bias)


@rule("addmm")
def _addmm(walk: Walk, node: Any, bias: object, x: object, weight: object) -> object:
    if not isinstance(weight, Parameter):
        refuse(node, f"a product with {told(weight)}")
    return _linear(walk, node, x, replace(weight, is_transposed=not weight.is_transposed), bias)


@rule("mm")
def _mm(walk: Walk, node: Any, x: object, weight: object) -> object:
    return _addmm(walk, node, None, x, weight)


def write_logits(walk: Walk, node: Any, x: object) -> None:
    """Ends the program: scale * linear, softly capped if the last activation is a tanh."""
    cap = 0.0
    if isinstance(x, Activated) and x.act == "tanh":
        cap, x = x.factor, x.x
    if not isinstance(x, Columns) or len(x.terms) != 1:
        refuse(node, f"wanted logits that are a product with a head, have {told(x)}")
    term = x.terms[0]
    source, factor = term.source.ravel(), float(term.factor.ravel()[0])
    linear = walk.pending[int(source[0]) // WIDEST - PENDING] if source[0] >= PENDING * WIDEST else None
    rows = source % WIDEST
    if linear is None or (source // WIDEST != source[0] // WIDEST).any() or (term.factor != factor).any():
        refuse(node, "wanted logits that are one product with a head, times one number")
    if (rows != np.arange(rows.size)).any():
        refuse(node, "wanted the head's rows in order")
    pieces = walk.names.matrix(linear.weight, rows)
    assert pieces is not None
    weights = [walk.m.matrix("logits", pieces, linear.sizes[1])]
    if linear.bias is not None:
        weights.append(walk.vector(node, "logits", linear.bias, rows))
    walk.m.spec["vocab_size"] = int(rows.size)
    given: dict[str, int | float] = {"scale": factor * cap if cap else factor, "softcap": cap}
    walk.m.spec["ops"].append(("logits", {"in": [linear.x.index], "out": [], "weights": weights, "attributes": given}))
    walk.m.states(Value(walk.m, linear.x.index, linear.x.width))
