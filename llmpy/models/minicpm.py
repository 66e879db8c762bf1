"""MiniCPM 1, 2 and 4, the dense models."""

from math import sqrt

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "MiniCPM 1B and 2B, MiniCPM4 0.5B and 8B"
REFERENCE = "Granite of transformers, under MiniCPM's names"
LIMITS = "dense attention: `sparse_config` is refused"


@architecture(
    "MiniCPMForCausalLM",
    "MiniCPMModel",
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dim_model_base": 1,
    },
)
def minicpm(cfg: ModelConfig, m: Model) -> None:
    """MiniCPM decoder: Llama with factors on the embedding, the branches of a layer and the logits.

    As in granite.py, the rows between layers are kept divided by the branches' factor.
    """
    cfg.without("sparse_config")
    bias, branch = cfg.get("attention_bias", False), cfg.positive("scale_depth", 1.0) / sqrt(cfg.num_layers)
    eps = cfg.rms_norm_eps / branch**2
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens", scale=cfg.get("scale_emb", 1.0) / branch)
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", eps), bias=bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        x = x + usual.mlp(cfg, layer, layer.rms_norm(x, "post_attention_layernorm", eps))
    scale = cfg.size("dim_model_base", 1) / cfg.hidden_size
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps), stem, scale=scale)
