"""Rules of mixtures of experts: the router is recognised by its choices for random logits, not by the form of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from ..models.block_mixture import ROUTE_SCORES
from ..models.blocks import ACTIVATIONS
from ..models.interpret import _expert_act, _route
from ..models.pieces import Piece
from ..models.program import Operands, Value
from .columns import Columns, Parameter, columns_of
from .leaves import name_of_act
from .refusal import refuse
from .walk import LINEARS, Walk, name_of, needed, rule, told

SAMPLES = 64  # rows of random logits
TOLERANCE = 1e-5


class Router(NamedTuple):
    """The logits of a router.

    Attributes:
        x: Its input.
        weight, bias: Its matrix [experts, columns] and bias.
        node: Its linear.
    """

    x: Value
    weight: Parameter
    bias: Parameter | None
    node: Any


def router(walk: Walk, node: Any, x: object, weight: object, bias: object) -> Router:
    """The linear before a choice of experts."""
    if not isinstance(weight, Parameter) or not isinstance(bias, Parameter | None) or weight.is_transposed:
        refuse(node, f"a router with {told(weight)}, {told(bias)}")
    return Router(walk.value(node, x), weight, bias, node)


@rule("llmpy.experts")
def _experts(walk: Walk, node: Any, x: object, index: object, weights: object, path: str) -> Columns:
    (linear,) = [each for each, own in walk.routers.items() if own == path]
    found = walk.values[linear]
    assert isinstance(found, Router)
    chosen = node.args[1].meta["val"].shape[-1]
    given = _routing(walk, node, found, int(chosen), path)
    return _apply(walk, node, x, _write_route(walk, node, found, *given), int(chosen), path)


# ---- the choice ------------------------------------------------------------------------------------------------------------


def _routing(walk: Walk, node: Any, found: Router, n_chosen: int, path: str) -> tuple[dict[str, Any], Parameter | None]:
    """The attributes of `route`, and the selection bias, that give the traced experts and weights for random logits."""
    n_experts = found.weight.shape[0]
    biases = _selection_biases(walk, path, n_experts, found.bias)
    random = np.random.default_rng(0)
    logits = (3 * random.standard_normal((SAMPLES, n_experts))).astype(np.float32)
    values = {name: random.standard_normal(bias.shape).astype(np.float32) for name, bias in biases.items()}
    wanted = _evaluated(walk, node, found.node, logits, values)
    for attributes, bias in _candidates(walk, biases, n_chosen, _scores(node)):
        own = None if bias is None else values[bias.name].ravel().astype(np.float64)
        operands: Operands = {"in": [], "out": [], "weights": [], "attributes": attributes}
        routes = _route(logits.astype(np.float64), own, operands)[:, : 2 * n_chosen].reshape(SAMPLES, n_chosen, 2)
        if _same_routes((routes[..., 0], routes[..., 1]), wanted):
            return attributes, bias
    refuse(node, f"a choice of {n_chosen} of {n_experts} experts that `route` does not have")


def _selection_biases(walk: Walk, path: str, n_experts: int, bias: Parameter | None) -> dict[str, Parameter]:
    """The vectors of one number for each expert near the experts."""
    stem = path.rpartition(".")[0]
    near = {name: each for name, each in walk.parameters.items() if name.startswith(stem) and each.size == n_experts}
    return {name: each for name, each in near.items() if bias is None or name != bias.name}


def _evaluated(
    walk: Walk, node: Any, start: Any, logits: Any, values: dict[str, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The experts and the weights that the traced nodes compute from a router's logits."""
    known: dict[Any, Any] = {start: torch.from_numpy(logits)}

    def get(each: Any) -> Any:
        if each not in known:
            if each.op == "placeholder":
                found = walk.values[each]
                known[each] = torch.from_numpy(values[found.name]) if isinstance(found, Parameter) else found
            elif isinstance(walk.values.get(each), torch.Tensor):
                known[each] = walk.values[each]
            elif name_of(each.target) == "sym_size":
                known[each] = SAMPLES
            elif name_of(each.target) == "type_as":
                known[each] = get(each.args[0])
            else:
                args = torch.fx.node.map_arg(each.args, get)
                known[each] = each.target(*args, **torch.fx.node.map_arg(each.kwargs, get))
        return known[each]

    try:
        with torch.no_grad():
            index, weights = (get(each).double().numpy().reshape(SAMPLES, -1) for each in node.args[1:3])
    except (KeyError, RuntimeError, AttributeError, TypeError) as error:
        refuse(node, f"a choice of experts that depends on more than the router's logits: {type(error).__name__}: {error}")
    return index, weights


def _scores(node: Any) -> list[str]:
    """ROUTE_SCORES, first those that score before the choice if the trace does so, else those that score the chosen ones: the
    weights may be equal, but their last bits are not."""
    choices = [each for each in needed(node.args[1:3], LINEARS) if name_of(each.target) == "topk"]
    before = {name_of(each.target) for each in needed(choices, LINEARS)}
    return sorted(ROUTE_SCORES, key=lambda score: score.startswith("chosen") == bool(before & {"softmax", "sigmoid"}))


def _candidates(
    walk: Walk, biases: dict[str, Parameter], n_chosen: int, scores: list[str]
) -> Iterator[tuple[dict[str, Any], Parameter | None]]:
    """The ways to choose that `route` has, with numbers of the configuration."""
    config = walk.model.config.get_text_config()

    def numbers(*names: str) -> list[float]:
        found = [getattr(config, name, None) for name in names]
        return [1.0, *(float(one) for one in found if isinstance(one, int | float) and not isinstance(one, bool) and one != 1)]

    groups = {(1, 1), (getattr(config, "n_group", 1) or 1, getattr(config, "topk_group", 1) or 1)}
    scales = numbers("routed_scaling_factor", "router_scaling_factor", "route_scale", "moe_routed_scaling_factor")
    choices = product([None, *biases.values()], scores, (1, 0), sorted(groups), (0, 1), scales, (0.0, 1e-20))
    for bias, score, is_normalised, (n_groups, chosen_groups), sums_two, scale, eps in choices:
        is_one = score == "chosen_softmax" and is_normalised  # the sum is 1 already
        if is_one or (n_groups == 1 and sums_two) or (not is_normalised and eps):
            continue
        yield {
            "n_chosen": n_chosen, "score": score, "n_groups": n_groups, "chosen_groups": chosen_groups, "sums_two": sums_two,
            "is_normalised": is_normalised, "sum_eps": eps, "scale": scale,
        }, bias  # fmt: skip


def _same_routes(mine: tuple[Any, Any], wanted: tuple[Any, Any]) -> bool:
    """Whether two choices have the same experts with the same weights, in any order."""
    pairs = []
    for experts, weights in (mine, wanted):
        order = np.argsort(experts, -1)
        pairs.append([np.take_along_axis(each, order, -1) for each in (experts, weights)])
    (experts, weights), (wanted_experts, wanted_weights) = pairs
    return np.array_equal(experts, wanted_experts) and bool(np.allclose(weights, wanted_weights, rtol=0, atol=TOLERANCE))


def _write_route(walk: Walk, node: Any, found: Router, attributes: dict[str, Any], bias: Parameter | None) -> Value:
    n_experts, width = found.weight.shape
    pieces = walk.names.matrix(found.weight, np.arange(n_experts))
    if pieces is None:
        refuse(node, f"the rows of {found.weight.name} in another order")
    weights = [walk.m.matrix("route", pieces, width)]
    weights += [-1 if each is None else walk.vector(node, "route", each) for each in (found.bias, bias)]
    return walk.m.emit("route", [found.x], 4 * attributes["n_chosen"], weights=weights, scratch=2 * n_experts, **attributes)


# ---- the experts -----------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How an expert combines the products of its first matrix: attributes of `experts`, and the order of the rows."""

    form: str
    act: str
    limit: float
    is_interleaved: bool


def _form(node: Any, module: Any, width: int) -> Form:
    """The form that gives the module's values for random products."""
    if not getattr(module, "has_gate", True):
        act = name_of_act(module.act_fn)
        if act is None:
            refuse(node, f"the activation {type(module.act_fn).__name__} of experts")
        return Form("plain", act, 0.0, False)
    products = 3 * torch.randn(SAMPLES, 2 * width, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = _gate(module, products).double().numpy()
    rows = products.double().numpy()
    limit = float(getattr(module, "limit", 0.0) or 0.0)
    for name, act, is_interleaved in product(("gated", "clamped"), _acts(module), (False, True)):
        order = np.arange(2 * width)
        order = np.concatenate([order[0::2], order[1::2]]) if is_interleaved else order
        given = {"form": name, "act": act, "limit": limit}
        operands: Operands = {"in": [], "out": [], "weights": [], "attributes": given}
        mine = np.stack([_expert_act(row[order], operands) for row in rows])
        if np.allclose(mine, wanted, rtol=0, atol=TOLERANCE):
            return Form(name, act, limit if name == "clamped" else 0.0, is_interleaved)
    refuse(node, "experts whose gate is neither gated nor clamped")


def _gate(module: Any, products: Any) -> Any:
    """The module's function of the products, with its activation as it was before the trace."""
    act = getattr(module, "act_fn", None)
    changed = vars(act).pop("forward", None) if act is not None else None
    try:
        return module._apply_gate(products)
    finally:
        if changed is not None:
            act.forward = changed  # type: ignore[union-attr]


def _acts(module: Any) -> list[str]:
    name = name_of_act(getattr(module, "act_fn", None))
    return ["silu"] if name is None else [ACTIVATIONS[name], "silu"]


def _apply(walk: Walk, node: Any, x: object, routes: Value, n_chosen: int, path: str) -> Columns:
    module = walk.model.get_submodule(path)
    is_transposed, has_bias = (bool(getattr(module, name, False)) for name in ("is_transposed", "has_bias"))
    if getattr(module, "has_post_expert_norm", False):
        refuse(node, "a norm behind each expert")
    has_gate = getattr(module, "has_gate", True)
    stem = "gate_up_proj" if has_gate else "up_proj"
    if f"{path}.{stem}" not in walk.all_parameters or f"{path}.down_proj" not in walk.all_parameters:
        refuse(node, f"experts without the tensors {stem} and down_proj")
    up, down = (walk.all_parameters[f"{path}.{name}"] for name in (stem, "down_proj"))
    n_experts, value = up.shape[0], walk.value(node, x)
    width = down.shape[1] if is_transposed else down.shape[2]
    form = _form(node, module, width)
    rows = _expert_rows(n_experts, width, form)
    downs = np.arange(n_experts * value.width).reshape(n_experts, 1, -1)
    weights = [
        walk.m.matrix("experts", _stacked(walk, node, up, rows, is_transposed), value.width),
        walk.m.matrix("experts", _stacked(walk, node, down, downs, is_transposed), width),
    ]
    if has_bias:
        for name, elements in ((f"{stem}_bias", rows), ("down_proj_bias", downs)):
            bias = walk.all_parameters[f"{path}.{name}"]
            parts = [walk.names.vector(bias, one) for each in elements for one in each]
            weights.append(walk.m.vector("experts", [piece for part in parts for piece in part]))
    scratch = n_chosen * 4 * max(width, value.width) + 2 * n_experts + 16
    made = walk.m.emit(
        "experts",
        [value, routes],
        value.width,
        weights=weights,
        scratch=scratch,
        n_experts=n_experts,
        n_chosen=n_chosen,
        form=form.form,
        act=ACTIVATIONS.get(form.act, form.act),
        is_input_scaled=False,
        limit=form.limit,
    )
    return columns_of(made.index, walk.shape(node))


def _expert_rows(n_experts: int, width: int, form: Form) -> Any:
    """Rows of the first matrices, [experts, parts, rows]: gate's rows before up's."""
    if form.form == "plain":
        return np.arange(n_experts * width).reshape(n_experts, 1, width)
    rows = np.arange(n_experts * 2 * width).reshape(n_experts, 2 * width)
    if form.is_interleaved:
        return np.stack([rows[:, 0::2], rows[:, 1::2]], 1)
    return rows.reshape(n_experts, 1, 2 * width)


def _stacked(walk: Walk, node: Any, tensor: Parameter, rows: Any, is_transposed: bool) -> list[Piece]:
    """The pieces of all experts, in their order."""
    own = Parameter(tensor.name, tensor.shape, is_transposed=is_transposed)
    parts = [walk.names.matrix(own, one) for each in rows for one in each]
    if any(part is None for part in parts):
        refuse(node, f"{tensor.name}: rows in an order that no pieces have")
    return [piece for part in parts for piece in part or ()]
