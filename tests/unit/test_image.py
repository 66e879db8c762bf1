"""Resizing and cutting of images in the core: the bits of Pillow 11 and 12."""

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from llmpy import _core

FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
SIDES = st.integers(1, 200)

old_pillow = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) >= 13, reason="Pillow 13 has other bits")


def resized(image: np.ndarray, height: int, width: int, number: int) -> np.ndarray:
    return np.frombuffer(_core.image_resize(image, height, width, number), np.uint8).reshape(height, width, 3)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@old_pillow
@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(list(FILTERS)))
def test_resize_has_the_bits_of_pillow(h: int, w: int, height: int, width: int, name: str) -> None:
    image = noise(h, w)
    wanted = np.array(Image.fromarray(image).resize((width, height), resample=FILTERS[name]))
    assert np.array_equal(resized(image, height, width, FILTERS[name]), wanted)


@old_pillow
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("shapes", [((1080, 960), (378, 336)), ((64, 64), (64, 32)), ((3, 3), (448, 448)), ((5, 900), (9, 9))])
def test_resize_of_usual_sizes(name: str, shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    (h, w), (height, width) = shapes
    image = noise(h, w)
    image[: h // 2] = np.where(image[: h // 2] > 127, 255, 0)  # overshoots are clipped
    wanted = np.array(Image.fromarray(image).resize((width, height), resample=FILTERS[name]))
    assert np.array_equal(resized(image, height, width, FILTERS[name]), wanted)


def test_a_view_of_an_image_is_resized_as_its_copy() -> None:
    image = noise(90, 80)
    part, flipped = image[7:60, 11:70], image[::-1]
    for view in (part, flipped):
        assert np.array_equal(resized(view, 33, 21, 3), resized(np.ascontiguousarray(view), 33, 21, 3))
        assert np.array_equal(resized(view, *view.shape[:2], 3), view)


@pytest.mark.parametrize("merge", [1, 2, 4])
def test_patches_lie_in_merge_order(merge: int) -> None:
    patch, image = 7, noise(7 * 8, 7 * 12)
    found = np.empty((8 * 12, 3 * patch * patch), np.uint8)
    _core.image_patches(image, patch, merge, found)
    cells = image.reshape(8 // merge, merge, patch, 12 // merge, merge, patch, 3)
    assert np.array_equal(found, cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(found.shape))


def test_what_is_no_image_is_refused() -> None:
    image = noise(8, 8)
    large = np.zeros((1, 70000, 3), np.uint8)
    for wrong in (image[..., :2], image.astype(np.float32), image[:, ::2], image[:0], image[0], large):
        with pytest.raises(ValueError, match="wanted uint8"):
            _core.image_resize(wrong, 4, 4, 3)
    for height, width, number in ((0, 4, 3), (4, 70000, 3), (4, 4, 0), (4, 4, 4)):
        with pytest.raises(ValueError, match="image_resize"):
            _core.image_resize(image, height, width, number)
    room = np.empty(8 * 8 * 3, np.uint8)
    for patch, merge, to in ((3, 1, room), (4, 4, room), (4, 2, room[:-1]), (0, 1, room)):
        with pytest.raises(ValueError, match="image_patches"):
            _core.image_patches(image, patch, merge, to)
    room.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _core.image_patches(image, 4, 2, room)


def test_a_resize_survives_a_lack_of_memory() -> None:
    image, held = noise(20, 20), _core.held_count()
    for n in range(5):
        _core.fail_allocation_after(n)
        with pytest.raises(MemoryError):
            _core.image_resize(image, 9, 9, 3)
    _core.fail_allocation_after(-1)
    assert _core.held_count() == held
    assert len(_core.image_resize(image, 9, 9, 3)) == 243
