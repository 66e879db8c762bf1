"""Qwen3, the dense models."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Qwen3 0.6B to 32B, Qwen3-Embedding and -Reranker"


@architecture(
    *heads.names("Qwen3"),
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
def qwen3(cfg: ModelConfig, m: Model) -> None:
    """Qwen3 dense decoder: Llama with an RMS norm on each head of q and k before rope."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    bias = cfg.get("attention_bias", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, window in zip(m.layers(f"{stem}layers", cfg.num_layers), cfg.layer_windows(), strict=True):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = layer.linear(
            h, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q_width, kv_width, kv_width], bias=bias
        )
        q = layer.rms_norm(q, "self_attn.q_norm", cfg.rms_norm_eps, per_head=True)
        k = layer.rms_norm(k, "self_attn.k_norm", cfg.rms_norm_eps, per_head=True)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v, window=window), "self_attn.o_proj", cfg.hidden_size, bias=bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + layer.gated_mlp(h, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act=cfg.hidden_act)
        x = m.inject(x)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
