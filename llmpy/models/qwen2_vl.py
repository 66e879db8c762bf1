"""Qwen2-VL and Qwen2.5-VL: a tower with positions by row and column, and Qwen2 with M-RoPE."""

from . import towers
from .blocks import Model, Value
from .config import ModelConfig
from .registry import architecture
from .rope import Rope

CHECKPOINTS = "Qwen2-VL 2B to 72B, Qwen2.5-VL 3B to 72B"
LIMITS = "images; clips are refused"

_STEMS = ("visual.", "model.visual.")
_NAMES = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "embed_dim": "hidden_size"}
_VISION = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}


def begin(cfg: ModelConfig, m: Model, *, bias: bool = False) -> tuple[ModelConfig, Model, Value, Rope]:
    """The tower's configuration and program, the embedded patches, and the rotation of heads."""
    vision = cfg.sub("vision_config", _NAMES, _VISION)
    vision.only("in_channels", 3)
    v = m.tower(vision, towers.prefix(m, "patch_embed.proj.weight", _STEMS), towers.feature_id(cfg))
    patch, frames = vision.size("patch_size", 14), vision.size("temporal_patch_size", 2)
    table = towers.byte_table(cfg, towers.HALVES if bias else towers.CLIP)
    x = v.linear(v.pixels(table, 3 * frames * patch**2, frames=frames), "patch_embed.proj", vision.hidden_size, bias=bias)
    return vision, v, x, v.axial_rope(vision.head_dim, towers.theta(vision))


def merge(cfg: ModelConfig, vision: ModelConfig, v: Model, x: Value) -> Value:
    """Neighbouring patches, joined, through two linears."""
    h = v.group(x, vision.size("spatial_merge_size", 2) ** 2)
    h = v.act(v.linear(h, "merger.mlp.0", h.width, bias=True), "gelu")
    return v.linear(h, "merger.mlp.2", cfg.hidden_size, bias=True)


@architecture("Qwen2VLForConditionalGeneration", texts={"qwen2_vl_text": "Qwen2ForCausalLM", "": "Qwen2ForCausalLM"})
def qwen2_vl(cfg: ModelConfig, m: Model) -> None:
    """Blocks with layer norms and a plain MLP; all patches of an image attend to each other."""
    vision, v, x, rope = begin(cfg, m)
    width, act = int(vision.positive("mlp_ratio", 4.0) * vision.hidden_size), vision.get("hidden_act", "quick_gelu")
    for block in v.layers("blocks", vision.num_layers):
        q, k, u = block.linear(block.layer_norm(x, "norm1", 1e-6), "attn.qkv", [x.width] * 3, bias=True)
        q, k = block.rope(q, k, rope)
        x = x + block.linear(block.row_attention(q, k, u), "attn.proj", x.width, bias=True)
        x = x + block.mlp(block.layer_norm(x, "norm2", 1e-6), "mlp.fc1", "mlp.fc2", width, act=act)
    v.features(merge(cfg, vision, v, v.layer_norm(x, "merger.ln_q", 1e-6)))
    towers.text(cfg, m)


@architecture("Qwen2_5_VLForConditionalGeneration", texts={"qwen2_5_vl_text": "Qwen2ForCausalLM", "": "Qwen2ForCausalLM"})
def qwen2_5_vl(cfg: ModelConfig, m: Model) -> None:
    """Blocks with RMS norms and a gated MLP; patches attend within windows, but in some blocks to all of their image."""
    vision, v, x, rope = begin(cfg, m)
    whole = vision.raw.get("fullatt_block_indexes", [7, 15, 23, 31])
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for i, block in enumerate(v.layers("blocks", vision.num_layers)):
        q, k, u = block.linear(block.rms_norm(x, "norm1", 1e-6), "attn.qkv", [x.width] * 3, bias=True)
        q, k = block.rope(q, k, rope)
        is_whole = isinstance(whole, list) and i in whole
        x = x + block.linear(block.row_attention(q, k, u, segments=int(is_whole)), "attn.proj", x.width, bias=True)
        h = block.rms_norm(x, "norm2", 1e-6)
        x = x + block.gated_mlp(h, *names, vision.intermediate_size, act=vision.get("hidden_act", "silu"), bias=True)
    v.features(v.rows(merge(cfg, vision, v, v.rms_norm(x, "merger.ln_q", 1e-6)), "features"))
    towers.text(cfg, m)
