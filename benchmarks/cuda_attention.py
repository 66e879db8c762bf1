"""Time of the CUDA backend's attention and of its fused qkv operation through its C ABI (kernels/backend.h): bfloat16, with
pages of bfloat16, e4m3 or int8.

    python benchmarks/cuda_attention.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--block 16]
                                        [--pages fp8 | int8] [--layers N] [--only "256 x 256"]
                                        [decode | step | prefill | qkv ...]

A CUDA graph of dependent launches of the operation (step: decode that also does the work of qkv) works on random keys and
values of several layers, more than the L2 cache holds, in turns; the result is the median of several rounds. A line has the
microseconds of a call, and the bound's share of that time. The bound is the bytes of keys and values at the read bandwidth of
an H200 (4.55 TB/s), or the operations of visible pairs at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Sequence
from ctypes import Structure, byref, c_size_t, c_void_p
from dataclasses import dataclass, field

import numpy as np
from cuda_linear import BF16, FP8, STRUCTS, Backend, View

Array = np.ndarray
I8 = 24  # csrc/base/dtype.h
READ, MATMUL, COLD_BYTES = 4.55e12, 790e12, 400 << 20
DECODE = [(1, 128), (1, 256), (1, 384), (1, 1024), (1, 8192), (1, 32768), (8, 256), (8, 1024), (32, 128), (32, 256), (32, 384),
          (64, 1024), (128, 384), (256, 256), (256, 1536)]  # fmt: skip
PREFILL = [(16, 16), (32, 32), (128, 128), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (2048, 32768)]
VALUE_BYTES = {"bfloat16": lambda dim: 2 * dim, "fp8": lambda dim: dim, "int8": lambda dim: dim + 4}  # of a head's key
QKV = [1, 8, 64, 256, 1024, 8192]


def random_halves(n: int, seed: int) -> Array:
    """n bfloat16 values of variance 1, as integers; a block of 8 M values repeats."""
    block = np.random.default_rng(seed).standard_normal(min(n, 1 << 23), np.float32)
    return np.resize((block.view(np.uint32) >> 16).astype(np.uint16), n)


@dataclass
class Case:
    """A step's batch: sequences whose last n_rows tokens of `length` are its rows, and the cache of some layers."""

    backend: Backend
    n_seqs: int
    n_rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    layers: int
    pages: str = "bfloat16"
    buffers: list[tuple[c_void_p, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pages = -(-self.length // self.block)
        layer = 2 * self.kv_heads * self.block * VALUE_BYTES[self.pages](self.head_dim)
        used = self.n_seqs * pages * layer
        self.layers = self.layers or max(1, min(64, -(-COLD_BYTES // used)))
        n_pages = self.n_seqs * pages + 1
        values = random_halves(n_pages * layer // 2, 1)
        if self.pages == "fp8":
            values &= 0xBFBF  # e4m3 from -2 to 2
        elif self.pages == "int8":
            values = (values & 0xBEBE) | 0x3000  # as scales: up to 0.2
        pool = self.give(values, self.layers)
        table = np.random.default_rng(2).permutation(n_pages - 1).astype(np.int32) + 1
        positions = np.tile(np.arange(self.length - self.n_rows, self.length, dtype=np.int32), self.n_seqs)
        self.first = np.arange(self.n_seqs + 1, dtype=np.int32) * self.n_rows
        self.rows = len(positions)
        self.batch = STRUCTS["batch_view"](
            self.rows, self.n_seqs, None, self.give(positions), self.give(np.repeat(np.arange(self.n_seqs), self.n_rows)),
            self.give(self.first), self.block, self.first.ctypes.data, False,
        )  # fmt: skip
        on_device = self.give(table)
        dtype = {"fp8": FP8, "int8": I8, "bfloat16": BF16}[self.pages]
        self.kv = [
            STRUCTS["kv_view"](pool, layer * self.layers, i * layer, on_device, pages, self.kv_heads, self.head_dim, dtype)
            for i in range(self.layers)
        ]
        self.width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.x = self.give(random_halves(self.rows * self.width, 3))
        self.out = self.give(random_halves(self.rows * self.heads * self.head_dim, 4))

    def give(self, host: Array, times: int = 1) -> c_void_p:
        """A buffer of the device with the array, repeated; indices as int32."""
        host = np.ascontiguousarray(host.astype(np.int32) if host.dtype == np.int64 else host)
        made = self.backend.buffer(host.nbytes * times)
        for i in range(times):
            at = c_void_p((made.value or 0) + i * host.nbytes)
            self.backend("upload", at, host.ctypes.data_as(c_void_p), c_size_t(host.nbytes))
        self.backend("synchronize")
        self.buffers.append((made, host.nbytes * times))
        return made

    def close(self) -> None:
        for buffer, n_bytes in self.buffers:
            self.backend.function("buffer_destroy")(self.backend.ctx, buffer, c_size_t(n_bytes))

    def view(self, first_head: int, n_heads: int) -> View:
        """Heads of the joint rows q | k | v."""
        address = (self.x.value or 0) + 2 * first_head * self.head_dim
        return View(address, n_heads * self.head_dim, self.width)

    def attention(self, heads: Sequence[Structure] = ()) -> list[Structure]:
        """heads: for every layer, the work that qkv would do first."""
        q, out = self.view(0, self.heads), View(self.out, self.heads * self.head_dim, self.heads * self.head_dim)
        scale = float(self.head_dim) ** -0.5
        args, batch = STRUCTS["attention_args"], ctypes.addressof(self.batch)
        calls = [args(batch, kv, self.heads, 0, scale, 0.0, q, out) for kv in self.kv]
        self.joint = heads  # the calls store only addresses, so this keeps the structures alive
        for call, its in zip(calls, heads, strict=bool(heads)):
            call.heads = ctypes.addressof(its)
        return calls

    def qkv(self) -> list[Structure]:
        table = self.give(np.random.default_rng(5).uniform(-1, 1, self.rows * self.head_dim).astype(np.float32))
        norm = self.give(np.ones(self.head_dim, np.float32))
        q, k = self.view(0, self.heads), self.view(self.heads, self.kv_heads)
        v = self.view(self.heads + self.kv_heads, self.kv_heads)
        rope = STRUCTS["rope_args"](self.rows, self.head_dim // 2, self.head_dim, False, table, q, k)
        writes = [STRUCTS["kv_write_args"](ctypes.addressof(self.batch), kv, k, v) for kv in self.kv]
        return [STRUCTS["qkv_args"](norm, norm, 1e-6, rope, write) for write in writes]

    def seconds(self, **calls: list[Structure]) -> float:
        """Seconds of one call of each operation: the median of 7 rounds of a graph of up to 256 such turns."""
        turns = list(zip(*calls.values(), strict=True))
        n, estimate = len(turns), self.rounds(list(calls), turns, 1)
        while n * estimate < 1e-3 and n < 256:
            n += len(turns)
        more = [turns[i % len(turns)] for i in range(n)]
        return statistics.median(self.rounds(list(calls), more, 3) for _ in range(7))

    def rounds(self, operations: list[str], turns: list[tuple[Structure, ...]], n: int) -> float:
        graph = c_void_p()
        self.backend("graph_begin")
        for turn in turns:
            for operation, call in zip(operations, turn, strict=True):
                self.backend(operation, byref(call))
        self.backend("graph_end", byref(graph))
        self.backend("graph_launch", graph)
        self.backend("synchronize")
        start = time.perf_counter()
        for _ in range(n):
            self.backend("graph_launch", graph)
        self.backend("synchronize")
        taken = time.perf_counter() - start
        self.backend.function("graph_destroy")(self.backend.ctx, graph)
        return taken / n / len(turns)


def measure(backend: Backend, what: str, args: argparse.Namespace) -> list[tuple[str, float, float]]:
    """(name, seconds of a call, seconds of its bound) of every case of decode, prefill or qkv."""
    sizes = (args.heads, args.kv_heads, args.head_dim, args.block, args.layers, args.pages)
    found = []
    cases = {"decode": [(n, 1, length) for n, length in DECODE], "prefill": [(1, n, length) for n, length in PREFILL],
             "step": [(n, 1, length) for n, length in DECODE], "qkv": [(1, n, n) for n in QKV]}[what]  # fmt: skip
    for n_seqs, n_rows, length in cases:
        name = {"qkv": f"{n_rows} rows", "prefill": f"{n_rows} rows up to {length}"}.get(what, f"{n_seqs} x {length}")
        if args.only not in name:
            continue
        case = Case(backend, n_seqs, n_rows, length, *sizes)
        token_bytes = 2 * VALUE_BYTES[args.pages](case.head_dim) * case.kv_heads
        if what == "qkv":
            floor = 4 * case.rows * case.width / READ
            taken = case.seconds(qkv=case.qkv())
        else:
            pairs = n_seqs * sum(range(length - n_rows + 1, length + 1))
            floor = max(n_seqs * length * token_bytes / READ, 4 * pairs * case.heads * case.head_dim / MATMUL)
            if what == "step":
                taken = case.seconds(attention=case.attention(case.qkv()))
            else:
                taken = case.seconds(attention=case.attention())
        case.close()
        found.append((f"{what} {name}", taken, floor))
        print(f"{what} {name:24} {taken * 1e6:9.2f} us  {100 * floor / taken:5.1f} %", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["decode", "step", "prefill", "qkv"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--pages", choices=list(VALUE_BYTES), default="bfloat16")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    backend = Backend(8192, 1024, "")
    for what in args.what:
        measure(backend, what, args)


if __name__ == "__main__":
    main()
