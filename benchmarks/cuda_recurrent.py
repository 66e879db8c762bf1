"""Time of the CUDA backend's recurrent operations, bfloat16, at sizes of known models, through its C ABI (kernels/backend.h).

    python benchmarks/cuda_recurrent.py [--only "ssm 32"]

A CUDA graph of dependent launches works on the states of several layers, more than the L2 cache holds, in turns; the result is
the median of several rounds. A line has the microseconds of a call, and the bound's share of that time. The bound is the bytes
of states and rows at the copy bandwidth of an H200 (3.94 TB/s), or for prompts the operations on the state at 128 lanes, 132
processors and 1.755 GHz.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from ctypes import Structure, byref, c_size_t, c_void_p

import numpy as np
from cuda_attention import random_halves
from cuda_linear import STRUCTS, Backend, View

Array = np.ndarray
COPY, LANES, COLD_BYTES, PAGE = 3.94e12, 128 * 132 * 1.755e9, 400 << 20, 1 << 18
# name: operation, units, floats of a unit, columns of x, columns of the state's inputs, operations of a state value and token
SHAPES = {
    "plamo-2-1b": ("ssm", 32, 128 * 64, 4096, 64, 3),
    "mamba-2 8b": ("ssm", 128, 64 * 128, 8192, 8 * 128, 3),
    "mamba 2.8b": ("selective_scan", 5120, 16, 5120, 16, 12),
    "qwen3-next": ("delta", 32, 128 * 128, 4096, 16 * 128, 4),
    "conv 4096": ("conv", 4096, 3, 4096, 0, 1),
}
ROWS = [(1, 1), (8, 1), (32, 1), (256, 1), (1, 128), (1, 8192), (8, 1024)]


class Case:
    """Calls of one shape for n_seqs sequences of n_rows rows, on the states of some layers."""

    def __init__(self, backend: Backend, shape: tuple[str, int, int, int, int, int], n_seqs: int, n_rows: int) -> None:
        self.backend, self.buffers = backend, list[tuple[c_void_p, int]]()
        self.name, units, floats, self.width, self.inputs, _ = shape
        self.rows, per_page = n_seqs * n_rows, PAGE // (4 * floats)
        entries = -(-units // per_page)
        layers = max(1, min(64, -(-COLD_BYTES // (n_seqs * units * floats * 4)))) if n_rows == 1 else 2
        order = np.random.default_rng(1).permutation(n_seqs * layers * entries).astype(np.int32).reshape(n_seqs, -1)
        pool, table = self.give(np.zeros(order.size * PAGE, np.uint8)), self.give(order)
        first = np.arange(n_seqs + 1, dtype=np.int32) * n_rows
        self.first = first
        positions = np.tile(np.arange(5, 5 + n_rows, dtype=np.int32), n_seqs)
        self.batch = STRUCTS["batch_view"](
            self.rows, n_seqs, None, self.give(positions), self.give(np.repeat(np.arange(n_seqs, dtype=np.int32), n_rows)),
            self.give(first), 16, first.ctypes.data, False,
        )  # fmt: skip
        view, rest = STRUCTS["state_view"], (units, 4 * floats, per_page)
        states = [view(pool, PAGE, table, order.shape[1], i * entries, *rest) for i in range(layers)]
        n_vectors = max(4 * self.width, self.width * 16 if self.name == "selective_scan" else 0)
        self.vector = self.give(np.random.default_rng(2).uniform(-1, 1, n_vectors).astype(np.float32))
        self.calls = [self.call(state, units) for state in states]

    def give(self, host: Array) -> c_void_p:
        made = self.backend.buffer(host.nbytes)
        self.backend("upload", made, host.ctypes.data_as(c_void_p), c_size_t(host.nbytes))
        self.backend("synchronize")
        self.buffers.append((made, host.nbytes))
        return made

    def view(self, width: int) -> View:
        return View(self.give(random_halves(self.rows * width, len(self.buffers))), width, width)

    def call(self, state: Structure, units: int) -> Structure:
        batch, v, wide = ctypes.addressof(self.batch), self.vector, self.view(self.width)
        out, args = self.view(self.width), STRUCTS[f"{self.name}_args"]
        if self.name == "conv":
            return args(batch, state, 4, v, v, True, 0, wide, out)
        b, c = self.view(self.inputs), self.view(self.inputs)
        if self.name == "delta":
            decays = self.view(units), self.view(units)
            return args(batch, state, units, self.inputs // 128, 128, 128, v, v, b, c, wide, *decays, out)
        if self.name == "selective_scan":
            return args(batch, state, self.inputs, v, v, v, wide, self.view(self.width), b, c, out, self.view(self.width))
        groups = max(1, self.inputs // 128)
        sizes = units, self.width // units, groups, self.inputs // groups
        return args(batch, state, *sizes, v, v, v, 0, 1e30, wide, self.view(units), b, c, out, self.view(self.width))

    def seconds(self) -> float:
        n = len(self.calls) * max(1, 64 // len(self.calls)) if self.rows <= 256 else 2
        graph = c_void_p()
        self.backend("graph_begin")
        for i in range(n):
            self.backend(self.name, byref(self.calls[i % len(self.calls)]))
        self.backend("graph_end", byref(graph))
        found = []
        for _ in range(7):
            self.backend("synchronize")
            start = time.perf_counter()
            for _ in range(3):
                self.backend("graph_launch", graph)
            self.backend("synchronize")
            found.append((time.perf_counter() - start) / 3 / n)
        self.backend.function("graph_destroy")(self.backend.ctx, graph)
        return statistics.median(found)

    def close(self) -> None:
        for buffer, n_bytes in self.buffers:
            self.backend.function("buffer_destroy")(self.backend.ctx, buffer, c_size_t(n_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    backend = Backend(8192, 1024, "")
    for shape_name, shape in SHAPES.items():
        for n_seqs, n_rows in ROWS:
            name = f"{shape_name} {n_seqs} x {n_rows}"
            if args.only not in name:
                continue
            case = Case(backend, shape, n_seqs, n_rows)
            seconds = case.seconds()
            _, units, floats, width, inputs, operations = shape
            n_bytes = n_seqs * units * floats * 8 + case.rows * (2 * width + 2 * inputs) * 2
            floor = max(n_bytes / COPY, case.rows * units * floats * operations / LANES)
            print(f"{name:28} {1e6 * seconds:10.2f} us  {100 * floor / seconds:5.1f} %", flush=True)
            case.close()


if __name__ == "__main__":
    main()
