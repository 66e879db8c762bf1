"""Operations of a block for mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Required, TypedDict

from .pieces import Piece, whole

if TYPE_CHECKING:
    from .blocks import Model, Value

ROUTE_SCORES = ("softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid")
EXPERT_FORMS = ("gated", "clamped", "plain")


class Routing(TypedDict, total=False):
    """Keyword arguments of `Block.route`."""

    score: Required[str]
    bias: bool
    selection_bias: str
    selection_shape: tuple[int, ...]
    groups: tuple[int, int]
    sums_two: bool
    normalised: bool
    sum_eps: float
    scale: float


class Routes:
    """The chosen experts of each row and their weights: result of `Block.route`, argument of `Block.experts`."""

    def __init__(self, value: Value, n_experts: int, n_chosen: int) -> None:
        self.value, self.n_experts, self.n_chosen = value, n_experts, n_chosen


class MixtureBlock:
    """Base class of `Block` with the operations of mixtures of experts."""

    _model: Model
    prefix: str

    def route(
        self,
        x: Value,
        name: str,
        n_experts: int,
        n_chosen: int,
        *,
        score: str,
        bias: bool = False,
        selection_bias: str = "",
        selection_shape: tuple[int, ...] = (),
        groups: tuple[int, int] = (1, 1),
        sums_two: bool = False,
        normalised: bool = False,
        sum_eps: float = 0.0,
        scale: float = 1.0,
    ) -> Routes:
        """Chooses each row's experts and their weights by a router's logits x W^T in float32; ties go to the lowest number.

        Args:
            x: Input, [rows, n].
            name: Module name of the router; the tensors are NAME.weight [n_experts, n] and, with bias, NAME.bias [n_experts].
            n_experts: Number of experts.
            n_chosen: Number of experts per row.
            score: Score of an expert and weight of a chosen expert:
                "softmax": both are the softmax of the logits over all experts;
                "sigmoid": both are the sigmoid of the logit;
                "chosen_softmax": the score is the logit, the weight the softmax over the chosen logits;
                "chosen_sigmoid": the score is the logit, the weight its sigmoid.
            bias: Whether the router has a bias.
            selection_bias: Name of a tensor [n_experts] that is added to the scores for the choice only.
            selection_shape: Shape of that tensor in the checkpoint if it is not [n_experts].
            groups: (n, m): the experts form n equal groups; experts are chosen from the best m groups. The score of a group is
                that of its best expert.
            sums_two: The score of a group is the sum of its two best experts' scores.
            normalised: Whether the weights are divided by their sum + sum_eps.
            sum_eps: Added to the sum of the weights if they are normalised.
            scale: Factor on the final weights.
        """
        m, where = self._model, self.prefix + name
        m.expect("route", where, x)
        n_groups, chosen_groups = groups
        fits = n_groups > 0 and n_experts % n_groups == 0 and 0 < chosen_groups <= n_groups
        if score not in ROUTE_SCORES or not fits or not 0 < n_chosen <= n_experts // n_groups * chosen_groups:
            m.refuse(
                "route",
                where,
                f"wanted a score of {', '.join(ROUTE_SCORES)}, equal groups, enough experts in those chosen, have {score!r}, "
                f"{n_chosen} of {n_experts} experts, {chosen_groups} of {n_groups} groups",
            )
        weights = [m.matrix("route", [(where, n_experts)], x.width)]
        weights.append(m.vector("route", [(f"{where}.bias", n_experts)]) if bias else -1)
        shape = selection_shape or (n_experts,)
        weights.append(m.vector("route", [(self.prefix + selection_bias, shape)]) if selection_bias else -1)
        routes = m.emit(
            "route",
            [x],
            4 * n_chosen,
            weights=weights,
            scratch=2 * n_experts,
            n_chosen=n_chosen,
            score=score,
            n_groups=n_groups,
            chosen_groups=chosen_groups,
            sums_two=sums_two,
            is_normalised=normalised,
            sum_eps=sum_eps,
            scale=scale,
        )
        return Routes(routes, n_experts, n_chosen)

    def experts(
        self,
        x: Value,
        routes: Routes,
        up: Sequence[str],
        down: str,
        width: int,
        *,
        act: str = "silu",
        form: str = "gated",
        limit: float = 0.0,
        bias: bool = False,
        input_scaled: bool = False,
        stacked: str = "",
        interleaved: bool = False,
    ) -> Value:
        """The sum over a row's chosen experts of weight * down(form(up(x))); each expert has its own matrices.

        Args:
            x: Input, [rows, n]; the output has the same width.
            routes: Result of `route` for these rows.
            up: Module names of gate and up; or one name of a matrix with gate's rows above up's; or (form "plain") the name of
                up. "#" stands for the expert's number.
            down: Module name, [n, width]; "#" as in `up`.
            width: The inner width.
            act: Name of the activation as in Hugging Face configurations.
            form: "gated": act(gate) * up; "clamped": min(gate, limit) * sigmoid(1.702 min(gate, limit)) * (1 + up clamped to
                -limit..limit); "plain": act(up).
            limit: Limit of form "clamped".
            bias: Whether all matrices have a bias.
            input_scaled: The weight multiplies x instead of the expert's result.
            stacked: If set, each name is one tensor of all experts: "rows": [n_experts, rows, columns]; "columns":
                [n_experts, columns, rows]. Biases are NAME_bias. GGUF files always stack experts, under GGUF's names.
            interleaved: The rows of gate and up alternate in the tensor that holds both.
        """
        m, where = self._model, self.prefix + down
        m.expect("experts", where, x, routes.value)
        rows = width * (1 if form == "plain" else 2) // max(len(up), 1)
        if form not in EXPERT_FORMS or len(up) not in (1, 2) or (form == "plain" and len(up) == 2):
            m.refuse("experts", where, f"wanted a form of {', '.join(EXPERT_FORMS)} and its names of up, have {form}, {up}")
        n = routes.n_experts
        if m.source.is_gguf:
            up, rows = self._up_in_gguf(form, width)
            down, stacked, interleaved = "mlp.experts.down_proj.weight", "rows", False
        if stacked:
            ups = self._stacked(up, (n, rows, x.width), stacked == "columns", interleaved)
            downs = self._stacked([down], (n, x.width, width), stacked == "columns", False)
            biases = [self._stacked_biases(up, (n, rows), interleaved), self._stacked_biases([down], (n, x.width), False)]
        else:
            ups = [whole(f"{self._expert(name, e)}.weight", rows, x.width) for e in range(n) for name in up]
            downs = [whole(f"{self._expert(down, e)}.weight", x.width, width) for e in range(n)]
            biases = [
                [whole(f"{self._expert(name, e)}.bias", rows) for e in range(n) for name in up],
                [whole(f"{self._expert(down, e)}.bias", x.width) for e in range(n)],
            ]
        weights = [m.matrix("experts", ups, x.width), m.matrix("experts", downs, width)]
        if bias:
            weights += [m.vector("experts", part) for part in biases]
        return m.emit(
            "experts",
            [x, routes.value],
            x.width,
            weights=weights,
            scratch=routes.n_chosen * 4 * max(width, x.width) + 2 * routes.n_experts + 16,
            n_experts=routes.n_experts,
            n_chosen=routes.n_chosen,
            form=form,
            act=m.activation("experts", where, act),
            is_input_scaled=input_scaled,
            limit=limit,
        )

    def _up_in_gguf(self, form: str, width: int) -> tuple[list[str], int]:
        """The names of gate and up, or of their joint tensor if the file has one, and the rows of each tensor."""
        both, stem = f"{self.prefix}mlp.experts.gate_up_proj.weight", "mlp.experts"
        if form == "plain":
            return [f"{stem}.up_proj.weight"], width
        if self._model.shape_of(both) is not None:
            return [f"{stem}.gate_up_proj.weight"], 2 * width
        return [f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight"], width

    def _expert(self, name: str, expert: int) -> str:
        return self.prefix + name.replace("#", str(expert))

    def _stacked(
        self, names: Sequence[str], shape: tuple[int, int, int], is_transposed: bool, interleaved: bool
    ) -> list[Piece]:
        """The pieces of all experts in order, from tensors [experts, rows, columns] (transposed: [experts, columns, rows])."""
        n_experts, rows, cols = shape
        own = (n_experts, cols, rows) if is_transposed else shape
        if interleaved:
            return [
                Piece(self.prefix + names[0], own, rows // 2, e * rows + half, 1, 2, is_transposed)
                for e in range(n_experts) for half in (0, 1)
            ]  # fmt: skip
        return [
            Piece(self.prefix + name, own, rows, e * rows, transposed=is_transposed) for e in range(n_experts) for name in names
        ]

    def _stacked_biases(self, names: Sequence[str], shape: tuple[int, int], interleaved: bool) -> list[Piece]:
        """The pieces of all experts in order, from tensors NAME_bias [experts, rows]."""
        n_experts, rows = shape
        is_gguf = self._model.source.is_gguf
        names = [self.prefix + (name.removesuffix("weight") + "bias" if is_gguf else f"{name}_bias") for name in names]
        if interleaved:
            return [Piece(names[0], shape, rows // 2, e * rows + half, 1, 2) for e in range(n_experts) for half in (0, 1)]
        return [Piece(name, shape, rows, e * rows) for e in range(n_experts) for name in names]
