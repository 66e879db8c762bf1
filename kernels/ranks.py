"""Contexts of one backend that run one model together: `Ranks` calls the functions of struct comm (backend.h) by ctypes.

Memory is given by address, so the caller decides where it lies. Each rank calls `meet` and `gather` from a thread of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from binding import Backend
from staging import struct

ARENA, LOGITS = 0, 1  # enum comm_memory
COLUMNS, ROWS, ROUTES, TO_FIRST, TO_OWNERS = range(5)  # enum gather_kind


def view(data: int, width: int, stride: int) -> Any:
    """A struct view of memory at an address."""
    return struct("view", data=data, width=width, stride=stride)


class Ranks:
    """Connected backends, in the order of their ranks.

    Args:
        backends: The backends.
        timeout_s: Seconds that a rank waits for another one.
        first_meeting: Number from which meetings are counted.
    """

    def __init__(self, backends: Sequence[Backend], timeout_s: float = 30.0, first_meeting: int = 0) -> None:
        self.backends, self.table, self._is_open = list(backends), backends[0].table.group("comm"), False
        self._ctxs = (ctypes.c_void_p * len(backends))(*(backend.ctx for backend in backends))
        options = struct("comm_options", timeout_seconds=timeout_s, first_meeting=first_meeting)
        self.table.call("open", ctypes.addressof(self._ctxs), len(self.backends), ctypes.addressof(options))
        self._is_open = True

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects the backends; no rank may be in a meeting."""
        if self._is_open:
            self._is_open = False
            self.table.function("close")(ctypes.addressof(self._ctxs), len(self.backends))

    def share(self, purpose: int, memory: Sequence[int], size_bytes: int) -> None:
        """Tells all ranks the addresses of all ranks' buffers of one purpose."""
        addresses = (ctypes.c_void_p * len(memory))(*memory)
        self.table.call("share", ctypes.addressof(self._ctxs), len(memory), purpose, ctypes.addressof(addresses), size_bytes)

    def meet(self, rank: int, slot: int = 0, n_tasks: int = 0, first_task: int = 0) -> None:
        """Opens a step on a rank, which brings the ids that it drew for n_tasks tasks of a slot."""
        args = struct("meet_args", slot=slot, n_tasks=n_tasks, first_task=first_task)
        self.table.call("meet", self.backends[rank].ctx, ctypes.addressof(args))

    def gather(self, rank: int, kind: int, n_rows: int, whole: Any, **fields: Any) -> None:
        """A gather on a rank; views are those of `view`, arrays are addresses, norm and combine are structs of that name."""
        norm, combine = fields.pop("norm", None), fields.pop("combine", None)
        args = struct("gather_args", kind=kind, n_rows=n_rows, whole=whole, **fields)
        if norm is not None:
            args.norm = ctypes.addressof(norm)
        if combine is not None:
            args.combine = ctypes.addressof(combine)
        self.table.call("gather", self.backends[rank].ctx, ctypes.addressof(args))

    def check(self, rank: int) -> None:
        """Raises the first failure of a rank's waits."""
        self.table.call("check", self.backends[rank].ctx)

    def abort(self) -> None:
        """Ends all waits of all ranks."""
        self.table.function("abort")(ctypes.addressof(self._ctxs), len(self.backends))
