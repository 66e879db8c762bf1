"""EXAONE 4."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "EXAONE 4.0 1.2B and 32B"


@architecture(
    *heads.names("Exaone4"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
)
def exaone4(cfg: ModelConfig, m: Model) -> None:
    """EXAONE 4 decoder: norms after attention and MLP and on the heads of q and k. If some layers have a window, the full
    layers have no rope."""
    window, eps = cfg.get("sliding_window", 0), cfg.rms_norm_eps
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, kind in zip(m.layers(f"{stem}layers", cfg.num_layers), cfg.layer_kinds(4), strict=True):
        q, k, v = usual.qkv(cfg, layer, x)
        q = layer.rms_norm(q, "self_attn.q_norm", eps, per_head=True)
        k = layer.rms_norm(k, "self_attn.k_norm", eps, per_head=True)
        slides = kind == "sliding_attention"
        q, k = layer.rope(q, k, cfg.rope) if slides or not window else (q, k)
        h = usual.out(cfg, layer, layer.attention(q, k, v, window=window if slides else 0))
        x = x + layer.rms_norm(h, "post_attention_layernorm", eps)
        x = x + layer.rms_norm(usual.mlp(cfg, layer, x), "post_feedforward_layernorm", eps)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps), stem)
