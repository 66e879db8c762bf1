"""Operations on the rows of a step: embed, linears, norms, activations, rows by their numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from staging import Array, Matrix, Stage, header, struct

from .opened import Opened


class RowOperations(Opened):
    """Operations on rows."""

    def embed(
        self, matrix: Matrix, token_ids: Array | None, out: Array, scale: float = 1.0, first_row: int = 0, first_id: int = 0,
        end_id: int = 0,
    ) -> None:  # fmt: skip
        """Rows of a matrix by token id; token_ids None: its first row for all; end_id 0: all ids are the matrix's."""
        stage = Stage(self)
        numbers = {"scale": scale, "first_row": first_row, "first_id": first_id, "end_id": end_id}
        args = struct("embed_args", matrix=matrix.address, **numbers)
        args.n_rows = stage.any_view(args.out, "out", out, True)
        if token_ids is not None and stage.array(args, "token_ids", token_ids, "i") != args.n_rows:
            raise ValueError("token_ids: wanted one id for each row of out")
        self._run(stage, "embed", args)

    def linear(
        self, matrix: Matrix, x: Array, y: Array, bias: Array | None = None, add: Array | None = None, input: int = 0,
        norm_weight: Array | None = None, norm_eps: float = 0.0, act: int = 0, is_float_out: bool = False,
        mid: Array | None = None, delta: Array | None = None,
    ) -> None:  # fmt: skip
        """y = f(x) W^T [+ delta]; with `mid` (twice as wide as y) y = act(gate) * up."""
        stage = Stage(self)
        args = struct("linear_args", matrix=matrix.address, input=input, norm_eps=norm_eps, act=act, is_float_out=is_float_out)
        stage_linear(stage, args, y, bias, mid, norm_weight)
        stage.view(args.x, "x", x)
        added = struct("view")
        if add is not None:
            stage.view(added, "add", add)
            args.add = ctypes.addressof(added)
        if delta is not None:
            stage.array(args, "delta", delta)
            args.delta_stride = delta.shape[1]
        args.n_rows = stage.n_rows
        self._run(stage, "linear", args)

    def lora(
        self, x: Array, y: Array, slots: Array, parts: Sequence[tuple[int, int, int, int, int]], row_slots: Array | None,
        max_rank: int, rows: Array | None = None, is_delta: bool = False, first_row: int = 0, base_bias: Array | None = None,
        token_ids: Array | None = None, factor: float = 1.0, ids: tuple[int, int] = (0, 0), is_bfloat16: bool = False,
    ) -> None:  # fmt: skip
        """Adds adapters to y; a part is (first row, rows, offsets of head, a, b); a row of slots is float32."""
        stage = Stage(self)
        args = struct("lora_args", n_parts=len(parts), max_rank=max_rank, slot_bytes=4 * slots.shape[1], is_delta=is_delta,
                      is_bfloat16=is_bfloat16, first_row=first_row, factor=factor, first_id=ids[0], end_id=ids[1])  # fmt: skip
        table = (header().structs["lora_part"] * len(parts))(*parts)
        args.parts = ctypes.addressof(table)
        stage.view(args.x, "x", x)
        stage.item_bytes = stage.item_bytes if token_ids is not None else 4
        stage.view(args.y, "y", y, True)
        stage.array(args, "slots", slots)
        stage.array(args, "row_slots", row_slots, "i")
        stage.array(args, "rows", rows, "i")
        stage.array(args, "base_bias", base_bias)
        stage.array(args, "token_ids", token_ids, "i")
        n_chunks = -(-max(x.shape[-1], 1) // 1024)  # LORA_CHUNK
        scratch = np.full(max(len(x) * len(parts) * n_chunks * max_rank, 1), np.nan, np.float32)
        stage.array(args, "scratch", scratch, is_written=True)
        args.n_rows = stage.n_rows
        self._run(stage, "lora", args)

    def rms_norm(
        self, x: Array, weight: Array | None, out: Array, eps: float, n_heads: int = 1, weight_stride: int = 0
    ) -> None:
        """Normalises each of n_heads equal parts of a row."""
        numbers = {"eps": eps, "n_heads": n_heads, "weight_stride": weight_stride}
        self._rows("rms_norm", {"x": x}, {"out": out}, {"weight": weight}, **numbers)

    def layer_norm(
        self, x: Array, weight: Array | None, bias: Array | None, out: Array, eps: float, n_heads: int = 1,
        weight_stride: int = 0,
    ) -> None:  # fmt: skip
        """Normalises each of n_heads equal parts of a row."""
        numbers = {"eps": eps, "n_heads": n_heads, "weight_stride": weight_stride}
        self._rows("layer_norm", {"x": x}, {"out": out}, {"weight": weight, "bias": bias}, **numbers)

    def gated(self, gate: Array, up: Array, out: Array, act: int = 0) -> None:
        """act(gate) * up."""
        self._rows("gated", {"gate": gate, "up": up}, {"out": out}, act=act)

    def act(self, x: Array, out: Array, act: int = 0, limit: float = 0.0, weights: Array | None = None) -> None:
        """act(x)."""
        self._rows("act", {"x": x}, {"out": out}, {"weights": weights}, act=act, limit=limit)

    def add(self, a: Array, b: Array, out: Array) -> None:
        """a + b."""
        self._rows("add", {"a": a, "b": b}, {"out": out})

    def scale_logits(self, logits: Array, scale: float, softcap: float) -> None:
        """Scales and caps float32 logits in place."""
        self._rows("scale_logits", {}, {"logits": logits}, item_bytes=4, scale=scale, softcap=softcap)

    def spread_logits(self, x: Array, sources: Array, out: Array) -> None:
        """Logits of some ids to the columns of all ids."""
        self._rows("spread_logits", {"x": x}, {"out": out}, {"sources": sources}, item_bytes=4)

    def head_linear(
        self, matrix: Matrix, x: Array, out: Array, n_heads: int, head_rows: int, first_row: int, used_rows: int,
        is_transposed: bool = False,
    ) -> None:  # fmt: skip
        """One matrix-vector product a head."""
        numbers = {"n_heads": n_heads, "head_rows": head_rows, "first_row": first_row, "used_rows": used_rows}
        self._rows("head_linear", {"x": x}, {"out": out}, matrix=matrix.address, is_transposed=is_transposed, **numbers)

    def add_rms_norm(
        self, a: Array, b: Array, sum: Array, weight: Array, out: Array, eps: float, inner_weight: Array | None = None,
        inner_eps: float = 0.0,
    ) -> None:  # fmt: skip
        """sum = a + b, or a + rms_norm(b); out = rms_norm(sum)."""
        vectors = {"weight": weight, "inner_weight": inner_weight}
        self._rows("add_rms_norm", {"a": a, "b": b}, {"sum": sum, "out": out}, vectors, eps=eps, inner_eps=inner_eps)

    def norm_linear(
        self, a: Array, b: Array, sum: Array, weight: Array, out: Array, eps: float, matrix: Matrix, y: Array,
        bias: Array | None = None, mid: Array | None = None, act: int = 0,
    ) -> None:  # fmt: skip
        """add_rms_norm and linear in one; writing out is optional."""
        self._need_fusion("FUSION_ADD_NORM_LINEAR", "fused norm and linear")
        stage, args = Stage(self), struct("add_rms_norm_args", eps=eps)
        linear = struct("linear_args", matrix=matrix.address, act=act)
        stage_sum(stage, args, a, b, sum, weight, out)
        stage_linear(stage, linear, y, bias, mid)
        linear.n_rows, linear.output = args.n_rows, mid is not None

        def work() -> None:  # the device addresses are known only now
            linear.x, args.linear = args.out, ctypes.addressof(linear)
            self.table.call("add_rms_norm", self.ctx, ctypes.addressof(args))

        stage.run(work)

    def take(self, x: Array, columns: Array, out: Array) -> None:
        """Columns of x by their numbers."""
        self._rows("take", {"x": x}, {"out": out}, {"columns": columns})

    def pixels(self, bytes_: Array, table: Array, out: Array, n_frames: int) -> None:
        """Numbers of bytes [rows, 3 * n], by a table [3, 256]."""
        stage, args = Stage(self), struct("pixels_args", n_frames=n_frames)
        stage.view(args.out, "out", out, True)
        if stage.array(args, "bytes", bytes_, "B") * n_frames != stage.n_rows * args.out.width:
            raise ValueError("bytes: wanted one for each number of a frame")
        if stage.array(args, "table", table) != 3 * 256:
            raise ValueError("table: wanted 3 x 256 numbers")
        args.n_rows = stage.n_rows
        self._run(stage, "pixels", args)

    def embed_taps(self, table: Array, rows: Array, weights: Array, out: Array) -> None:
        """Weighted sums of rows of a table; rows and weights are [rows, taps]."""
        stage, args = Stage(self), struct("embed_taps_args")
        stage.view(args.out, "out", out, True)
        args.n_rows = stage.n_rows
        stage.array(args, "table", table)
        args.n_taps = stage.array(args, "rows", rows, "i") // stage.n_rows
        if stage.array(args, "weights", weights) != args.n_taps * stage.n_rows:
            raise ValueError("weights: wanted one for each tap")
        self._run(stage, "embed_taps", args)

    def place_rows(self, x: Array, rows: Array, out: Array) -> None:
        """Stores rows of x at the numbers."""
        self._listed("place_rows", {"x": x, "out": out}, "rows", rows)

    def splice(self, x: Array, visual: Array, features: Array, is_sum: bool = False) -> None:
        """Replaces rows of x by features, or adds those; -1: the row stays."""
        self._listed("splice", {"features": features, "out": x}, "visual", visual, {"out": "x"}, is_sum=is_sum)

    def mean_rows(self, x: Array, out: Array, n: int) -> None:
        """Means of n neighbouring rows."""
        self._listed("mean_rows", {"x": x, "out": out}, "", None, n=n, n_rows=len(out))

    def _listed(
        self, entry: str, views: Mapping[str, Array], name: str, rows: Array | None, fields: Mapping[str, str] | None = None,
        **numbers: Any,
    ) -> None:  # fmt: skip
        """Runs an operation whose views have unlike numbers of rows; `rows` has one number for each row that it computes."""
        stage, args = Stage(self), struct(f"{entry}_args", **numbers)
        for view, value in views.items():
            stage.any_view(getattr(args, (fields or {}).get(view, view)), view, value, view == "out")
        if rows is not None:
            args.n_rows = stage.array(args, name, rows, "i")
        self._run(stage, entry, args)

    def position_scale(self, x: Array, positions: Array, out: Array, every: int, slope: float, first: int) -> None:
        """Multiplies rows by a factor that depends on their positions."""
        stage, args = Stage(self), struct("position_scale_args", every=every, slope=slope, first=first)
        stage.view(args.x, "x", x)
        stage.view(args.out, "out", out, True)
        if stage.array(args, "positions", positions, "i") != stage.n_rows or not every:
            raise ValueError("positions: wanted one for each row, and steps of at least 1")
        args.n_rows = stage.n_rows
        self._run(stage, "position_scale", args)

    def select(self, x: Array, rows: Array, out: Array, other: Array | None = None) -> None:
        """out row i = x row rows[i]; -1: zeros, -2, -3, ...: rows of `other`."""
        stage, args = Stage(self), struct("select_args")
        stage.any_view(args.x, "x", x)
        stage.n_rows = args.n_selected = stage.array(args, "rows", rows, "i")
        stage.view(args.out, "out", out, True)
        stage.array(args, "other", other)
        self._run(stage, "select", args)


def stage_linear(
    stage: Stage, args: Any, y: Array, bias: Array | None, mid: Array | None, norm: Array | None = None
) -> None:
    of_activations, stage.item_bytes = stage.item_bytes, 4 if args.is_float_out else stage.item_bytes
    stage.view(args.y, "y", y, True)
    stage.item_bytes = of_activations
    stage.array(args, "bias", bias)
    stage.array(args, "norm_weight", norm)
    if mid is not None:
        stage.view(args.mid, "mid", mid, True)
        args.output = args.mid.width == 2 * args.y.width


def stage_sum(stage: Stage, args: Any, a: Array, b: Array, sum: Array, weight: Array, out: Array) -> None:
    stage.view(args.a, "a", a)
    stage.view(args.b, "b", b)
    stage.view(args.sum, "sum", sum, True)
    stage.view(args.out, "out", out, True)
    stage.array(args, "weight", weight)
    args.n_rows = stage.n_rows
