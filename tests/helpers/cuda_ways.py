"""The tables of ways.cuh on a device, by two functions that the library exports for tests."""

import ctypes
from collections.abc import Callable

import numpy as np

from binding import Backend
from llmpy import hardware

Array = np.ndarray
TABLES = ("linear", "experts", "experts_linear", "attention", "gather")  # enum way_table


class Ways:
    """One table of an opened backend.

    Args:
        backend: The backend, on a CUDA device.
        table: One of TABLES.
    """

    def __init__(self, backend: Backend, table: str) -> None:
        library = ctypes.CDLL(hardware.cuda_library())
        library.llmpy_cuda_way.restype = ctypes.c_char_p
        library.llmpy_cuda_put_first.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32]
        self.library, self.backend, self.number = library, backend, TABLES.index(table)
        self.names: list[str] = []
        while name := library.llmpy_cuda_way(self.number, len(self.names)):
            self.names.append(name.decode())
        self.reached: set[str] = set()

    def put_first(self, row: int) -> list[str]:
        """Puts a row first, counted from 1, or with 0 none. Returns the rows that ran since the last call."""
        found = self.library.llmpy_cuda_put_first(self.backend.ctx, self.number, row)
        return [name for i, name in enumerate(self.names) if found >> i & 1]

    def takers(self, call: Callable[[], Array]) -> list[str]:
        """Names of the rows that run a problem, the chosen ones first; all have given the same bits."""
        self.put_first(0)
        expected = call()
        found = self.put_first(0)
        self.reached |= {*found}
        for row, name in enumerate(self.names, 1):
            self.put_first(row)
            got = call()
            if name in self.put_first(0):
                assert got.tobytes() == expected.tobytes(), name
                found += [] if name in found else [name]
        return found
