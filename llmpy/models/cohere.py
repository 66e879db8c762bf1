"""Cohere's Command R (families Cohere and Cohere2)."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Command R and R+ (v01, 08-2024), Command R7B, Aya 23 and Expanse"
DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}


@architecture(*heads.names("Cohere"), defaults={**DEFAULTS, "rope_theta": 500000.0})
def cohere(cfg: ModelConfig, m: Model) -> None:
    """Cohere decoder: attention and MLP read the same layer norm, which has no bias. Rope is interleaved. If `use_qk_norm`,
    each head of q and k has a norm with its own weights before rope."""
    write(cfg, m, repeat((0, True), cfg.num_layers))


@architecture(*heads.names("Cohere2"), defaults={**DEFAULTS, "sliding_window": 4096})
def cohere2(cfg: ModelConfig, m: Model) -> None:
    """Cohere 2 decoder: Cohere, but three of four layers have a window, and the others have no rope."""
    window = cfg.get("sliding_window", 0)
    slides = (kind == "sliding_attention" and window > 0 for kind in cfg.layer_kinds(4))
    write(cfg, m, ((window if is_sliding else 0, is_sliding) for is_sliding in slides))


def write(cfg: ModelConfig, m: Model, layers: Iterable[tuple[int, bool]]) -> None:
    """Writes the program; `layers` gives the window of each layer and whether the layer has rope."""
    eps, bias = cfg.positive("layer_norm_eps", 1e-5), cfg.get("attention_bias", False)
    rope, has_norms = replace(cfg.rope, interleaved=True), cfg.get("use_qk_norm", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, (window, turns) in zip(m.layers(f"{stem}layers", cfg.num_layers), layers, strict=True):
        h = layer.layer_norm(x, "input_layernorm", eps, bias=False)
        q, k, v = usual.qkv(cfg, layer, h, bias=bias)
        if has_norms:
            q = layer.layer_norm(q, "self_attn.q_norm", eps, bias=False, per_head=True, own_weights=True)
            k = layer.layer_norm(k, "self_attn.k_norm", eps, bias=False, per_head=True, own_weights=True)
        q, k = layer.rope(q, k, rope) if turns else (q, k)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, window=window), bias=bias)
        x = x + usual.mlp(cfg, layer, h)
    scale = cfg.positive("logit_scale", 0.0625)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}norm", eps, bias=False), stem, scale=scale)
