"""Apertus."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Apertus 8B and 70B"


@architecture(
    *heads.names("Apertus"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rope_theta": 12000000.0,
    },
)
def apertus(cfg: ModelConfig, m: Model) -> None:
    """Apertus decoder: Llama with norms on the heads of q and k, and a plain MLP whose activation has weights."""
    eps, bias = cfg.rms_norm_eps, cfg.get("attention_bias", False)
    cfg.only("hidden_act", "xielu")
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "attention_layernorm", eps), bias=bias)
        q = layer.rms_norm(q, "self_attn.q_norm", eps, per_head=True)
        k = layer.rms_norm(k, "self_attn.k_norm", eps, per_head=True)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        h = layer.linear(layer.rms_norm(x, "feedforward_layernorm", eps), "mlp.up_proj", cfg.intermediate_size)
        x = x + layer.linear(layer.xielu(h, "mlp.act_fn"), "mlp.down_proj", cfg.hidden_size)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps), stem)
