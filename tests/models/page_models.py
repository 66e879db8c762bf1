"""A tiny DeepSeek-OCR: transformers' SAM, CLIP and text model, joined and cut as its authors publish it, under their names."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.ImageOps
import pytest
import safetensors.torch
import torch
from PIL import Image
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoder

from llmpy.vision.items import ImageItem
from llmpy.vision.processors import Processor

BASE, TILE, PATCH = 48, 32, 4
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2", "image_token_id": 98, "dtype": "float32",
    "vision_config": {"image_size": BASE, "width": {
        "sam_vit_b": {"width": 32, "layers": 2, "heads": 2, "patch_size": PATCH, "window_size": 5, "global_attn_indexes": [1],
                      "output_channels": 16, "downsample_channels": [32, 32]},
        "clip-l-14-224": {"width": 32, "layers": 2, "heads": 2, "patch_size": 14, "image_size": 42}}},
    "language_config": {
        "use_mla": False, "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "kv_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "eos_token_id": 2, "bos_token_id": 1},
}  # fmt: skip
PROCESSOR = {"processor_class": "DeepseekVLV2Processor", "tile_size": TILE, "size": BASE}


class Page(torch.nn.Module):
    """The whole model; its parameters have the names of transformers' parts."""

    def __init__(self) -> None:
        super().__init__()
        parts = pytest.importorskip("transformers.models.deepseek_ocr2.modeling_deepseek_ocr2")
        configs = pytest.importorskip("transformers.models.deepseek_ocr2.configuration_deepseek_ocr2")
        text = {name: value for name, value in CONFIG["language_config"].items() if name not in
                ("use_mla", "kv_lora_rank", "first_k_dense_replace")}  # fmt: skip
        config = configs.DeepseekOcr2TextConfig(**text, mlp_layer_types=["dense", "sparse"])
        config._attn_implementation = "eager"
        sam = configs.DeepseekOcr2SamVisionConfig(
            hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=BASE, patch_size=PATCH,
            window_size=5, global_attn_indexes=[1], downsample_channels=[32, 32],
        )  # fmt: skip
        sam._attn_implementation = "eager"
        clip = CLIPVisionConfig(hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
        clip._attn_implementation = "eager"
        self.text, self.sam, self.clip = (
            parts.DeepseekOcr2TextModel(config), parts.DeepseekOcr2SamVisionEncoder(sam), CLIPEncoder(clip),
        )  # fmt: skip
        self.class_row, self.places = torch.nn.Parameter(torch.zeros(32)), torch.nn.Parameter(torch.zeros(10, 32))
        self.before = torch.nn.LayerNorm(32)
        self.projector, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 99, bias=False)
        self.newline, self.separator = torch.nn.Parameter(torch.zeros(64)), torch.nn.Parameter(torch.zeros(64))

    def encoded(self, tile: torch.Tensor) -> torch.Tensor:
        """Features [side, side, hidden] of a tile [3, h, w]."""
        cells = self.sam(tile[None]).last_hidden_state
        side = cells.shape[-1]
        table = self.places[1:].reshape(1, 3, 3, -1).permute(0, 3, 1, 2)
        if side != 3:
            table = torch.nn.functional.interpolate(table, size=(side, side), mode="bicubic", antialias=True)
        places = torch.cat([self.places[:1], table.permute(0, 2, 3, 1).reshape(side * side, -1)])
        rows = torch.cat([self.class_row[None], cells[0].flatten(1).T])
        seen = self.clip(inputs_embeds=self.before(rows + places)[None]).last_hidden_state[0, 1:]
        return self.projector(torch.cat([seen, cells[0].flatten(1).T], -1)).reshape(side, side, -1)

    def features(self, image: np.ndarray) -> torch.Tensor:
        tiles, whole = cut(image)

        def lines(grid: torch.Tensor) -> torch.Tensor:
            newlines = self.newline.expand(len(grid), 1, -1)
            return torch.cat([grid, newlines], 1).flatten(0, 1)

        rows = [torch.cat([self.encoded(tile) for tile in row], 1) for row in tiles]
        local = [lines(torch.cat(rows))] if rows else []
        return torch.cat([*local, lines(self.encoded(whole)), self.separator[None]])

    def forward(self, input_ids: torch.Tensor, images: Sequence[np.ndarray] = ()) -> Any:
        x = self.text.embed_tokens(input_ids)
        if images:
            found = torch.cat([self.features(image) for image in images])
            x = x.masked_scatter((input_ids == 98)[..., None].expand_as(x), found)
        return SimpleNamespace(logits=self.head(self.text(inputs_embeds=x).last_hidden_state))


def cut(image: np.ndarray) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Tiles by line, and the whole image, as the published code cuts and normalises them."""
    picture = Image.fromarray(image)

    def numbers(part: Image.Image) -> torch.Tensor:
        return torch.tensor((np.asarray(part, np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1)

    whole = numbers(PIL.ImageOps.pad(picture, (BASE, BASE), color=(127, 127, 127)))
    if max(picture.size) <= TILE:
        return [], whole
    width, height = picture.size
    grids = sorted({(i, j) for n in range(2, 10) for i in range(1, n + 1) for j in range(1, n + 1) if 2 <= i * j <= 9},
                   key=math.prod)  # fmt: skip
    cols, rows = min(grids, key=lambda grid: abs(width / height - grid[0] / grid[1]))
    large = picture.resize((TILE * cols, TILE * rows))
    boxes = [[(TILE * x, TILE * y, TILE * (x + 1), TILE * (y + 1)) for x in range(cols)] for y in range(rows)]
    return [[numbers(large.crop(box)) for box in line] for line in boxes], whole


RENAMES = (
    ("text.", "model."), ("head.", "lm_head."), ("sam.layers", "model.sam_model.blocks"), ("sam.", "model.sam_model."),
    ("clip.layers", "model.vision_model.transformer.layers"), ("before.", "model.vision_model.pre_layrnorm."),
    ("projector.", "model.projector.layers."), ("newline", "model.image_newline"), ("separator", "model.view_seperator"),
    ("class_row", "model.vision_model.embeddings.class_embedding"),
    ("places", "model.vision_model.embeddings.position_embedding.weight"),
)  # fmt: skip
INSIDE = (
    ("neck.conv1", "neck.0"), ("neck.layer_norm1", "neck.1"), ("neck.conv2", "neck.2"), ("neck.layer_norm2", "neck.3"),
    ("proj.conv1", "net_2"), ("proj.conv2", "net_3"), ("embed.projection", "embed.proj"), (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
)  # fmt: skip


def published(model: Page) -> dict[str, torch.Tensor]:
    """The tensors under the names of the published checkpoint."""
    found = {}
    for name, tensor in model.state_dict().items():
        old, new = next(pair for pair in RENAMES if name.startswith(pair[0]))
        name = new + name.removeprefix(old)
        for old, new in INSIDE if name.startswith("model.sam_model") else ():
            name = name.replace(old, new)
        if ".experts." in name:
            stem, kind = name.rsplit(".", 1)
            for number, own in enumerate(tensor):
                parts = own.chunk(2) if kind == "gate_up_proj" else [own]
                names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
                found |= {f"{stem}.{number}.{each}.weight": part for each, part in zip(names, parts, strict=True)}
        elif ".self_attn.q_proj" in name and "vision_model" in name:
            parts = [model.state_dict()[f"clip.{name.split('transformer.')[1]}".replace("q_proj", each)]
                     for each in ("q_proj", "k_proj", "v_proj")]  # fmt: skip
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "vision_model" not in name or (".k_proj" not in name and ".v_proj" not in name):
            found[name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def make(directory: Path, randomise: Callable[[torch.nn.Module, int], None]) -> Page:
    """Saves a random model and returns it."""
    model = Page().eval()
    randomise(model, 3)
    safetensors.torch.save_file(published(model), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def item(image: np.ndarray) -> ImageItem:
    return Processor(CONFIG, {"image_processor_type": PROCESSOR["processor_class"], **PROCESSOR}).item(image)
