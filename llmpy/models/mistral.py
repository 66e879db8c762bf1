"""Mistral 7B, Nemo and Small."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Mistral 7B v0.1 to v0.3, Mistral Nemo 12B, Mistral Small 22B and 24B (text)"


@architecture(
    *heads.names("Mistral"),
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
def mistral(cfg: ModelConfig, m: Model) -> None:
    """Mistral decoder: Llama without biases, every layer with the same attention window or none."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    window = cfg.get("sliding_window", 0)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = layer.linear(
            h, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q_width, kv_width, kv_width]
        )
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v, window=window), "self_attn.o_proj", cfg.hidden_size)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + layer.gated_mlp(
            h, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act=cfg.hidden_act
        )
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
