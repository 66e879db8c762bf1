"""OLMo 2 and OLMo 3."""

from collections.abc import Iterable
from itertools import repeat

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture
from .rope import Rope

CHECKPOINTS = "OLMo 2 1B, 7B, 13B and 32B; OLMo 3 7B and 32B"
DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048}


@architecture(*heads.names("Olmo2"), defaults=DEFAULTS)
def olmo2(cfg: ModelConfig, m: Model) -> None:
    """OLMo 2 decoder: norms after attention and MLP instead of before, and norms over all heads of q and of k at once."""
    write(cfg, m, repeat((0, cfg.rope), cfg.num_layers))


@architecture(*heads.names("Olmo3"), defaults={**DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096})
def olmo3(cfg: ModelConfig, m: Model) -> None:
    """OLMo 3 decoder: OLMo 2, but three of four layers have a window and unscaled rope."""
    kinds, window = cfg.layer_kinds(4), cfg.get("sliding_window", 0)
    ropes = cfg.layer_ropes(cfg.get("rope_theta", 500000.0))
    write(cfg, m, ((window if kind == "sliding_attention" else 0, ropes[kind]) for kind in kinds))


def write(cfg: ModelConfig, m: Model, layers: Iterable[tuple[int, Rope]]) -> None:
    """Writes the program; `layers` gives the window and the rope of each layer."""
    bias = cfg.get("attention_bias", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, (window, rope) in zip(m.layers(f"{stem}layers", cfg.num_layers), layers, strict=True):
        q, k, v = usual.qkv(cfg, layer, x, bias=bias)
        q = layer.rms_norm(q, "self_attn.q_norm", cfg.rms_norm_eps)
        k = layer.rms_norm(k, "self_attn.k_norm", cfg.rms_norm_eps)
        q, k = layer.rope(q, k, rope)
        h = usual.out(cfg, layer, layer.attention(q, k, v, window=window), bias=bias)
        x = x + layer.rms_norm(h, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + layer.rms_norm(usual.mlp(cfg, layer, x), "post_feedforward_layernorm", cfg.rms_norm_eps)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
