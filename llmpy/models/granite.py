"""Granite 3 and 4, the dense models, and Granite 3's with mixtures of experts."""

from collections.abc import Callable

from . import heads, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Granite 3.0 to 3.3 2B and 8B, Granite 3.0 and 3.1 1B-A400M and 3B-A800M"


@architecture(*heads.names("Granite"), defaults={"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048})
def granite(cfg: ModelConfig, m: Model) -> None:
    """Granite decoder: Llama with factors on the embedding, the scores, the branches of a layer and the logits."""
    bias = cfg.get("mlp_bias", False)
    write(cfg, m, lambda layer, h: usual.mlp(cfg, layer, h, bias=bias))


@architecture(
    *heads.names("GraniteMoe"),
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
def granite_moe(cfg: ModelConfig, m: Model) -> None:
    """Granite decoder with a mixture of experts instead of the MLP."""
    write(cfg, m, lambda layer, h: mixture.granite(cfg, layer, h))


def write(cfg: ModelConfig, m: Model, mlp: Callable[[Block, Value], Value]) -> None:
    """Writes the program; `mlp` writes the MLP of a layer.

    The rows between layers are kept divided by the branches' factor r, so that r needs no operation. An RMS norm cancels this
    division except for eps, so eps is divided by r^2.
    """
    attention_bias = cfg.get("attention_bias", False)
    branch, scale = cfg.positive("residual_multiplier", 1.0), cfg.get("attention_multiplier", 1.0)
    eps = cfg.rms_norm_eps / branch**2
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens", scale=cfg.get("embedding_multiplier", 1.0) / branch)
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", eps), bias=attention_bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, scale=scale), bias=attention_bias)
        x = x + mlp(layer, layer.rms_norm(x, "post_attention_layernorm", eps))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps), stem, scale=1 / cfg.positive("logits_scaling", 1.0))
