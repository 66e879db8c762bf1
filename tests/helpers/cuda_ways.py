"""The tables of ways.cuh on a device, by two functions that the library exports for tests."""

import ctypes
from collections.abc import Callable

import numpy as np

from binding import Backend
from llmpy import hardware

Array = np.ndarray
TABLES = ("linear", "experts", "experts_linear", "attention", "gather")  # enum way_table


def is_portable(backend: Backend) -> bool:
    """Does the device run the code for compute_80?"""
    return "portable kernels" in backend.description


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
        self.is_portable = is_portable(backend)
        self.names: list[str] = []
        while name := library.llmpy_cuda_way(self.number, len(self.names)):
            self.names.append(name.decode())
        devices = [library.llmpy_cuda_way_devices(self.number, row) for row in range(len(self.names))]
        self.here = [name for name, on in zip(self.names, devices, strict=True) if on & (2 if self.is_portable else 1)]
        self.reached: set[str] = set()

    def put_first(self, row: int) -> list[str]:
        """Puts a row first, counted from 1, or with 0 none. Returns the rows that ran since the last call."""
        found = self.library.llmpy_cuda_put_first(self.backend.ctx, self.number, row)
        return [name for i, name in enumerate(self.names) if found >> i & 1]

    def check(self, call: Callable[[], Array], wanted: list[str], inner: str = "") -> None:
        """Checks that of the wanted rows those run a problem whose kernels the device has, with equal bits.

        Args:
            call: The problem.
            wanted: Rows of all devices, in the table's order.
            inner: Rows that also run where rows of sm_90a are missing.
        """
        found, here = self.takers(call), [name for name in wanted if name in self.here]
        assert {*found} == {*here, *inner.split()} if self.is_portable else found == here

    def unreached(self) -> set[str]:
        """Rows of the device that no problem has reached."""
        return {*self.here} - self.reached

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
