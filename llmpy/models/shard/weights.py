"""Rows of weights: a rank's parts are parts of the same tensors, so loading and updates need not know of ranks."""

from collections.abc import Sequence

from ..pieces import Part
from ..program import Weight

Ranges = Sequence[tuple[int, int]]


def rows_of(weight: Weight, ranges: Ranges) -> Weight:
    """A weight with the rows (a vector: elements) of adjacent or distant ranges, in order."""
    values = weight["values"]
    parts = [each for first, end in ranges for each in _parts_between(weight["parts"], first, end)]
    return {
        **weight,
        "rows": sum(end - first for first, end in ranges),
        "parts": parts,
        "values": None if values is None else b"".join(values[4 * first : 4 * end] for first, end in ranges),
    }


def _parts_between(parts: Sequence[Part], first: int, end: int) -> list[Part]:
    found, start = [], 0
    for part in parts:
        a, b = max(first - start, 0), min(end - start, part.rows)
        if a < b:
            found += _cut(part, a, b)
        start += part.rows
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
