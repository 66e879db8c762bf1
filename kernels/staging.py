"""Copies NumPy arrays to device buffers, calls a backend's function and copies the results back; binding uses it.

The same tests therefore run on every device. Arrays that overlap in host memory share one device buffer. So operations in place
work, and a write outside an array reaches the guard bytes around it. Addresses keep their alignment modulo 64.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from header import Header
from llmpy import _core, errors

if TYPE_CHECKING:
    from binding.opened import Opened

Array = Any
"""Anything that NumPy can use as an array without a copy."""
Batch = tuple[Array, Array, Array]
State = tuple[Array, Array, int, int]
"""Pool [pages, floats per page], table [n_seqs, entries], first entry, units per page."""
ERRORS = {
    "RC_MEMORY": MemoryError, "RC_INVALID": errors.InvalidRequestError, "RC_CONFIG": errors.ConfigError,
    "RC_UNSUPPORTED": errors.UnsupportedError, "RC_DEVICE": errors.DeviceError, "RC_DEVICE_MEMORY": errors.DeviceMemoryError,
}  # fmt: skip


@cache
def header() -> Header:
    """backend.h, parsed once."""
    return Header()


def struct(name: str, **fields: Any) -> Any:
    """A structure of backend.h with the given fields set; a field of None stays zero."""
    return header().structs[name](**{key: value for key, value in fields.items() if value is not None})


def dtype_number(name: str) -> int:
    """The enum dtype of a checkpoint's type name, such as "bfloat16"; DTYPE_NONE if unknown."""
    enums, whole = header().enums, name.upper()
    short = whole.replace("BFLOAT", "BF").replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")
    return enums.get(f"DTYPE_{whole}", enums.get(f"DTYPE_{short}", enums["DTYPE_NONE"]))


def address(array: Array) -> int:
    """The address of a NumPy array's first item."""
    return int(np.asarray(array).__array_interface__["data"][0])


def as_bytes(data: Array) -> np.ndarray:
    """An array made contiguous, or a bytes object as an array of uint8."""
    if isinstance(data, np.ndarray):
        return data if data.flags.c_contiguous else np.ascontiguousarray(data)
    return np.frombuffer(data, np.uint8)


class Table:
    """The functions of one backend, or of a group of them. A failed call raises the exception of its enum rc (ERRORS).

    Args:
        address: Address of the table.
        name: Name of its structure.
    """

    def __init__(self, address: int, name: str = "backend") -> None:
        self._table, self._name = header().structs[name].from_address(address), name

    def group(self, name: str) -> Table:
        """A group of functions, such as "comm"."""
        if name not in self:
            raise NotImplementedError(f"this backend has no {name}")
        return Table(getattr(self._table, name), name)

    def __contains__(self, name: str) -> bool:
        return bool(getattr(self._table, name))

    def function(self, name: str) -> Any:
        """A function that cannot fail."""
        if name not in self:
            raise NotImplementedError(f"this backend has no {name}")
        return header().functions[self._name, name](getattr(self._table, name))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns an enum rc and has a struct err as its last parameter."""
        err = struct("err")
        if self.function(name)(*arguments, ctypes.addressof(err)):
            number = {value: key for key, value in header().enums.items() if key.startswith("RC_")}[err.rc]
            error = ERRORS.get(number, RuntimeError)(err.message.decode(errors="replace"))
            error.code = err.code
            raise error


class Matrix:
    """A matrix of a backend. The object keeps the backend open."""

    def __init__(self, backend: Opened, number: int) -> None:
        self.backend, self.address = backend, number

    def __del__(self) -> None:
        if self.backend.ctx:  # garbage collection may have closed it first
            self.backend.table.function("matrix_destroy")(self.backend.ctx, self.address)


class Pool:
    """Pages of keys and values on a backend. The object keeps the backend open."""

    def __init__(self, backend: Opened, view: Any, n_pages: int, n_layers: int, block_tokens: int) -> None:
        self.backend, self.view, self.n_layers, self.block_tokens = backend, view, n_layers, block_tokens
        self.size_bytes = n_pages * view.page_bytes

    def __del__(self) -> None:
        if self.backend.ctx:
            self.backend.table.function("buffer_destroy")(self.backend.ctx, self.view.pool, self.size_bytes)


class Stage:
    """The arrays of one call: uploads them, runs the call, downloads what the call wrote.

    Args:
        backend: The backend.
        item_bytes: Bytes of an element of a view; None: bytes of an activation.
    """

    def __init__(self, backend: Opened, item_bytes: int | None = None) -> None:
        self.backend, self.item_bytes = backend, item_bytes or backend.item_bytes
        self.n_rows: int | None = None
        self._ranges: list[tuple[int, int, bool]] = []  # host bytes [low, high); true if the call writes them
        self._targets: list[tuple[Any, str, int]] = []  # structure and field of a pointer, and its host address
        self._kept: list[Any] = []

    def _join(self, low: int, high: int, is_written: bool) -> None:
        for other in [one for one in self._ranges if one[0] < high and one[1] > low]:
            self._ranges.remove(other)
            low, high, is_written = min(low, other[0]), max(high, other[1]), is_written or other[2]
        self._ranges.append((low, high, is_written))

    def _take(self, to: Any, field: str, array: np.ndarray, n_bytes: int, is_written: bool) -> None:
        if is_written and not array.flags.writeable:
            raise ValueError(f"{field}: wanted an array that can be written")
        self._kept.append(array)
        self._join(address(array), address(array) + n_bytes, is_written)
        self._targets.append((to, field, address(array)))

    def array(self, to: Any, field: str, value: Array | None, kind: str = "f", is_written: bool = False) -> int:
        """Binds a contiguous float32 ("f"), int32 ("i") or uint8 ("B") array to a pointer of a structure; None leaves it NULL.

        Returns:
            The number of items.
        """
        if value is None:
            return 0
        array = np.asarray(value)
        if array.dtype.char != kind or not array.flags.c_contiguous:
            raise ValueError(f"{field}: wanted a contiguous {np.dtype(kind)} array")
        self._take(to, field, array, array.nbytes, is_written)
        return array.size

    def any_view(self, view: Any, name: str, value: Array, is_written: bool = False) -> int:
        """Binds a two-dimensional array to a struct view; returns the number of rows."""
        array, item = np.asarray(value), self.item_bytes
        is_type = array.dtype.char == "f" if item == 4 else array.dtype.itemsize == item
        if not is_type or array.ndim != 2 or not self._has_rows(array, item):
            raise ValueError(f"{name}: wanted a two-dimensional array of the backend's activations with contiguous rows")
        n_rows, view.width = array.shape
        view.stride = array.strides[0] // item if n_rows > 1 else view.width
        n_items = (n_rows - 1) * view.stride + view.width if n_rows else 0
        self._take(view, "data", array, n_items * item, is_written)
        return n_rows

    @staticmethod
    def _has_rows(array: np.ndarray, item: int) -> bool:
        apart, beside = array.strides
        is_apart = array.shape[0] <= 1 or (apart % item == 0 and apart >= array.shape[1] * item)
        return is_apart and (beside == item or array.shape[1] <= 1)

    def view(self, view: Any, name: str, value: Array, is_written: bool = False) -> None:
        """Like `any_view`, but all arrays bound by `view` must have equally many rows."""
        n_rows = self.any_view(view, name, value, is_written)
        if self.n_rows not in (None, n_rows):
            raise ValueError(f"{name}: wanted as many rows as the other arrays")
        self.n_rows = n_rows

    def batch(self, batch: Batch) -> Any:
        """A struct batch_view of positions, row_seq and seq_first_row."""
        positions, row_seq, first = batch
        view = struct("batch_view")
        view.n_rows = self.n_rows = self.array(view, "positions", positions, "i")
        if self.array(view, "row_seq", row_seq, "i") != view.n_rows:
            raise ValueError("row_seq: wanted as many items as positions")
        view.n_seqs = self.array(view, "seq_first_row", first, "i") - 1
        view.host_seq_first_row = address(first)
        return view

    def kv(self, to: Any, pool: Pool, table: Array, layer: int, batch: Any) -> None:
        """Fills a struct kv_view for one layer of a pool, with its page table."""
        ctypes.pointer(to)[0] = pool.view
        to.layer_offset = layer * (pool.view.page_bytes // pool.n_layers)
        batch.block_tokens = pool.block_tokens
        n = self.array(to, "table", table, "i")
        to.table_stride = n // batch.n_seqs if batch.n_seqs else 0
        if layer >= pool.n_layers or n != to.table_stride * batch.n_seqs:
            raise ValueError("table: wanted one row a sequence, and a layer of the pool")

    def state(self, to: Any, state: State, n_units: int, unit_floats: int) -> None:
        """Fills a struct state_view."""
        pool, table, to.first_entry, to.units_per_page = state
        self.array(to, "pool", pool, is_written=True)
        self.array(to, "table", table, "i")
        to.page_bytes, to.table_stride = pool.shape[1] * 4, table.shape[1]
        to.n_units, to.unit_bytes = n_units, unit_floats * 4
        n_pages = -(-n_units // to.units_per_page)
        if to.units_per_page * to.unit_bytes > to.page_bytes or to.first_entry + n_pages > to.table_stride:
            raise ValueError("state: wanted pages with room for their units, and a table with room for the pages")

    def run(self, work: Callable[[], None]) -> None:
        """Uploads all arrays, times the work, and downloads the arrays that it writes."""
        table, ctx = self.backend.table, self.backend.ctx
        made: list[tuple[int, int, int, bool, int]] = []  # buffer; device and host address of its bytes; is written; size
        try:
            for low, high, is_written in self._ranges:
                buffer = self.backend.new_buffer(high - low + 64)
                made.append((buffer, buffer + low % 64, low, is_written, high - low))
                table.call("upload", ctx, buffer + low % 64, low, high - low)
            for to, field, host in self._targets:
                there, here = next((there, low) for _, there, low, _, n in made if host == low or low < host < low + n)
                setattr(to, field, there + host - here)
            self._timed(work)
            for _, there, low, is_written, n in made:
                if is_written:
                    table.call("download", ctx, low, there, n)
        finally:
            for buffer, _, _, _, n in made:
                table.function("buffer_destroy")(ctx, buffer, n + 64)

    def _timed(self, work: Callable[[], None]) -> None:
        allocations, begin = _core.allocation_count(), time.perf_counter()
        work()
        self.backend.table.call("synchronize", self.backend.ctx)
        self.backend.seconds = time.perf_counter() - begin
        self.backend.allocations = _core.allocation_count() - allocations
