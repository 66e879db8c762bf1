"""Nemotron-H."""

from .blocks import Block, Model, Value
from .config import ModelConfig
from .mamba2 import limits_of, mixer
from .registry import architecture

CHECKPOINTS = "Nemotron-H 4B, 8B, 47B and 56B, Nemotron Nano 2 9B and 12B"
KINDS = {
    "M": "mamba", "mamba": "mamba", "linear_attention": "mamba", "*": "attention", "attention": "attention",
    "full_attention": "attention", "-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe",
}  # fmt: skip


@architecture(
    "NemotronHForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
    },
    ignore=["mtp.*"],
)
def nemotron_h(cfg: ModelConfig, m: Model) -> None:
    """Nemotron-H decoder: a layer is one of Mamba-2's mixer, attention without positions, an MLP, or a mixture."""
    eps = cfg.need("layer_norm_epsilon", float)
    kinds = cfg.raw.get("layers_block_type") or cfg.raw.get("layer_types") or cfg.raw.get("hybrid_override_pattern") or ""
    x = m.embed("backbone.embeddings")
    for layer, kind in zip(m.layers("backbone.layers", len(kinds)), kinds, strict=True):  # type: ignore[arg-type, call-overload]
        h = layer.rms_norm(x, "norm", eps)
        if KINDS.get(kind) == "mamba":
            h = mixer(
                layer, h, "mixer", heads=cfg.size("mamba_num_heads", 1), head_size=cfg.size("mamba_head_dim", 1),
                groups=cfg.size("n_groups", 1), state=cfg.size("ssm_state_size", 1), taps=cfg.size("conv_kernel", 1),
                act=cfg.need("mamba_hidden_act", str), eps=eps, bias=cfg.get("use_bias", False),
                conv_bias=cfg.get("use_conv_bias", True), limits=limits_of(cfg),
            )  # fmt: skip
        elif KINDS.get(kind) == "attention":
            h = attention(cfg, layer, h)
        elif KINDS.get(kind) == "mlp":
            act, bias = cfg.need("mlp_hidden_act", str), cfg.get("mlp_bias", False)
            h = layer.mlp(h, "mixer.up_proj", "mixer.down_proj", cfg.intermediate_size, act=act, bias=bias)
        else:
            m.refuse("layers_block_type", layer.prefix, f"wanted one of {', '.join(KINDS)}, have {kind!r}")
        x = x + h
    m.logits(m.rms_norm(x, "backbone.norm_f", eps), "lm_head", tied_to="backbone.embeddings")


def attention(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Attention without positions."""
    widths = [n * cfg.head_dim for n in (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads)]
    q, k, v = layer.linear(x, ["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"], widths)
    return layer.linear(layer.attention(q, k, v), "mixer.o_proj", cfg.hidden_size)
