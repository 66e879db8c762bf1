"""Decoding of images: forms, modes, turns, limits, damage."""

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from llmpy.errors import InvalidRequestError, UnsupportedError
from llmpy.vision.decode import Limits, decode, from_data_url

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def found(image: object, **limits: Any) -> np.ndarray:
    return decode(image, Limits(**limits))


def test_every_form_gives_the_same_pixels(tmp_path: Path) -> None:
    data = encoded(Image.fromarray(PIXELS))
    path = tmp_path / "image.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [Image.fromarray(PIXELS), data, bytearray(data), path, str(path), path.as_uri(), url, PIXELS]
    for form in [*forms, PIXELS.transpose(2, 0, 1), PIXELS.tolist() and np.asfortranarray(PIXELS)]:
        pixels = found(form)
        assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous
        assert np.array_equal(pixels, PIXELS)
    grey = found(PIXELS[..., 0])
    assert np.array_equal(grey, np.stack([PIXELS[..., 0]] * 3, 2))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG"])
def test_formats_give_what_pillow_gives(kind: str) -> None:
    data = encoded(Image.fromarray(PIXELS), kind)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(found(data), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert("L" if mode == "I;16" else mode)
    image = Image.fromarray(np.asarray(image).astype(np.uint16)) if mode == "I;16" else image
    data = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    with Image.open(io.BytesIO(data)) as again:
        assert np.array_equal(found(data), np.asarray(again.convert("RGB")))


def test_alpha_is_dropped_and_the_first_frame_is_taken() -> None:
    clear = np.concatenate([PIXELS, np.zeros((20, 30, 1), np.uint8)], 2)
    assert np.array_equal(found(encoded(Image.fromarray(clear))), PIXELS)
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert found(data)[0, 0].tolist() == [255, 0, 0]


def test_files_are_turned_by_exif_and_pil_images_are_not() -> None:
    image = Image.fromarray(PIXELS)
    exif = image.getexif()
    exif[0x0112] = 6
    data = encoded(image, exif=exif)
    assert np.array_equal(found(data), np.rot90(PIXELS, -1))
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(found(opened), PIXELS)


def png(height: int, width: int) -> bytes:
    """The head of a PNG file of a size, with few bytes behind it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(50_000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((30000, 30000), "more pixels than 50000000; raise max_image_pixels"),
        ((8000, 8000), "8000 x 8000 pixels are more than 50000000; raise max_image_pixels"),
        ((100, 17000), "a side has at most 16384; raise max_image_side"),
        ((10, 2001), "more than 200 times the other"),
    ],
)
def test_sizes_beyond_a_limit_are_refused_by_the_header(size: tuple[int, int], words: str) -> None:
    for image in (png(*size), Image.new("1", size[::-1]) if size[0] < 9000 else png(*size)):
        with pytest.raises(InvalidRequestError, match=words):
            found(image)


def test_limits_can_be_changed() -> None:
    with pytest.raises(InvalidRequestError, match="more than 599"):
        found(PIXELS, pixels=599)
    with pytest.raises(InvalidRequestError, match="at most 29"):
        found(PIXELS, side=29)
    assert found(PIXELS, pixels=600, side=30).shape == (20, 30, 3)
    assert found(np.zeros((1, 200, 3), np.uint8)).shape == (1, 200, 3)
    with pytest.raises(InvalidRequestError, match="no pixels"):
        found(np.zeros((0, 5, 3), np.uint8))


def test_wrong_forms_are_refused(tmp_path: Path) -> None:
    for array, words in (
        (PIXELS.astype(np.float32), "pass uint8"),
        (np.zeros((4, 4, 4), np.uint8), r"has \[4, 4, 4\]"),
        (np.zeros((1, 4, 4, 3), np.uint8), r"has \[1, 4, 4, 3\]"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            found(array)
    with pytest.raises(TypeError, match="of type int"):
        found(3)
    for url in ("http://host/a.png", "https://host/a.png", "ftp://host/a.png"):
        with pytest.raises(UnsupportedError, match="download"):
            found(url)
    for url in ("data:image/png,abc", "data:image/png;base64", "data:;base64,%%%", "data:;base64,abc"):
        with pytest.raises(InvalidRequestError, match="base64"):
            found(url)
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        found(tmp_path / "none.png")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        found("a\0b")


def test_a_folder_bounds_paths(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    for path in (inside / "a.png", outside):
        path.write_bytes(encoded(Image.fromarray(PIXELS)))
    (inside / "link.png").symlink_to(outside)
    assert found(inside / "a.png", folder=inside).shape == (20, 30, 3)
    for path in (outside, inside / "link.png", inside / ".." / "out.png"):
        with pytest.raises(InvalidRequestError, match="allowed_image_folder"):
            found(path, folder=inside)


def test_formats_beyond_the_list_are_refused() -> None:
    for data in (encoded(Image.fromarray(PIXELS), "PPM"), encoded(Image.fromarray(PIXELS), "ICO"), b"%!PS-Adobe", b"", b"text"):
        with pytest.raises(InvalidRequestError, match="no image of JPEG"):
            found(data)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]), st.data())
def test_damaged_files_are_refused_or_decoded(kind: str, data: st.DataObject) -> None:
    whole = encoded(Image.fromarray(PIXELS), kind)
    torn = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for place in data.draw(st.lists(st.integers(0, max(len(torn) - 1, 0)), max_size=3)):
        if torn:
            torn[place] = data.draw(st.integers(0, 255))
    try:
        assert found(bytes(torn)).shape[2] == 3
    except InvalidRequestError as error:
        assert str(error).startswith("image: ")


def test_spaces_in_base64_are_left_out() -> None:
    assert from_data_url("data:image/png;base64,YW Jj\nZA==") == b"abcd"
