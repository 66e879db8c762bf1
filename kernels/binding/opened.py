"""An opened backend: its matrices and its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmpy import _core
from staging import Array, Matrix, Stage, Table, address, as_bytes, dtype_number, header, struct

F32, LINEAR = 0, 1  # enum dtype, enum matrix_use


class Opened:
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

    def _need_fusion(self, name: str, what: str) -> None:
        if not self.fusions & header().enums[name]:
            raise NotImplementedError(f"this backend has no {what}")


def _text(text: str) -> bytes:
    return text.encode()
