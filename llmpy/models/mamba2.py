"""Mamba-2, and its mixer, which most hybrid models use."""

from math import inf

from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Mamba-2 130M to 2.7B, Codestral Mamba 7B"


def mixer(
    layer: Block,
    x: Value,
    name: str,
    *,
    heads: int,
    head_size: int,
    groups: int,
    state: int,
    taps: int,
    act: str,
    eps: float,
    bias: bool = False,
    conv_bias: bool = True,
    limits: tuple[float, float] = (0.0, inf),
) -> Value:
    """The mixer of Mamba-2: one matrix computes the gate, the convolution's input (x, b, c) and dt; a norm follows the gate.

    Args:
        layer: The block of the mixer's tensors.
        x: Input, [rows, n].
        name: Module name; the tensors have transformers' names in that module.
        heads: Heads of the recurrence, of head_size channels each.
        head_size: Channels of a head; they share a decay.
        groups: Number of groups of adjacent heads; the heads of a group share b and c. The norm works on each group alone.
        state: Size of a channel's state.
        taps: Taps of the convolution.
        act: Activation of the convolution and of the gate.
        eps: Epsilon of the norm.
        bias: Whether the projections in and out have a bias.
        conv_bias: Whether the convolution has a bias.
        limits: Lower and upper limit of the step.
    """
    width, shared = heads * head_size, groups * state
    gate, u, dt = layer.linear(x, f"{name}.in_proj", [width, width + 2 * shared, heads], bias=bias)
    u, b, c = layer.split(layer.conv(u, f"{name}.conv1d", taps, act=act, bias=conv_bias), [width, shared, shared])
    y = layer.gated(gate, layer.ssm(u, dt, b, c, name, groups=groups, limits=limits), act)
    y = layer.rms_norm(y, f"{name}.norm", eps, per_head=width // groups, own_weights=True)
    return layer.linear(y, f"{name}.out_proj", x.width, bias=bias)


def hybrid_mixer(cfg: ModelConfig, layer: Block, x: Value, name: str) -> Value:
    """The mixer with Bamba's configuration fields: mamba_n_heads, mamba_d_state, ..."""
    heads, size = cfg.size("mamba_n_heads", 128), cfg.raw.get("mamba_d_head", "auto")
    return mixer(
        layer, x, name, heads=heads, groups=cfg.size("mamba_n_groups", 1), state=cfg.size("mamba_d_state", 256),
        head_size=cfg.size("mamba_expand", 2) * cfg.hidden_size // heads if size == "auto" else cfg.size("mamba_d_head", 1),
        taps=cfg.size("mamba_d_conv", 4), act=cfg.hidden_act, eps=cfg.rms_norm_eps, bias=cfg.get("mamba_proj_bias", False),
        conv_bias=cfg.get("mamba_conv_bias", True), limits=limits_of(cfg),
    )  # fmt: skip


def limits_of(cfg: ModelConfig, field: str = "time_step_limit") -> tuple[float, float]:
    """A pair of limits on the step; transformers writes infinity as {"__float__": "Infinity"}."""
    given = cfg.raw.get(field) or (0.0, inf)
    low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in given)  # type: ignore[attr-defined]
    return low, high


@architecture(
    "Mamba2ForCausalLM",
    defaults={
        "num_attention_heads": 1,  # there is no attention
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,  # the model has no limit; the engine's tables need one
    },
)
def mamba2(cfg: ModelConfig, m: Model) -> None:
    """Mamba-2: one mixer per layer; the state of a head has one decay."""
    eps = cfg.need("layer_norm_epsilon", float)
    x = m.embed("backbone.embeddings")
    for layer in m.layers("backbone.layers", cfg.num_layers):
        x = x + mixer(
            layer, layer.rms_norm(x, "norm", eps), "mixer", heads=cfg.size("num_heads", 1), head_size=cfg.size("head_dim", 1),
            groups=cfg.size("n_groups", 1), state=cfg.size("state_size", 1), taps=cfg.size("conv_kernel", 1),
            act=cfg.hidden_act, eps=eps, bias=cfg.get("use_bias", False), conv_bias=cfg.get("use_conv_bias", True),
            limits=limits_of(cfg),
        )  # fmt: skip
    m.logits(m.rms_norm(x, "backbone.norm_f", eps), "lm_head", tied_to="backbone.embeddings")
