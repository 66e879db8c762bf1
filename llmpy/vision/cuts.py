"""Cuts images to tiles, one function for each way of transformers' processors. Both are uint8 [height, width, 3]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import _core
from . import sizes
from .fields import MOST_PIXELS

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    from .fields import Fields
    from .sizes import Size

    Pixels: TypeAlias = npt.NDArray[np.uint8]


class Cut(NamedTuple):
    """Tiles of an image.

    Args:
        tiles: What the tower sees, in order.
        rows, cols: Grid of the tiles, apart from one that shows the whole image; 0: there is only that one.
    """

    tiles: list[Pixels]
    rows: int = 0
    cols: int = 0


def resize(image: Pixels, size: Size, fields: Fields) -> Pixels:
    """The image with another size, by the filter of the field `resample`."""
    if image.shape[:2] == size:
        return image
    number = fields.count("resample", 3)
    return np.frombuffer(_core.image_resize(image, *size, number), np.uint8).reshape(*size, 3)


def centre(image: Pixels, size: Size) -> Pixels:
    """The middle of the image; zeros where the image is smaller."""
    top, left = ((have - want) // 2 for have, want in zip(image.shape, size, strict=False))
    if top >= 0 and left >= 0:
        return image[top : top + size[0], left : left + size[1]]
    canvas = np.zeros((*size, 3), np.uint8)
    part = image[max(top, 0) : top + size[0], max(left, 0) : left + size[1]]
    canvas[max(-top, 0) :, max(-left, 0) :][: part.shape[0], : part.shape[1]] = part
    return canvas


def squared(image: Pixels, fields: Fields) -> Pixels:
    """The image in the middle of a square of the mean colour."""
    height, width = image.shape[:2]
    side = max(height, width)
    canvas = np.empty((side, side, 3), np.uint8)
    canvas[:] = [int(mean * 255) for mean in fields.numbers("image_mean")]
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = image
    return canvas


def plain(image: Pixels, factor: int, fields: Fields) -> Cut:
    """One tile: resized to a height and a width, or by the shorter side and cropped (CLIP, SigLIP, LLaVA)."""
    if fields.flag("pads_to_square") and fields.flag("do_pad") and image.shape[0] != image.shape[1]:
        image = squared(image, fields)
    return Cut([_plain(image, fields)])


def _plain(image: Pixels, fields: Fields) -> Pixels:
    if fields.flag("do_resize"):
        height, width = image.shape[:2]
        if fields.has_edge("size", "shortest_edge"):
            size = sizes.by_shortest((height, width), fields.edge("size", "shortest_edge"))
        else:
            size = fields.size("size")
        image = resize(image, size, fields)
    return centre(image, fields.size("crop_size")) if fields.flag("do_center_crop") else image


def by_area(image: Pixels, factor: int, fields: Fields) -> Cut:
    """One tile of the image's shape within bounds of its area (Qwen-VL)."""
    if not fields.flag("do_resize"):
        return Cut([image])
    least, most = (fields.edge("size", edge, MOST_PIXELS) for edge in ("shortest_edge", "longest_edge"))
    return Cut([resize(image, sizes.by_area(image.shape[:2], factor, least, most), fields)])


def by_longest(image: Pixels, factor: int, fields: Fields) -> Cut:
    """One tile of the image's shape within a bound of its longer side (Pixtral)."""
    if not fields.flag("do_resize"):
        return Cut([image])
    if fields.has_edge("size", "longest_edge"):
        most = (fields.edge("size", "longest_edge"),) * 2
    else:
        most = fields.size("size")
    return Cut([resize(image, sizes.by_longest(image.shape[:2], most, factor), fields)])


def with_crops(image: Pixels, factor: int, fields: Fields) -> Cut:
    """The whole image; with do_pan_and_scan also crops along its longer side (Gemma 3)."""
    parts, rows, cols = [image], 0, 0
    if fields.flag("do_pan_and_scan"):
        least, most = fields.count("pan_and_scan_min_crop_size"), fields.count("pan_and_scan_max_num_crops", 64)
        rows, cols = sizes.crops(image.shape[:2], least, most, fields.number("pan_and_scan_min_ratio_to_activate"))
        parts += _split(image, rows, cols)
    return Cut([_plain(part, fields) for part in parts], rows, cols)


def _split(image: Pixels, rows: int, cols: int) -> list[Pixels]:
    """Tiles of equal size, row by row; the last ones may be smaller."""
    height, width = (math.ceil(side / max(count, 1)) for side, count in zip(image.shape, (rows, cols), strict=False))
    return [image[y * height : (y + 1) * height, x * width : (x + 1) * width] for y in range(rows) for x in range(cols)]


def nearest_grid(image: Pixels, factor: int, fields: Fields) -> Cut:
    """Tiles of the nearest grid, then the whole image if there are several (InternVL)."""
    most = fields.count("max_patches", 64)
    if not fields.flag("crop_to_patches") or most == 1:
        return Cut([_plain(image, fields)])
    tile = fields.size("size")
    rows, cols = sizes.tile_grid(image.shape[:2], tile, fields.count("min_patches", most), most)
    tiles = _split(resize(image, (tile[0] * rows, tile[1] * cols), fields), rows, cols)
    if len(tiles) == 1:
        return Cut(tiles)
    return Cut([*tiles, resize(image, tile, fields)], rows, cols)


def up_to_tiles(image: Pixels, factor: int, fields: Fields) -> Cut:
    """Tiles of the image, resized by its longer side and up to whole tiles; then the whole image (Idefics3, SmolVLM)."""
    tile = fields.edge("max_image_size", "longest_edge")
    if fields.flag("do_resize"):
        if fields.has_edge("size", "longest_edge"):
            size = sizes.to_longest(image.shape[:2], fields.edge("size", "longest_edge"))
        else:
            size = fields.size("size")
        image = resize(image, size, fields)
    if not fields.flag("do_image_splitting"):
        return Cut([resize(image, (tile, tile), fields)])
    image = resize(image, sizes.to_tiles(image.shape[:2], tile), fields)
    rows, cols = image.shape[0] // tile, image.shape[1] // tile
    if rows == cols == 1:
        return Cut([image])
    return Cut([*_split(image, rows, cols), resize(image, (tile, tile), fields)], rows, cols)


def fitting_canvas(image: Pixels, factor: int, fields: Fields) -> Cut:
    """Tiles of the canvas that fits best, the image in its corner; then the whole image if there are several (Llama 4)."""
    size, tile, largest = (image.shape[0], image.shape[1]), fields.size("size"), fields.flag("resize_to_max_canvas")
    rows, cols = sizes.fitting_grid(size, tile, fields.count("max_patches", 64), largest)
    canvas = np.zeros((rows * tile[0], cols * tile[1], 3), np.uint8)
    height, width = canvas.shape[:2]
    if not largest:  # an image is not enlarged beyond a tile
        height, width = min(max(size[0], tile[0]), height), min(max(size[1], tile[0]), width)
    inside = resize(image, sizes.into(size, (height, width)), fields)
    canvas[: inside.shape[0], : inside.shape[1]] = inside
    tiles = _split(canvas, rows, cols)
    return Cut(tiles) if len(tiles) == 1 else Cut([*tiles, resize(image, tile, fields)], rows, cols)


def page(image: Pixels, factor: int, fields: Fields) -> Cut:
    """Tiles of the nearest grid if the image exceeds a tile; then the whole in a square of mean colour (DeepSeek-OCR)."""
    tile, base = fields.count("tile_size"), fields.count("size")
    tiles, grid = [], (0, 0)
    if max(image.shape[:2]) > tile:
        least, most = fields.count("min_patches", 64), fields.count("max_patches", 64)
        grid = sizes.tile_grid(image.shape[:2], (tile, tile), least, most)
        tiles = _split(resize(image, (tile * grid[0], tile * grid[1]), fields), *grid)
    whole = resize(image, sizes.within_square(image.shape[:2], base), fields)
    canvas = np.empty((base, base, 3), np.uint8)
    canvas[:] = [int(mean * 255) for mean in fields.numbers("image_mean")]
    top, left = (round((base - side) * 0.5) for side in whole.shape[:2])
    canvas[top : top + whole.shape[0], left : left + whole.shape[1]] = whole
    return Cut([*tiles, canvas], *grid)


def best_canvas(image: Pixels, factor: int, fields: Fields) -> Cut:
    """The whole image, then tiles of it on the canvas that fits best (LLaVA-NeXT)."""
    tile = fields.edge("crop_size", "height")
    whole = (fields.edge("size", "shortest_edge"),) * 2 if fields.has_edge("size", "shortest_edge") else fields.size("size")
    canvas = sizes.best_canvas(image.shape[:2], canvases(fields))
    inside = resize(image, sizes.inside(image.shape[:2], canvas), fields)
    full = np.zeros((*canvas, 3), np.uint8)
    top, left = (canvas[0] - inside.shape[0]) // 2, (canvas[1] - inside.shape[1]) // 2
    full[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    rows, cols = math.ceil(canvas[0] / tile), math.ceil(canvas[1] / tile)
    parts = [full[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile] for y in range(rows) for x in range(cols)]
    return Cut([_plain(part, fields) for part in (resize(image, whole, fields), *parts)], rows, cols)


def canvases(fields: Fields) -> list[Size]:
    """The field image_grid_pinpoints."""
    found = fields["image_grid_pinpoints"]
    if isinstance(found, list | tuple) and found:
        pairs = [tuple(pair) for pair in found if isinstance(pair, list | tuple) and len(pair) == 2]
        if len(pairs) == len(found) and all(type(side) is int and 1 <= side <= 16384 for pair in pairs for side in pair):
            return [(pair[0], pair[1]) for pair in pairs]
    raise fields.wrong("image_grid_pinpoints", "a list of [height, width]", found)
