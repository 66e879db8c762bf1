"""Qwen2 and Qwen2.5."""

from . import heads
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Qwen2 and Qwen2.5 0.5B to 72B, Qwen2.5-Coder and -Math, R1-Distill-Qwen, QwQ-32B"


DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@architecture(*heads.names("Qwen2"), defaults=DEFAULTS)
def qwen2(cfg: ModelConfig, m: Model) -> None:
    """Qwen2 decoder: Llama with a bias on q, k and v; some layers may have an attention window."""
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, window in zip(m.layers(f"{stem}layers", cfg.num_layers), cfg.layer_windows(), strict=True):
        x = decoder_layer(cfg, layer, x, window)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)


def decoder_layer(cfg: ModelConfig, layer: Block, x: Value, window: int = 0) -> Value:
    """Attention, perhaps within a window, and an MLP."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
    q, k, v = layer.linear(
        h, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q_width, kv_width, kv_width], bias=True
    )
    q, k = layer.rope(q, k, cfg.rope)
    x = x + layer.linear(layer.attention(q, k, v, window=window), "self_attn.o_proj", cfg.hidden_size)
    h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
    return x + layer.gated_mlp(h, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act=cfg.hidden_act)
