"""DeepSeek-OCR: SAM on a page or a tile of it, CLIP on SAM's map, and a text model with DeepSeek's mixtures."""

from ..errors import CheckpointError
from . import towers
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "DeepSeek-OCR 3B"
LIMITS = "tiles of 640 pixels beside the whole page at 1024 (what its authors call Gundam)"

NAMES = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
MOST_TAPS = 64
"""Rows of a learned table in a position of a tile of another size: 8 along each side, enough down to half a side."""


@architecture(
    "DeepseekOCRForCausalLM",
    texts={"": "DeepseekV2ForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"},
    defaults={"use_mla": False, "image_token_id": 128815},
    ignore=["model.vision_model.embeddings.position_ids", "model.vision_model.embeddings.patch_embedding.weight"],
)
def deepseek_ocr(cfg: ModelConfig, m: Model) -> None:
    """Both encoders' columns through one matrix; a newline behind each line of features, a separator behind the page."""
    cfg.only("use_mla", False)
    vision = cfg.sub("vision_config", {}, {"image_size": 1024})
    parts = vision.sub("width", {}, {})
    sam, clip = (parts.sub(name, NAMES, {}) for name in ("sam_vit_b", "clip-l-14-224"))
    v = m.tower(sam, "model.sam_model.", towers.feature_id(cfg))
    x = compressed(sam, v, write_sam(cfg, sam, vision.size("image_size", 1024), v))
    v.head_dim = clip.head_dim
    y = write_clip(clip, v.at("model.vision_model."), x)
    p = v.at("model.")
    features = p.linear(v.concat(y, v.rows(x, "patches")), "projector.layers", cfg.hidden_size, bias=True)
    v.features(p.rows(features, "features", weight=("image_newline", "view_seperator")))
    towers.text(cfg, m)


def write_sam(cfg: ModelConfig, sam: ModelConfig, image_size: int, v: Model) -> Value:
    """The rows of SAM's encoder: attention in windows filled up with zeros, in some layers over the whole tile."""
    dim, patch, eps = sam.hidden_size, sam.size("patch_size", 16), 1e-6
    window, side = sam.size("window_size", 14), image_size // patch
    whole = sam.raw.get("global_attn_indexes", [2, 5, 8, 11])
    x = v.linear(v.pixels(towers.byte_table(cfg, towers.HALVES), 3 * patch**2), "patch_embed.proj", dim, bias=True)
    x = x + v.embed_taps("pos_embed", (1, side, side, dim), taps=MOST_TAPS)
    for i, block in enumerate(v.layers("blocks", sam.num_layers)):
        is_whole = isinstance(whole, list) and i in whole
        h = block.layer_norm(x, "norm1", eps)
        h = h if is_whole else block.rows(h, "windows")
        q, k, u = block.linear(h, "attn.qkv", [dim] * 3, bias=True)
        names, sides = ("attn.rel_pos_h", "attn.rel_pos_w"), side if is_whole else window
        h = block.linear(block.grid_attention(q, k, u, *names, sides, segments=int(is_whole)), "attn.proj", dim, bias=True)
        x = x + (h if is_whole else block.rows(h, "class"))
        h = block.layer_norm(x, "norm2", eps)
        x = x + block.mlp(h, "mlp.lin1", "mlp.lin2", 4 * dim, act="gelu")
    return x


def compressed(sam: ModelConfig, v: Model, x: Value) -> Value:
    """A sixteenth of the rows: four convolutions, the last two at every second row and line."""
    neck, widths = sam.size("output_channels", 256), sam.raw.get("downsample_channels", [512, 1024])
    if not isinstance(widths, list) or len(widths) != 2:
        raise CheckpointError(f"{sam.file}: downsample_channels: wanted two widths, have {widths!r}", file=sam.file)
    x = v.layer_norm(v.linear(x, "neck.0", neck), "neck.1", 1e-6)
    x = v.layer_norm(v.around(x, "near", "neck.2", neck), "neck.3", 1e-6)
    return v.around(v.around(x, "near_half", "net_2", widths[0]), "near_quarter", "net_3", widths[1])


def write_clip(clip: ModelConfig, block: Block, x: Value) -> Value:
    """The rows of CLIP on SAM's map in place of patches; there is no norm behind its layers."""
    dim, side, eps = clip.hidden_size, clip.size("image_size", 224) // clip.size("patch_size", 14), 1e-5
    x = block.rows(x, "cells", weight="embeddings.class_embedding")
    x = x + block.embed_taps("embeddings.position_embedding.weight", (side**2 + 1, dim), taps=MOST_TAPS, of_cells=True)
    x = block.layer_norm(x, "pre_layrnorm", eps)
    for i in range(clip.num_layers):
        layer = Block(block._model, f"{block.prefix}transformer.layers.{i}.")
        q, k, u = layer.linear(layer.layer_norm(x, "layer_norm1", eps), "self_attn.qkv_proj", [dim] * 3, bias=True)
        x = x + layer.linear(layer.row_attention(q, k, u, segments=2), "self_attn.out_proj", dim, bias=True)
        h = layer.layer_norm(x, "layer_norm2", eps)
        x = x + layer.mlp(h, "mlp.fc1", "mlp.fc2", 4 * dim, act="quick_gelu")
    return block.rows(x, "patches")
