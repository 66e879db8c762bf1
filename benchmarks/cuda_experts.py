"""Time of the CUDA backend's mixtures of experts (route, then experts), bfloat16 weights or quantised ones, through its C ABI
(kernels/backend.h).

    python benchmarks/cuda_experts.py [--models qwen3-30b,gpt-oss-20b] [--rows 1,8,...] [--profile]

A CUDA graph of dependent launches over two layers of random weights and routes by random logits that differ from call to call,
so that hardly any weight is still in the L2 cache when it is read; the median of several rounds. A line has the microseconds
of a call of both operations, and the bound's share of that time. The bound is the bytes of the experts that have rows at the
read bandwidth of an H200 (4.55 TB/s), or the operations at 790 TFLOP/s. --profile prints the kernels of torch's profiler.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass

import numpy as np
from cuda_linear import BF16, BYTES, STRUCTS, Backend, View, stored_rows

READ, MATMUL = 4.55e12, 790e12
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS, CALLS = 2, 16
LINEAR, EXPERTS = 1, 4  # enum matrix_use
GATED, CLAMPED = 0, 1  # enum expert_form
MXFP4 = 39  # csrc/base/dtype.h


@dataclass(frozen=True)
class Shape:
    """A model's mixture."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    form: int = GATED
    dtype: int = BF16
    stored: str = ""  # or quantised rows, a form of cuda_linear.py

    @property
    def weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def weight_bytes(self) -> float:
        return self.weights * (BYTES[self.stored] if self.stored else 17 / 32 if self.dtype == MXFP4 else 2)


MODELS = {
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "qwen3-30b-fp8": Shape(128, 8, 2048, 768, stored="fp8_blocks"),
    "qwen3-30b-int8": Shape(128, 8, 2048, 768, stored="int8_rows"),
    "qwen3-30b-w4": Shape(128, 8, 2048, 768, stored="w4_128"),
    "qwen3-30b-w4-32": Shape(128, 8, 2048, 768, stored="w4_32"),
    "qwen3-30b-q8_0": Shape(128, 8, 2048, 768, stored="gguf_q8_0"),
    "qwen3-30b-q4_k": Shape(128, 8, 2048, 768, stored="gguf_q4_k"),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, CLAMPED, MXFP4),
    "gpt-oss-20b-bf16": Shape(32, 4, 2880, 2880, CLAMPED),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
}


class Bench:
    """Layers of one model on the device, with rows for the largest batch."""

    def __init__(self, backend: Backend, shape: Shape, max_rows: int) -> None:
        self.backend, self.shape, self.rng = backend, shape, np.random.default_rng(1)
        s = shape
        self.layers = [
            (self.matrix(2 * s.inner, s.hidden, 2 * i), self.matrix(s.hidden, s.inner, 2 * i + 1)) for i in range(LAYERS)
        ]
        self.x = self.give(self.rng.standard_normal(max_rows * s.hidden).astype(np.float32).view(np.uint16)[1::2])
        self.y = backend.buffer(2 * max_rows * s.hidden)
        self.width = s.chosen * 4 * max(s.hidden, s.inner) + 2 * s.experts + 16
        self.scratch = backend.buffer(2 * max_rows * self.width)
        self.routes = backend.buffer(8 * max_rows * s.chosen)
        biases = [self.give(np.ones((s.experts, n), np.float32)) for n in (2 * s.inner, s.hidden)]
        self.biases = biases if s.form == CLAMPED else [c_void_p(), c_void_p()]

    def matrix(self, rows: int, cols: int, key: int) -> c_void_p:
        """Weights of all experts, `rows` each. Of quantised ones eight experts are random, the others repeat them."""
        s = self.shape
        if not s.stored:
            return self.backend.matrix(s.experts * rows, cols, key, LINEAR | EXPERTS, s.dtype)
        dtype, values = stored_rows(s.stored, min(s.experts, 8) * rows, cols)
        return self.backend.matrix_of(dtype, s.experts * rows, cols, values, LINEAR | EXPERTS, s.experts)

    def give(self, host: np.ndarray) -> c_void_p:
        host = np.ascontiguousarray(host)
        made = self.backend.buffer(host.nbytes)
        self.backend("upload", made, host.ctypes.data_as(c_void_p), c_size_t(host.nbytes))
        self.backend("synchronize")
        return made

    def graph(self, rows: int, calls: int) -> tuple[c_void_p, float]:
        """(a graph of `calls` mixtures, experts that have rows in one of them)."""
        s, graph, wanted = self.shape, c_void_p(), []
        logits = []
        for _ in range(calls):
            values = self.rng.standard_normal((rows, s.experts)).astype(np.float32)
            wanted.append(len(np.unique(np.argsort(-values, 1)[:, : s.chosen])))
            logits.append(self.give(values))
        self.backend("graph_begin")
        for values, (up, down) in zip(logits, itertools.cycle(self.layers), strict=False):
            route = STRUCTS["route_args"](
                rows, s.experts, s.chosen, 0, 1, 1, False, True, 0.0, 1.0, values, s.experts, None, self.routes, s.chosen
            )
            experts = STRUCTS["experts_args"](
                rows, s.experts, s.chosen, s.form, 0, 7.0, False, up, down, *self.biases, self.routes, s.chosen,
                View(self.x, s.hidden, s.hidden), View(self.y, s.hidden, s.hidden),
                View(self.scratch, self.width, self.width),
            )  # fmt: skip
            self.backend("route", byref(route))
            self.backend("experts", byref(experts))
        self.backend("graph_end", byref(graph))
        return graph, float(np.mean(wanted))

    def time(self, rows: int) -> tuple[float, float]:
        """(seconds of a mixture, seconds of its bound)."""
        s, calls = self.shape, CALLS if rows <= 512 else 2
        graph, wanted = self.graph(rows, calls)
        self.backend.seconds(graph, 1)
        taken = statistics.median(self.backend.seconds(graph, 3) - self.backend.seconds(graph, 1) for _ in range(5)) / 2 / calls
        self.backend.function("graph_destroy")(self.backend.ctx, graph)
        return taken, max(wanted * s.weight_bytes / READ, 2 * rows * s.chosen * s.weights / MATMUL)

    def profile(self, rows: int) -> None:
        import torch
        from cuda import print_kernels  # benchmarks/cuda.py
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        torch.cuda.init()
        graph, _ = self.graph(rows, 4)
        self.backend.seconds(graph, 2)
        with record(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
            self.backend.seconds(graph, 2)
        recorded.export_chrome_trace("/tmp/trace.json")
        import json

        print(f"{rows} rows, by kernel, a mixture")
        with open("/tmp/trace.json") as file:
            print_kernels(json.load(file)["traceEvents"], 8)
        self.backend.function("graph_destroy")(self.backend.ctx, graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b,gpt-oss-20b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    for name in args.models.split(","):
        backend = Backend(max(rows), 1024, "")
        bench = Bench(backend, MODELS[name], max(rows))
        for n in rows:
            if args.profile:
                bench.profile(n)
                continue
            taken, floor = bench.time(n)
            flops = 2 * n * bench.shape.chosen * bench.shape.weights / taken
            print(
                f"{name:14} rows {n:5}: {1e6 * taken:9.2f} us  floor {1e6 * floor:9.2f} us  {100 * floor / taken:5.1f} %  "
                f"{flops / 1e12:6.1f} TFLOP/s",
                flush=True,
            )
        backend.function("close")(backend.ctx)


if __name__ == "__main__":
    main()
