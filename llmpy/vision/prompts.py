"""What stands for an image in a prompt: the placeholder of each family, and what it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError, InvalidRequestError
from .items import PlacedItem

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    from .fields import Fields
    from .items import ImageItem

    Ids: TypeAlias = npt.NDArray[np.int32]
    Texts: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Expansion:
    """How a family writes an image in a prompt.

    Args:
        tokens: Id and usual text of each token that is used, by its role: "feature" stands for one feature, "placeholder" for
            one image (left out: "feature" does). The id is that of the configuration; None: the tokenizer knows the text.
        write: Text that a placeholder becomes, from the item and the tokens' texts.
        comes_first: Whether images stand before the begin of the text, and a newline ends the text.
    """

    tokens: Mapping[str, tuple[int | None, str]]
    write: Callable[[ImageItem, Texts], str]
    comes_first: bool = False


class Writer:
    """Writes images into prompts of one model.

    Args:
        expansion: How the family writes an image.
        token_of: Text of a token id, or None.
        id_of: Id of a token's text, or None.
        encode: Ids of a text, without tokens that the tokenizer adds; None: there is no tokenizer.

    Raises:
        CheckpointError: A token that the family needs is not in the vocabulary.
    """

    def __init__(
        self,
        expansion: Expansion,
        token_of: Callable[[int], str | None],
        id_of: Callable[[str], int | None],
        encode: Callable[[str], Sequence[int]] | None,
    ) -> None:
        self._write, self._encode, self._comes_first = expansion.write, encode, expansion.comes_first
        self.texts = {role: (token_of(number) if number is not None else None) or text
                      for role, (number, text) in expansion.tokens.items()}  # fmt: skip
        self.ids = {role: expansion.tokens[role][0] for role in self.texts}
        for role, text in self.texts.items():
            if self.ids[role] is None:
                self.ids[role] = id_of(text)
            if self.ids[role] is None and role in ("feature", "placeholder"):
                raise CheckpointError(f"images: the vocabulary has no token {text!r}, which stands for an image")
        self.placeholder = self.texts.get("placeholder", self.texts["feature"])
        self.feature_id = self._id("feature")
        self.placeholder_id = self._id("placeholder") if "placeholder" in self.ids else self.feature_id

    def _id(self, role: str) -> int:
        number = self.ids[role]
        assert number is not None
        return number

    def expand_text(self, text: str, items: Sequence[ImageItem]) -> str:
        """The text with each placeholder replaced by what stands for its image.

        Raises:
            InvalidRequestError: Placeholders and images differ in number.
        """
        parts = text.split(self.placeholder)
        self._check_count(len(parts) - 1, items)
        written = [self._write(item, self.texts) for item in items]
        text = "".join([parts[0], *(piece for pair in zip(written, parts[1:], strict=True) for piece in pair)])
        return text + "\n" if self._comes_first else text

    def arranged(self, ids: Sequence[int], bos: int | None) -> Sequence[int]:
        """Ids of an expanded text with the begin token where the family has it; bos None: the tokenizer has none."""
        if not self._comes_first or bos is None or self.feature_id not in ids:
            return ids
        plain = list(ids[1:] if ids[0] == bos else ids)
        end = len(plain) - plain[::-1].index(self.feature_id)
        return [*plain[:end], bos, *plain[end:]]

    def expand_ids(self, ids: Ids, items: Sequence[ImageItem]) -> Ids:
        """The ids with each placeholder replaced; ids that have a placeholder for each feature already stay as they are.

        Raises:
            InvalidRequestError: Placeholders are as many as neither images nor features; or there is no tokenizer to expand.
        """
        places = np.flatnonzero(ids == self.placeholder_id)
        n_features = sum(item.n_tokens for item in items)
        has_each = int((ids == self.feature_id).sum()) == n_features
        if has_each and (self.placeholder_id != self.feature_id or len(places) != len(items) or n_features == len(items)):
            return ids
        self._check_count(len(places), items)
        if self.placeholder_id != self.feature_id and (ids == self.feature_id).any():
            self._check_count(int((ids == self.feature_id).sum()), items)
        if self._encode is None:
            raise InvalidRequestError(
                "images: expanding placeholders needs a tokenizer; skip_tokenizer_init is True: pass expanded ids",
                parameter="prompt_token_ids",
            )
        parts: list[Any] = []
        start = 0
        for place, item in zip(places.tolist(), items, strict=True):
            parts += [ids[start:place], np.array(self._encode(self._write(item, self.texts)), np.int32)]
            start = place + 1
        return np.concatenate([*parts, ids[start:]]).astype(np.int32)

    def place(self, ids: Ids, items: Sequence[ImageItem]) -> tuple[PlacedItem, ...]:
        """Where the images lie in expanded ids.

        Raises:
            InvalidRequestError: The ids have another number of feature tokens than the images have features.
        """
        found = np.flatnonzero(ids == self.feature_id)
        ends = np.cumsum([item.n_tokens for item in items])
        n_features = int(ends[-1]) if len(items) else 0
        if len(found) != n_features:
            raise InvalidRequestError(
                f"images: {len(items)} images with {n_features} features, but {len(found)} tokens {self.texts['feature']!r} in "
                "the prompt; write one placeholder an image",
                parameter="multi_modal_data",
                value=len(found),
            )
        placed = []
        for item, end in zip(items, ends.tolist(), strict=True):
            first, last = int(found[end - item.n_tokens]), int(found[end - 1])
            placed.append(PlacedItem(item, first, last + 1 - first))
        return tuple(placed)

    def _check_count(self, n_placeholders: int, items: Sequence[ImageItem]) -> None:
        if n_placeholders != len(items):
            raise InvalidRequestError(
                f"images: {len(items)} images but {n_placeholders} placeholders {self.placeholder!r} in the prompt; "
                "write one for each image",
                parameter="multi_modal_data",
                value=n_placeholders,
            )


def _id(config: Fields, *names: str) -> int | None:
    """The first of some fields that is there: a token id."""
    for name in names:
        value = config[name]
        if value is not None:
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
                return value
            raise config.wrong(name, "a token id", value)
    return None


def _feature(config: Fields, usual: str) -> tuple[int | None, str]:
    return _id(config, "image_token_id", "image_token_index"), usual


def repeated(config: Fields) -> Expansion:
    """The feature token, once for each feature."""
    usual = "<|image_pad|>" if str(config["model_type"]).startswith("qwen") else "<image>"
    return Expansion({"feature": _feature(config, usual)}, lambda item, texts: texts["feature"] * item.n_tokens)


def llama4(config: Fields) -> Expansion:
    """Tiles with separators between columns and behind lines, then the whole image; a begin and an end around all."""

    def write(item: ImageItem, texts: Texts) -> str:
        features = texts["feature"] * item.pieces[0].n_features
        tiles = ""
        if len(item.pieces) > 1:
            tiles = (texts["column"].join([features] * item.grid.tile_cols) + texts["line"]) * item.grid.tile_rows
        return f"{texts['begin']}{tiles}{texts['placeholder']}{features}{texts['end']}"

    return Expansion(
        {
            "feature": _feature(config, "<|patch|>"),
            "placeholder": (None, "<|image|>"),
            "begin": (_id(config, "boi_token_index"), "<|image_start|>"),
            "end": (_id(config, "eoi_token_index"), "<|image_end|>"),
            "column": (None, "<|tile_x_separator|>"),
            "line": (None, "<|tile_y_separator|>"),
        },
        write,
    )


def paligemma(config: Fields) -> Expansion:
    """As `repeated`, before the begin of the text."""
    return replace(repeated(config), comes_first=True)


def llava(config: Fields) -> Expansion:
    """As `repeated`; with a tower of Pixtral's kind as `pixtral`."""
    part = config["vision_config"]
    is_pixtral = isinstance(part, Mapping) and part.get("model_type") == "pixtral"
    return pixtral(config) if is_pixtral else repeated(config)


def pixtral(config: Fields) -> Expansion:
    """Rows of feature tokens, each with a break behind it, the last one with an end."""

    def write(item: ImageItem, texts: Texts) -> str:
        merge = math.isqrt(item.grid.rows * item.grid.cols // item.n_tokens)
        row = texts["feature"] * (item.grid.cols // merge)
        return texts["break"].join([row] * (item.grid.rows // merge)) + texts["end"]

    tokens = {"feature": _feature(config, "[IMG]"), "break": (None, "[IMG_BREAK]"), "end": (None, "[IMG_END]")}
    return Expansion(tokens, write)


def gemma3(config: Fields) -> Expansion:
    """Empty lines around a begin, the feature tokens and an end; crops behind the whole image, with words between."""

    def write(item: ImageItem, texts: Texts) -> str:
        parts = [f"\n\n{texts['placeholder']}{texts['feature'] * piece.n_features}{texts['end']}\n\n" for piece in item.pieces]
        if len(parts) == 1:
            return parts[0]
        words = "Here is the original image {} and here are some crops to help you see better {}"
        return words.format(parts[0], " ".join(parts[1:]))

    return Expansion(
        {
            "feature": _feature(config, "<image_soft_token>"),
            "placeholder": (_id(config, "boi_token_index"), "<start_of_image>"),
            "end": (_id(config, "eoi_token_index"), "<end_of_image>"),
        },
        write,
    )


def internvl(config: Fields) -> Expansion:
    """A begin, the feature tokens of all tiles, an end."""
    tokens = {"feature": _feature(config, "<IMG_CONTEXT>"), "begin": (None, "<img>"), "end": (None, "</img>")}
    return Expansion(tokens, lambda item, texts: f"{texts['begin']}{texts['feature'] * item.n_tokens}{texts['end']}")


def idefics3(config: Fields) -> Expansion:
    """Tiles with their row and column, a line for each row of tiles; then the whole image."""

    def write(item: ImageItem, texts: Texts) -> str:
        around, features = texts["around"], texts["feature"] * item.pieces[0].n_features
        whole = f"{around}{texts['whole']}{features}{around}"
        if len(item.pieces) == 1:
            return whole
        cols = range(1, item.grid.tile_cols + 1)
        lines = ("".join(f"{around}<row_{row}_col_{col}>{features}" for col in cols) + "\n"
                 for row in range(1, item.grid.tile_rows + 1))  # fmt: skip
        return "".join(lines) + "\n" + whole

    tokens = {
        "feature": _feature(config, "<image>"),
        "around": (None, "<fake_token_around_image>"),
        "whole": (None, "<global-img>"),
    }
    return Expansion(tokens, write)
