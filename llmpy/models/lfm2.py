"""LFM2."""

from . import usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "LFM2 350M, 700M, 1.2B and 2.6B"


@architecture(
    "Lfm2ForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128000,
    },
)
def lfm2(cfg: ModelConfig, m: Model) -> None:
    """LFM2 decoder: a short convolution between two gates in most layers, attention in the others."""
    eps, inner = cfg.need("norm_eps", float), mlp_width(cfg)
    x = m.embed("model.embed_tokens")
    for layer, is_conv in zip(m.layers("model.layers", cfg.num_layers), conv_layers(cfg), strict=True):
        h = layer.rms_norm(x, "operator_norm", eps)
        x = x + (short_conv(cfg, layer, h) if is_conv else attention(cfg, layer, h, eps))
        h = layer.rms_norm(x, "ffn_norm", eps)
        x = x + layer.gated_mlp(h, "feed_forward.w1", "feed_forward.w3", "feed_forward.w2", inner, act="silu")
    m.logits(m.rms_norm(x, "model.embedding_norm", eps), "lm_head", tied_to="model.embed_tokens")


def conv_layers(cfg: ModelConfig) -> list[bool]:
    """Whether each layer is a convolution."""
    kinds, full = cfg.raw.get("layer_types"), cfg.raw.get("full_attn_idxs")
    if isinstance(kinds, list):
        return [kind != "full_attention" for kind in kinds]
    return [isinstance(full, list) and i not in full for i in range(cfg.num_layers)]


def mlp_width(cfg: ModelConfig) -> int:
    """The MLP's inner width; the configuration has the width before its adjustment."""
    width = cfg.size("block_ff_dim", cfg.size("intermediate_size", 12288))
    if not cfg.get("block_auto_adjust_ff_dim", True):
        return width
    step = cfg.size("block_multiple_of", 256)
    return -(-int(cfg.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // step) * step


def short_conv(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Multiplies by the first gate, convolves, multiplies by the second gate."""
    n, bias = cfg.hidden_size, cfg.get("conv_bias", False)
    enter, leave, u = layer.linear(x, "conv.in_proj", [n, n, n], bias=bias)
    u = layer.conv(enter * u, "conv.conv", cfg.size("conv_L_cache", 3), bias=bias)
    return layer.linear(leave * u, "conv.out_proj", n, bias=bias)


def attention(cfg: ModelConfig, layer: Block, x: Value, eps: float) -> Value:
    """Qwen 3's attention under other names."""
    q, k, v = usual.qkv(cfg, layer, x)
    q = layer.rms_norm(q, "self_attn.q_layernorm", eps, per_head=True)
    k = layer.rms_norm(k, "self_attn.k_layernorm", eps, per_head=True)
    q, k = layer.rope(q, k, cfg.rope)
    return layer.linear(layer.attention(q, k, v), "self_attn.out_proj", cfg.hidden_size)
