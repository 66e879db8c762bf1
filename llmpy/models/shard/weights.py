"""Rows of weights: a rank's parts are parts of the same tensors, so loading and updates need not know of ranks."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ..pieces import Part
from ..program import Weight

Ranges = Sequence[tuple[int, int]]


def rows_of(weight: Weight, ranges: Ranges) -> Weight:
    """A weight with the rows (a vector: elements) of adjacent or distant ranges, in order."""
    values = weight["values"]
    starts = [0, *accumulate(part.rows for part in weight["parts"])]
    parts = [each for first, end in ranges for each in _parts_between(weight["parts"], starts, first, end)]
    return {
        **weight,
        "rows": sum(end - first for first, end in ranges),
        "parts": parts,
        "values": None if values is None else b"".join(values[4 * first : 4 * end] for first, end in ranges),
    }


def _parts_between(parts: Sequence[Part], starts: Sequence[int], first: int, end: int) -> list[Part]:
    found = []
    for number in range(bisect_right(starts, first) - 1, min(bisect_left(starts, end), len(parts))):
        start, part = starts[number], parts[number]
        found += _cut(part, max(first - start, 0), min(end - start, part.rows))
    return found


def _cut(part: Part, first: int, end: int) -> list[Part]:
    """Rows of a part. A range that begins or ends within a contiguous run becomes up to three parts."""
    inner = part.inner
    if first % inner and end > (first // inner + 1) * inner:
        middle = (first // inner + 1) * inner
        return [*_cut(part, first, middle), *_cut(part, middle, end)]
    if end - first > inner and end % inner:
        middle = end // inner * inner
        return [*_cut(part, first, middle), *_cut(part, middle, end)]
    base = part.base + first // inner * part.stride + first % inner
    is_run = end - first <= inner
    rows = end - first
    return [part._replace(rows=rows, base=base, inner=rows if is_run else inner, stride=rows if is_run else part.stride)]
