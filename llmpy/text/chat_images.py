"""Images among the content parts of messages: taken out before a template is rendered, which sees only where they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidRequestError, UnsupportedError
from ..inputs import ImageInputs

KINDS = ("image", "image_url", "input_image")
"""Types of content parts that are images: of transformers, of chat completions, of responses."""
PLACE: Mapping[str, Any] = {"type": "image"}
"""What a template sees of an image."""

Message = Mapping[str, Any]


class Taken(NamedTuple):
    """Messages without their images, and the images in order."""

    messages: list[Message]
    images: ImageInputs | None


def has_images(messages: Sequence[Message]) -> bool:
    """Whether a message has an image."""
    return any(_kind(part) in KINDS for message in messages for part in _parts(message))


def take_images(messages: Sequence[Message]) -> Taken:
    """Takes the images out of messages.

    Args:
        messages: A conversation. A part is {"type": "image", "image": x}, {"type": "image_url", "image_url": {"url": x}} or
            {"type": "input_image", "image_url": x}; "uuid" beside them names the image.

    Raises:
        InvalidRequestError: A part has no image.
    """
    if not has_images(messages):
        return Taken(list(messages), None)
    data: list[object] = []
    uuids: list[str | None] = []
    made: list[Message] = []
    for message in messages:
        parts = []
        for part in _parts(message):
            if _kind(part) in KINDS:
                data.append(_source(part))
                uuids.append(_uuid(part))
            parts.append(PLACE if _kind(part) in KINDS else part)
        made.append({**message, "content": parts} if parts else message)
    return Taken(made, ImageInputs(tuple(data), tuple(uuids), {}))


def refuse_images(messages: Sequence[Message]) -> None:
    """Raises UnsupportedError if a message has an image."""
    for message in messages:
        for part in _parts(message):
            if _kind(part) in KINDS:
                raise UnsupportedError(
                    f"content part of type '{_kind(part)}': the model has no tower for images; load a model that has one "
                    "(without limit_mm_per_prompt={'image': 0}), or leave the images out"
                )


def _parts(message: object) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, Mapping) else None


def _source(part: Mapping[str, Any]) -> object:
    """The image of a part, as the caller gave it."""
    found = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    if isinstance(found, Mapping):
        found = found.get("url")
    if found is None and part.get("uuid") is None:
        raise InvalidRequestError(
            f"messages: a content part of type {_kind(part)!r} has no image; give it 'image' or 'image_url'",
            parameter="messages",
        )
    return found


def _uuid(part: Mapping[str, Any]) -> str | None:
    name = part.get("uuid")
    if not (name is None or isinstance(name, str)):
        raise InvalidRequestError("messages: uuid of an image must be a str", parameter="messages", value=name)
    return name
