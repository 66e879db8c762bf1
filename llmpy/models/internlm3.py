"""InternLM 3."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "InternLM3 8B"
REFERENCE = "Llama of transformers, under InternLM 3's names"


@architecture(
    *heads.names("InternLM3"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
)
def internlm3(cfg: ModelConfig, m: Model) -> None:
    """InternLM 3 decoder: Llama with one field for the biases of q, k and v and one for all other biases."""
    qkv_bias = cfg.get("qkv_bias", cfg.get("attention_bias", False))
    bias = cfg.get("bias", cfg.get("mlp_bias", False))
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=qkv_bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        x = x + usual.mlp(cfg, layer, layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps), bias=bias)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
