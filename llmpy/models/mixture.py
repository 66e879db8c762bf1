"""Mixtures of experts with the tensor names that most families use."""

from collections.abc import Iterator, Sequence
from typing import Unpack

from ..errors import CheckpointError
from .block_mixture import Routing
from .blocks import Block, Value
from .config import ModelConfig

NAMES = ("gate_proj", "up_proj", "down_proj")


def experts(
    cfg: ModelConfig,
    layer: Block,
    x: Value,
    stem: str,
    n_experts: int,
    n_chosen: int,
    width: int,
    *,
    router: str = "gate",
    names: Sequence[str] = NAMES,
    act: str | None = None,
    **routing: Unpack[Routing],
) -> Value:
    """A mixture: STEM.gate is the router, STEM.experts.N.{gate,up,down}_proj are the experts.

    Args:
        cfg: The configuration.
        layer: The layer.
        x: Input, [rows, hidden_size].
        stem: Prefix of the tensor names, such as "mlp".
        n_experts: Number of experts.
        n_chosen: Number of experts per row.
        width: The inner width of an expert.
        router: Name of the router.
        names: Names of gate, up and down; two names: the experts have no gate.
        act: The activation; None: hidden_act.
        routing: Further arguments of `Block.route`.
    """
    routes = layer.route(x, f"{stem}.{router}", n_experts, n_chosen, **routing)
    *up, down = [f"{stem}.experts.#.{name}" for name in names]
    form, stacked = "gated" if len(up) == 2 else "plain", ""
    if shape := cfg.get("stacks_experts", False) and layer._model.shape_of(f"{layer.prefix}{stem}.experts.down_proj"):
        up, down = [f"{stem}.experts.gate_up_proj"], f"{stem}.experts.down_proj"
        stacked = "columns" if shape[1] == width else "rows"  # as released; as transformers saves it
    return layer.experts(x, routes, up, down, width, act=act or cfg.hidden_act, form=form, stacked=stacked)


def shared(cfg: ModelConfig, layer: Block, x: Value, stem: str, width: int, *, gate: str = "", bias: bool = False) -> Value:
    """The shared expert STEM.{gate,up,down}_proj; times sigmoid(GATE.weight x) if `gate` is set."""
    y = layer.gated_mlp(x, f"{stem}.gate_proj", f"{stem}.up_proj", f"{stem}.down_proj", width, act=cfg.hidden_act, bias=bias)
    return layer.gated(layer.linear(x, gate, 1), y, "sigmoid") if gate else y


def qwen_layers(cfg: ModelConfig) -> Iterator[bool]:
    """Whether each layer has a mixture, by mlp_only_layers and decoder_sparse_step."""
    dense, step = cfg.raw.get("mlp_only_layers") or [], cfg.size("decoder_sparse_step", 1)
    if not isinstance(dense, list):
        raise CheckpointError(f"{cfg.file}: mlp_only_layers: wanted a list of layers, have {dense!r}", file=cfg.file)
    return (i not in dense and (i + 1) % step == 0 for i in range(cfg.num_layers))


def deepseek3(cfg: ModelConfig, router: str) -> Routing:
    """The routing of DeepSeek-V3 and later families: sigmoid scores plus a selection bias, within the best groups."""
    return {
        "score": "sigmoid",
        "selection_bias": f"{router}.e_score_correction_bias",
        "groups": (cfg.size("n_group", 1), cfg.size("topk_group", 1)),
        "sums_two": True,
        "normalised": cfg.get("norm_topk_prob", True),
        "sum_eps": 1e-20,
        "scale": cfg.get("routed_scaling_factor", 1.0),
    }


def granite(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """block_sparse_moe of Granite: the experts' matrices are stacked, with gate's rows above up's."""
    n_experts, n_chosen = cfg.size("num_local_experts", 8), cfg.size("num_experts_per_tok", 2)
    routes = layer.route(x, "block_sparse_moe.router.layer", n_experts, n_chosen, score="chosen_softmax")
    up, down = "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
    return layer.experts(x, routes, [up], down, cfg.intermediate_size, act=cfg.hidden_act, stacked="rows")
