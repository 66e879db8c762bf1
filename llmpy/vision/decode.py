"""Decodes images of every accepted form to uint8 [height, width, 3], within limits that hold before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import InvalidRequestError, UnsupportedError
from .sizes import MAX_ASPECT

if TYPE_CHECKING:
    import numpy.typing as npt

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_IMAGE_BYTES = 256 << 20


class Limits(NamedTuple):
    """What an image may be.

    Args:
        pixels: Most pixels.
        side: Longest side.
        folder: Folder of the files that a path may name; None: every path may be read.
    """

    pixels: int = 50_000_000
    side: int = 16384
    folder: Path | None = None


def decode(image: object, limits: Limits) -> npt.NDArray[np.uint8]:
    """Decodes an image.

    Args:
        image: A PIL image, bytes of a file, a path, a data: URL, or uint8 [h, w, 3], [3, h, w] or [h, w].
        limits: What it may be.

    Returns:
        uint8 [height, width, 3], contiguous.

    Raises:
        InvalidRequestError: The image is damaged, beyond a limit or of a wrong form.
        UnsupportedError: An http URL; or Pillow, which decodes files, is not installed.
    """
    if hasattr(image, "__array__") and not _is_pil(image):
        array = _from_array(np.asarray(image))
        check_size(array.shape[0], array.shape[1], limits)
        return array
    if isinstance(image, bytes | bytearray | memoryview):
        return _from_bytes(bytes(image), limits)
    if isinstance(image, str | os.PathLike):
        return _from_bytes(read(os.fspath(image), limits), limits)
    if _is_pil(image):
        return _to_rgb(_sized(image, limits))
    raise TypeError(
        "an image is a PIL image, bytes, a path, a data: URL or a NumPy array of uint8, "
        f"but is of type {type(image).__name__}"
    )


def read(source: str, limits: Limits) -> bytes:
    """Bytes of a data: URL or of a file."""
    if source.startswith("data:"):
        return from_data_url(source)
    if "://" in source[:16] and not source.startswith("file://"):
        raise UnsupportedError("images from http URLs are not supported here; download them, and pass bytes or a path")
    path = Path(source.removeprefix("file://"))
    try:
        return _read_file(path, limits.folder)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _invalid(f"file {str(path)[:200]!r} cannot be read: {reason}") from None


def _read_file(path: Path, folder: Path | None) -> bytes:
    if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
        raise _invalid(f"file {str(path)[:200]!r} is not in allowed_image_folder")
    with path.open("rb") as file:
        data = file.read(MAX_IMAGE_BYTES + 1)
    if len(data) > MAX_IMAGE_BYTES:
        raise _invalid(f"file {str(path)[:200]!r} has more than {MAX_IMAGE_BYTES} bytes")
    return data


def from_data_url(url: str) -> bytes:
    """Bytes of a data: URL in base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _invalid("a data: URL must be data:image/...;base64,...")
    return from_base64(body)


def from_base64(text: str) -> bytes:
    """Bytes of base64; spaces and line ends are left out."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _invalid("the data is not valid base64") from None


def _from_array(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if array.dtype != np.uint8:
        raise _invalid(f"an array must be of uint8, but is of {array.dtype}; pass uint8")
    if array.ndim == 2:
        return np.repeat(array[..., None], 3, axis=2)
    if array.ndim == 3 and array.shape[2] == 3:
        return np.ascontiguousarray(array)
    if array.ndim == 3 and array.shape[0] == 3:
        return np.ascontiguousarray(array.transpose(1, 2, 0))
    raise _invalid(f"an array must have the shape [h, w, 3], [3, h, w] or [h, w], but has {list(array.shape)}")


def check_size(height: int, width: int, limits: Limits) -> None:
    """Raises InvalidRequestError for a size beyond a limit."""
    if height < 1 or width < 1:
        raise _invalid("the image has no pixels")
    if max(height, width) > limits.side:
        raise _invalid(f"{width} x {height} pixels, but a side has at most {limits.side}; raise max_image_side, or shrink it")
    if height * width > limits.pixels:
        raise _invalid(f"{width} x {height} pixels are more than {limits.pixels}; raise max_image_pixels, or shrink it")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise _invalid(f"{width} x {height} pixels: one side has more than {MAX_ASPECT} times the other; cut it")


def _from_bytes(data: bytes, limits: Limits) -> npt.NDArray[np.uint8]:
    """Decodes a file. Only its header is read before its size is checked."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, and of sizes, which are checked here
            with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                return _to_rgb(_turned(_sized(image, limits)))
    except (InvalidRequestError, MemoryError):
        raise
    except pillow.DecompressionBombError:
        raise _invalid(f"the image has more pixels than {limits.pixels}; raise max_image_pixels, or shrink it") from None
    except pillow.UnidentifiedImageError:
        raise _invalid(f"the data is no image of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise errors of every class for damaged files
        raise _invalid(f"the image is damaged: {str(error)[:200]}") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UnsupportedError(
            "decoding images needs Pillow; install llmpy's extra 'vision', or pass arrays of uint8 [h, w, 3]"
        ) from None
    return Image


def _sized(image: Any, limits: Limits) -> Any:
    """The PIL image, unless its size is beyond a limit."""
    width, height = image.size
    check_size(height, width, limits)
    return image


def _turned(image: Any) -> Any:
    """The image as its EXIF orientation shows it."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _to_rgb(image: Any) -> npt.NDArray[np.uint8]:
    """Pixels of a PIL image in its first or current frame: a palette is resolved, alpha is dropped."""
    return np.asarray(image.convert("RGB"))


def _is_pil(image: object) -> bool:
    return hasattr(image, "convert") and hasattr(image, "getexif")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"image: {message}", parameter="multi_modal_data")
