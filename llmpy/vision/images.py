"""Images of one engine's prompts: from what the caller gave to items at their places in the prompt's tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import frozen
from ..errors import ConfigError, InvalidRequestError, LlmpyError, UnsupportedError
from . import processors
from .decode import Limits, decode
from .prompts import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..config import EngineConfig
    from ..inputs import Prompt
    from ..text.tokenizer import Tokenizer
    from .items import ImageItem
    from .processors import Processor

MOST_PROCESSORS = 8


class Images:
    """Prepares the images of prompts. Any thread may call it.

    Args:
        config: Options of the engine.
        raw: The model's config.json.
        folder: Folder of the model's files.
        tokenizer: The tokenizer; None: ids of prompts are expanded already.

    Attributes:
        processor: The processor with the engine's mm_processor_kwargs.
        writer: Writes images into prompts.
    """

    def __init__(self, config: EngineConfig, raw: Mapping[str, Any], folder: Path, tokenizer: Tokenizer | None) -> None:
        self._raw, self._folder = raw, folder
        self._given = dict(config.mm_processor_kwargs or {})
        self._others: OrderedDict[object, Processor] = OrderedDict()
        self.most = most_images(config)
        allowed = None if config.allowed_image_folder is None else Path(config.allowed_image_folder)
        self.limits = Limits(config.max_image_pixels, config.max_image_side, allowed)
        self.processor = processors.load(folder, raw, self._given)
        self.writer = Writer(
            self.processor.expansion,
            lambda number: None if tokenizer is None else tokenizer.convert_ids_to_tokens(number),
            lambda text: None if tokenizer is None else tokenizer.convert_tokens_to_ids(text),
            None if tokenizer is None else lambda text: tokenizer.encode(text, False),
        )

    def add(self, prompt: Prompt) -> None:
        """Makes items of a prompt's images, and expands its placeholders; ids also get their places.

        Raises:
            InvalidRequestError: An image cannot be used, or placeholders and images differ in number.
        """
        assert prompt.media is not None
        prompt.items = self._items(prompt.media.data, prompt.media.uuids, prompt.media.kwargs)
        if prompt.ids is None:
            prompt.expanded = self.writer.expand_text(prompt.text or "", prompt.items)
        else:
            prompt.ids = self.writer.expand_ids(prompt.ids, prompt.items)
            self.place(prompt)

    def place(self, prompt: Prompt) -> None:
        """Finds the places of a prompt's images in its expanded ids."""
        assert prompt.ids is not None
        prompt.images = self.writer.place(prompt.ids, prompt.items)

    def _items(
        self, data: Sequence[object], uuids: Sequence[str | None], given: Mapping[str, object]
    ) -> tuple[ImageItem, ...]:
        if len(data) > self.most:
            raise InvalidRequestError(
                f"images: {len(data)} in one prompt, but limit_mm_per_prompt allows {self.most}; raise it",
                parameter="multi_modal_data",
                value=len(data),
            )
        processor = self._processor(given)
        return tuple(
            self._item(processor, image, uuid, number, len(data))
            for number, (image, uuid) in enumerate(zip(data, uuids, strict=True), 1)
        )

    def _item(self, processor: Processor, image: object, uuid: str | None, number: int, count: int) -> ImageItem:
        """The item of one image; its errors say which image it was."""
        try:
            if image is None:
                raise UnsupportedError("leaving the data of an image out is not supported yet; send it")
            item = processor.item(decode(image, self.limits))
        except LlmpyError as error:
            if count > 1:
                error.args = (f"image {number} of {count}: {str(error).removeprefix('image: ')}",)
            raise
        return item if uuid is None else replace(item, content=_named(uuid, processor))

    def _processor(self, given: Mapping[str, object]) -> Processor:
        """The processor for a prompt's own mm_processor_kwargs, which stand over those of the engine."""
        if not given:
            return self.processor
        key = frozen(given)
        found = self._others.get(key)
        if found is None:
            try:
                found = processors.load(self._folder, self._raw, {**self._given, **given})
            except ConfigError as error:
                raise InvalidRequestError(str(error), parameter="mm_processor_kwargs", value=dict(given)) from None
            self._others[key] = found
            while len(self._others) > MOST_PROCESSORS:
                self._others.popitem(last=False)
        return found


def most_images(config: EngineConfig) -> int:
    """Most images of a prompt."""
    return (config.limit_mm_per_prompt or {})["image"]


def _named(uuid: str, processor: Processor) -> bytes:
    """The content key of an image that the caller names."""
    digest = blake2b(processor.seed, digest_size=16)
    digest.update(b"uuid " + uuid.encode())
    return digest.digest()
