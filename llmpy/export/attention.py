"""Rules of attention and of rotary embeddings, which are recognised where attention reads its operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..models.rope import Rope
from .columns import PLAIN, SIN, Array, Columns, Mask, Parameter, Term, columns_of
from .refusal import refuse
from .walk import Walk, rule, told


class Turn(NamedTuple):
    """A rotation of heads.

    Attributes:
        rope: Frequencies, magnitude and order of the pairs.
        head_dim: Columns of a head.
        is_tail: The last columns of the head are rotated.
    """

    rope: Rope
    head_dim: int
    is_tail: bool

    def equals(self, other: Turn) -> bool:
        """Whether both rotate alike."""
        one, two = self.rope, other.rope
        same = one.inv_freq.tobytes() == two.inv_freq.tobytes() and self[1:] == other[1:]
        return same and (one.magnitude, one.interleaved) == (two.magnitude, two.interleaved)


def turn_of(node: Any, x: Columns) -> tuple[Columns, Turn | None]:
    """The columns before a rotation of heads, [heads, head_dim], and the rotation; None: there is none.

    A rotated column is cos(f) x[a] + sin(f) x[b] with a sign. All of this is read from the terms, so that the order of the
    operations that made them does not matter.
    """
    if not x.is_turned:
        return x, None
    shape = x.shape
    own, other = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    frequency, cosine, sine = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for term in x.terms:
        is_here = term.source >= 0
        straight = is_here & (term.turn != SIN)
        if (own[straight] >= 0).any() or (other[is_here & (term.turn == SIN)] >= 0).any():
            refuse(node, "a rotation of more than two columns")
        own[straight], cosine[straight] = term.source[straight], term.factor[straight]
        across = is_here & (term.turn == SIN)
        other[across], sine[across] = term.source[across], term.factor[across]
        both = is_here & (term.turn != PLAIN)
        frequency[both] = term.frequency[both]
    before = Columns([Term(np.ones(shape), own, np.zeros(shape), np.zeros(shape, np.int8))])
    if (own < 0).any():
        refuse(node, "a rotation without a cosine")
    return before, _turn(node, x, own, other, frequency, cosine, sine)


def _turn(node: Any, x: Columns, own: Array, other: Array, frequency: Array, cosine: Array, sine: Array) -> Turn:
    """The rotation, whose pairs are halves or neighbours, at the front or at the end of every head."""
    head_dim = x.shape[-1]
    is_turned = other >= 0
    n, first = int(is_turned[0].sum()), int(is_turned[0].argmax())
    is_tail = first > 0
    is_block = is_turned[:, first : first + n].all() and is_turned.sum() == n * len(own)
    if n % 2 or not is_block or (is_tail and first + n != head_dim):
        refuse(node, "a rotation of columns that are neither the first nor the last of each head")
    here = slice(first, first + n)
    column, half = np.arange(n), n // 2
    magnitude = float(np.abs(cosine[0, first]))
    if not np.array_equal(cosine[:, here], np.full((len(own), n), magnitude)) or (cosine[~is_turned] != 1).any():
        refuse(node, "a rotation whose cosines have several factors")
    orders = (
        (False, np.where(column < half, half, -half), np.where(column < half, -1, 1), frequency[0, here][:half]),
        (True, np.where(column % 2 == 0, 1, -1), np.where(column % 2 == 0, -1, 1), frequency[0, here][::2]),
    )
    for interleaved, offset, sign, own_frequency in orders:
        direction = float(np.sign(sine[0, first] * sign[0]))
        is_order = ((other - own)[:, here] == offset).all() and (sine[:, here] == direction * magnitude * sign).all()
        if is_order:
            pairs = np.repeat(own_frequency, 2) if interleaved else np.tile(own_frequency, 2)
            if (frequency[:, here] != pairs).any():
                refuse(node, "a rotation of pairs by unlike angles")
            return Turn(Rope((direction * own_frequency).astype(np.float32), magnitude, interleaved), head_dim, is_tail)
    refuse(node, "a rotation of pairs that are neither halves nor neighbours")


def settle(walk: Walk, node: Any, x: Columns) -> Columns:
    """The columns of one rotated value that something else than attention reads; `tidy` pairs it with another one."""
    heads = x.map(lambda array: array.reshape(-1, array.shape[-1]))
    before, turn = turn_of(node, heads)
    value = walk.value(node, before)
    assert turn is not None
    return columns_of(walk.m.emit("rope", [value], value.width, **_attributes(walk, turn)).index, x.shape)


def _attributes(walk: Walk, turn: Turn) -> dict[str, Any]:
    given: dict[str, Any] = {"rope": walk.m.rope_index(turn.rope), "head_dim": turn.head_dim}
    return {**given, "is_tail": 1} if turn.is_tail else given


def _heads(walk: Walk, node: Any, x: object) -> Columns:
    """[heads, head_dim] of [1, heads, 1, head_dim]."""
    rows = walk.force(node, x)
    if len(rows.shape) != 4:
        refuse(node, f"attention over {list(rows.shape)}")
    return rows.map(lambda array: array.reshape(array.shape[1], array.shape[3]))


@rule("llmpy.attention")
def _attention(
    walk: Walk, node: Any, q: object, k: object, v: object, mask: object, sinks: object, scale: float, softcap: float
) -> Columns:
    if not isinstance(mask, Mask):
        refuse(node, f"attention with {told(mask)} as the mask")
    rows = [_heads(walk, node, each) for each in (q, k, v)]
    head_dim, n_heads, n_kv_heads = rows[0].shape[1], rows[0].shape[0], rows[1].shape[0]
    if rows[2].shape != rows[1].shape:
        refuse(node, f"keys of {rows[1].shape[1]} columns a head and values of {rows[2].shape[1]}")
    (before_q, turn_q), (before_k, turn_k) = (turn_of(node, each) for each in rows[:2])
    query, key = walk.value(node, before_q), walk.value(node, before_k)
    if turn_q is not None and turn_k is not None and turn_q.equals(turn_k):
        query, key = walk.m.emit_pair("rope", query, key, **_attributes(walk, turn_q))
    elif turn_q is not None or turn_k is not None:
        refuse(node, "queries and keys that are rotated differently")
    value = walk.value(node, rows[2])
    weights = []
    if sinks is not None:
        if not isinstance(sinks, Parameter) or sinks.size != n_heads:
            refuse(node, f"sinks that are {told(sinks)}")
        weights = [-1, walk.vector(node, "attention", sinks)]
    walk.m.spec["layers"].append((n_heads, n_kv_heads, head_dim, mask.size))
    layer, chunk = len(walk.m.spec["layers"]) - 1, mask.size if mask.kind == 2 else 0
    inputs, width = [query, key, value], query.width
    made = walk.m.emit(
        "attention", inputs, width, weights=weights, layer=layer, chunk=chunk, scale=scale, softcap=softcap
    )
    return columns_of(made.index, walk.shape(node))


@rule("llmpy.mask")
def _mask(walk: Walk, node: Any, like: object, kind: int, size: int) -> Mask:
    return Mask(kind, size)
