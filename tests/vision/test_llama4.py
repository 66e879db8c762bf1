"""Llama 4's tiles, numbers and prompts by its processor's published formulas, which need torchvision in transformers."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import pytest
from PIL import Image

from llmpy.vision.items import WEIGHT_ROW
from llmpy.vision.processors import Processor

torch = pytest.importorskip("torch")

TILE = 28
CONFIG: dict[str, Any] = {"model_type": "llama4", "vision_config": {"image_size": TILE, "patch_size": 14}}
STORED = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": TILE, "width": TILE}}


def canvas_of(size: tuple[int, int], most: int) -> tuple[int, int]:
    """The canvas with the smallest enlargement, or else the least reduction; then the least area. Scales are float32."""
    found: list[tuple[int, int]] = []
    shapes: dict[float, list[tuple[int, int]]] = {}
    for n in range(most, 0, -1):
        for rows in (d for d in range(1, n + 1) if n % d == 0):
            shapes.setdefault(rows * rows / n, []).append((rows * TILE, n // rows * TILE))
    for each in shapes.values():
        found += each
    canvases = torch.tensor(found)
    scales = torch.minimum(canvases[:, 0] / size[0], canvases[:, 1] / size[1])
    larger = scales[scales >= 1]
    best = canvases[scales == (larger.min() if len(larger) else scales.max())]
    chosen = best[torch.argmin(best[:, 0] * best[:, 1])]
    return int(chosen[0]), int(chosen[1])


def tiles_of(pixels: npt.NDArray[np.uint8], most: int) -> list[npt.NDArray[np.uint8]]:
    picture, (height, width) = Image.fromarray(pixels), pixels.shape[:2]
    canvas = canvas_of((height, width), most)
    down, across = (min(max(side, TILE), most) for side, most in zip((height, width), canvas, strict=True))
    if across / width < down / height:
        new = max(min(math.floor(height * (across / width)), down), 1), across
    else:
        new = down, max(min(math.floor(width * (down / height)), across), 1)
    full = np.zeros((*canvas, 3), np.uint8)
    full[: new[0], : new[1]] = np.asarray(picture.resize(new[::-1], Image.Resampling.BILINEAR))
    rows, cols = canvas[0] // TILE, canvas[1] // TILE
    parts = [full[y * TILE : (y + 1) * TILE, x * TILE : (x + 1) * TILE] for y in range(rows) for x in range(cols)]
    whole = np.asarray(picture.resize((TILE, TILE), Image.Resampling.BILINEAR))
    return [*parts, whole] if len(parts) > 1 else parts


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) >= 13, reason="Pillow 13 has other bits")
@pytest.mark.parametrize("most", [16, 5])
def test_tiles_as_published(most: int) -> None:
    processor = Processor(CONFIG, {**STORED, "max_patches": most})
    for size in [(28, 28), (20, 11), (29, 28), (60, 90), (57, 28), (300, 40), (13, 250), (111, 113), (200, 150)]:
        pixels = np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8)
        item, wanted = processor.item(pixels), tiles_of(pixels, most)
        assert len(item.pieces) == len(wanted), size
        for rows, tile in zip(np.split(item.rows, len(wanted)), wanted, strict=True):
            cells = rows[:4].reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(TILE, TILE, 3)
            assert np.array_equal(cells, tile), size


def test_numbers_are_rounded_to_bfloat16() -> None:
    values = torch.arange(256).to(torch.bfloat16) * (1 / 255)
    mean, std = (torch.tensor(0.5, dtype=torch.bfloat16) for _ in range(2))
    assert Processor(CONFIG, STORED).table.tolist() == [((values - mean) / std).float().tolist()] * 3


def test_the_class_row_is_the_last_position() -> None:
    item = Processor(CONFIG, STORED).item(np.zeros((28, 28, 3), np.uint8))
    assert item.tables["rows.class"].values.tolist() == [0, 1, 2, 3, WEIGHT_ROW]
    assert item.tables["taps.index"].values.tolist() == [[0, 1, 2, 3, 4]]
    assert item.tables["positions"].values.tolist() == [[1, 1, 2, 2, 0], [1, 2, 1, 2, 0]]
    assert item.pieces[0] == (5, 1)
