"""Mamba and Falcon-Mamba."""

from collections.abc import Callable

from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Mamba 130M to 2.8B, Falcon-Mamba 7B"
DEFAULTS = {
    "num_attention_heads": 1,  # there is no attention
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 1048576,  # the model has no limit; the engine's tables need one
}


def mixer(
    layer: Block,
    x: Value,
    name: str,
    *,
    width: int,
    state: int,
    rank: int,
    taps: int,
    act: str,
    bias: bool = False,
    conv_bias: bool = True,
    norm: Callable[[Value, str], Value] = lambda value, name: value,
) -> Value:
    """The mixer of Mamba, and of Jamba.

    Args:
        layer: The block of the mixer's tensors.
        x: Input, [rows, n].
        name: Module name; the tensors have transformers' names in that module.
        width: Channels of the recurrence.
        state: Size of a channel's state.
        rank: Width of dt before its projection.
        taps: Taps of the convolution.
        act: Activation of the convolution and of the gate.
        bias: Whether the projections in and out have a bias.
        conv_bias: Whether the convolution has a bias.
        norm: Writes a norm for a value by its name, "dt", "b" or "c"; default: no norm.
    """
    u, gate = layer.linear(x, f"{name}.in_proj", [width, width], bias=bias)
    u = layer.conv(u, f"{name}.conv1d", taps, act=act, bias=conv_bias)
    dt, b, c = layer.linear(u, f"{name}.x_proj", [rank, state, state])
    dt = layer.linear(norm(dt, "dt"), f"{name}.dt_proj", width)
    y = layer.selective_scan(u, dt, norm(b, "b"), norm(c, "c"), name, dt_bias="dt_proj.bias")
    return layer.linear(layer.gated(gate, y, act), f"{name}.out_proj", x.width, bias=bias)


def rank_of(cfg: ModelConfig, field: str) -> int:
    """A rank that may be "auto"."""
    return -(-cfg.hidden_size // 16) if cfg.raw.get(field, "auto") == "auto" else cfg.need(field, int)


@architecture("MambaForCausalLM", defaults=DEFAULTS)
def mamba(cfg: ModelConfig, m: Model) -> None:
    """Mamba: one mixer per layer; dt, B and C are functions of the row."""
    write(cfg, m, lambda value, name: value)


@architecture("FalconMambaForCausalLM", defaults={**DEFAULTS, "mixer_rms_eps": 1e-6})
def falcon_mamba(cfg: ModelConfig, m: Model) -> None:
    """Falcon-Mamba: Mamba with weightless norms on dt, B and C."""
    write(cfg, m, lambda value, name: m.rms_norm(value, None, cfg.need("mixer_rms_eps", float)))


def write(cfg: ModelConfig, m: Model, norm: Callable[[Value, str], Value]) -> None:
    """Writes the program of Mamba and Falcon-Mamba."""
    eps = cfg.need("layer_norm_epsilon", float)
    x = m.embed("backbone.embeddings")
    for layer in m.layers("backbone.layers", cfg.num_layers):
        x = x + mixer(
            layer, layer.rms_norm(x, "norm", eps), "mixer",
            width=cfg.size("intermediate_size", cfg.need("expand", int) * cfg.hidden_size),
            state=cfg.need("state_size", int), rank=rank_of(cfg, "time_step_rank"),
            taps=cfg.need("conv_kernel", int), act=cfg.hidden_act, bias=cfg.get("use_bias", False),
            conv_bias=cfg.get("use_conv_bias", True), norm=norm,
        )  # fmt: skip
    m.logits(m.rms_norm(x, "backbone.norm_f", eps), "lm_head", tied_to="backbone.embeddings")
