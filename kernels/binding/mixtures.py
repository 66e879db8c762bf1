"""Mixtures of experts: routes, experts, their sums."""

from __future__ import annotations

import ctypes
from typing import Any

from staging import Array, Matrix, Stage, struct

from .opened import Opened
from .rows import stage_sum


class Mixtures(Opened):
    """Operations of mixtures of experts."""

    def route(
        self, logits: Array, routes: Array, score: int = 0, bias: Array | None = None, n_groups: int = 1,
        chosen_groups: int = 1, sums_two: bool = False, normalised: bool = False, sum_eps: float = 0.0, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Writes routes: int32 pairs of an expert and the bits of its float32 weight."""
        stage, args = Stage(self), struct(
            "route_args", score=score, n_groups=n_groups, chosen_groups=chosen_groups, sums_two=sums_two,
            is_normalised=normalised, sum_eps=sum_eps, scale=scale,
        )  # fmt: skip
        self.table.function("route")
        args.n_rows = stage_routes(stage, args, routes, True)
        n = stage.array(args, "logits", logits)
        if not args.n_rows or n % args.n_rows:
            raise ValueError("logits: wanted as many rows as routes")
        args.n_experts = args.logits_stride = n // args.n_rows
        if bias is not None and stage.array(args, "selection_bias", bias) != args.n_experts:
            raise ValueError("bias: wanted one for each expert")
        self._run(stage, "route", args)

    def norm_route(
        self, a: Array, b: Array, sum: Array, weight: Array, out: Array, eps: float, router: Matrix, router_bias: Array | None,
        logits: Array, routes: Array, score: int = 0, bias: Array | None = None, normalised: bool = False,
    ) -> None:  # fmt: skip
        """add_rms_norm, linear and route in one; writing the logits is optional."""
        self._need_fusion("FUSION_NORM_ROUTE", "fused norm and route")
        stage, args = Stage(self), struct("add_rms_norm_args", eps=eps)
        linear = struct("linear_args", matrix=router.address, is_float_out=True)
        route = struct("route_args", n_groups=1, chosen_groups=1, scale=1.0, score=score, is_normalised=normalised)
        stage_sum(stage, args, a, b, sum, weight, out)
        stage.array(linear, "bias", router_bias)
        n_experts = stage.array(linear.y, "data", logits, is_written=True) // (stage.n_rows or 1)
        route.n_rows = stage_routes(stage, route, routes, True)
        stage.array(route, "selection_bias", bias)
        linear.n_rows = args.n_rows
        linear.y.width = linear.y.stride = route.n_experts = route.logits_stride = n_experts

        def work() -> None:  # the device addresses are known only now
            linear.x, route.logits = args.out, linear.y.data
            args.router, args.route = ctypes.addressof(linear), ctypes.addressof(route)
            self.table.call("add_rms_norm", self.ctx, ctypes.addressof(args))

        stage.run(work)

    def experts(
        self, up: Matrix | None, down: Matrix | None, routes: Array, x: Array, y: Array, n_experts: int, inner: int,
        form: int = 0, act: int = 0, limit: float = 0.0, up_bias: Array | None = None, down_bias: Array | None = None,
        input_scaled: bool = False, held: tuple[int, int] | None = None, first_column: int = 0,
    ) -> None:  # fmt: skip
        """The weighted sum of the chosen experts. held: a rank's experts (first, count); y gets their results by route.

        Without down only the way up, to columns of y's parts from first_column on; without up only the way down.
        """
        first, n_local = held or (0, 0)
        stage, args = Stage(self), struct(
            "experts_args", n_experts=n_experts, form=form, act=act, limit=limit, is_input_scaled=input_scaled,
            up=up.address if up else None, down=down.address if down else None, first=first, n_local=n_local,
            is_by_route=held is not None, half=1 if down is None else 2 if up is None else 0, first_column=first_column,
        )  # fmt: skip
        self.table.function("experts")
        stage.view(args.x, "x", x)
        stage.view(args.y, "y", y, True)
        args.n_rows = stage.n_rows
        stage_chosen(stage, args, routes, "x")
        stage.array(args, "up_bias", up_bias)
        stage.array(args, "down_bias", down_bias)
        width = (args.n_chosen * 4 * max(inner, args.x.width, args.y.width) + 2 * n_experts + 16 + 15) // 16 * 16
        args.scratch.width = args.scratch.stride = width
        n_bytes = width * args.n_rows * self.item_bytes
        args.scratch.data = self.new_buffer(n_bytes)
        try:
            self._run(stage, "experts", args)
        finally:
            self.table.function("buffer_destroy")(self.ctx, args.scratch.data, n_bytes)

    def combine(self, results: Array, routes: Array, y: Array, input_scaled: bool = False) -> None:
        """The weighted sum of the results of routes."""
        stage, args = Stage(self), struct("combine_args", is_input_scaled=input_scaled)
        self.table.function("combine")
        stage.view(args.results, "results", results)
        stage.view(args.y, "y", y, True)
        args.n_rows = stage.n_rows
        stage_chosen(stage, args, routes, "results")
        self._run(stage, "combine", args)


def stage_routes(stage: Stage, args: Any, routes: Array, is_written: bool) -> int:
    """Their rows."""
    stage.array(args, "routes", routes, "i", is_written)
    if routes.ndim != 2 or routes.shape[1] < 2 or routes.shape[1] % 2:
        raise ValueError("routes: wanted a two-dimensional array of pairs")
    args.route_stride = args.n_chosen = routes.shape[1] // 2
    return int(routes.shape[0])


def stage_chosen(stage: Stage, args: Any, routes: Array, of: str) -> None:
    """Routes that an operation reads, one row of them for each row of the array `of`."""
    if stage_routes(stage, args, routes, False) != args.n_rows:
        raise ValueError(f"routes: wanted as many rows as {of}")
