"""Tiny models that take images: their configurations, their images as items and as transformers wants them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from modules import load

from llmpy.inputs import Prompt
from llmpy.vision.items import WEIGHT_ROW, Grid, ImageItem, Piece, PlacedItem, Table, rope_positions

pages = load(Path(__file__).with_name("page_models.py"))
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
        types: The argument that says so.
        merge: Patches of a feature along each side, if images have positions by row and column; 0: they do not.
        is_by_hand: Whether the class's forward() fails.
        processor: The type of the processor that the model's folder names.
        make: Makes and saves a model that is not a class of transformers.
        is_prefix: Whether all tokens of a prompt see each other.
    """

    name: str
    config: Callable[[], Any]
    item: Callable[[np.ndarray], ImageItem]
    inputs: Callable[[Sequence[np.ndarray]], dict[str, Any]]
    sizes: Sequence[tuple[int, int]]
    wants_types: bool = False
    merge: int = 0
    types: str = "mm_token_type_ids"
    is_by_hand: bool = False
    processor: str = "CLIPImageProcessor"
    make: Callable[[Path, Callable[[torch.nn.Module, int], None]], Any] | None = None
    is_prefix: bool = False


class VisionModel:
    """A saved tiny model with random parameters, and transformers' results."""

    def __init__(self, family: Family, directory: Path, randomise: Callable[[torch.nn.Module, int], None]) -> None:
        self.family, self.directory = family, directory
        if family.make:
            self.model = family.make(directory, randomise)
            return
        kind = getattr(transformers, family.name)
        model = kind(family.config())
        randomise(model, 3)
        model.save_pretrained(directory)
        (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": family.processor}))
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

    def request(self, parts: Sequence[int | np.ndarray]) -> Prompt:
        """The prompt of token ids and images, as LLM takes it."""
        ids, placed = self.prompt(parts)
        made = Prompt(None, np.array(ids, np.int32))
        made.images = placed
        return made

    def arguments(self, ids: Sequence[int], images: Sequence[np.ndarray]) -> dict[str, Any]:
        given = {"input_ids": torch.tensor([ids]), **(self.family.inputs(images) if images else {})}
        if images and (self.family.wants_types or self.family.types == "token_type_ids"):
            given[self.family.types] = (given["input_ids"] == FEATURE).int()
        return given

    def positions(self, placed: Sequence[PlacedItem], n: int) -> np.ndarray | None:
        """Positions of a prompt's tokens, int32 [3, n]; None: they are the tokens' numbers."""
        return rope_positions(n, placed, self.family.merge)[0] if self.family.merge else None

    def logits(self, ids: Sequence[int], images: Sequence[np.ndarray], n_prompt: int | None = None) -> np.ndarray:
        given = self.arguments(ids, images)
        if self.family.is_prefix:  # type 0: what the prompt has, of which all tokens see each other
            given["token_type_ids"] = (torch.arange(len(ids))[None] >= (n_prompt or len(ids))).int()
        with torch.no_grad():
            if self.family.is_by_hand:
                return self._logits_by_hand(**given).logits[0].double().numpy()
            return self.model(**given).logits[0].double().numpy()

    def _logits_by_hand(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> Any:
        """What forward() of Llama 4 does; transformers 5.24 fails behind it."""
        x = self.model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            rows = self.model.get_image_features(pixel_values=pixel_values, return_dict=True).last_hidden_state
            features = self.model.multi_modal_projector(rows.reshape(-1, rows.shape[-1]))
            x = x.masked_scatter((input_ids == FEATURE)[..., None].expand_as(x), features)
        return self.model.language_model(inputs_embeds=x)

    def greedy(self, ids: Sequence[int], images: Sequence[np.ndarray], n: int) -> list[int]:
        """The best token n times, each from all tokens before it; generate() of Qwen2-VL is wrong for an image alone."""
        tokens = list(ids)
        while len(tokens) < len(ids) + n and FEATURE not in tokens[len(ids) :]:
            tokens.append(int(self.logits(tokens, images, len(ids))[-1].argmax()))
        return tokens[len(ids) :]


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


def in_bfloat16(images: Sequence[np.ndarray]) -> dict[str, Any]:
    """Inputs of Llama 4, whose processor computes in bfloat16."""
    bytes_ = torch.tensor(np.stack(images)).permute(0, 3, 1, 2)
    return {"pixel_values": ((bytes_.to(torch.bfloat16) * (1 / 255) - 0.5) / 0.5).float()}


def tiled(usual: tuple[Sequence[float], Sequence[float]]) -> Callable[[Sequence[np.ndarray]], dict[str, Any]]:
    """Inputs of Idefics3: all tiles of a prompt."""
    return lambda images: {"pixel_values": torch.tensor(np.stack([numbers(each, usual) for each in images]))[None]}


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=42, patch_size=14
    )
    return transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=FEATURE
    )


def plain_item(size: int, merge: int) -> Callable[[np.ndarray], ImageItem]:
    """One piece of patches without class rows, each with a learned position, `merge` of which on a side make a feature."""

    def item(image: np.ndarray) -> ImageItem:
        h, w = image.shape[0] // size, image.shape[1] // size
        row, col = order(h, w, merge)
        n = h * w
        return make_item(
            patches(image, size, merge), Grid(1, h, w), [Piece(n, n // merge**2)], taps__index=[(row * w + col)[None]],
            taps__weight=[np.ones((1, n), np.float32)],
        )  # fmt: skip

    return item


def class_item(size: int, is_first: bool) -> Callable[[np.ndarray], ImageItem]:
    """Patches in merge order and a class row, whose learned position is the first or the last; four patches are a feature."""

    def item(image: np.ndarray) -> ImageItem:
        h, w = image.shape[0] // size, image.shape[1] // size
        row, col = order(h, w, 2)
        n = h * w
        rows = np.concatenate([patches(image, size, 2), np.zeros((1, 3 * size * size), np.uint8)])
        index = np.append(row * w + col + is_first, 0 if is_first else n).astype(np.int32)
        places = {} if is_first else {"positions": [np.append(np.stack([row, col]) + 1, [[0], [0]], 1).astype(np.int32)]}
        return make_item(
            rows, Grid(1, h, w), [Piece(n + 1, n // 4)], taps__index=[index[None]],
            taps__weight=[np.ones((1, n + 1), np.float32)], rows__class=[np.int32([*range(n), WEIGHT_ROW])],
            rows__patches=[np.arange(n, dtype=np.int32)], **places,
        )  # fmt: skip

    return item


def turned_item(size: int, merge: int) -> Callable[[np.ndarray], ImageItem]:
    """Patches in merge order with positions by row and column."""

    def item(image: np.ndarray) -> ImageItem:
        h, w = image.shape[0] // size, image.shape[1] // size
        pieces = [Piece(h * w, h * w // merge**2)]
        return make_item(patches(image, size, merge), Grid(1, h, w), pieces, positions=[order(h, w, merge)])

    return item


def windowed_item(image: np.ndarray) -> ImageItem:
    """Merged cells in windows of two by two, the last ones smaller, and the list that undoes their order."""
    h, w = image.shape[0] // 14, image.shape[1] // 14
    cells = [
        (y, x) for top in range(0, h // 2, 2) for left in range(0, w // 2, 2)
        for y in range(top, min(top + 2, h // 2)) for x in range(left, min(left + 2, w // 2))
    ]  # fmt: skip
    heights, widths = ([min(2, n // 2 - at) for at in range(0, n // 2, 2)] for n in (h, w))
    number = np.array([y * (w // 2) + x for y, x in cells])
    rows = patches(image, 14, 2).reshape(len(cells), 4, -1)[number].reshape(h * w, -1)
    return make_item(
        rows, Grid(1, h, w), [Piece(h * w, h * w // 4)], segments__0=[np.int32([4 * a * b for a in heights for b in widths])],
        segments__1=[np.int32([h * w])], rows__features=[np.argsort(number).astype(np.int32)],
        positions=[order(h, w, 2).reshape(2, len(cells), 4)[:, number].reshape(2, -1)],
    )  # fmt: skip


def tapped_item(image: np.ndarray) -> ImageItem:
    """Qwen3-VL: four weighted rows of a square of learned positions, here four by four."""
    h, w, side = image.shape[0] // 16, image.shape[1] // 16, 4
    row, col = order(h, w, 2)
    index, weight = [], []
    at = [np.linspace(0, side - 1, n).astype(np.float32)[each] for n, each in ((h, row), (w, col))]
    low = [each.astype(np.int32) for each in at]
    high = [np.minimum(each + 1, side - 1) for each in low]
    part = [a - b for a, b in zip(at, low, strict=True)]
    for y, wy in ((low[0], 1 - part[0]), (high[0], part[0])):
        for x, wx in ((low[1], 1 - part[1]), (high[1], part[1])):
            index.append(y * side + x)
            weight.append(wy * wx)
    return make_item(
        patches(image, 16, 2), Grid(1, h, w), [Piece(h * w, h * w // 4)], positions=[np.stack([row, col])],
        taps__index=[np.stack(index).astype(np.int32)], taps__weight=[np.stack(weight).astype(np.float32)],
    )  # fmt: skip


def next_item(image: np.ndarray) -> ImageItem:
    """LLaVA-NeXT of an image that fills two tiles beside or below each other: the whole image small, then the tiles."""
    h, w = image.shape[0] // 28, image.shape[1] // 28
    small = image[:: image.shape[0] // 28, :: image.shape[1] // 28]
    tiles = [image[28 * y : 28 * y + 28, 28 * x : 28 * x + 28] for y in range(h) for x in range(w)]
    each = clip_item(small)
    rows = np.concatenate([clip_item(tile).rows for tile in (small, *tiles)])
    n, index = len(tiles), each.tables["taps.index"].values
    grid = np.arange(4 * n).reshape(h, w, 2, 2).transpose(0, 2, 1, 3).reshape(2 * h, 2 * w)
    lines = np.concatenate([grid, np.full((2 * h, 1), WEIGHT_ROW)], 1).reshape(-1).astype(np.int32)
    inner = np.int32([5 * i + j if j < 4 else WEIGHT_ROW for i in range(n) for j in range(5)])
    return make_item(
        rows, Grid(1, 2, 2, h, w), [Piece(5, 4), Piece(5 * n, len(lines))], taps__index=[index, np.tile(index, n)],
        taps__weight=[np.ones((1, 5), np.float32), np.ones((1, 5 * n), np.float32)],
        rows__class=[np.int32([0, 1, 2, 3, WEIGHT_ROW]), inner], rows__features=[np.arange(4, dtype=np.int32), lines],
        rows__patches=[np.arange(4, dtype=np.int32), np.int32([5 * i + j for i in range(n) for j in range(4)])],
        segments__0=[np.int32([5]), np.int32([5] * n)],
    )  # fmt: skip


def next_inputs(images: Sequence[np.ndarray]) -> dict[str, Any]:
    parts = [next_item(image) for image in images]
    tiles = [item.rows.reshape(-1, 5, 3 * 14 * 14)[:, :4] for item in parts]
    made = [
        np.stack([numbers(t.reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 28, 3), CLIP) for t in each])
        for each in tiles
    ]
    most = max(len(each) for each in made)
    padded = [np.concatenate([each, np.zeros((most - len(each), *each.shape[1:]), np.float32)]) for each in made]
    sizes = torch.tensor([image.shape[:2] for image in images])
    return {"pixel_values": torch.tensor(np.stack(padded)), "image_sizes": sizes}


def flattened(size: int, usual: tuple[Sequence[float], Sequence[float]]) -> Callable[[Sequence[np.ndarray]], dict[str, Any]]:
    """Inputs of Qwen's models: rows of numbers in merge order, each frame twice."""

    def inputs(images: Sequence[np.ndarray]) -> dict[str, Any]:
        rows, grids = [], []
        for image in images:
            h, w = image.shape[0] // size, image.shape[1] // size
            x = numbers(image, usual).reshape(3, h // 2, 2, size, w // 2, 2, size).transpose(1, 4, 2, 5, 0, 3, 6)
            rows.append(x.reshape(h * w, 3, 1, size * size).repeat(2, 2).reshape(h * w, -1))
            grids.append([1, h, w])
        return {"pixel_values": torch.tensor(np.concatenate(rows)), "image_grid_thw": torch.tensor(grids)}

    return inputs


def sized(usual: tuple[Sequence[float], Sequence[float]]) -> Callable[[Sequence[np.ndarray]], dict[str, Any]]:
    """Inputs of Pixtral: images of unlike sizes, padded."""

    def inputs(images: Sequence[np.ndarray]) -> dict[str, Any]:
        side = [max(image.shape[axis] for image in images) for axis in (0, 1)]
        out = np.zeros((len(images), 3, *side), np.float32)
        for to, image in zip(out, images, strict=True):
            to[:, : image.shape[0], : image.shape[1]] = numbers(image, usual)
        return {"pixel_values": torch.tensor(out), "image_sizes": torch.tensor([image.shape[:2] for image in images])}

    return inputs


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}


IDS = {"image_token_id": FEATURE, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip


def qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    return transformers.Qwen2VLConfig(text_config={**TEXT, **rope(mrope_section=[2, 3, 3])}, vision_config=vision, **IDS)


def qwen2_5_vl() -> Any:
    vision = {**QWEN, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(text_config={**TEXT, **rope(mrope_section=[2, 3, 3])}, vision_config=vision, **IDS)


def qwen3_vl() -> Any:
    vision = {**QWEN, "depth": 3, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 16, **rope(mrope_section=[4, 2, 2], mrope_interleaved=True)}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **IDS)


def qwen3_vl_moe() -> Any:
    vision = {**QWEN, "depth": 3, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 16, **rope(mrope_section=[4, 2, 2], mrope_interleaved=True), "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 48}  # fmt: skip
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **IDS)


def internvl() -> Any:
    vision = {**SMALL, "image_size": [28, 28], "patch_size": [7, 7], "use_qk_norm": True, "attention_bias": True}
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT}, vision_config=vision, image_token_id=FEATURE, image_seq_length=4
    )


def idefics3() -> Any:
    vision = {**SMALL, "image_size": 56, "patch_size": 14}
    text = {"model_type": "llama", **TEXT}
    return transformers.Idefics3Config(text_config=text, vision_config=vision, image_token_id=FEATURE, scale_factor=2)


def smolvlm() -> Any:
    vision = {**SMALL, "image_size": 56, "patch_size": 14}
    text = {"model_type": "llama", **TEXT}
    return transformers.SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=FEATURE, scale_factor=2)


def pixtral(**fields: Any) -> Callable[[], Any]:
    vision = {**SMALL, "image_size": 56, "patch_size": 14, "model_type": "pixtral"}
    given = {"vision_config": vision, "image_token_index": FEATURE, "vision_feature_layer": -1, **fields}
    kind = transformers.Mistral3Config if "spatial_merge_size" in fields else transformers.LlavaConfig
    return lambda: kind(text_config={"model_type": "mistral", **TEXT}, **given)


def llama4() -> Any:
    vision = {**SMALL, "intermediate_size": 128, "image_size": 56, "patch_size": 14, "pixel_shuffle_ratio": 0.5,
              "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48}  # fmt: skip
    text = {**TEXT, "head_dim": 16, "attention_chunk_size": 64, "num_local_experts": 4, "intermediate_size_mlp": 96}
    return transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=FEATURE)


def llava_next() -> Any:
    vision = {**SMALL, "num_hidden_layers": 3, "image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"}
    return transformers.LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT}, vision_config=vision, image_token_index=FEATURE,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )  # fmt: skip


def gemma3() -> Any:
    text = {**TEXT, "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {**SMALL, "image_size": 56, "patch_size": 14, "vision_use_head": False}
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=FEATURE, boi_token_index=97,
        eoi_token_index=96,
    )  # fmt: skip


def paligemma(kind: str, **fields: Any) -> Callable[[], Any]:
    text = {"model_type": kind, "head_dim": 16, **TEXT, **fields}
    vision = {**SMALL, "model_type": "siglip_vision_model", "image_size": 42, "patch_size": 14, "vision_use_head": False}
    return lambda: transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=FEATURE, projection_dim=64, hidden_size=64, vocab_size=99
    )


MERGED: dict[str, Any] = {"wants_types": True, "merge": 2, "processor": "Qwen2VLImageProcessor"}
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
FAMILIES = {
    "llava": Family("LlavaForConditionalGeneration", llava, clip_item, stacked(CLIP), [(42, 42)]),
    "llava-next": Family("LlavaNextForConditionalGeneration", llava_next, next_item, next_inputs, [(28, 56), (56, 28)]),
    "qwen2-vl": Family(
        "Qwen2VLForConditionalGeneration", qwen2_vl, turned_item(14, 2), flattened(14, CLIP), [(56, 84), (28, 28)], **MERGED
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLForConditionalGeneration", qwen2_5_vl, windowed_item, flattened(14, CLIP), [(84, 56), (84, 140)], **MERGED
    ),
    "qwen3-vl": Family(
        "Qwen3VLForConditionalGeneration", qwen3_vl, tapped_item, flattened(16, HALVES), [(64, 96), (32, 64)], **MERGED
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe, tapped_item, flattened(16, HALVES), [(64, 96), (32, 64)], **MERGED
    ),
    "internvl": Family("InternVLForConditionalGeneration", internvl, class_item(7, True), stacked(IMAGENET), [(28, 28)]),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration", gemma3, plain_item(14, 2), stacked(HALVES), [(56, 56)], types="token_type_ids"
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration", paligemma("gemma"), plain_item(14, 1), stacked(HALVES), [(42, 42)], is_prefix=True
    ),
    "paligemma2": Family(
        "PaliGemmaForConditionalGeneration", paligemma("gemma2", sliding_window=64, query_pre_attn_scalar=16),
        plain_item(14, 1), stacked(HALVES), [(42, 42)], is_prefix=True,
    ),
    "smolvlm": Family("SmolVLMForConditionalGeneration", smolvlm, plain_item(14, 2), tiled(HALVES), [(56, 56)]),
    "idefics3": Family("Idefics3ForConditionalGeneration", idefics3, plain_item(14, 2), tiled(HALVES), [(56, 56)]),
    "pixtral": Family(
        "LlavaForConditionalGeneration", pixtral(vision_feature_select_strategy="full"), turned_item(14, 1), sized(CLIP),
        [(28, 42), (56, 14)],
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration", pixtral(spatial_merge_size=2), turned_item(14, 2), sized(CLIP), [(56, 28), (28, 56)]
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration", llama4, class_item(14, False), in_bfloat16, [(56, 56)], is_by_hand=True
    ),
    "deepseek-ocr": Family(
        "", dict, pages.item, lambda images: {"images": images}, [(40, 70), (20, 28)], make=pages.make
    ),
}  # fmt: skip
