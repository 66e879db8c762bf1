"""Jamba."""

from collections.abc import Callable

from . import heads, mamba, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Jamba v0.1, Jamba 1.5 and 1.6 Mini and Large, Jamba Reasoning 3B"


@architecture(
    "JambaForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
)
def jamba(cfg: ModelConfig, m: Model) -> None:
    """Jamba decoder: Mamba's mixer with norms or attention without positions, then an MLP or a mixture of experts."""
    eps, n_experts = cfg.rms_norm_eps, cfg.size("num_experts", 16)
    period, first = cfg.size("attn_layer_period", 8), cfg.get("attn_layer_offset", 4)
    x = m.embed("model.embed_tokens")
    for i, layer in enumerate(m.layers("model.layers", cfg.num_layers)):
        h = layer.rms_norm(x, "input_layernorm", eps)
        if i % period == first:
            x = x + usual.out(cfg, layer, layer.attention(*usual.qkv(cfg, layer, h)))
        else:
            x = x + mamba.mixer(
                layer, h, "mamba", width=cfg.size("mamba_expand", 2) * cfg.hidden_size, state=cfg.size("mamba_d_state", 16),
                rank=mamba.rank_of(cfg, "mamba_dt_rank"), taps=cfg.size("mamba_d_conv", 4), act=cfg.hidden_act,
                bias=cfg.get("mamba_proj_bias", False), conv_bias=cfg.get("mamba_conv_bias", True),
                norm=norms(layer, eps),
            )  # fmt: skip
        h, inner = layer.rms_norm(x, "pre_ff_layernorm", eps), cfg.intermediate_size
        if n_experts > 1 and i % cfg.size("expert_layer_period", 2) == cfg.get("expert_layer_offset", 1):
            n_chosen = cfg.size("num_experts_per_tok", 2)
            x = x + mixture.experts(cfg, layer, h, "feed_forward", n_experts, n_chosen, inner, router="router", score="softmax")
        else:
            x = x + mixture.shared(cfg, layer, h, "feed_forward", inner)
    heads.head(cfg, m, m.rms_norm(x, "model.final_layernorm", eps), "model.")


def norms(layer: Block, eps: float) -> Callable[[Value, str], Value]:
    """A function that writes the norms on dt, B and C of the mixer."""
    return lambda value, name: layer.rms_norm(value, f"mamba.{name}_layernorm", eps)
