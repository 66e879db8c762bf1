"""Weight updates from the caller's tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from staging import Array, Stage, address, dtype_number, struct

from .opened import Opened


class WeightUpdates(Opened):
    """Writes and checksums of weights."""

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
