"""Phi-3, Phi-3.5 and Phi-4, the dense text models."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini"
LIMITS = "longrope takes the factors for `max_model_len`, not for each length"


@architecture(
    *heads.names("Phi3"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
)
def phi3(cfg: ModelConfig, m: Model) -> None:
    """Phi-3 decoder: Llama with q, k and v in one matrix, gate and up in another; rope may rotate a part of each head."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    window = cfg.get("sliding_window", 0)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        h = layer.linear(h, "self_attn.qkv_proj", q_width + 2 * kv_width)
        q, k, v = layer.split(h, [q_width, kv_width, kv_width])
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, window=window))
        x = x + usual.fused_mlp(cfg, layer, layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
