"""Time of the CUDA backend's linears, bfloat16, beside cuBLASLt's own choice of algorithms (through torch, if it is installed).

    python benchmarks/cuda_linear.py [--models 8b,0.6b] [--rows 1,8,...] [--no-torch] [--no-library]
        [--fp8 SCALES | --int8 SCALES | --w4 GROUP | --gguf TYPE] [--out DIR]

Each shape has several copies of random weights, together far larger than the L2 cache, that take turns in a CUDA graph. A graph
of few rows has at least 64 launches, so that its start does not count. The backend is used through its C ABI
(kernels/backend.h). A line has the microseconds of a call, TB/s of weights, TFLOP/s, and the time over cuBLASLt's. gate_up*
also computes the gated product. The totals use it instead of gate_up, but cuBLASLt's gate_up.

--fp8: weights in FP8 with a scale for every row ("rows") or 128 rows ("blocks") and 128 columns, bfloat16 activations that the
backend rounds to FP8 (a launch before each linear, which the times include), beside cuBLASLt's times in bfloat16; without the
head. A line has the share of the 4.55 TB/s that an H200 reads. --out writes results.csv. --int8: the same with INT8.

--w4: 4-bit weights in groups of 128 or 32 columns, bfloat16 activations as they are, otherwise the same. --gguf: weights of a
type of GGUF likewise. With LLMPY_CUDA_KERNELS=portable an H200 runs the portable kernels, and rows of results.csv begin with
"portable.".
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import statistics
import sys
import time
from collections.abc import Iterable
from ctypes import addressof, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from llmpy import _core, devices, environment, hardware

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
    "8b-half": [("qkv", 3072, 4096, 32), ("o", 2048, 4096, 32), ("gate_up*", 14336, 4096, 32), ("down", 2048, 14336, 32),
                ("head", 64128, 4096, 1)],
    "0.6b": [("qkv", 4096, 1024, 28), ("o", 1024, 2048, 28), ("gate_up", 6144, 1024, 0), ("gate_up*", 6144, 1024, 28),
             ("down", 1024, 3072, 28),
             ("head", 151936, 1024, 1)],
}  # fmt: skip
ROWS = (1, 8, 32, 64, 128, 256, 1024, 8192)
COLD_BYTES, HEAD_ROWS = 400 << 20, 256
PRODUCT = 1  # enum linear_output
LINEAR, LOGITS = 1, 16  # enum matrix_use
BF16, FP8, INT8, INT4 = 30, 66, 69, {128: 67, 32: 68}  # csrc/base/dtype.h
FP8_ROWS = (1, 8, 32, 64, 128, 1024, 4096)
W4_ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
EIGHT_BITS = ("fp8_rows", "fp8_blocks", "int8_rows", "int8_blocks")
# type; values and bytes of a block
GGUF = {"q4_0": (2, 32, 18), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144), "q6_k": (14, 256, 210)}
HALVES = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}  # where a block has float16 numbers
BYTES = dict.fromkeys(EIGHT_BITS, 132 / 128) | {"w4_128": 68 / 128, "w4_32": 20 / 32}  # of a weight
BYTES |= {f"gguf_{name}": size / values for name, (_, values, size) in GGUF.items()}
READ_TBS = 4.55


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

    def matrix_of(self, dtype: int, n: int, k: int, rows: np.ndarray, use: int = LINEAR, n_experts: int = 0) -> c_void_p:
        """A matrix of n rows of a type, given as bytes; fewer rows are repeated."""
        made = c_void_p()
        part = STRUCTS["matrix_part"](n, dtype)
        self("matrix_create", byref(STRUCTS["matrix_desc"](addressof(part), 1, k, use, 0, n_experts)), byref(made))
        for first in range(0, n, len(rows)):
            count = min(len(rows), n - first)
            self("matrix_write", made, c_uint32(0), c_uint32(first), c_uint32(count), rows.ctypes.data_as(c_void_p))
        return made

    def seconds(self, graph: c_void_p, launches: int) -> float:
        """Seconds of this number of launches, one after the other."""
        self("synchronize")
        start = time.perf_counter()
        for _ in range(launches):
            self("graph_launch", graph)
        self("synchronize")
        return time.perf_counter() - start


def fp8_rows(n: int, k: int, scales: str) -> np.ndarray:
    """Rows of random FP8 blocks, near normal, as a file has them."""
    rng = np.random.default_rng(n + k)
    blocks = np.zeros((n, k // 128, 132), np.uint8)
    values = rng.uniform(1e-4, 4e-4, (n if scales == "rows" else n // 128, k // 128, 1)).astype(np.float32)
    blocks[:, :, :4] = values.repeat(n // len(values), 0).view(np.uint8)
    blocks[:, :, 4:] = _normal_bytes(rng)[rng.integers(0, 4096, (n, k // 128, 128), np.uint16)]
    return blocks


def int8_rows(n: int, k: int, scales: str) -> np.ndarray:
    """Rows of random INT8 blocks, normal, as a file has them."""
    blocks, rng = fp8_rows(n, k, scales), np.random.default_rng(n + k)
    normal = np.clip(np.rint(32 * rng.standard_normal(4096)), -127, 127).astype(np.int8).view(np.uint8)
    blocks[:, :, 4:] = normal[rng.integers(0, 4096, (n, k // 128, 128), np.uint16)]
    return blocks


def int4_rows(n: int, k: int, group: int) -> np.ndarray:
    """Rows of random blocks of int4 as a file has them, with random zeros."""
    rng = np.random.default_rng(n + k)
    blocks = rng.integers(0, 256, (n, k // group, 4 + group // 2), np.uint8)
    scales = rng.uniform(1e-3, 3e-3, (n, k // group, 1)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFF00)
    blocks[:, :, :4] = (scales | rng.integers(0, 16, scales.shape, np.uint32)).view(np.uint8)
    return blocks


def gguf_rows(n: int, k: int, name: str) -> np.ndarray:
    """Rows of random blocks of a type of GGUF."""
    _, values, size = GGUF[name]
    rng = np.random.default_rng(n + k)
    blocks: np.ndarray = rng.integers(0, 256, (n, k // values, size), np.uint8)
    for at in HALVES[name]:
        blocks[:, :, at : at + 2] = rng.uniform(1e-4, 3e-4, (n, k // values, 1)).astype(np.float16).view(np.uint8)
    return blocks


def stored_rows(form: str, n: int, k: int) -> tuple[int, np.ndarray]:
    """(type, random rows) of a form: a key of BYTES."""
    kind, _, which = form.partition("_")
    if kind == "gguf":
        return GGUF[which][0], gguf_rows(n, k, which)
    if kind == "int8":
        return INT8, int8_rows(n, k, which)
    return (FP8, fp8_rows(n, k, which)) if kind == "fp8" else (INT4[int(which)], int4_rows(n, k, int(which)))


def _normal_bytes(rng: np.random.Generator) -> np.ndarray:
    """4,096 normal values of standard deviation 64 in e4m3."""
    values = np.clip(64 * rng.standard_normal(4096), -400, 400)
    exponents = np.clip(np.floor(np.log2(np.abs(values))), -6, 8)
    fractions = np.clip(np.round((np.abs(values) / 2**exponents - 1) * 8), 0, 7)
    return ((exponents + 7) * 8 + fractions + np.where(values < 0, 128, 0)).astype(np.uint8)


def turns(n_copies: int, rows: int) -> int:
    """How often all copies take their turn in a graph."""
    return -(-64 // n_copies) if rows <= 256 else 1


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

    def copies(self, name: str, n: int, k: int, form: str) -> list[c_void_p]:
        """Equal matrices, together larger than the cache."""
        if form:
            dtype, stored = stored_rows(form, n, k)
            count = min(64, max(4, COLD_BYTES // stored.nbytes))
            return [self.backend.matrix_of(dtype, n, k, stored) for _ in range(count)]
        count = min(64, max(4, COLD_BYTES // (2 * n * k)))
        use = LINEAR | (LOGITS if name == "head" else 0)
        return [self.backend.matrix(n, k, 2 + i, use) for i in range(count)]

    def time(self, name: str, n: int, k: int, rows: list[int], form: str = "") -> dict[int, float]:
        """Seconds of a call for each number of rows. form: of quantised weights."""
        copies = self.copies(name, n, k, form)
        self.backend("prepare")
        found = {}
        for m in rows:
            graph = c_void_p()
            self.backend("graph_begin")
            for matrix in copies * turns(len(copies), m):
                self.backend("linear", byref(self.args(name, matrix, n, k, m)))
            self.backend("graph_end", byref(graph))
            run = self.backend.seconds
            run(graph, 1)
            taken = [run(graph, 4) - run(graph, 1) for _ in range(5)]
            found[m] = statistics.median(taken) / 3 / len(copies) / turns(len(copies), m)
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
            for w in copies * turns(len(copies), m):
                torch.mm(x, w.t(), out=y)
        taken = []
        for _ in range(5):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last) * 1e-3 / len(copies) / turns(len(copies), m))
        found[m] = statistics.median(taken[1:])
        del graph
    del copies
    torch.cuda.empty_cache()
    return found


def measure_form(models: list[str], rows: list[int], with_torch: bool, form: str) -> Iterable[tuple[str, float]]:
    """Prints a line per shape and number of rows. Yields (row of results.csv, microseconds), totals of a step's layers last."""
    for model in models:
        bench = Bench(max(rows), 0, "")
        totals = {m: (0.0, 0.0) for m in rows}
        shapes = [shape for shape in MODELS[model] if shape[0] != "head"]
        for name, n, k, launches in shapes:
            ours, theirs = bench.time(name, n, k, rows, form), time_cublas(n, k, rows) if with_torch else {}
            for m in rows:
                a, b, n_bytes = ours[m], theirs.get(m, float("nan")), n * k * BYTES[form]
                totals[m] = (totals[m][0] + launches * a, totals[m][1] + launches * b)
                print(
                    f"{model:5}{name:8} {n:6} x {k:5} rows {m:4}: {1e6 * a:8.2f} us {n_bytes / a / READ_TBS * 1e-10:5.1f} % of "
                    f"{READ_TBS} TB/s {2e-12 * n * k * m / a:7.1f} TFLOP/s {a / b:6.2f}x bfloat16",
                    flush=True,
                )
                yield f"linear.{form}.{model}.{name.replace('*', '.product')}.{m}", 1e6 * a
        bench.close()
        for m in rows:
            a, b = totals[m]
            print(f"{model:5}linears of all layers, rows {m:4}: {1e3 * a:8.3f} ms, bfloat16 {1e3 * b:8.3f} ms, {a / b:.3f}x")
            yield f"linear.{form}.{model}.layers.{m}", 1e6 * a


def write_results(out: Path, commit: str, option: str, found: Iterable[tuple[str, float]]) -> None:
    """Writes the lines of results.csv as benchmarks/results_h200.csv has them."""
    name, command, first = devices()[1]["name"], f"benchmarks/cuda_linear.py {option}".rstrip(), ""
    if environment.forces_portable_kernels():
        command, first = f"LLMPY_CUDA_KERNELS=portable {command}", "portable."
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["device", "date", "commit", "command", "row", "value", "unit", "must", "aim"])
        for row, us in found:
            writer.writerow([name, time.strftime("%Y-%m-%d"), commit, command, first + row, f"{us:.2f}", "us", "", ""])


Totals = dict[str, dict[int, tuple[float, float]]]


def measure(models: list[str], rows: list[int], with_torch: bool, library: str, found: list[tuple[str, float]]) -> Totals:
    """Prints a line per shape and number of rows, and appends (row of results.csv, microseconds) to `found`. Returns (our,
    cuBLASLt's) seconds of a step's linears by model."""
    totals: Totals = {}
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
                found.append((f"linear.bfloat16.{model}.{name.replace('*', '.product')}.{m}", 1e6 * a))
        bench.close()
        for m in rows:
            a, b = total[m]
            print(f"{model:5}all linears of a step, rows {m:4}: {1e3 * a:8.3f} ms, cuBLASLt {1e3 * b:8.3f} ms, {a / b:.3f}x")
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,0.6b")
    parser.add_argument("--rows", default="")
    parser.add_argument("--fp8", default="", choices=("rows", "blocks"), help="FP8 weights and activations")
    parser.add_argument("--int8", default="", choices=("rows", "blocks"), help="INT8 weights and activations")
    parser.add_argument("--w4", type=int, default=0, choices=(128, 32), help="4-bit weights in groups")
    parser.add_argument("--gguf", default="", choices=GGUF, help="weights of a type of GGUF")
    parser.add_argument("--out", type=Path, help="a directory for results.csv")
    parser.add_argument("--commit", default="", help="the commit under test")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-library", action="store_true", help="our own kernels alone")
    args = parser.parse_args()
    forms = [f"{kind}_{which}" for kind in ("fp8", "int8", "w4", "gguf") if (which := getattr(args, kind))]
    default = ROWS if not forms else W4_ROWS if args.w4 or args.gguf else FP8_ROWS
    rows = [int(m) for m in args.rows.split(",") if m] or [*default]
    if forms:
        found = [*measure_form(args.models.split(","), rows, not args.no_torch, forms[0])]
    else:
        library = "" if args.no_library else hardware.cublaslt_library()
        found = []
        measure(args.models.split(","), rows, not args.no_torch, library, found)
    if args.out:
        write_results(args.out, args.commit, "--" + forms[0].replace("_", " ", 1) if forms else "", found)


if __name__ == "__main__":
    main()
