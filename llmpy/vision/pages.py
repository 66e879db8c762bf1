"""Makes an ImageItem of a page for DeepSeek-OCR: lists, positions and distances of its two encoders, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import UnsupportedError
from .items import NO_ROW, WEIGHT_ROW, Grid, ImageItem, Piece, Table

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    from .cuts import Cut, Pixels
    from .sizes import Size

    Ints: TypeAlias = npt.NDArray[np.int32]
    Floats: TypeAlias = npt.NDArray[np.float32]
    Tables: TypeAlias = dict[str, npt.NDArray[Any]]

SEPARATOR = WEIGHT_ROW - 1
SHRINK = 4
"""Patches of a cell along each side: two convolutions that take every second one."""


@dataclass(frozen=True)
class PageTower:
    """What the tower wants of its rows.

    Args:
        patch: Side of a patch, in pixels.
        side: Learned positions along each side of the first encoder.
        window: Patches of a window along each side.
        cells: Learned positions along each side of the second encoder.
    """

    patch: int
    side: int
    window: int
    cells: int

    @property
    def factor(self) -> int:
        """What divides the sides of a tile."""
        return self.patch * SHRINK


def make_page(cut: Cut, size: Size, tower: PageTower, seed: bytes) -> ImageItem:
    """The item of an image: a piece for each tile, then one for the whole, which has all newlines and the separator.

    Args:
        cut: Square tiles of the image.
        size: Height and width of the image.
        tower: What the tower wants.
        seed: What the content key depends on besides rows and grid.
    """
    sides = [tile.shape[0] // tower.patch for tile in cut.tiles]
    if any(tile.shape[0] != tile.shape[1] or tile.shape[0] % tower.factor for tile in cut.tiles):
        raise UnsupportedError(
            f"images: wanted square tiles of a multiple of {tower.factor} pixels, "
            f"have {[tile.shape[:2] for tile in cut.tiles]}; leave the processor's size as it is"
        )
    parts = [_tables(side, tower) for side in sides]
    lists = _features(sides, cut.rows, cut.cols)
    for part, (features, places) in zip(parts, lists, strict=True):
        part["rows.features"], part["places"] = features, places
    _pad_taps(parts)
    rows = np.concatenate([_rows(tile, tower.patch) for tile in cut.tiles])
    rows.flags.writeable = False
    pieces = tuple(Piece(side**2, len(features)) for side, (features, _) in zip(sides, lists, strict=True))
    grid = Grid(1, sides[-1], sides[-1], max(cut.rows, 1), max(cut.cols, 1))
    digest = blake2b(seed, digest_size=16)
    digest.update(repr((grid, pieces, rows.shape)).encode())
    digest.update(rows.reshape(-1).data)
    tables = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return ImageItem(rows, grid, pieces, digest.digest(), sum(piece.n_features for piece in pieces), tables)


def _rows(tile: Pixels, patch: int) -> npt.NDArray[np.uint8]:
    rows = np.zeros((tile.shape[0] // patch * (tile.shape[1] // patch), 3 * patch * patch), np.uint8)
    _core.image_patches(tile, patch, 1, rows)
    return rows


def _joined(values: list[npt.NDArray[Any]]) -> Table:
    joined = np.concatenate(values, axis=-1)
    joined.flags.writeable = False
    return Table(joined, tuple(np.cumsum([value.shape[-1] for value in values]).tolist()))


def _pad_taps(parts: list[Tables]) -> None:
    """Gives the positions of all tiles as many taps; those of weight 0 add nothing."""
    for name in ("taps.index", "taps.weight", "cells.index", "cells.weight"):
        most = max(len(part[name]) for part in parts)
        for part in parts:
            part[name] = np.pad(part[name], ((0, most - len(part[name])), (0, 0)))


def _features(sides: list[int], tile_rows: int, tile_cols: int) -> list[tuple[Ints, Ints]]:
    """For each tile the rows that are features, and their places: lines over all tiles, lines of the whole, the separator."""
    found = []
    base = sides[-1] // SHRINK
    n, line = (sides[0] // SHRINK, tile_cols * (sides[0] // SHRINK) + 1) if tile_rows else (0, 0)
    for tile_row, tile_col in np.ndindex(tile_rows, tile_cols):
        row, col = np.indices((n, n)).reshape(2, -1)
        found.append((_ints(np.arange(n * n)), _ints((tile_row * n + row) * line + tile_col * n + col)))
    newlines = np.arange(1, tile_rows * n + 1) * line - 1
    whole = np.full((base, base + 1), WEIGHT_ROW)
    whole[:, :-1] = np.arange(base * base).reshape(base, base)
    first = tile_rows * n * line
    features = np.concatenate([whole.reshape(-1), [SEPARATOR], np.full(len(newlines), WEIGHT_ROW)])
    places = np.concatenate([first + np.arange(whole.size + 1), newlines])
    return [*found, (_ints(features), _ints(places))]


def _tables(side: int, tower: PageTower) -> Tables:
    """The tables of a tile of side x side patches that do not depend on other tiles."""
    cells = side // SHRINK
    tables: Tables = {}
    tables["rows.windows"], tables["rows.class"] = windows(side, tower.window)
    n_windows = len(tables["rows.windows"]) // tower.window**2
    tables["segments.0"] = _ints(np.full(n_windows, tower.window**2))
    tables["segments.1"], tables["segments.2"] = _ints([side**2]), _ints([cells**2 + 1])
    for table, n, made_for in ((0, tower.window, tower.window), (1, side, tower.side)):
        tables[f"distances.{table}"], tables[f"shares.{table}"] = distances(2 * n - 1, 2 * made_for - 1)
    tables["rows.near"], tables["rows.near_half"] = near(side, 1), near(side, 2)
    tables["rows.near_quarter"] = near(side // 2, 2)
    tables["rows.cells"] = _ints([*range(cells**2), WEIGHT_ROW])
    tables["rows.patches"] = _ints(np.arange(cells**2))
    tables["taps.index"], tables["taps.weight"] = square_taps(side, tower.side)
    index, weight = square_taps(cells, tower.cells)
    first = np.zeros((len(index), 1))
    tables["cells.index"] = _ints(np.concatenate([index + 1, first], 1))  # the class has the first learned position
    tables["cells.weight"] = np.concatenate([weight, first + (np.arange(len(index)) == 0)[:, None]], 1).astype(np.float32)
    return tables


def windows(side: int, window: int) -> tuple[Ints, Ints]:
    """Patches window by window, NO_ROW beyond the tile; and where each patch lies among them."""
    n = -(-side // window)
    index = np.full((n * window, n * window), NO_ROW)
    index[:side, :side] = np.arange(side * side).reshape(side, side)
    flat = index.reshape(n, window, n, window).transpose(0, 2, 1, 3).reshape(-1)
    places = np.empty(side * side, np.int32)
    places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    return _ints(flat), places


def near(side: int, step: int) -> Ints:
    """The 3 x 3 rows around every step-th row of every step-th line; NO_ROW beyond the square."""
    padded = np.full((side + 2, side + 2), NO_ROW)
    padded[1:-1, 1:-1] = np.arange(side * side).reshape(side, side)
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))[::step, ::step]
    return _ints(around.reshape(-1))


def distances(n: int, made_for: int) -> tuple[Ints, Floats]:
    """Rows of a table of `made_for` distances for n of them, and their weights: linear, the ends of the intervals together."""
    place = np.maximum((np.arange(n) + 0.5) * (made_for / n) - 0.5, 0)
    low = place.astype(np.int32)
    share = place - low
    return np.stack([low, np.minimum(low + 1, made_for - 1)]), np.stack([1 - share, share]).astype(np.float32)


def square_taps(n: int, side: int) -> tuple[Ints, Floats]:
    """Learned positions of a square of n x n rows from one of side x side: bicubic with antialiasing; [taps, n * n]."""
    index, weight = axis_taps(n, side)
    down, across = index[:, None, :, None] * side, index[None, :, None, :]
    both = weight[:, None, :, None] * weight[None, :, None, :]
    return _ints((down + across).reshape(-1, n * n)), both.reshape(-1, n * n).astype(np.float32)


def axis_taps(n: int, side: int) -> tuple[Ints, npt.NDArray[np.float64]]:
    """The places of an axis of `side` that make each of n, and their weights, [taps, n]; equal sizes: the place itself."""
    if n == side:
        return np.arange(n, dtype=np.int32)[None], np.ones((1, n))
    scale = side / n
    wide = max(scale, 1.0)
    centre = (np.arange(n) + 0.5) * scale
    first = np.maximum((centre - 2 * wide + 0.5).astype(np.int32), 0)
    end = np.minimum((centre + 2 * wide + 0.5).astype(np.int32), side)
    place = first + np.arange((end - first).max())[:, None]
    weight = np.where(place < end, cubic((place - centre + 0.5) / wide), 0)
    return np.minimum(place, side - 1).astype(np.int32), weight / weight.sum(0)


def cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The bicubic filter with a = -0.5."""
    x = np.abs(x)
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


def _ints(values: Any) -> Ints:
    return np.asarray(values, np.int32)
