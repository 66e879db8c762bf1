"""Tiny models that take images: their configurations, their images as items and as transformers wants them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from llmpy.vision.items import WEIGHT_ROW, Grid, ImageItem, Piece, PlacedItem, Table, rope_positions

FEATURE = 98
TEXT = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALVES = ([0.5] * 3, [0.5] * 3)


def numbers(image: np.ndarray, usual: tuple[Sequence[float], Sequence[float]]) -> np.ndarray:
    """float32 [channels, h, w], as a processor makes of bytes [h, w, channels]."""
    mean, std = (np.asarray(each, np.float32) for each in usual)
    scaled = (image.astype(np.float64) * (1 / 255)).astype(np.float32)
    return ((scaled - mean) / std).transpose(2, 0, 1)


def patches(image: np.ndarray, size: int, merge: int = 1) -> np.ndarray:
    """Rows of bytes in merge order, each channel, y, x."""
    h, w = image.shape[0] // size // merge, image.shape[1] // size // merge
    cells = image.reshape(h, merge, size, w, merge, size, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return cells.reshape(h * w * merge * merge, 3 * size * size)


def order(h: int, w: int, merge: int = 1) -> np.ndarray:
    """int32 [2, h * w]: row and column of each patch in merge order."""
    found = np.indices((h, w), np.int32).reshape(2, h // merge, merge, w // merge, merge)
    return found.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def make_item(rows: np.ndarray, grid: Grid, pieces: Sequence[Piece], **tables: Sequence[np.ndarray]) -> ImageItem:
    """An item; a table is given piece by piece, and "__" stands for the dot in its name."""
    made = {}
    for name, parts in tables.items():
        ends = np.cumsum([np.shape(part)[-1] for part in parts])
        made[name.replace("__", ".")] = Table(np.concatenate(parts, -1), tuple(int(end) for end in ends))
    content = hashlib.sha256(rows.tobytes() + repr(grid).encode()).digest()[:16]
    return ImageItem(rows, grid, tuple(pieces), content, sum(piece.n_features for piece in pieces), made)


@dataclass
class Family:
    """A tiny model that takes images.

    Args:
        name: The class in transformers.
        config: Its configuration.
        item: Makes the item of an image, uint8 [h, w, 3].
        inputs: Arguments of transformers' model for images.
        sizes: Sides (h, w) of images that the model takes.
        wants_types: Whether transformers wants to know which tokens are images.
        merge: Patches of a feature along each side, if images have positions by row and column; 0: they do not.
        processor: What preprocessor_config.json holds.
    """

    name: str
    config: Callable[[], Any]
    item: Callable[[np.ndarray], ImageItem]
    inputs: Callable[[Sequence[np.ndarray]], dict[str, Any]]
    sizes: Sequence[tuple[int, int]]
    wants_types: bool = False
    merge: int = 0
    processor: dict[str, Any] = field(default_factory=dict)


class VisionModel:
    """A saved tiny model with random parameters, and transformers' results."""

    def __init__(self, family: Family, directory: Path, randomise: Callable[[torch.nn.Module, int], None]) -> None:
        self.family, self.directory = family, directory
        kind = getattr(transformers, family.name)
        model = kind(family.config())
        randomise(model, 3)
        model.save_pretrained(directory)
        self.model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    def images(self, n: int) -> list[np.ndarray]:
        random = np.random.default_rng(n)
        sizes = (self.family.sizes * n)[:n]
        return [random.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in sizes]

    def prompt(self, parts: Sequence[int | np.ndarray]) -> tuple[list[int], list[PlacedItem]]:
        """Ids and placed images of token ids and images in their order."""
        ids: list[int] = []
        placed = []
        for part in parts:
            if isinstance(part, np.ndarray):
                item = self.family.item(part)
                placed.append(PlacedItem(item, len(ids), item.n_tokens))
                ids += [FEATURE] * item.n_tokens
            else:
                ids.append(int(part))
        return ids, placed

    def arguments(self, ids: Sequence[int], images: Sequence[np.ndarray]) -> dict[str, Any]:
        given = {"input_ids": torch.tensor([ids]), **(self.family.inputs(images) if images else {})}
        if self.family.wants_types and images:
            given["mm_token_type_ids"] = (given["input_ids"] == FEATURE).int()
        return given

    def positions(self, placed: Sequence[PlacedItem], n: int) -> np.ndarray | None:
        """Positions of a prompt's tokens, int32 [3, n]; None: they are the tokens' numbers."""
        return rope_positions(n, placed, self.family.merge)[0] if self.family.merge else None

    def logits(self, ids: Sequence[int], images: Sequence[np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            return self.model(**self.arguments(ids, images)).logits[0].double().numpy()

    def greedy(self, ids: Sequence[int], images: Sequence[np.ndarray], n: int) -> list[int]:
        with torch.no_grad():
            out = self.model.generate(**self.arguments(ids, images), max_new_tokens=n, do_sample=False, eos_token_id=None)
        return out[0, len(ids) :].tolist()


def clip_item(image: np.ndarray) -> ImageItem:
    """One piece with a class row behind the patches; the class has the first learned position."""
    rows = patches(image, 14)
    n = len(rows)
    rows = np.concatenate([rows, np.zeros((1, rows.shape[1]), np.uint8)])
    index = np.int32([[*range(1, n + 1), 0]])
    return make_item(
        rows, Grid(1, image.shape[0] // 14, image.shape[1] // 14), [Piece(n + 1, n)], taps__index=[index],
        taps__weight=[np.ones((1, n + 1), np.float32)], rows__class=[np.int32([*range(n), WEIGHT_ROW])],
        rows__patches=[np.arange(n, dtype=np.int32)],
    )  # fmt: skip


def stacked(usual: tuple[Sequence[float], Sequence[float]]) -> Callable[[Sequence[np.ndarray]], dict[str, Any]]:
    return lambda images: {"pixel_values": torch.tensor(np.stack([numbers(each, usual) for each in images]))}


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=42, patch_size=14
    )
    return transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=FEATURE
    )


FAMILIES = {
    "llava": Family("LlavaForConditionalGeneration", llava, clip_item, stacked(CLIP), [(42, 42)]),
}
