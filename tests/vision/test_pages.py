"""Pages for DeepSeek-OCR: tiles against Pillow's, positions and distances against torch's interpolation."""

from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import PIL.ImageOps
import pytest
from PIL import Image

from llmpy.vision.items import NO_ROW, WEIGHT_ROW
from llmpy.vision.pages import SEPARATOR, axis_taps, distances, near, square_taps, windows
from llmpy.vision.processors import Processor

CONFIG: dict[str, Any] = {"model_type": "deepseek_vl_v2", "vision_config": {"image_size": 1024}}
STORED = {"image_processor_type": "DeepseekVLV2Processor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tiles_of(rows: npt.NDArray[np.uint8], sides: list[int]) -> list[npt.NDArray[np.uint8]]:
    ends = np.cumsum([side * side for side in sides])
    parts = np.split(rows, ends[:-1])
    return [part.reshape(side, side, 3, 16, 16).transpose(0, 3, 1, 4, 2).reshape(16 * side, 16 * side, 3)
            for part, side in zip(parts, sides, strict=True)]  # fmt: skip


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) >= 13, reason="Pillow 13 has other bits")
@pytest.mark.parametrize(
    ("size", "grid"),
    [((300, 640), (0, 0)), ((700, 333), (2, 1)), ((1100, 1500), (2, 3)), ((641, 5000), (1, 8)), ((9, 9), (0, 0))],
)
def test_a_page_is_cut_as_published(size: tuple[int, int], grid: tuple[int, int]) -> None:
    pixels = np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8)
    picture, (rows, cols) = Image.fromarray(pixels), grid
    item = Processor(CONFIG, STORED).item(pixels)
    wanted = []
    if rows:
        large = picture.resize((640 * cols, 640 * rows))
        boxes = [(640 * x, 640 * y, 640 * (x + 1), 640 * (y + 1)) for y in range(rows) for x in range(cols)]
        wanted = [np.asarray(large.crop(box)) for box in boxes]
    wanted.append(np.asarray(PIL.ImageOps.pad(picture, (1024, 1024), color=(127, 127, 127))))
    for tile, want in zip(tiles_of(item.rows, [40] * rows * cols + [64]), wanted, strict=True):
        assert np.array_equal(tile, want)
    assert item.n_tokens == 273 + 10 * rows * (10 * cols + 1 if rows else 0)
    assert sorted(item.tables["places"].values.tolist()) == list(range(item.n_tokens))


def test_lines_of_features() -> None:
    """Two tiles beside each other: ten lines of twenty features and a newline; then the whole; then the separator."""
    item = Processor(CONFIG, STORED).item(np.zeros((400, 800, 3), np.uint8))
    kinds = np.empty(item.n_tokens, np.int64)
    piece = np.repeat(np.arange(3), [p.n_features for p in item.pieces])
    kinds[item.tables["places"].values] = np.where(item.tables["rows.features"].values < 0, 0, 1 + piece)
    lines = kinds[:210].reshape(10, 21)
    assert (lines == [*[1] * 10, *[2] * 10, 0]).all()
    assert (kinds[210:482].reshape(16, 17) == [*[3] * 16, 0]).all() and item.n_tokens == 483
    assert (item.tables["rows.features"].values == SEPARATOR).sum() == 1
    assert (item.tables["rows.features"].values == WEIGHT_ROW).sum() == 26


@pytest.mark.parametrize(("n", "side"), [(40, 64), (64, 64), (10, 16), (9, 7)])
def test_positions_as_torch_interpolates_them(n: int, side: int) -> None:
    torch = pytest.importorskip("torch")
    table = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(n))
    want = torch.nn.functional.interpolate(table, size=(n, n), mode="bicubic", antialias=True, align_corners=False)
    index, weight = square_taps(n, side)
    found = (weight[..., None] * table[0].reshape(3, -1).T.numpy()[index]).sum(0)
    assert np.abs(found - want[0].reshape(3, -1).T.numpy()).max() <= 1e-5
    assert len(index) <= 64 and np.array_equal(axis_taps(side, side)[0][0], np.arange(side))


def test_distances_as_torch_interpolates_them() -> None:
    torch = pytest.importorskip("torch")
    table = torch.randn(1, 5, 127, generator=torch.Generator().manual_seed(1))
    want = torch.nn.functional.interpolate(table, size=79, mode="linear")[0].T.numpy()
    number, share = distances(79, 127)
    found = (share[..., None] * table[0].T.numpy()[number]).sum(0)
    assert np.abs(found - want).max() <= 1e-4  # torch computes places in float32
    assert distances(27, 27)[1].tolist() == [[1] * 27, [0] * 27]


def test_windows_and_the_rows_around() -> None:
    flat, places = windows(4, 3)
    assert flat.reshape(2, 2, 3, 3)[0, 1].tolist() == [[3, NO_ROW, NO_ROW], [7, NO_ROW, NO_ROW], [11, NO_ROW, NO_ROW]]
    assert np.array_equal(flat[places], np.arange(16))
    assert near(4, 2).reshape(2, 2, 9)[0, 1].tolist() == [NO_ROW, NO_ROW, NO_ROW, 1, 2, 3, 5, 6, 7]
