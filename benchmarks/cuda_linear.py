"""Time of the CUDA backend's linears, bfloat16, beside cuBLASLt's own choice of algorithms (through torch, if it is installed).

    python benchmarks/cuda_linear.py [--models 8b,0.6b] [--rows 1,8,...] [--no-torch] [--no-library]

Each shape has several copies of random weights, together far larger than the L2 cache, that take turns in a CUDA graph. The
backend is used through its C ABI (kernels/backend.h). A line has the microseconds of a call, TB/s of weights, TFLOP/s, and the
time over cuBLASLt's. gate_up* also computes the gated product. The totals use it instead of gate_up, but cuBLASLt's gate_up.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from ctypes import addressof, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from llmpy import _core, hardware

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from header import Header

STRUCTS = Header().structs
"""Structures of kernels/backend.h."""
View = STRUCTS["view"]

# (name, rows of the weight, columns, launches of it in a step)
MODELS = {
    "8b": [("qkv", 6144, 4096, 32), ("o", 4096, 4096, 32), ("gate_up", 28672, 4096, 0), ("gate_up*", 28672, 4096, 32),
           ("down", 4096, 14336, 32),
           ("head", 128256, 4096, 1)],
    "0.6b": [("qkv", 4096, 1024, 28), ("o", 1024, 2048, 28), ("gate_up", 6144, 1024, 0), ("gate_up*", 6144, 1024, 28),
             ("down", 1024, 3072, 28),
             ("head", 151936, 1024, 1)],
}  # fmt: skip
ROWS = (1, 8, 32, 64, 128, 256, 1024, 8192)
COLD_BYTES, HEAD_ROWS = 400 << 20, 256
PRODUCT = 1  # enum linear_output
LINEAR, LOGITS = 1, 16  # enum matrix_use
BF16 = 30  # csrc/base/dtype.h


class Backend:
    """The backend's functions by the names of its header; a failed call raises an error with its message."""

    def __init__(self, max_rows: int, vocab_size: int, library: str, attention: tuple[int, int, int] = (0, 0, 0)) -> None:
        """attention: max_model_len, max_group and max_head_dim of the options."""
        self.table = STRUCTS["backend"].from_address(_core.backend_table("cuda:0", hardware.cuda_library()))
        self.ctx, self.err = c_void_p(), STRUCTS["err"]()
        limits = dict(zip(("max_model_len", "max_group", "max_head_dim"), attention, strict=True))
        options = STRUCTS["backend_options"](
            device=b"cuda:0", isa=b"", max_rows=max_rows, max_logits_rows=HEAD_ROWS, max_cols=16384, vocab_size=vocab_size,
            dtype=BF16, cublaslt=library.encode(), **limits,
        )  # fmt: skip
        self.check(self.function("open")(byref(options), byref(self.ctx), byref(self.err)))

    def function(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(c_int)(getattr(self.table, name) or 0)

    def description(self) -> str:
        function = self.function("describe")
        function.restype = c_char_p
        return str(function(self.ctx).decode())

    def check(self, rc: int) -> None:
        if rc:
            raise RuntimeError(self.err.message.decode())

    def __call__(self, name: str, *args: Any) -> None:
        self.check(self.function(name)(self.ctx, *args, byref(self.err)))

    def buffer(self, n_bytes: int) -> c_void_p:
        made = c_void_p()
        self("buffer_create", c_size_t(n_bytes), byref(made))
        return made

    def matrix(self, n: int, k: int, key: int, use: int = 1, dtype: int = BF16) -> c_void_p:
        made = c_void_p()
        part = STRUCTS["matrix_part"](n, dtype)
        self("matrix_create", byref(STRUCTS["matrix_desc"](addressof(part), 1, k, use, 0)), byref(made))
        self("matrix_fill", made, c_uint32(0), byref(STRUCTS["row_run"](0, n, 0, 1)), ctypes.c_uint64(key))
        return made

    def seconds(self, graph: c_void_p, launches: int) -> float:
        """Seconds of this number of launches, one after the other."""
        self("synchronize")
        start = time.perf_counter()
        for _ in range(launches):
            self("graph_launch", graph)
        self("synchronize")
        return time.perf_counter() - start


class Bench:
    """A backend with buffers for the widest rows."""

    def __init__(self, max_rows: int, vocab_size: int, library: str) -> None:
        self.backend = Backend(max_rows, vocab_size, library)
        rng = np.random.default_rng(0)
        host = (rng.standard_normal(max_rows * 14336).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.x = self.backend.buffer(host.nbytes)
        self.backend("upload", self.x, host.ctypes.data_as(c_void_p), c_size_t(host.nbytes))
        self.y = self.backend.buffer(4 * max(max_rows * 28672, HEAD_ROWS * 151936))
        self.mid = self.backend.buffer(2 * max_rows * 28672)

    def close(self) -> None:
        print(self.backend.description())
        self.backend.function("close")(self.backend.ctx)

    def args(self, name: str, matrix: c_void_p, n: int, k: int, rows: int) -> Any:
        x, y = View(self.x, k, k), View(self.y, n, n)
        args = STRUCTS["linear_args"](matrix=matrix, n_rows=rows, x=x, y=y, is_float_out=name == "head")
        if name.endswith("*"):
            args.output, args.y, args.mid = PRODUCT, View(self.y, n // 2, n // 2), View(self.mid, n, n)
        return args

    def time(self, name: str, n: int, k: int, rows: list[int]) -> dict[int, float]:
        """Seconds of a call for each number of rows."""
        use = LINEAR | (LOGITS if name == "head" else 0)
        copies = [self.backend.matrix(n, k, 2 + i, use) for i in range(min(64, max(4, COLD_BYTES // (2 * n * k))))]
        self.backend("prepare")
        found = {}
        for m in rows:
            graph = c_void_p()
            self.backend("graph_begin")
            for matrix in copies:
                self.backend("linear", byref(self.args(name, matrix, n, k, m)))
            self.backend("graph_end", byref(graph))
            run = self.backend.seconds
            run(graph, 1)
            taken = [run(graph, 4) - run(graph, 1) for _ in range(5)]
            found[m] = statistics.median(taken) / 3 / len(copies)
            self.backend.function("graph_destroy")(self.backend.ctx, graph)
        for matrix in copies:
            self.backend.function("matrix_destroy")(self.backend.ctx, matrix)
        return found


def time_cublas(n: int, k: int, rows: list[int]) -> dict[int, float]:
    """The same by torch with cuBLASLt, which uses the first choice of its heuristics; {} without torch."""
    try:
        import torch
    except ImportError:
        return {}
    torch.backends.cuda.preferred_blas_library("cublaslt")
    copies = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(max(4, COLD_BYTES // (2 * n * k)))]
    found = {}
    for m in rows:
        x, y = (torch.randn(m, size, dtype=torch.bfloat16, device="cuda") for size in (k, n))
        for w in copies[:2]:
            torch.mm(x, w.t(), out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for w in copies:
                torch.mm(x, w.t(), out=y)
        taken = []
        for _ in range(5):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last) * 1e-3 / len(copies))
        found[m] = statistics.median(taken[1:])
        del graph
    del copies
    torch.cuda.empty_cache()
    return found


def measure(models: list[str], rows: list[int], with_torch: bool, library: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Prints a line per shape and number of rows. Returns (our, cuBLASLt's) seconds of a step's linears by model."""
    totals: dict[str, dict[int, tuple[float, float]]] = {}
    for model in models:
        bench = Bench(max(rows), max(n for _, n, _, _ in MODELS[model]), library)
        total = totals[model] = {m: (0.0, 0.0) for m in rows}
        for name, n, k, launches in MODELS[model]:
            counts = [m for m in rows if name != "head" or m <= HEAD_ROWS]
            ours, theirs = bench.time(name, n, k, counts), time_cublas(n, k, counts) if with_torch else {}
            for m in counts:
                a, b = ours[m], theirs.get(m, float("nan"))
                total[m] = (total[m][0] + launches * a, total[m][1] + launches * b)
                print(
                    f"{model:5}{name:8} {n:6} x {k:5} rows {m:4}: {1e6 * a:8.2f} us {2e-12 * n * k / a:6.2f} TB/s "
                    f"{2e-12 * n * k * m / a:6.1f} TFLOP/s {a / b:6.2f}x",
                    flush=True,
                )
        bench.close()
        for m in rows:
            a, b = total[m]
            print(f"{model:5}all linears of a step, rows {m:4}: {1e3 * a:8.3f} ms, cuBLASLt {1e3 * b:8.3f} ms, {a / b:.3f}x")
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,0.6b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-library", action="store_true", help="our own kernels alone")
    args = parser.parse_args()
    measure(
        args.models.split(","),
        [int(m) for m in args.rows.split(",")],
        not args.no_torch,
        "" if args.no_library else hardware.cublaslt_library(),
    )


if __name__ == "__main__":
    main()
