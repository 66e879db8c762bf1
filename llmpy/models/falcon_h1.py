"""Falcon-H1."""

from collections.abc import Sequence

from . import usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .mamba2 import limits_of
from .registry import architecture

CHECKPOINTS = "Falcon-H1 0.5B, 1.5B, 3B, 7B and 34B"


@architecture(
    "FalconH1ForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
)
def falcon_h1(cfg: ModelConfig, m: Model) -> None:
    """Falcon-H1 decoder: attention and Mamba-2's mixer in parallel in every layer, with a factor on every branch."""
    bias, mlp_bias = cfg.get("attention_bias", False), cfg.get("mlp_bias", False)
    eps, inner = cfg.rms_norm_eps, cfg.intermediate_size
    enter, leave = cfg.get("attention_in_multiplier", 1.0), cfg.get("attention_out_multiplier", 1.0)
    before, behind = cfg.get("ssm_in_multiplier", 1.0), cfg.get("ssm_out_multiplier", 1.0)
    scores = cfg.head_dim**-0.5 * cfg.get("key_multiplier", 1.0)
    on_gate, on_mlp = factors(cfg, "mlp_multipliers", 2)
    x = m.embed("model.embed_tokens", scale=cfg.get("embedding_multiplier", 1.0))
    for layer in m.layers("model.layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", eps)
        q, k, v = usual.qkv(cfg, layer, layer.scale(h, [enter]), bias=bias)
        q, k = layer.rope(q, k, cfg.rope)
        y = usual.out(cfg, layer, layer.attention(q, k, v, scale=scores), bias=bias)
        x = x + layer.scale(mixer(cfg, layer, layer.scale(h, [before])), [behind]) + layer.scale(y, [leave])
        h = layer.rms_norm(x, "pre_ff_layernorm", eps)
        names = ["feed_forward.gate_proj", "feed_forward.up_proj"]
        gate, up = layer.linear(h, names, [inner, inner], bias=mlp_bias)
        h = layer.gated(layer.scale(gate, [on_gate]), up, cfg.hidden_act)
        x = x + layer.scale(layer.linear(h, "feed_forward.down_proj", cfg.hidden_size, bias=mlp_bias), [on_mlp])
    x = m.rms_norm(x, "model.final_layernorm", eps)
    m.logits(x, "lm_head", tied_to="model.embed_tokens", scale=cfg.get("lm_head_multiplier", 1.0))


def factors(cfg: ModelConfig, name: str, n: int) -> Sequence[float]:
    """A list of n factors; 1 for each if the field is absent."""
    given = cfg.raw.get(name)
    return [float(x) for x in given] if isinstance(given, list) and len(given) == n else [1.0] * n


def mixer(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Mamba-2's mixer with a factor on each of its inputs; its norm may be missing, or come before the gate."""
    heads, width = cfg.size("mamba_n_heads", 128), cfg.size("mamba_d_ssm", cfg.size("mamba_expand", 2) * cfg.hidden_size)
    groups, taps, bias = cfg.size("mamba_n_groups", 1), cfg.size("mamba_d_conv", 4), cfg.get("mamba_proj_bias", False)
    shared, act, conv_bias = groups * cfg.size("mamba_d_state", 256), cfg.hidden_act, cfg.get("mamba_conv_bias", True)
    widths = [width, width, shared, shared, heads]
    h = layer.linear(x, "mamba.in_proj", sum(widths), bias=bias)
    each = zip(factors(cfg, "ssm_multipliers", 5), widths, strict=True)
    h = layer.scale(h, [factor for factor, n in each for _ in range(n)])
    gate, u, dt = layer.split(h, [width, width + 2 * shared, heads])
    u = layer.conv(u, "mamba.conv1d", taps, act=act, bias=conv_bias)
    u, b, c = layer.split(u, [width, shared, shared])
    y = layer.ssm(u, dt, b, c, "mamba", groups=groups, limits=limits_of(cfg))
    is_normed, is_first = cfg.get("mamba_rms_norm", False), cfg.get("mamba_norm_before_gate", True)
    if is_normed and is_first:
        y = layer.rms_norm(y, "mamba.norm", cfg.rms_norm_eps, per_head=width // groups, own_weights=True)
    y = layer.gated(gate, y, act)
    if is_normed and not is_first:
        y = layer.rms_norm(y, "mamba.norm", cfg.rms_norm_eps, per_head=width // groups, own_weights=True)
    return layer.linear(y, "mamba.out_proj", cfg.hidden_size, bias=cfg.get("projectors_bias", False))
