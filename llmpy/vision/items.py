"""What one image of a prompt is for the engine: rows of bytes, pieces, and the tables that the tower's operations read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

NO_ROW = -1
"""In a list of rows: zeros."""
WEIGHT_ROW = -2
"""In a list of rows: the row of a weight (a class embedding, a newline)."""


class Grid(NamedTuple):
    """How an image was cut: frames; patches of one tile; tiles, a thumbnail aside."""

    frames: int
    rows: int
    cols: int
    tile_rows: int = 1
    tile_cols: int = 1


class Piece(NamedTuple):
    """What the tower computes alone: its rows, and the features that come out of them."""

    n_rows: int
    n_features: int


class Table(NamedTuple):
    """One table of an image.

    Args:
        values: Numbers; the last axis runs over the entries of all pieces, in order.
        ends: Where each piece's entries end on that axis.
    """

    values: npt.NDArray[Any]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class ImageItem:
    """One image, ready for the tower. Nothing in it depends on other images or on the prompt.

    A list of rows counts from the first row of its piece; NO_ROW and WEIGHT_ROW stand for themselves. Tables, by name:

    | Name | Values | Meaning |
    |---|---|---|
    | positions | int32 [axes, rows] | positions for axial_rope; class rows have 0 |
    | segments.0, segments.1, segments.2 | int32 [segments] | lengths, in rows, of the segments of an attention's table |
    | taps.index, taps.weight | int32, float32 [taps, rows] | rows of the position embedding, and their weights |
    | cells.index, cells.weight | int32, float32 [taps, cells] | the same for the list rows.cells |
    | distances.N, shares.N | int32, float32 [2, 2 n - 1] | rows of a table of distances in n x n rows, their weights |
    | places | int32 [features] | place of each feature in the item; absent: features follow those of the pieces before |
    | rows.class | int32 [rows] | each row itself, or WEIGHT_ROW for a class row; or a place in rows.windows |
    | rows.patches | int32 [rows without class rows] | rows that go on behind the last layer; absent: all |
    | rows.features | int32 [features] | features in the order of the placeholders; absent: as they are computed |
    | rows.windows, rows.near, ... | int32 | the lists of enum row_list in csrc/program/program.h |

    Args:
        rows: Bytes of the tower's rows, uint8 [rows, patch_bytes], read-only. A row is a patch in the order channel, y, x.
            Patches lie in merge order. The class row of a tile is its last row and holds zeros.
        grid: How the image was cut.
        pieces: Pieces, in the order of the rows.
        content: Key of what the features depend on: tower, fields of the processor, grid and rows. 16 bytes.
        n_tokens: Placeholder tokens, which is the sum of the pieces' features.
        tables: Tables by name.
        kind: Name of the tower.
    """

    rows: npt.NDArray[np.uint8]
    grid: Grid
    pieces: tuple[Piece, ...]
    content: bytes
    n_tokens: int
    tables: Mapping[str, Table] = field(default_factory=dict)
    kind: str = "image"


@dataclass(frozen=True)
class PlacedItem:
    """An image at its place in a prompt.

    Args:
        item: The image.
        first: Position of the first token of the range that belongs to the image.
        n_tokens: Tokens of the range. Those whose id is the model's feature id are placeholders, one a feature, in order;
            separators between them are ordinary tokens.
    """

    item: ImageItem
    first: int
    n_tokens: int


def rope_positions(n_tokens: int, placed: Sequence[PlacedItem], merge: int) -> tuple[npt.NDArray[np.int32], int]:
    """Positions of a prompt for M-RoPE (Qwen2-VL and later): text counts on, an image has time, row and column.

    Args:
        n_tokens: Tokens of the prompt.
        placed: Images in the order of their ranges; the grid of each, merged, is the range.
        merge: Patches of one feature along each side.

    Returns:
        int32 [3, n_tokens]: time, row, column; and what an output token's index lacks to its position.
    """
    positions = np.empty((3, n_tokens), np.int32)
    index, start = 0, 0
    for begin, frames, rows, cols in _ranges(placed, merge):
        text = begin - index
        positions[:, index:begin] = np.arange(start, start + text)
        start += text
        index = begin + frames * rows * cols
        positions[:, begin:index] = start + np.indices((frames, rows, cols)).reshape(3, -1)
        start += max(frames, rows, cols)
    positions[:, index:] = np.arange(start, start + n_tokens - index)
    return positions, start - index


def _ranges(placed: Sequence[PlacedItem], merge: int) -> Iterator[tuple[int, int, int, int]]:
    for one in placed:
        grid = one.item.grid
        yield one.first, grid.frames, grid.rows // merge, grid.cols // merge
