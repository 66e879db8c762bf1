"""Nemotron-H."""

from .blocks import Block, Model, Value
from .config import ModelConfig
from .mamba2 import limits_of, mixer
from .registry import architecture

CHECKPOINTS = "Nemotron-H 4B, 8B, 47B and 56B, Nemotron Nano 2 9B and 12B, Nemotron 3 Nano 30B-A3B"
LIMITS = "layers that only predict further tokens are left out"
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
        "norm_topk_prob": True,
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
        elif KINDS.get(kind) == "moe":
            h = experts(cfg, layer, h)
        else:
            m.refuse("layers_block_type", layer.prefix, f"wanted one of {', '.join(KINDS)}, have {kind!r}")
        x = x + h
    m.logits(m.rms_norm(x, "backbone.norm_f", eps), "lm_head", tied_to="backbone.embeddings")


def attention(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Attention without positions."""
    widths = [n * cfg.head_dim for n in (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads)]
    q, k, v = layer.linear(x, ["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"], widths)
    return layer.linear(layer.attention(q, k, v), "mixer.o_proj", cfg.hidden_size)


def experts(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Plain experts, which may work on rows of another width, plus a shared expert; DeepSeek-V3's routing."""
    act, bias, latent = cfg.need("mlp_hidden_act", str), cfg.get("mlp_bias", False), cfg.get("moe_latent_size", 0)
    routes = layer.route(
        x, "mixer.gate", cfg.size("n_routed_experts", 8), cfg.size("num_experts_per_tok", 2), score="sigmoid",
        selection_bias="mixer.gate.e_score_correction_bias", groups=(cfg.size("n_group", 1), cfg.size("topk_group", 1)),
        sums_two=True, normalised=cfg.get("norm_topk_prob", True), sum_eps=1e-20, scale=cfg.get("routed_scaling_factor", 1.0),
    )  # fmt: skip
    names, width = ("mixer.experts.#.up_proj", "mixer.experts.#.down_proj"), cfg.size("moe_intermediate_size", 7688)
    h = layer.linear(x, "mixer.fc1_latent_proj", latent, bias=bias) if latent else x
    h = layer.experts(h, routes, names[:1], names[1], width, act=act, form="plain")
    h = layer.linear(h, "mixer.fc2_latent_proj", cfg.hidden_size, bias=bias) if latent else h
    width = cfg.size("moe_shared_expert_intermediate_size", 7688)
    return h + layer.mlp(x, "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", width, act=act, bias=bias)
