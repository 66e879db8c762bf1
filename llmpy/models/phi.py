"""Phi-1, Phi-1.5 and Phi-2."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "phi-1, phi-1_5, phi-2"


@architecture(
    *heads.names("Phi"),
    defaults={
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
    },
)
def phi(cfg: ModelConfig, m: Model) -> None:
    """Phi decoder: attention and a plain MLP read the same layer norm. All modules have biases, the head too. Rope rotates a
    part of each head; if `qk_layernorm`, each head has a norm before rope."""
    eps, has_norms = cfg.positive("layer_norm_eps", 1e-5), cfg.get("qk_layernorm", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.layer_norm(x, "input_layernorm", eps)
        q, k, v = usual.qkv(cfg, layer, h, bias=True)
        if has_norms:
            q = layer.layer_norm(q, "self_attn.q_layernorm", eps, per_head=True)
            k = layer.layer_norm(k, "self_attn.k_layernorm", eps, per_head=True)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v), "self_attn.dense", cfg.hidden_size, bias=True)
        x = x + layer.mlp(h, "mlp.fc1", "mlp.fc2", cfg.intermediate_size, act=cfg.hidden_act)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}final_layernorm", eps), stem, bias=True)
