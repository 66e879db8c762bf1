"""Nemotron 3 and 4, and Minitron."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Minitron 4B and 8B, Nemotron-3 8B, Nemotron-4 15B and 340B"


@architecture(
    *heads.names("Nemotron"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
    },
)
def nemotron(cfg: ModelConfig, m: Model) -> None:
    """Nemotron decoder: layer norms with weights stored minus 1, rope on half of each head, a plain MLP with squared ReLU."""
    eps = cfg.positive("norm_eps", 1e-5)
    attention_bias, mlp_bias = cfg.get("attention_bias", False), cfg.get("mlp_bias", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.layer_norm(x, "input_layernorm", eps, offset=1.0)
        q, k, v = usual.qkv(cfg, layer, h, bias=attention_bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=attention_bias)
        h = layer.layer_norm(x, "post_attention_layernorm", eps, offset=1.0)
        x = x + layer.mlp(h, "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act=cfg.hidden_act, bias=mlp_bias)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}norm", eps, offset=1.0), stem)
