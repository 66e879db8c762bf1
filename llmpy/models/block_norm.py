"""Norms, and activations that are told more than their name: the part of the vocabulary that works on each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from .pieces import Piece

if TYPE_CHECKING:
    from .blocks import Model, Value

XIELU_BETA, XIELU_EPS = 0.5, -1.046875 * 2**-20  # in models that train it: 0.5 and -1e-6, of bfloat16


class NormBlock:
    """Operations of a `Block`."""

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
        """x * rsqrt(mean(x^2) + eps) * (w + offset), the mean over the row or, per_head, over each head of it.

        Args:
            x: Input, [rows, n].
            name: Module name; the tensor is NAME.weight, or NAME where that ends with "weight"; [n], [head_dim] or
                [heads, head_dim] or that flat. A "#" stands for the number of the head, whose tensor is [head_dim] then. None:
                no weight.
            eps: Added to the mean of squares.
            per_head: The row is heads of the model's head_dim (a number: of so many elements), each normalised alone.
            own_weights: Each head has weights of its own, else all share them.
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
        """(w + offset) * (x - mean) / sqrt(variance + eps) + b over the row or, per_head, over each head of it.

        Args:
            x: Input, [rows, n].
            name: Module name; the tensors are NAME.weight and, with bias, NAME.bias; [n], [head_dim] or [heads, head_dim].
                None: there is neither.
            eps: Added to the variance.
            bias: Whether there is one.
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
        """How many heads a norm has, and its weights; the offset is that of the first."""
        m, where = self._model, self.prefix + (name or "")
        m.expect(op, where, x)
        size = x.width if per_head is False else m.head_dim if per_head is True else per_head
        if size < 1 or x.width % size:
            m.refuse(op, where, f"wanted a row of heads of {size}, have {x.width}")
        heads = x.width // size
        names = [where if where.endswith(kind) else f"{where}.{kind}" for kind in kinds] if name else []
        if m.source.is_gguf:  # which has the heads' tensors in one
            names = [each.replace(".#", "") for each in names]
        usual = 2 if per_head is True else 1  # of heads, or of groups of columns
        shapes = [(size,) if not own_weights else (heads, size) if m.n_dims(each, usual) == 2 else (x.width,) for each in names]
        parts = [
            [(each.replace("#", str(head)), (size,)) for head in range(heads)] if "#" in each else [(each, shape)]
            for each, shape in zip(names, shapes, strict=True)
        ]
        return heads, [m.vector(op, tensors, 0.0 if i else offset) for i, tensors in enumerate(parts)]

    def scale(self, x: Value, factors: Sequence[float]) -> Value:
        """x times a factor of each column, or one for all of them."""
        m = self._model
        m.expect("scale", self.prefix, x)
        if len(factors) not in (1, x.width):
            m.refuse("scale", self.prefix, f"wanted 1 or {x.width} factors, have {len(factors)}")
        if all(factor == 1 for factor in factors):
            return x
        given = [float(factor) for factor in factors] * (x.width // len(factors))
        return m.emit("act", [x], x.width, weights=[m.constant(given)], act="scale")

    def scale_by_position(self, x: Value, every: int, slope: float, *, first: int = 0) -> Value:
        """x * (1 + slope * log(1 + (position + first) // every)): queries of far positions grow.

        Args:
            x: [rows, n].
            every: Positions from one step of the factor to the next; at least 1.
            slope: Of the factor over the logarithm; at least 0.
            first: Added to the position; at least 0.
        """
        m = self._model
        m.expect("scale_by_position", self.prefix, x)
        if every < 1 or first < 0 or not 0 <= slope < inf:
            given = f"every={every}, slope={slope}, first={first}"
            m.refuse("scale_by_position", self.prefix, f"wanted every at least 1, slope and first at least 0, have {given}")
        return m.emit("position_scale", [x], x.width, every=every, first=first, slope=slope)

    def clip(self, x: Value, limit: float) -> Value:
        """x, not below -limit and not above limit."""
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
            name: Module name; the tensors are NAME.alpha_p, NAME.alpha_n, NAME.beta and NAME.eps, of one element. The last two
                are constants, which updates may leave out.
        """
        m, where = self._model, self.prefix + name
        m.expect("xielu", where, x)
        tensors = (("alpha_p", 1, None), ("alpha_n", 1, None), ("beta", 0, XIELU_BETA), ("eps", 0, XIELU_EPS))
        parts = [
            Piece(f"{where}.{each}", m.scalar_shape(f"{where}.{each}", n_dims), 1, constant=constant)
            for each, n_dims, constant in tensors
        ]
        return m.emit("act", [x], x.width, weights=[m.vector("xielu", parts)], act="xielu")
