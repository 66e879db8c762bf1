"""Mixtures of experts under the names that most families have for them."""

from collections.abc import Sequence
from typing import Unpack

from .blocks import Block, Routing, Value
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
    """STEM.gate chooses, STEM.experts.N.{gate,up,down}_proj compute.

    Args:
        cfg: The configuration.
        layer: The layer.
        x: Input, [rows, hidden_size].
        stem: What the names begin with, as "mlp".
        n_experts: How many there are.
        n_chosen: How many a row goes to.
        width: The width of an expert.
        router: The router's name.
        names: Of gate, up and down; two: the experts are plain.
        act: The activation; None: hidden_act.
        routing: What else `Block.route` takes.
    """
    routes = layer.route(x, f"{stem}.{router}", n_experts, n_chosen, **routing)
    *up, down = [f"{stem}.experts.#.{name}" for name in names]
    form = "gated" if len(up) == 2 else "plain"
    return layer.experts(x, routes, up, down, width, act=act or cfg.hidden_act, form=form)


def shared(cfg: ModelConfig, layer: Block, x: Value, stem: str, width: int, *, gate: str = "") -> Value:
    """STEM.{gate,up,down}_proj, which every row goes through; times sigmoid(GATE.weight x) where a gate has a name."""
    y = layer.gated_mlp(x, f"{stem}.gate_proj", f"{stem}.up_proj", f"{stem}.down_proj", width, act=cfg.hidden_act)
    return layer.gated(layer.linear(x, gate, 1), y, "sigmoid") if gate else y
