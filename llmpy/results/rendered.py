"""What a prompt or a conversation would run, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..vision.items import PlacedItem


class RenderedImage(NamedTuple):
    """One image of a rendered prompt.

    Args:
        first: Index of the first id that belongs to the image.
        n_tokens: Ids that belong to it, separators between its features included.
        content: Key of what its features depend on, 32 hexadecimal digits: equal keys have equal features.
    """

    first: int
    n_tokens: int
    content: str


class RenderedPrompt(NamedTuple):
    """A prompt as the model gets it.

    Args:
        prompt: The text as it was given or rendered; None: the prompt was given as ids.
        prompt_token_ids: The ids, images expanded.
        images: The images, in order.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    images: tuple[RenderedImage, ...]


def rendered_images(placed: Sequence[PlacedItem]) -> tuple[RenderedImage, ...]:
    """The images of a prompt for callers."""
    return tuple(RenderedImage(one.first, one.n_tokens, one.item.content.hex()) for one in placed)
