"""Bamba."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .mamba2 import hybrid_mixer
from .registry import architecture

CHECKPOINTS = "Bamba 9B"


@architecture(
    "BambaForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.5,
    },
)
def bamba(cfg: ModelConfig, m: Model) -> None:
    """Bamba decoder: Llama with Mamba-2's mixer in all layers but a few."""
    bias, mlp_bias = cfg.get("attention_bias", False), cfg.get("mlp_bias", False)
    eps, inner = cfg.rms_norm_eps, cfg.intermediate_size
    attending = cfg.raw.get("attn_layer_indices") or []
    x = m.embed("model.embed_tokens")
    for i, layer in enumerate(m.layers("model.layers", cfg.num_layers)):
        h = layer.rms_norm(x, "input_layernorm", eps)
        if i in attending:  # type: ignore[operator]
            q, k, v = usual.qkv(cfg, layer, h, bias=bias)
            q, k = layer.rope(q, k, cfg.rope)
            x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        else:
            x = x + hybrid_mixer(cfg, layer, h, "mamba")
        h = layer.rms_norm(x, "pre_ff_layernorm", eps)
        names = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
        x = x + layer.gated_mlp(h, *names, inner, act=cfg.hidden_act, bias=mlp_bias)
    heads.head(cfg, m, m.rms_norm(x, "model.final_layernorm", eps), "model.")
