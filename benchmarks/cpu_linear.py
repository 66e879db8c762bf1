"""Linears of a model of Qwen3-0.6B's shape on the CPU: weight types x rows, against the machine's own peaks.

    python benchmarks/cpu_linear.py [--isa avx2] [--types bfloat16,q8_0] [--rows 1,8,32,512] [--layers 28]

Each figure is the median of the repetitions. The peaks are measured just before and after every repetition. One
step multiplies the four linears of each layer and the head (for up to 64 rows; then the head of one row), with random
weights of finite bits, different in every layer. "tok/s" is rows per second of whole steps.
"""

import argparse
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from cpu import Peaks

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from binding import Backend

SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
HEAD = (151936, 1024)
MAX_HEAD_ROWS = 64
HEADER = 0x3B800008
"""The scale of a block of FP8 or of a group, 2^-8; at 4 bits its lowest byte is the zero, 8."""
# bytes and values of a block, offsets of its float16 scales
BLOCKS: dict[str, tuple[int, int, list[int]]] = {
    "float32": (4, 1, []), "float16": (2, 1, []), "bfloat16": (2, 1, []), "q8_0": (34, 32, [0]), "q4_0": (18, 32, [0]),
    "q4_1": (20, 32, [0, 2]), "q5_0": (22, 32, [0]), "q5_1": (24, 32, [0, 2]), "q2_k": (84, 256, [80, 82]),
    "q3_k": (110, 256, [108]), "q4_k": (144, 256, [0, 2]), "q5_k": (176, 256, [0, 2]), "q6_k": (210, 256, [208]),
    "iq4_nl": (18, 32, [0]), "iq4_xs": (136, 256, [0]), "iq3_xxs": (98, 256, [0]), "iq3_s": (110, 256, [0]),
    "iq2_xxs": (66, 256, [0]), "iq2_xs": (74, 256, [0]), "iq2_s": (82, 256, [0]), "iq1_s": (50, 256, [0]),
    "tq1_0": (54, 256, [52]), "tq2_0": (66, 256, [64]), "mxfp4": (17, 32, []),
    "fp8": (132, 128, []), "int4_g128": (68, 128, []), "int4_g32": (20, 32, []), "int8_g128": (132, 128, []),
    "int8_g32": (36, 32, []),
}  # fmt: skip


def random_rows(dtype: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Weights of any bits whose values are finite and small."""
    n_bytes, n_values, scales = BLOCKS[dtype]
    if dtype == "float32":
        return rng.standard_normal((rows, cols), np.float32) * np.float32(0.02)
    if n_values == 1:
        return rng.integers(0x2000, 0x2800, (rows, cols), dtype=np.uint16)
    raw = rng.integers(0, 256, (rows, cols // n_values, n_bytes), dtype=np.uint8)
    for offset in scales:
        raw[:, :, offset : offset + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if dtype == "mxfp4":
        raw[:, :, 0] = 120
    elif not scales:
        raw[:, :, :4] = np.frombuffer(np.uint32(HEADER).tobytes(), np.uint8)
        raw[:, :, 4:] &= 0x77  # FP8 without NaN
    return raw


class Weights:
    """One type's matrices on the backend."""

    def __init__(self, backend: Backend, dtype: str, arithmetic: int, layers: int) -> None:
        rng = np.random.default_rng(0)
        self.backend = backend
        self.linears = []
        for _ in range(layers):
            for n, k in SHAPES:
                parts = [(dtype, n, random_rows(dtype, n, k, rng))]
                self.linears.append((backend.matrix(parts, k, 1, arithmetic), n, k))
        piece = random_rows(dtype, HEAD[0] // 8, HEAD[1], rng)
        self.head = (backend.matrix([(dtype, len(piece), piece)] * 8, HEAD[1], 1, arithmetic), *HEAD)
        self.bytes = sum(backend.matrix_info(matrix, 0)[0] for matrix, _, _ in [*self.linears, self.head])

    def step(self, rows: int, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """(seconds, operations) of one step."""
        seconds = operations = 0.0
        head_rows = rows if rows <= MAX_HEAD_ROWS else 1
        for (matrix, n, k), m in [*((linear, rows) for linear in self.linears), (self.head, head_rows)]:
            self.backend.linear(matrix, x[: m * k].reshape(m, k), y[: m * n].reshape(m, n))
            seconds += self.backend.seconds
            operations += 2.0 * m * n * k
        return seconds, operations


def measure(weights: Weights, rows: int, repeats: int, peaks: Peaks, x: np.ndarray, y: np.ndarray) -> str:
    """One line of the table, after its label."""
    weights.step(min(rows, 8), x, y)
    marks, steps = [(peaks.read(), peaks.multiply())], []
    for _ in range(repeats):
        steps.append(weights.step(rows, x, y))
        marks.append((peaks.read(), peaks.multiply()))
    rates = [(weights.bytes / seconds / 1e9, operations / seconds / 1e9) for seconds, operations in steps]
    near = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in pairwise(marks)]
    read, flops = (statistics.median(rate[i] for rate in rates) for i in (0, 1))
    shares = [[100 * rate[i] / peak[i] for rate, peak in zip(rates, near, strict=True)] for i in (0, 1)]
    of_read, of_peak = (statistics.median(share) for share in shares)
    speed = statistics.median(rows / seconds for seconds, _ in steps)
    return f"{rows:5d} {speed:9.1f} {read:7.2f} {of_read:9.0f} {flops:8.1f} {of_peak:9.0f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--types", default=",".join(BLOCKS))
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--float", action="store_true", help="float arithmetic for quantised types, too")
    args = parser.parse_args()
    counts = [int(rows) for rows in args.rows.split(",")]
    backend = Backend("cpu", args.isa, args.threads, max(counts), 4096)
    peaks = Peaks(int(backend.description.split()[2]))
    x = np.random.default_rng(1).standard_normal(max(counts) * 3072).astype(np.float32)
    y = np.zeros(max(max(counts) * 6144, min(MAX_HEAD_ROWS, max(counts)) * HEAD[0]), np.float32)
    print(f"{backend.description}; {args.layers} layers; median of {args.repeats}")
    print(f"{'type':12s} {'rows':>5s} {'tok/s':>9s} {'GB/s':>7s} {'% of read':>9s} {'GFLOP/s':>8s} {'% of peak':>9s}")
    for dtype in args.types.split(","):
        is_float = BLOCKS[dtype][1] == 1
        weights = Weights(backend, dtype, 1 if args.float or is_float else 2, args.layers)
        for rows in counts:
            label = dtype + (" float" if args.float and not is_float else "")
            print(f"{label:12s} {measure(weights, rows, args.repeats, peaks, x, y)}", flush=True)


if __name__ == "__main__":
    main()
