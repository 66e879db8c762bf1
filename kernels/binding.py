"""One backend's functions on NumPy arrays, for kernel tests and benchmarks: `Backend` calls the table of backend.h by ctypes.

Views are two-dimensional arrays of the activations' type (any two-byte items for two-byte types) with rows that may lie apart;
other arrays are contiguous float32 or int32. A batch is (positions, row_seq, seq_first_row), a table int32 [n_seqs, pages].
Outputs are written in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmpy import _core
from staging import Array, Batch, Matrix, Pool, Stage, State, Table, address, as_bytes, dtype_number, header, struct

F32, LINEAR = 0, 1  # enum dtype, enum matrix_use


class Backend:
    """One opened backend.

    Args:
        device: "cpu", "cuda:0", ...
        isa: CPU only: "auto", "avx2", "avx512".
        num_threads: CPU only: number of threads; 0: one for each core.
        max_rows: Most rows of a step.
        max_cols: Widest input of a linear, in elements.
        vocab_size: Vocabulary size of the sampler; 0: no sampler.
        dtype: Wanted type of activations.
        library: Path of the backend's library; "" for the CPU.
        cublaslt: Path of cuBLASLt, which may compute linears of many rows; "": not used.
        max_loras: Slots of adapters.
    """

    def __init__(
        self, device: str = "cpu", isa: str = "auto", num_threads: int = 0, max_rows: int = 512, max_cols: int = 16384,
        vocab_size: int = 0, dtype: str = "float32", library: str = "", cublaslt: str = "", max_loras: int = 0,
    ) -> None:  # fmt: skip
        self.ctx: int | None = None
        self.table = Table(_core.backend_table(device, library))
        self.seconds, self.allocations = 0.0, 0
        """Duration of the last operation in seconds, and the core's allocations during it."""
        options = struct(
            "backend_options", device=_text(device), isa=_text(isa), n_threads=num_threads, max_rows=max_rows,
            max_logits_rows=max_rows, max_cols=max_cols, vocab_size=vocab_size, dtype=dtype_number(dtype),
            cublaslt=_text(cublaslt), max_loras=max_loras,
        )  # fmt: skip
        opened = ctypes.c_void_p()
        self.table.call("open", ctypes.addressof(options), ctypes.addressof(opened))
        self.ctx = opened.value
        self.item_bytes = 4 if self.table.function("activations")(self.ctx) == F32 else 2
        self.has_host_memory = bool(_core.device_traits(device, library)["has_host_memory"])

    def __del__(self) -> None:
        if self.ctx:
            self.table.function("close")(self.ctx)
            self.ctx = None

    @property
    def description(self) -> str:
        """The backend's description, such as "cpu avx512 2 threads"."""
        return str(self.table.function("describe")(self.ctx).decode())

    @property
    def fusions(self) -> int:
        """The backend's fusions: enum fusion, or-ed."""
        return int(self.table.function("fusions")(self.ctx))

    def new_buffer(self, n_bytes: int) -> int:
        """Address of a new zeroed device buffer; the caller frees it with buffer_destroy."""
        made = ctypes.c_void_p()
        self.table.call("buffer_create", self.ctx, n_bytes, ctypes.addressof(made))
        return made.value or 0

    # ---- matrices and memory --------------------------------------------------------------------------------------------

    def matrix(
        self, parts: Sequence[tuple[str, int, Array]], cols: int, use: int = LINEAR, arithmetic: int = 0, n_experts: int = 0
    ) -> Matrix:
        """A matrix of parts; each part is (type, rows, bytes of the rows)."""
        if not 1 <= len(parts) <= 512:
            raise ValueError("parts: wanted 1 to 512 of them")
        listed = (header().structs["matrix_part"] * len(parts))(*((rows, dtype_number(name)) for name, rows, _ in parts))
        desc = struct("matrix_desc", parts=ctypes.addressof(listed), n_parts=len(parts), n_cols=cols, use=use,
                      arithmetic=arithmetic, n_experts=n_experts)  # fmt: skip
        made = ctypes.c_void_p()
        self.table.call("matrix_create", self.ctx, ctypes.addressof(desc), ctypes.addressof(made))
        matrix = Matrix(self, made.value or 0)
        for i, (_, rows, data) in enumerate(parts):
            self.matrix_write(matrix, i, 0, rows, data)
        return matrix

    def matrix_info(self, matrix: Matrix, part: int) -> tuple[int, int]:
        """Bytes of the matrix and the arithmetic of a part."""
        return (self.table.function("matrix_bytes")(matrix.address),
                self.table.function("matrix_arithmetic")(matrix.address, part))  # fmt: skip

    def matrix_write(self, matrix: Matrix, part: int, first_row: int, n_rows: int, data: Array) -> None:
        """Writes rows of a part, given in the file's format."""
        rows = as_bytes(data)
        self.table.call("matrix_write", self.ctx, matrix.address, part, first_row, n_rows, address(rows))

    def matrix_borrow(self, matrix: Matrix, part: int, rows: Array) -> None:
        """Reads a part from rows of a C-like array, which must stay alive; they may be apart."""
        args = struct("matrix_borrow_args", matrix=matrix.address, part=part, rows=rows.ctypes.data, row_bytes=rows.strides[0])
        self.table.call("matrix_borrow", self.ctx, ctypes.addressof(args))

    def matrix_fill(
        self, matrix: Matrix, part: int, key: int, dtype: str, n_rows: int, cols: int, first_row: int = 0, source_row: int = 0,
        step: int = 1,
    ) -> None:  # fmt: skip
        """Fills rows with the dummy values of csrc/base/dummy.h."""
        table, rows = ctypes.addressof(self.table._table), (first_row, n_rows, source_row, step)
        _core.weights_fill(table, self.ctx or 0, matrix.address, part, dtype_number(dtype), rows, cols, key)

    def matrix_read(self, matrix: Matrix, first_row: int, n_rows: int, out: np.ndarray) -> None:
        """Reads exact values as float32 into the given array."""
        self.table.call("matrix_read", self.ctx, matrix.address, first_row, n_rows, address(out))

    def supports(self, dtype: str, use: int = LINEAR) -> bool:
        """Whether a part of a matrix can have the type."""
        return bool(self.table.function("supports")(self.ctx, dtype_number(dtype), use))

    def prepare(self) -> None:
        """Chooses kernels for the matrices made so far."""
        if "prepare" in self.table:
            self.table.call("prepare", self.ctx)

    def memory(self) -> dict[str, int] | None:
        """Bytes held of each use, and the device's total and free bytes; None if the backend does not report memory."""
        if "memory" not in self.table:
            return None
        told = struct("backend_memory")
        self.table.call("memory", self.ctx, ctypes.addressof(told))
        held = dict(zip(("weights", "kv", "work", "pinned"), told.held_bytes, strict=True))
        return held | {"total": told.total_bytes, "free": told.free_bytes}

    def _of_pools(self, name: str, use: int) -> None:
        if name in self.table:
            self.table.call(name, self.ctx, use)

    def pool_release(self, use: int) -> None:
        """Frees the memory of weights (0) or pages (1), if the backend can."""
        self._of_pools("pool_release", use)

    def pool_restore(self, use: int) -> None:
        """Restores the memory that `pool_release` freed."""
        self._of_pools("pool_restore", use)

    def pool_save(self, use: int) -> None:
        """Saves the current contents for the next restore."""
        self._of_pools("pool_save", use)

    # ---- operations on rows ---------------------------------------------------------------------------------------------

    def _rows(
        self, entry: str, reads: Mapping[str, Array | None], writes: Mapping[str, Array | None],
        vectors: Mapping[str, Array | None] | None = None, item_bytes: int | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Runs an operation on float32 vectors, numbers, and views with equally many rows."""
        self.table.function(entry)
        stage, args = Stage(self, item_bytes), struct(f"{entry}_args", **fields)
        for views, is_written in ((reads, False), (writes, True)):
            for name, value in views.items():
                if value is not None:
                    stage.view(getattr(args, name), name, value, is_written)
        for name, value in (vectors or {}).items():
            stage.array(args, name, value)
        args.n_rows = stage.n_rows
        self._run(stage, entry, args)

    def _run(self, stage: Stage, entry: str, args: Any) -> None:
        stage.run(lambda: self.table.call(entry, self.ctx, ctypes.addressof(args)))

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
        self._stage_linear(stage, args, y, bias, mid, norm_weight)
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
        max_rank: int, rows: Array | None = None, is_delta: bool = False, first_row: int = 0,
    ) -> None:  # fmt: skip
        """Adds adapters to y; a part is (first row, rows, offsets of head, a, b); a row of slots is float32."""
        stage = Stage(self)
        args = struct("lora_args", n_parts=len(parts), max_rank=max_rank, slot_bytes=4 * slots.shape[1], is_delta=is_delta,
                      first_row=first_row)  # fmt: skip
        table = (header().structs["lora_part"] * len(parts))(*parts)
        args.parts = ctypes.addressof(table)
        stage.view(args.x, "x", x)
        stage.item_bytes = 4
        stage.view(args.y, "y", y, True)
        stage.array(args, "slots", slots)
        stage.array(args, "row_slots", row_slots, "i")
        stage.array(args, "rows", rows, "i")
        scratch = np.full(max(len(x) * len(parts) * max_rank, 1), np.nan, np.float32)
        stage.array(args, "scratch", scratch, is_written=True)
        args.n_rows = stage.n_rows
        self._run(stage, "lora", args)

    def _stage_linear(
        self, stage: Stage, args: Any, y: Array, bias: Array | None, mid: Array | None, norm: Array | None = None
    ) -> None:
        of_activations, stage.item_bytes = stage.item_bytes, 4 if args.is_float_out else stage.item_bytes
        stage.view(args.y, "y", y, True)
        stage.item_bytes = of_activations
        stage.array(args, "bias", bias)
        stage.array(args, "norm_weight", norm)
        if mid is not None:
            stage.view(args.mid, "mid", mid, True)
            args.output = args.mid.width == 2 * args.y.width

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

    # ---- mixtures -------------------------------------------------------------------------------------------------------

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
        args.n_rows = self._stage_routes(stage, args, routes, True)
        n = stage.array(args, "logits", logits)
        if not args.n_rows or n % args.n_rows:
            raise ValueError("logits: wanted as many rows as routes")
        args.n_experts = args.logits_stride = n // args.n_rows
        if bias is not None and stage.array(args, "selection_bias", bias) != args.n_experts:
            raise ValueError("bias: wanted one for each expert")
        self._run(stage, "route", args)

    @staticmethod
    def _stage_routes(stage: Stage, args: Any, routes: Array, is_written: bool) -> int:
        """Their rows."""
        stage.array(args, "routes", routes, "i", is_written)
        if routes.ndim != 2 or routes.shape[1] < 2 or routes.shape[1] % 2:
            raise ValueError("routes: wanted a two-dimensional array of pairs")
        args.route_stride = args.n_chosen = routes.shape[1] // 2
        return int(routes.shape[0])

    def _stage_sum(self, stage: Stage, args: Any, a: Array, b: Array, sum: Array, weight: Array, out: Array) -> None:
        stage.view(args.a, "a", a)
        stage.view(args.b, "b", b)
        stage.view(args.sum, "sum", sum, True)
        stage.view(args.out, "out", out, True)
        stage.array(args, "weight", weight)
        args.n_rows = stage.n_rows

    def _need_fusion(self, name: str, what: str) -> None:
        if not self.fusions & header().enums[name]:
            raise NotImplementedError(f"this backend has no {what}")

    def norm_route(
        self, a: Array, b: Array, sum: Array, weight: Array, out: Array, eps: float, router: Matrix, router_bias: Array | None,
        logits: Array, routes: Array, score: int = 0, bias: Array | None = None, normalised: bool = False,
    ) -> None:  # fmt: skip
        """add_rms_norm, linear and route in one; writing the logits is optional."""
        self._need_fusion("FUSION_NORM_ROUTE", "fused norm and route")
        stage, args = Stage(self), struct("add_rms_norm_args", eps=eps)
        linear = struct("linear_args", matrix=router.address, is_float_out=True)
        route = struct("route_args", n_groups=1, chosen_groups=1, scale=1.0, score=score, is_normalised=normalised)
        self._stage_sum(stage, args, a, b, sum, weight, out)
        stage.array(linear, "bias", router_bias)
        n_experts = stage.array(linear.y, "data", logits, is_written=True) // (stage.n_rows or 1)
        route.n_rows = self._stage_routes(stage, route, routes, True)
        stage.array(route, "selection_bias", bias)
        linear.n_rows = args.n_rows
        linear.y.width = linear.y.stride = route.n_experts = route.logits_stride = n_experts

        def work() -> None:  # the device addresses are known only now
            linear.x, route.logits = args.out, linear.y.data
            args.router, args.route = ctypes.addressof(linear), ctypes.addressof(route)
            self.table.call("add_rms_norm", self.ctx, ctypes.addressof(args))

        stage.run(work)

    def norm_linear(
        self, a: Array, b: Array, sum: Array, weight: Array, out: Array, eps: float, matrix: Matrix, y: Array,
        bias: Array | None = None, mid: Array | None = None, act: int = 0,
    ) -> None:  # fmt: skip
        """add_rms_norm and linear in one; writing out is optional."""
        self._need_fusion("FUSION_ADD_NORM_LINEAR", "fused norm and linear")
        stage, args = Stage(self), struct("add_rms_norm_args", eps=eps)
        linear = struct("linear_args", matrix=matrix.address, act=act)
        self._stage_sum(stage, args, a, b, sum, weight, out)
        self._stage_linear(stage, linear, y, bias, mid)
        linear.n_rows, linear.output = args.n_rows, mid is not None

        def work() -> None:  # the device addresses are known only now
            linear.x, args.linear = args.out, ctypes.addressof(linear)
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
        if self._stage_routes(stage, args, routes, False) != args.n_rows:
            raise ValueError("routes: wanted as many rows as x")
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
        if self._stage_routes(stage, args, routes, False) != args.n_rows:
            raise ValueError("routes: wanted as many rows as results")
        self._run(stage, "combine", args)

    # ---- the cache and attention ----------------------------------------------------------------------------------------

    def kv_pool(
        self, n_pages: int, n_kv_heads: int, head_dim: int, dtype: str = "float32", block_tokens: int = 16, n_layers: int = 1,
        fill: int = 0xFF,
    ) -> Pool:  # fmt: skip
        """A pool with all bytes set to one value; 0xFF makes every element NaN."""
        number = dtype_number(dtype)
        layer_bytes = self.table.function("kv_layer_bytes")(self.ctx, n_kv_heads, head_dim, number, block_tokens)
        view = struct("kv_view", n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=number, page_bytes=layer_bytes * n_layers)
        if not view.page_bytes:
            raise ValueError(f"kv_pool: no pages of {dtype}")
        made = ctypes.c_void_p()
        if "pool_create" in self.table:
            use = header().enums["MEMORY_KV"]
            self.table.call("pool_create", self.ctx, use, n_pages * view.page_bytes, ctypes.addressof(made))
        else:
            made.value = self.new_buffer(n_pages * view.page_bytes)
        view.pool = made.value
        pool = Pool(self, view, n_pages, n_layers, block_tokens)
        page = np.full(view.page_bytes, fill, np.uint8)
        for i in range(n_pages):
            self.table.call("upload", self.ctx, view.pool + i * view.page_bytes, address(page), page.nbytes)
        return pool

    def kv_read(self, pool: Pool) -> bytes:
        """The bytes of all pages."""
        data = np.empty(pool.size_bytes, np.uint8)
        self.table.call("download", self.ctx, address(data), pool.view.pool, data.nbytes)
        return data.tobytes()

    def kv_write(self, pool: Pool, batch: Batch, table: Array, k: Array, v: Array, layer: int = 0) -> None:
        """Stores the keys and values of all rows."""
        stage, args = Stage(self), struct("kv_write_args")
        self._stage_write(stage, args, pool, batch, table, k, v, layer)
        self._run(stage, "kv_write", args)

    @staticmethod
    def _stage_write(
        stage: Stage, args: Any, pool: Pool, batch: Batch, table: Array, k: Array, v: Array, layer: int, writes_k: bool = False
    ) -> None:
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        stage.kv(args.kv, pool, table, layer, view)
        stage.view(args.k, "k", k, writes_k)
        stage.view(args.v, "v", v)

    def copy_pages(self, pool: Pool, copies: Array) -> None:
        """Copies pages; `copies` holds int32 pairs of a source and a target page."""
        listed = np.ascontiguousarray(copies, np.int32)
        args = struct("copy_pages_args", pool=pool.view.pool, page_bytes=pool.view.page_bytes, copies=address(listed),
                      n_copies=listed.size // 2)  # fmt: skip
        self._run(Stage(self), "copy_pages", args)

    def rope_table(self, positions: Array, inv_freq: Array, out: Array, magnitude: float = 1.0) -> None:
        """Writes cosines and sines, [rows, frequencies, 2]."""
        stage, args = Stage(self), struct("rope_table_args", magnitude=magnitude)
        args.n_rows = stage.array(args, "positions", positions, "i")
        args.n_freqs = stage.array(args, "inv_freq", inv_freq)
        if stage.array(args, "table", out, is_written=True) != 2 * args.n_rows * args.n_freqs:
            raise ValueError("out: wanted positions x inv_freq x 2 items")
        self._run(stage, "rope_table", args)

    def rope(self, table: Array, q: Array, k: Array, head_dim: int, interleaved: bool = False) -> None:
        """Rotates q and k in place."""
        stage, args = Stage(self), struct("rope_args", head_dim=head_dim, interleaved=interleaved)
        self._stage_rope(stage, args, table, q, k)
        self._run(stage, "rope", args)

    @staticmethod
    def _stage_rope(stage: Stage, args: Any, table: Array | None, q: Array, k: Array) -> None:
        stage.view(args.q, "q", q, True)
        stage.view(args.k, "k", k, True)
        args.n_rows = stage.n_rows
        n = stage.array(args, "table", table)
        args.n_freqs = n // 2 // args.n_rows if args.n_rows else 0
        if n != 2 * args.n_rows * args.n_freqs:
            raise ValueError("table: wanted rows x frequencies x 2 items")

    def _stage_heads(
        self, stage: Stage, args: Any, q: Array, k: Array, q_norm: Array | None, k_norm: Array | None, rope: Array | None,
        interleaved: bool,
    ) -> None:  # fmt: skip
        head_dim = args.write.kv.head_dim
        self._stage_rope(stage, args.rope, rope, q, k)
        args.norm_stride = head_dim if stage.array(args, "q_norm", q_norm) > head_dim else 0
        stage.array(args, "k_norm", k_norm)
        args.rope.head_dim, args.rope.interleaved = head_dim, interleaved

    def qkv(
        self, pool: Pool, batch: Batch, table: Array, q: Array, k: Array, v: Array, q_norm: Array | None = None,
        k_norm: Array | None = None, eps: float = 0.0, rope: Array | None = None, interleaved: bool = False, layer: int = 0,
    ) -> None:  # fmt: skip
        """Norms of q and k, rope and kv_write in one."""
        self.table.function("qkv")
        stage, args = Stage(self), struct("qkv_args", eps=eps)
        self._stage_write(stage, args.write, pool, batch, table, k, v, layer, writes_k=True)
        self._stage_heads(stage, args, q, k, q_norm, k_norm, rope, interleaved)
        self._run(stage, "qkv", args)

    def attention(
        self, pool: Pool, batch: Batch, table: Array, q: Array, out: Array, scale: float, window: int = 0, softcap: float = 0.0,
        layer: int = 0, slopes: Array | None = None, sinks: Array | None = None, chunk: int = 0, ends: Array | None = None,
        heads: tuple[Array, Array, Array | None, Array | None, Array | None, float, bool] | None = None,
    ) -> None:  # fmt: skip
        """Attention over the cache; `heads` (k, v, q_norm, k_norm, rope, eps, interleaved) makes it run qkv first.

        ends: visible_end of `struct attention_args`.
        """
        stage = Stage(self)
        args = struct("attention_args", scale=scale, window=window, softcap=softcap, chunk=chunk)
        joint = struct("qkv_args")
        if heads:
            self._need_fusion("FUSION_QKV_ATTENTION", "attention that does qkv")
            k, v, q_norm, k_norm, rope, joint.eps, interleaved = heads
            self._stage_write(stage, joint.write, pool, batch, table, k, v, layer, writes_k=True)
            self._stage_heads(stage, joint, q, k, q_norm, k_norm, rope, interleaved)
            args.heads = ctypes.addressof(joint)
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        stage.kv(args.kv, pool, table, layer, view)
        stage.view(args.q, "q", q)
        stage.view(args.out, "out", out, True)
        args.n_heads = args.q.width // args.kv.head_dim
        for name, value in (("slopes", slopes), ("sinks", sinks)):
            if stage.array(args, name, value) not in (0, args.n_heads):
                raise ValueError(f"{name}: wanted one number a head")
        if ends is not None:
            self._need_fusion("FUSION_VISIBLE_END", "attention whose rows see later ones")
            stage.array(args, "visible_end", ends, "i")
        self._run(stage, "attention", args)

    def latent_attention(
        self, pool: Pool, batch: Batch, table: Array, q: Array, q_rope: Array, latent: Array, rope_key: Array, out: Array,
        n_heads: int, scale: float, layer: int = 0,
    ) -> None:  # fmt: skip
        """Latent attention in the absorbed form; stores latents and rope keys first."""
        self.table.function("latent_attention")
        stage, args = Stage(self), struct("latent_attention_args", n_heads=n_heads, scale=scale)
        view = stage.batch(batch)
        args.batch = ctypes.addressof(view)
        stage.kv(args.kv, pool, table, layer, view)
        for name, value in (("q", q), ("q_rope", q_rope), ("latent", latent), ("rope_key", rope_key), ("out", out)):
            stage.view(getattr(args, name), name, value, name == "out")
        self._run(stage, "latent_attention", args)

    def row_attention(
        self, seq_first_row: Array, q: Array, k: Array, v: Array, out: Array, n_heads: int, n_kv_heads: int, scale: float
    ) -> None:
        """Attention over whole sequences, without a cache."""
        stage, batch = Stage(self), struct("batch_view", host_seq_first_row=address(seq_first_row))
        args = struct("row_attention_args", batch=ctypes.addressof(batch), n_heads=n_heads, n_kv_heads=n_kv_heads, scale=scale)
        for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
            stage.view(getattr(args, name), name, value, name == "out")
        batch.n_seqs = stage.array(batch, "seq_first_row", seq_first_row, "i") - 1
        batch.n_rows, args.head_dim = stage.n_rows, args.q.width // n_heads
        self._run(stage, "row_attention", args)

    def grid_attention(
        self,
        seq_first_row: Array,
        tables: Sequence[Array],
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        n_heads: int,
        scale: float,
    ) -> None:
        """Attention over squares; tables: lines, columns, rows and shares of `struct grid_attention_args`."""
        stage, batch = Stage(self), struct("batch_view", host_seq_first_row=address(seq_first_row))
        args = struct("grid_attention_args", batch=ctypes.addressof(batch), n_heads=n_heads, scale=scale)
        for name, value in (("q", q), ("k", k), ("v", v), ("out", out)):
            stage.view(getattr(args, name), name, value, name == "out")
        for name, value in zip(("lines", "columns", "rows", "shares"), tables, strict=True):
            n = stage.array(args, name, value, "i" if name == "rows" else "f")
        batch.n_seqs = stage.array(batch, "seq_first_row", seq_first_row, "i") - 1
        batch.n_rows, args.head_dim, args.side = stage.n_rows, args.q.width // n_heads, (n // 2 + 1) // 2
        self._run(stage, "grid_attention", args)

    # ---- recurrent mixers -----------------------------------------------------------------------------------------------

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

    # ---- weight updates from the caller's tensors -----------------------------------------------------------------------

    @staticmethod
    def _stage_place(stage: Stage, to: Any, place: Any, offset: float, is_written: bool) -> None:
        """Fills a struct tensor_place. A place is (matrix, part, first_row, n_rows, first_index, row_step, col_step), or a
        float32 array for a vector."""
        if isinstance(place, tuple):
            matrix, to.part, to.first_row, to.n_rows, to.first_index, to.row_step, to.col_step = place
            to.matrix = matrix.address
        else:
            to.n_values, to.offset, to.col_step = stage.array(to, "vector", place, is_written=is_written), offset, 1

    @staticmethod
    def _stage_tensor(stage: Stage, view: Any, data: Array, shape: tuple[int, ...], dtype: str, on_device: bool) -> int:
        """Fills a struct tensor_view. Device data of any type is passed as 4-byte items. Returns the byte offset of the first
        element."""
        first, view.n_rows, view.n_cols, view.row_stride, view.col_stride = shape
        view.dtype, view.is_host = dtype_number(dtype), not on_device
        if on_device:
            stage.array(view, "data", data, "i")
        else:
            view.data = address(data)
        return first * (4 if dtype == "float32" else 2)

    def tensor_write(
        self, place: Any, data: Array, shape: tuple[int, ...], dtype: str, on_device: bool = True, offset: float = 0.0
    ) -> None:
        """Writes a tensor to a place; `shape` is (first item, rows, columns, row stride, column stride)."""
        stage, args = Stage(self), struct("tensor_write_args")
        self._stage_place(stage, args.to, place, offset, True)
        first = self._stage_tensor(stage, getattr(args, "from"), data, shape, dtype, on_device)

        def work() -> None:
            self.table.call("synchronize", self.ctx)  # the write may run on another stream than the uploads
            getattr(args, "from").data += first
            self.table.call("tensor_write", self.ctx, ctypes.addressof(args))
            self.table.call("tensor_finish", self.ctx)

        stage.run(work)

    def tensor_sum(
        self, place: Any, data: Array | None = None, shape: tuple[int, ...] | None = None, dtype: str | None = None,
        on_device: bool = True, offset: float = 0.0,
    ) -> tuple[int, int]:  # fmt: skip
        """The checksum of a place and the number of its values that are not finite; with data: as after a write of data."""
        found, view = struct("tensor_sum"), struct("tensor_view")
        stage, args = Stage(self), struct("tensor_sum_args", result=ctypes.addressof(found))
        self._stage_place(stage, args.of, place, offset, False)
        first = 0 if data is None else self._stage_tensor(stage, view, data, shape or (), dtype or "", on_device)

        def work() -> None:
            self.table.call("synchronize", self.ctx)
            if data is not None:
                view.data += first
                setattr(args, "from", ctypes.addressof(view))
            self.table.call("tensor_sum", self.ctx, ctypes.addressof(args))

        stage.run(work)
        return found.sum, found.n_non_finite

    # ---- steps ----------------------------------------------------------------------------------------------------------

    def begin(
        self, slot: int, rows: tuple[Array, ...], tables: Array, runs: Array, to: tuple[Array, ...], to_tables: Array,
        n_pad_rows: int = 0, pad_row_seq: int = 0, row_adapters: Array | None = None, has_adapters: bool = False,
    ) -> None:  # fmt: skip
        """Uploads a batch. rows and to: token_ids, positions, row_seq, seq_first_row, logits_rows; runs: first, count, .."""
        self.table.function("begin")
        names = ("token_ids", "positions", "row_seq", "seq_first_row", "logits_rows")
        n_rows = len(rows[0])
        if len(rows[1]) != n_rows or len(rows[2]) != n_rows or not len(rows[3]):
            raise ValueError("rows: wanted as many positions and row_seq as token ids, and a seq_first_row")
        stage, args = Stage(self), struct(
            "begin_args", slot=slot, n_rows=n_rows, n_seqs=len(rows[3]) - 1, n_logits_rows=len(rows[4]), n_pad_rows=n_pad_rows,
            pad_row_seq=pad_row_seq, tables=address(tables), runs=address(runs), n_runs=runs.size // 2,
            has_adapters=has_adapters, row_adapters=0 if row_adapters is None else address(row_adapters),
            **{name: address(values) for name, values in zip(names, rows, strict=True)},
        )  # fmt: skip
        for name, values in zip(names, to, strict=True):
            if stage.array(args.to, name, values, "i", True) <= n_rows + n_pad_rows:
                raise ValueError("to: wanted one item more than there are rows")
        if stage.array(args.to, "tables", to_tables, "i", True) != tables.size:
            raise ValueError("to_tables: wanted as many entries as tables")
        if any(first + count > tables.size for first, count in runs.reshape(-1, 2)):
            raise ValueError("runs: wanted runs of entries")
        self._run(stage, "begin", args)

    def sample(
        self, logits: Array, tasks: Sequence[Mapping[str, Any]], vocab_limit: int = 0, banned: Array | None = None,
        slots: int = 1,
    ) -> list[tuple[Any, ...]]:  # fmt: skip
        """Draws tokens from float32 logits, or scores given tokens.

        Args:
            logits: [rows, vocab].
            tasks: Fields of struct sample_task, its lists as Python lists.
            vocab_limit: Ids >= vocab_limit are never sampled; 0: no limit.
            banned: int32 ids that are never sampled.
            slots: 1, or 2: each slot has half of the tasks, and both are in flight at once.

        Returns:
            (id, status, raw, full, processed, kept_mass, rank, [(id, value, rank), ...]) of each task.
        """
        kept: list[Any] = []
        made = (header().structs["sample_task"] * len(tasks))(*(self._task(task, kept) for task in tasks))
        n_top = 0
        for task in made:
            task.top_offset, n_top = n_top, n_top + task.n_top
        results = (header().structs["sample_result"] * len(tasks))()
        ids, values, ranks = np.zeros(n_top, np.int32), np.zeros(n_top, np.float32), np.zeros(n_top, np.int32)
        stage, view = Stage(self, 4), struct("view")
        stage.view(view, "logits", logits)
        args = struct(
            "sample_args", vocab_size=view.width, vocab_stride=view.stride, n_logits_rows=stage.n_rows,
            vocab_limit=vocab_limit or view.width, top_ids=address(ids), top_values=address(values), top_ranks=address(ranks),
            banned=None if banned is None else address(banned), n_banned=0 if banned is None else banned.size,
        )  # fmt: skip

        def work() -> None:
            args.logits = view.data
            copies = []
            for slot in range(slots):
                first, end = len(tasks) * slot // slots, len(tasks) * (slot + 1) // slots
                one = type(args).from_buffer_copy(args)
                one.slot, one.first_task, one.n_tasks = slot, first, end - first
                one.tasks = ctypes.addressof(made) + first * ctypes.sizeof(made) // max(len(tasks), 1)
                one.results = ctypes.addressof(results) + first * ctypes.sizeof(results) // max(len(tasks), 1)
                copies.append(one)
                self.table.call("sample", self.ctx, ctypes.addressof(one))
            for slot in range(slots if "sample_finish" in self.table else 0):
                self.table.call("sample_finish", self.ctx, slot)

        stage.run(work)
        tops = [range(task.top_offset, task.top_offset + task.n_top) for task in made]
        return [
            (r.id, r.status, r.raw, r.full, r.processed, r.kept_mass, r.rank,
             [(int(ids[i]), float(values[i]), int(ranks[i])) for i in top])
            for r, top in zip(results, tops, strict=True)
        ]  # fmt: skip

    @staticmethod
    def _task(given: Mapping[str, Any], kept: list[Any]) -> Any:
        """A struct sample_task; the arrays that it points to are appended to `kept`."""
        task = struct("sample_task", temperature=1.0, top_p=1.0, repetition_penalty=1.0)
        kinds = {"bias": "token_bias", "seen": "token_seen"}
        for name, value in given.items():
            if name in kinds:
                items = (header().structs[kinds[name]] * len(value))(*value)
            elif name in ("banned", "allowed", "mask"):
                items = (ctypes.c_uint32 * len(value))(*(item & 0xFFFFFFFF for item in value))
            else:
                setattr(task, name, value)
                continue
            kept.append(items)
            setattr(task, name, ctypes.addressof(items) if len(value) else None)
            if name != "mask":
                setattr(task, f"n_{name}", len(value))
        return task


def _text(text: str) -> bytes:
    return text.encode()
