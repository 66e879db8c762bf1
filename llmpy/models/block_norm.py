"""Norms, and activations with parameters: the operations of a block that work on each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from .pieces import Piece

if TYPE_CHECKING:
    from .blocks import Model, Value

XIELU_BETA, XIELU_EPS = 0.5, -1.046875 * 2**-20  # values that trained models have: 0.5 and bfloat16(-1e-6)


class NormBlock:
    """Base class of `Block` with norms and activations."""

    _model: Model
    prefix: str

    def rms_norm(
        self,
        x: Value,
        name: str | None,
        eps: float,
        *,
        per_head: bool | int = False,
        own_weights: bool = False,
        offset: float = 0.0,
    ) -> Value:
        """x * rsqrt(mean(x^2) + eps) * (w + offset), the mean over the row or (per_head) over each head of the row.

        Args:
            x: Input, [rows, n].
            name: Module name; the tensor is NAME.weight, or NAME if NAME ends with "weight". Its shape is [n], [head_dim],
                [heads, head_dim] or [heads * head_dim]. "#" stands for the head's number; each head then has a tensor
                [head_dim]. None: no weight.
            eps: Added to the mean of squares.
            per_head: Normalise each head alone. True: heads have the model's head_dim; a number: heads have so many elements.
            own_weights: Each head has its own weights; otherwise all heads share them.
            offset: Added to the weight once, at load (1 for weights stored as a deviation from 1).
        """
        m = self._model
        heads, weights = self._norm_weights("rms_norm", x, name, ["weight"], per_head, own_weights, offset)
        return m.emit("rms_norm", [x], x.width, weights=weights, n_heads=heads, eps=eps)

    def layer_norm(
        self,
        x: Value,
        name: str | None,
        eps: float,
        *,
        bias: bool = True,
        per_head: bool | int = False,
        own_weights: bool = False,
        offset: float = 0.0,
    ) -> Value:
        """(w + offset) * (x - mean) / sqrt(variance + eps) + b over the row or (per_head) over each head of the row.

        Args:
            x: Input, [rows, n].
            name: Module name; the tensors are NAME.weight and, with bias, NAME.bias; [n], [head_dim] or [heads, head_dim].
                None: no weight and no bias.
                eps: Added to the variance.
                bias: Whether the norm has a bias.
            per_head, own_weights: As in `rms_norm`.
            offset: Added to the weight once, at load (1 for weights stored as a deviation from 1).
        """
        kinds = ["weight", "bias"] if bias else ["weight"]
        heads, weights = self._norm_weights("layer_norm", x, name, kinds, per_head, own_weights, offset)
        return self._model.emit("layer_norm", [x], x.width, weights=weights, n_heads=heads, eps=eps)

    def _norm_weights(
        self,
        op: str,
        x: Value,
        name: str | None,
        kinds: Sequence[str],
        per_head: bool | int,
        own_weights: bool,
        offset: float,
    ) -> tuple[int, list[int]]:
        """The number of heads of a norm, and its weights; `offset` applies to the first weight."""
        m, where = self._model, self.prefix + (name or "")
        m.expect(op, where, x)
        size = x.width if per_head is False else m.head_dim if per_head is True else per_head
        if size < 1 or x.width % size:
            m.refuse(op, where, f"wanted a row of heads of {size}, have {x.width}")
        heads = x.width // size
        names = [where if where.endswith(kind) else f"{where}.{kind}" for kind in kinds] if name else []
        if m.source.is_gguf:  # one tensor for all heads
            names = [each.replace(".#", "") for each in names]
        usual = 2 if per_head is True else 1  # dimensions: [heads, head_dim], or flat for groups of columns
        shapes = [(size,) if not own_weights else (heads, size) if m.n_dims(each, usual) == 2 else (x.width,) for each in names]
        parts = [
            [(each.replace("#", str(head)), (size,)) for head in range(heads)] if "#" in each else [(each, shape)]
            for each, shape in zip(names, shapes, strict=True)
        ]
        return heads, [m.vector(op, tensors, 0.0 if i else offset) for i, tensors in enumerate(parts)]

    def scale(self, x: Value, factors: Sequence[float]) -> Value:
        """x times one factor per column, or one factor for all columns."""
        m = self._model
        m.expect("scale", self.prefix, x)
        if len(factors) not in (1, x.width):
            m.refuse("scale", self.prefix, f"wanted 1 or {x.width} factors, have {len(factors)}")
        if all(factor == 1 for factor in factors):
            return x
        given = [float(factor) for factor in factors] * (x.width // len(factors))
        return m.emit("act", [x], x.width, weights=[m.constant(given)], act="scale")

    def scale_by_position(self, x: Value, every: int, slope: float, *, first: int = 0) -> Value:
        """x * (1 + slope * log(1 + (position + first) // every)): scales queries up as the position grows.

        Args:
            x: [rows, n].
            every: Positions from one step of the factor to the next; at least 1.
            slope: Slope of the factor over the logarithm; at least 0.
            first: Added to the position; at least 0.
        """
        m = self._model
        m.expect("scale_by_position", self.prefix, x)
        if every < 1 or first < 0 or not 0 <= slope < inf:
            given = f"every={every}, slope={slope}, first={first}"
            m.refuse("scale_by_position", self.prefix, f"wanted every at least 1, slope and first at least 0, have {given}")
        return m.emit("position_scale", [x], x.width, every=every, first=first, slope=slope)

    def clip(self, x: Value, limit: float) -> Value:
        """x clamped to -limit..limit."""
        m = self._model
        m.expect("clip", self.prefix, x)
        if not limit > 0:
            m.refuse("clip", self.prefix, f"wanted a limit above 0, have {limit}")
        return m.emit("act", [x], x.width, act="clip", limit=limit)

    def xielu(self, x: Value, name: str) -> Value:
        """p x^2 + beta x above 0, else n (exp(min(x, eps)) - 1 - x) + beta x; p = softplus(alpha_p),
        n = beta + softplus(alpha_n) (https://arxiv.org/abs/2411.13010).

        Args:
            x: [rows, n].
            name: Module name; the tensors are NAME.alpha_p, NAME.alpha_n, NAME.beta and NAME.eps, of one element each. beta and
                eps are constants; updates may leave them out.
        """
        m, where = self._model, self.prefix + name
        m.expect("xielu", where, x)
        tensors = (("alpha_p", 1, None), ("alpha_n", 1, None), ("beta", 0, XIELU_BETA), ("eps", 0, XIELU_EPS))
        parts = [
            Piece(f"{where}.{each}", m.scalar_shape(f"{where}.{each}", n_dims), 1, constant=constant)
            for each, n_dims, constant in tensors
        ]
        return m.emit("act", [x], x.width, weights=[m.vector("xielu", parts)], act="xielu")
