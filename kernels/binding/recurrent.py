"""Recurrent mixers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from staging import Array, Batch, Matrix, Stage, State, struct

from .opened import Opened


class Recurrent(Opened):
    """Operations with a state a sequence."""

    def _mix(
        self, entry: str, args: Any, state: State, batch: Batch, views: Mapping[str, Array | None],
        shape: Callable[[Any], tuple[int, int, Mapping[str, int]]], vectors: Mapping[str, Array | None],
        stage: Stage | None = None,
    ) -> None:  # fmt: skip
        """Runs a recurrent operation.

        `shape` gets the arguments after their views are set and returns the units of the state, the floats of a unit and the
        wanted number of items of each vector.
        """
        stage = stage or Stage(self)
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        for name, value in views.items():
            if value is not None:
                stage.view(getattr(args, name), name, value, name in ("out", "scratch"))
        n_units, unit_floats, wanted = shape(args)
        for name, value in vectors.items():
            if value is not None and stage.array(args, name, value) != wanted[name]:
                raise ValueError(f"{name}: wanted as many items as the other arrays ask for")
        stage.state(args.state, state, n_units, unit_floats)
        self._run(stage, entry, args)

    def conv(
        self, state: State, batch: Batch, x: Array, weight: Array, bias: Array | None, out: Array, n_taps: int, act: int = -1
    ) -> None:
        """Depthwise convolution; act -1: no activation."""
        args = struct("conv_args", n_taps=n_taps, has_act=act >= 0, act=max(act, 0))
        self._mix("conv", args, state, batch, {"x": x, "out": out},
                  lambda a: (a.x.width, n_taps - 1, {"weight": a.x.width * n_taps, "bias": a.x.width}),
                  {"weight": weight, "bias": bias})  # fmt: skip

    def ssm(
        self, state: State, batch: Batch, x: Array, dt: Array, b: Array, c: Array, a_log: Array, dt_bias: Array, skip: Array,
        out: Array, n_groups: int = 1, dt_min: float = 0.0, dt_max: float = 3.4e38, gate: Array | None = None, act: int = 0,
        norms: tuple[Array, Array, Array, float, Matrix, Array] | None = None,
    ) -> None:  # fmt: skip
        """State space of Mamba-2.

        `norms` (CUDA only): norm weights of b, c and dt, eps, dt_matrix, and scratch [rows, 2 n_state + dt + heads, each
        rounded up to a multiple of 16].
        """
        args = struct("ssm_args", n_groups=n_groups, dt_min=dt_min, dt_max=dt_max, act=act, n_heads=a_log.size)
        of_b, of_c, of_dt, args.norm_eps, matrix, scratch = norms or (None, None, None, 0.0, None, None)
        args.dt_matrix = matrix.address if matrix else None

        def shape(a: Any) -> tuple[int, int, Mapping[str, int]]:
            in_heads = n_groups and a.n_heads and not a.x.width % a.n_heads and not a.n_heads % n_groups
            if not in_heads or a.b.width % n_groups or (not norms and a.dt.width != a.n_heads):
                raise ValueError("x: wanted heads in groups")
            a.head_dim, a.n_state = a.x.width // a.n_heads, a.b.width // n_groups
            widths = {"b_norm": a.b.width, "c_norm": a.c.width, "dt_norm": a.dt.width}
            return a.n_heads, a.head_dim * a.n_state, dict.fromkeys(("a_log", "dt_bias", "skip"), a.n_heads) | widths

        views = {"x": x, "dt": dt, "b": b, "c": c, "out": out, "gate": gate, "scratch": scratch}
        vectors = {"a_log": a_log, "dt_bias": dt_bias, "skip": skip, "b_norm": of_b, "c_norm": of_c, "dt_norm": of_dt}
        self._mix("ssm", args, state, batch, views, shape, vectors)

    def selective_scan(
        self, state: State, batch: Batch, x: Array, dt: Array, b: Array, c: Array, a_log: Array, dt_bias: Array | None,
        skip: Array, out: Array, gate: Array | None = None, act: int = 0,
    ) -> None:  # fmt: skip
        """Selective scan of Mamba."""

        def shape(a: Any) -> tuple[int, int, Mapping[str, int]]:
            a.n_state = a.b.width
            return a.x.width, a.n_state, {"a_log": a.x.width * a.n_state, "dt_bias": a.x.width, "skip": a.x.width}

        views = {"x": x, "dt": dt, "b": b, "c": c, "out": out, "gate": gate}
        vectors = {"a_log": a_log, "dt_bias": dt_bias, "skip": skip}
        self._mix("selective_scan", struct("selective_scan_args", act=act), state, batch, views, shape, vectors)

    def delta(
        self, state: State, batch: Batch, q: Array, k: Array, v: Array, a: Array, b: Array, a_log: Array, dt_bias: Array,
        out: Array, n_key_heads: int,
    ) -> None:  # fmt: skip
        """The gated delta rule."""

        def shape(args: Any) -> tuple[int, int, Mapping[str, int]]:
            n = args.n_heads = args.a.width
            if not n_key_heads or not n or n % n_key_heads or args.q.width % n_key_heads or args.v.width % n:
                raise ValueError("v: wanted value heads, a multiple of the key heads")
            args.key_dim, args.value_dim = args.q.width // n_key_heads, args.v.width // n
            return n, args.key_dim * args.value_dim, {"a_log": n, "dt_bias": n}

        views = {"q": q, "k": k, "v": v, "a": a, "b": b, "out": out}
        vectors = {"a_log": a_log, "dt_bias": dt_bias}
        self._mix("delta", struct("delta_args", n_key_heads=n_key_heads), state, batch, views, shape, vectors)
