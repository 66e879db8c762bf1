"""Seed-OSS."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Seed-OSS 36B"


@architecture(
    *heads.names("SeedOss"),
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
)
def seed_oss(cfg: ModelConfig, m: Model) -> None:
    """Seed-OSS decoder: Llama with one field for the biases of q, k and v and another for the output projection's bias."""
    bias, out_bias = cfg.get("attention_bias", True), cfg.get("attention_out_bias", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=out_bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + usual.mlp(cfg, layer, h, bias=cfg.get("mlp_bias", False))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
