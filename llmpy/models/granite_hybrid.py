"""Granite 4, the hybrids."""

from . import heads, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .mamba2 import hybrid_mixer
from .registry import architecture

CHECKPOINTS = "Granite 4.0 H-Micro, H-Tiny, H-Small, H-1B, H-350M"


@architecture(
    "GraniteMoeHybridForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
)
def granite_hybrid(cfg: ModelConfig, m: Model) -> None:
    """Granite 4 hybrid decoder: Mamba-2's mixer or attention, usually without rope, and Granite's factors (granite.py)."""
    branch, scale = cfg.positive("residual_multiplier", 1.0), cfg.get("attention_multiplier", 1.0)
    eps, bias = cfg.rms_norm_eps / branch**2, cfg.get("attention_bias", False)
    kinds = cfg.raw.get("layer_types") or cfg.raw.get("layers_block_type") or ["mamba"] * cfg.num_layers
    x = m.embed("model.embed_tokens", scale=cfg.get("embedding_multiplier", 1.0) / branch)
    for layer, kind in zip(m.layers("model.layers", cfg.num_layers), kinds, strict=False):  # type: ignore[call-overload]
        h = layer.rms_norm(x, "input_layernorm", eps)
        if kind in ("mamba", "linear_attention"):
            x = x + hybrid_mixer(cfg, layer, h, "mamba")
        else:
            q, k, v = usual.qkv(cfg, layer, h, bias=bias)
            if cfg.raw.get("position_embedding_type") == "rope":
                q, k = layer.rope(q, k, cfg.rope)
            x = x + usual.out(cfg, layer, layer.attention(q, k, v, scale=scale), bias=bias)
        h = layer.rms_norm(x, "post_attention_layernorm", eps)
        y = shared_mlp(cfg, layer, h)
        x = x + (y + mixture.granite(cfg, layer, h) if cfg.get("num_local_experts", 8) else y)
    scale = 1 / cfg.positive("logits_scaling", 1.0)
    heads.head(cfg, m, m.rms_norm(x, "model.norm", eps), "model.", scale=scale)


def shared_mlp(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """The shared expert."""
    inner = cfg.size("shared_intermediate_size", 1)
    gate, up = layer.linear(x, "shared_mlp.input_linear", [inner, inner])
    return layer.linear(layer.gated(gate, up, cfg.hidden_act), "shared_mlp.output_linear", cfg.hidden_size)
