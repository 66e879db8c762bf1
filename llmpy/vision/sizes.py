"""Sizes to which processors of images resize and cut, as transformers computes them. A size is (height, width).

Python's `round` (half to even), `int` and `floor` of float64 stand where transformers has them, so that each size is equal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

import numpy as np

Size = tuple[int, int]

MAX_ASPECT = 200
IDEFICS_LONGEST = 4096


def by_shortest(size: Size, shortest: int) -> Size:
    """The shorter side becomes `shortest` (CLIP)."""
    height, width = size
    longest = int(shortest * max(size) / min(size))
    return (longest, shortest) if width <= height else (shortest, longest)


def by_area(size: Size, factor: int, least: int, most: int) -> Size:
    """Multiples of `factor`, from `least` to `most` pixels, of nearly the same shape (Qwen-VL)."""
    height, width = size
    new = round(height / factor) * factor, round(width / factor) * factor
    if new[0] * new[1] > most:
        shrink = math.sqrt((height * width) / most)
        down, across = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
        return down, across
    if new[0] * new[1] < least:
        grow = math.sqrt(least / (height * width))
        down, across = (math.ceil(side * grow / factor) * factor for side in size)
        return down, across
    return new


def by_longest(size: Size, most: Size, factor: int) -> Size:
    """Sides of at most `most`, then up to multiples of `factor` (Pixtral)."""
    height, width = size
    ratio = max(height / most[0], width / most[1])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return ((height - 1) // factor + 1) * factor, ((width - 1) // factor + 1) * factor


def to_longest(size: Size, longest: int) -> Size:
    """The longer side becomes `longest`, the other one even, both at most 4096 (Idefics3)."""
    height, width = size
    ratio = width / height
    if width >= height:
        height = int(longest / ratio)
        size = max(height + height % 2, 1), longest
    else:
        width = int(longest * ratio)
        size = longest, max(width + width % 2, 1)
    height, width = size
    ratio = width / height
    if width >= height and width > IDEFICS_LONGEST:
        return max(int(IDEFICS_LONGEST / ratio), 1), IDEFICS_LONGEST
    if height > width and height > IDEFICS_LONGEST:
        return IDEFICS_LONGEST, max(int(IDEFICS_LONGEST * ratio), 1)
    return size


def to_tiles(size: Size, tile: int) -> Size:
    """Up to multiples of the tile: the longer side, then the other one in proportion (Idefics3)."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = _up(width, tile)
        return _up(int(width / ratio), tile), width
    height = _up(height, tile)
    return height, _up(int(height * ratio), tile)


def _up(side: int, factor: int) -> int:
    return math.ceil(side / factor) * factor


def tile_grid(size: Size, tile: Size, least: int, most: int) -> Size:
    """(rows, columns) of tiles whose shape is nearest to the image's (InternVL).

    Of equal ones the smaller grid wins, unless the image has more than half the pixels of the larger one.
    """
    height, width = size
    grids = [grid for grid in product(range(1, most + 1), repeat=2) if least <= grid[0] * grid[1] <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    best, nearest = (1, 1), math.inf
    for cols, rows in grids:
        distance = abs(width / height - cols / rows)
        if distance < nearest:
            best, nearest = (rows, cols), distance
        elif distance == nearest and width * height > 0.5 * tile[0] * tile[1] * cols * rows:
            best = rows, cols
    return best


def within_square(size: Size, side: int) -> Size:
    """The longer side becomes `side` (DeepSeek-OCR)."""
    height, width = size
    if width > height:
        return round(height / width * side), side
    return side, round(width / height * side)


def grids_of(most: int) -> list[Size]:
    """Grids (rows, columns) of at most so many tiles; those of equal shape together, larger ones first (Llama 4)."""
    by_shape: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_shape.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_shape.values() for grid in grids]


def fitting_grid(size: Size, tile: Size, most: int, largest: bool) -> Size:
    """The grid of tiles that the image fits with the smallest enlargement, or else with the least reduction (Llama 4).

    Of equal ones the one with fewest tiles; largest: with the largest enlargement instead.
    """
    grids = grids_of(most)
    scales = [min(np.float32(rows * tile[0]) / np.float32(size[0]), np.float32(cols * tile[1]) / np.float32(size[1]))
              for rows, cols in grids]  # fmt: skip
    larger = [scale for scale in scales if scale >= 1]
    chosen = (max(larger) if largest else min(larger)) if larger else max(scales)
    return min((grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen), key=math.prod)


def into(size: Size, target: Size) -> Size:
    """The largest size of the image's shape within a target, by whole pixels (Llama 4)."""
    across, down = target[1] / size[1], target[0] / size[0]
    if across < down:
        return max(min(math.floor(size[0] * across), target[0]), 1), max(target[1], 1)
    return max(target[0], 1), max(min(math.floor(size[1] * down), target[1]), 1)


def best_canvas(size: Size, canvases: Iterable[Size]) -> Size:
    """The canvas that shows most pixels of the image, then the one that wastes fewest (LLaVA-NeXT)."""
    height, width = size

    def merit(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - canvas[0] * canvas[1]

    return max(canvases, key=merit)


def inside(size: Size, canvas: Size) -> Size:
    """The largest size of the image's shape within a canvas (LLaVA-NeXT)."""
    height, width = size
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def without_padding(size: Size, grid: Size) -> tuple[int, int]:
    """Rows and columns to cut from each side of a grid of features, of which `inside` filled only a part (LLaVA-NeXT)."""
    height, width = size
    if width / height > grid[1] / grid[0]:
        return (grid[0] - int(round(height * (grid[1] / width), 7))) // 2, 0
    return 0, (grid[1] - int(round(width * (grid[0] / height), 7))) // 2


def crops(size: Size, least_side: int, most: int, least_ratio: float) -> Size:
    """(rows, columns) of crops along the longer side; (0, 0): none (Gemma 3's pan and scan)."""
    height, width = size
    longest, shortest = max(size), min(size)
    if longest / shortest < least_ratio:
        return 0, 0
    count = min(math.floor(longest / least_side), math.floor(longest / shortest + 0.5))
    count = min(most, max(2, count))
    if min(math.ceil(longest / count), shortest) < least_side:
        return 0, 0
    return (1, count) if width >= height else (count, 1)
