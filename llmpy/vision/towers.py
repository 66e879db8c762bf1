"""Makes an ImageItem of tiles: rows of bytes in the tower's order, and the tables of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import UnsupportedError
from . import sizes
from .items import WEIGHT_ROW, Grid, ImageItem, Piece, Table

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    from .cuts import Cut, Pixels
    from .sizes import Size

    Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tower:
    """What a tower wants of its rows.

    Args:
        patch: Side of a patch, in pixels.
        merge: Patches of one feature along each side; neighbouring rows are those of a feature.
        has_class: Whether each tile has a class row.
        side: Learned positions along each side; 0: there are none.
        blends: Whether learned positions are interpolated (Qwen3-VL); else tiles have `side` patches along each side.
        has_axes: Whether rows have a row and a column for rotary positions.
        class_last: Whether a class row has the last learned position, and rows and columns count from 1 (Llama 4); else the
            first one.
        window: Cells of a window along each side, a cell being the patches of a feature; 0: no windows (Qwen2.5-VL).
        select: Rows that become features: "all"; "patches", which leaves out class rows; "full", class row first; "rest", all
            but the first.
        joins: Whether all tiles are one piece, whose features are laid out as one grid with newlines (LLaVA-NeXT).
    """

    patch: int
    merge: int = 1
    has_class: bool = False
    side: int = 0
    blends: bool = False
    has_axes: bool = False
    window: int = 0
    select: str = "all"
    joins: bool = False
    class_last: bool = False

    @property
    def patch_bytes(self) -> int:
        """Bytes of a row."""
        return 3 * self.patch * self.patch

    @property
    def factor(self) -> int:
        """What divides the sides of a tile of free size."""
        return self.patch * self.merge


def make_item(cut: Cut, size: Size, tower: Tower, seed: bytes) -> ImageItem:
    """The item of an image.

    Args:
        cut: Tiles of the image.
        size: Height and width of the image.
        tower: What the tower wants.
        seed: What the content key depends on besides rows and grid: the tower's name and the processor's fields.
    """
    grids = [(tile.shape[0] // tower.patch, tile.shape[1] // tower.patch) for tile in cut.tiles]
    _check_grids(grids, tower)
    parts = [_tile(grid, tower) for grid in grids]
    rows = _rows(cut.tiles, parts, tower)
    grid = Grid(1, *grids[0], max(cut.rows, 1), max(cut.cols, 1))
    names = parts[0].tables
    lengths = {name: [part.tables[name].shape[-1] for part in parts] for name in names}
    tables = {name: np.concatenate([part.tables[name] for part in parts], axis=-1) for name in names}
    if tower.joins:
        _join(tables, lengths, parts, cut, size)
        pieces: tuple[Piece, ...] = (Piece(len(rows), tables["rows.features"].shape[-1]),)
    else:
        pieces = tuple(Piece(part.n_rows, part.n_features) for part in parts)
    digest = blake2b(seed, digest_size=16)
    digest.update(repr((grid, pieces, rows.shape)).encode())
    digest.update(rows.reshape(-1).data)
    named = {name: _table(values, lengths[name]) for name, values in tables.items()}
    return ImageItem(rows, grid, pieces, digest.digest(), sum(piece.n_features for piece in pieces), named)


def _table(values: npt.NDArray[Any], lengths: list[int]) -> Table:
    values.flags.writeable = False
    return Table(values, tuple(np.cumsum(lengths).tolist()))


def _check_grids(grids: list[Size], tower: Tower) -> None:
    for rows, cols in grids:
        if tower.side and not tower.blends and (rows, cols) != (tower.side, tower.side):
            raise UnsupportedError(
                f"images: a tile of {rows} x {cols} patches for a tower of {tower.side} x {tower.side} positions; "
                "interpolated positions are not supported: leave the processor's size as it is"
            )
        if rows % tower.merge or cols % tower.merge:
            raise UnsupportedError(
                f"images: a tile of {rows} x {cols} patches, which squares of {tower.merge} do not divide; "
                "leave the processor's size as it is"
            )


def _rows(tiles: list[Pixels], parts: list[_Tile], tower: Tower) -> npt.NDArray[np.uint8]:
    """Bytes of all rows. Every tile's patches are cut in merge order, then put into the tile's order."""
    rows = np.zeros((sum(part.n_rows for part in parts), tower.patch_bytes), np.uint8)
    start = 0
    for tile, part in zip(tiles, parts, strict=True):
        n_patches = part.n_rows - tower.has_class
        whole = tile[: part.grid[0] * tower.patch, : part.grid[1] * tower.patch]  # a convolution leaves out the rest
        _core.image_patches(whole, tower.patch, tower.merge, rows[start : start + n_patches])
        if part.order is not None:
            rows[start : start + n_patches] = rows[start : start + n_patches][part.order]
        start += part.n_rows
    rows.flags.writeable = False
    return rows


@dataclass
class _Tile:
    """Tables of one tile. order: where the rows lie in merge order; None: at the same places."""

    grid: Size
    n_rows: int
    n_features: int
    tables: dict[str, npt.NDArray[Any]]
    order: Ints | None = None


def _tile(grid: Size, tower: Tower) -> _Tile:
    row, col = in_merge_order(grid, tower.merge)
    n_patches = row.size
    tile = _Tile(grid, n_patches + tower.has_class, n_patches // tower.merge**2, {"segments.0": _ints([n_patches])})
    if tower.window:
        cells, lengths = windows((grid[0] // tower.merge, grid[1] // tower.merge), tower.window)
        per = tower.merge**2
        tile.order = (cells[:, None] * per + np.arange(per)).ravel().astype(np.int32)
        row, col = row[tile.order], col[tile.order]
        tile.tables["segments.0"] = lengths * per
        tile.tables["segments.1"] = _ints([n_patches])
        tile.tables["rows.features"] = np.argsort(cells).astype(np.int32)
    if tower.has_axes:
        tile.tables["positions"] = np.stack([row, col])
    if tower.side:
        index, weight = taps(row, col, grid, tower)
        tile.tables["taps.index"], tile.tables["taps.weight"] = index, weight
    if tower.has_class:
        _add_class(tile, n_patches, tower.class_last)
    _select(tile, tower, n_patches)
    return tile


def _add_class(tile: _Tile, n_patches: int, is_last: bool) -> None:
    """Adds a class row behind the patches; its learned position is the first one, or the last."""
    tile.tables["segments.0"] = _ints([n_patches + 1])
    tile.tables["rows.class"] = np.append(np.arange(n_patches, dtype=np.int32), np.int32(WEIGHT_ROW))
    if "positions" in tile.tables:
        tile.tables["positions"] = np.pad(tile.tables["positions"] + np.int32(is_last), ((0, 0), (0, 1)))
    if "taps.index" in tile.tables:
        first, own = (0, n_patches) if is_last else (1, 0)
        index = tile.tables["taps.index"] + np.int32(first)
        tile.tables["taps.index"] = np.pad(index, ((0, 0), (0, 1)), constant_values=own)
        tile.tables["taps.weight"] = np.pad(tile.tables["taps.weight"], ((0, 0), (0, 1)), constant_values=1)


def _select(tile: _Tile, tower: Tower, n_patches: int) -> None:
    """Adds the list of the rows that become features."""
    if tower.select == "all":
        return
    patches = np.arange(n_patches, dtype=np.int32)
    lists = {"patches": patches, "rest": patches[1:], "full": np.roll(np.arange(tile.n_rows, dtype=np.int32), 1)}
    tile.tables["rows.patches"] = lists[tower.select]
    tile.n_features = lists[tower.select].size // tower.merge**2


def _join(
    tables: dict[str, npt.NDArray[Any]], lengths: dict[str, list[int]], parts: list[_Tile], cut: Cut, size: Size
) -> None:
    """Makes one piece of all tiles: lists count from its first row, and features lie in one grid behind the first tile's."""
    starts = np.cumsum([0, *(part.n_rows for part in parts)])
    for name in ("rows.class", "rows.patches"):
        if name in tables:
            moved = [np.where(part.tables[name] < 0, part.tables[name], part.tables[name] + start)
                     for part, start in zip(parts, starts, strict=False)]  # fmt: skip
            tables[name] = np.concatenate(moved).astype(np.int32)
    tables["rows.features"] = grid_with_newlines(parts[0].grid, parts[0].n_features, cut.rows, cut.cols, size)
    for name, values in tables.items():
        lengths[name] = [values.shape[-1]]


def grid_with_newlines(grid: Size, base: int, tile_rows: int, tile_cols: int, size: Size) -> Ints:
    """Features of the first tile, then those of the others as one grid without its padding, a newline behind each row.

    Args:
        grid: Patches of a tile.
        base: Features of a tile.
        tile_rows, tile_cols: Grid of the tiles behind the first.
        size: Height and width of the image.
    """
    rows, cols = grid
    first = np.arange(base, dtype=np.int32)
    index = np.arange(tile_rows * tile_cols * rows * cols, dtype=np.int32).reshape(tile_rows, tile_cols, rows, cols) + base
    whole = index.transpose(0, 2, 1, 3).reshape(tile_rows * rows, tile_cols * cols)
    top, left = sizes.without_padding(size, (whole.shape[0], whole.shape[1]))
    whole = whole[top : whole.shape[0] - top, left : whole.shape[1] - left]
    lines = np.pad(whole, ((0, 0), (0, 1)), constant_values=WEIGHT_ROW)
    return np.concatenate([first, lines.ravel()])


def in_merge_order(grid: Size, merge: int) -> tuple[Ints, Ints]:
    """Row and column of each patch, squares of merge x merge patches together."""
    rows, cols = grid
    index = np.arange(rows * cols, dtype=np.int32).reshape(rows // merge, merge, cols // merge, merge)
    flat = index.transpose(0, 2, 1, 3).ravel()
    return flat // np.int32(cols), flat % np.int32(cols)


def windows(cells: Size, side: int) -> tuple[Ints, Ints]:
    """Cells of a grid window by window, and the number of cells of each window."""
    rows, cols = cells
    index = np.arange(rows * cols, dtype=np.int32).reshape(rows, cols)
    parts = [index[y : y + side, x : x + side].ravel() for y in range(0, rows, side) for x in range(0, cols, side)]
    return np.concatenate(parts), _ints([part.size for part in parts])


def taps(row: Ints, col: Ints, grid: Size, tower: Tower) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Learned positions of patches: rows of the embedding and their weights, [taps, patches]."""
    if not tower.blends:
        return (row * np.int32(tower.side) + col)[None], np.ones((1, row.size), np.float32)
    (down, down_weight), (across, across_weight) = (
        _linear(index, n, tower.side) for index, n in zip((row, col), grid, strict=True)
    )
    index = down[:, None] * np.int32(tower.side) + across[None]
    weight = down_weight[:, None] * across_weight[None]
    return index.reshape(4, -1), weight.reshape(4, -1)


def _linear(index: Ints, n: int, side: int) -> tuple[Ints, npt.NDArray[np.float32]]:
    """The two neighbours of each place of n on an axis of `side` places, corners on corners, and their weights."""
    place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1))
    floor = np.floor(place)
    near = floor + np.arange(2, dtype=np.float32)[:, None]
    weight = np.maximum(1 - np.abs(place - floor - np.arange(2, dtype=np.float32)[:, None]), np.float32(0))
    return np.minimum(near, side - 1).astype(np.int32), weight.astype(np.float32)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)
