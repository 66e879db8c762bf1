"""Llama 4, text."""

from dataclasses import replace

from ..errors import CheckpointError
from . import heads, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "the language models of Llama 4 Scout and Maverick, saved alone"
LIMITS = "text alone"


@architecture(
    *heads.names("Llama4"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "num_local_experts": 16,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
    },
)
def llama4(cfg: ModelConfig, m: Model) -> None:
    """Llama 4 decoder: three of four layers have interleaved rope and attend within chunks.

    The other layers attend to all positions without rope, and their queries grow with the position. A mixture's weights
    multiply its experts' inputs; there is also a shared expert.
    """
    bias, chunk = cfg.get("attention_bias", False), cfg.get("attention_chunk_size", 8192)
    every, slope = cfg.size("floor_scale", 8192), cfg.positive("attn_scale", 0.1)
    grows = cfg.raw.get("attn_temperature_tuning") not in (False, 0) and cfg.served_length >= every
    rope, has_norm = replace(cfg.rope, interleaved=True), cfg.get("use_qk_norm", True)
    step, stem = cfg.size("interleave_moe_layer_step", 1), m.stem("model.", "embed_tokens")
    sparse = cfg.raw.get("moe_layers")
    if sparse is not None and not isinstance(sparse, list):
        raise CheckpointError(f"{cfg.file}: moe_layers: wanted a list of layers, have {sparse!r}", file=cfg.file)
    interval = cfg.size("no_rope_layer_interval", 4)
    turned = cfg.layer_flags("no_rope_layers", lambda i: (i + 1) % interval > 0)
    x = m.embed(f"{stem}embed_tokens")
    for i, (layer, is_turned) in enumerate(zip(m.layers(f"{stem}layers", cfg.num_layers), turned, strict=True)):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
        if is_turned:
            q, k = layer.rope(q, k, rope)
            if has_norm:
                q, k = (layer.rms_norm(part, None, cfg.rms_norm_eps, per_head=True) for part in (q, k))
        elif grows:
            q = layer.scale_by_position(q, every, slope, first=1)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, chunk=chunk if is_turned else 0), bias=bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        is_mixture = i in sparse if sparse is not None else (i + 1) % step == 0
        x = x + (mix(cfg, m, layer, h) if is_mixture else mlp(cfg, layer, h, "feed_forward", "intermediate_size_mlp"))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)


def mlp(cfg: ModelConfig, layer: Block, x: Value, stem: str, width: str) -> Value:
    """A gated MLP; `width` names the field of its inner width."""
    names = [f"{stem}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    return layer.gated_mlp(x, names[0], names[1], names[2], cfg.size(width, 1), act=cfg.hidden_act)


def mix(cfg: ModelConfig, m: Model, layer: Block, x: Value) -> Value:
    """The mixture plus the shared expert."""
    n_experts, n_chosen = cfg.size("num_local_experts", 16), cfg.size("num_experts_per_tok", 1)
    routes = layer.route(x, "feed_forward.router", n_experts, n_chosen, score="chosen_sigmoid")
    up, down, stacked = ["feed_forward.experts.gate_up_proj"], "feed_forward.experts.down_proj", "columns"
    if m.shape_of(f"{layer.prefix}feed_forward.experts.0.down_proj.weight"):  # quantised files have experts one by one
        up = [f"feed_forward.experts.#.{name}_proj" for name in ("gate", "up")]
        down, stacked = "feed_forward.experts.#.down_proj", ""
    y = layer.experts(
        x, routes, up, down, cfg.intermediate_size, act=cfg.hidden_act, stacked=stacked, input_scaled=True,
    )  # fmt: skip
    return y + mlp(cfg, layer, x, "feed_forward.shared_expert", "intermediate_size")
