"""Images of a prompt as the core takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.block_tower import LISTS
from ..vision.items import PlacedItem, Table, rope_positions

if TYPE_CHECKING:
    from ..models import Spec
    from ..vision.items import ImageItem

_TABLES = (
    "positions", "segments.0", "segments.1", "segments.2", "taps.index", "cells.index", "taps.weight", "cells.weight",
    "distances.0", "distances.1", "shares.0", "shares.1", "places", *(f"rows.{name}" for name in LISTS),
)  # fmt: skip
"""Tables of a piece in the order of enum piece_table in csrc/step/items.h."""

_FLOATS = ("taps.weight", "cells.weight", "shares.0", "shares.1")


def has_axes(spec: Spec) -> bool:
    """Whether the text's positions have several axes."""
    return any("axes" in rope for rope in spec.get("ropes", ()))


def encoder_sizes(spec: Spec, max_encoder_rows: int | None, cache_tokens: int | None, max_rows: int) -> tuple[int, int] | None:
    """The core's option `encoder`: most rows of a piece, and features that the pool holds; None: the model takes no images.

    Args:
        spec: The program.
        max_encoder_rows, cache_tokens: The options of the engine; None = their defaults.
        max_rows: max_num_batched_tokens.
    """
    if not spec.get("towers"):
        return None
    most = max_encoder_rows or max(DEFAULT_ROWS, max_rows)
    features = cache_tokens or 2 * max(max_rows, most)
    return most, -(-features // 16) * 16


DEFAULT_ROWS = 4096
"""Default of max_encoder_rows, at least max_num_batched_tokens."""


def core_params(placed: Sequence[PlacedItem], n_tokens: int, with_axes: bool) -> dict[str, Any]:
    """The parameters of `Engine.submit` for the images of a prompt.

    Args:
        placed: Images in the order of their ranges.
        n_tokens: Tokens of the prompt.
        with_axes: As `has_axes` says of the model.
    """
    found: dict[str, Any] = {"items": [_item(one) for one in placed]}
    if with_axes:
        grid, n_features = placed[0].item.grid, placed[0].item.n_tokens
        merge = isqrt(grid.frames * grid.rows * grid.cols // n_features)
        positions, delta = rope_positions(n_tokens, placed, merge)
        found |= {"rope_positions": positions.tobytes(), "rope_delta": delta}
    return found


def _item(one: PlacedItem) -> tuple[int, int, int, bytes, list[Any]]:
    item = one.item
    return one.first, one.n_tokens, item.n_tokens, item.content, [_piece(item, i) for i in range(len(item.pieces))]


def _piece(item: ImageItem, number: int) -> tuple[int, int, bytes, tuple[bytes, ...]]:
    """One piece: (rows, features, bytes, tables)."""
    first = sum(piece.n_rows for piece in item.pieces[:number])
    n_rows, n_features = item.pieces[number]
    tables = tables_of(item, number)
    return n_rows, n_features, item.rows[first : first + n_rows].tobytes(), tuple(_core_table(tables, name) for name in _TABLES)


def tables_of(item: ImageItem, number: int) -> dict[str, np.ndarray[Any, Any]]:
    """The tables of one piece by their names; a piece without segments is one segment."""
    found = {name: _part(table, number) for name, table in item.tables.items()}
    found.setdefault("segments.0", np.array([item.pieces[number].n_rows], np.int32))
    return found


def _part(table: Table, number: int) -> np.ndarray[Any, Any]:
    begin = table.ends[number - 1] if number else 0
    return table.values[..., begin : table.ends[number]]


def _core_table(tables: Mapping[str, np.ndarray[Any, Any]], name: str) -> bytes:
    """A table's words: segments as their first rows, taps row by row."""
    values = tables.get(name)
    if values is None:
        return b""
    if name.startswith("segments"):
        values = np.cumsum([0, *values])
    if name.startswith(("taps", "cells", "distances", "shares")):
        values = values.T
    return np.ascontiguousarray(values, np.float32 if name in _FLOATS else np.int32).tobytes()
