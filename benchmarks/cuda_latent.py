"""Time of the CUDA backend's latent attention, bfloat16, latents of 512 and rope keys of 64, through its C ABI.

    python benchmarks/cuda_latent.py [--heads 16] [--only "32 x 1"]

A CUDA graph of dependent launches works on the caches of several layers, more than the L2 cache holds, in turns; the result is
the median of several rounds. A line has the microseconds of a call, and the bound's share of that time. The bound is 1152 bytes
a token at the read bandwidth of an H200 (4.55 TB/s), or 2176 operations of every visible pair and head at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from ctypes import Structure

from cuda_attention import COLD_BYTES, MATMUL, READ, Case, random_halves
from cuda_linear import BF16, STRUCTS, Backend, View

LATENT, ROPE, PART, BLOCK = 512, 64, 192, 16
# sequences, rows of each, tokens up to the last one
CASES = [(1, 1, 256), (1, 1, 1024), (1, 1, 8192), (8, 1, 1024), (32, 1, 256), (32, 1, 1024), (32, 1, 4096), (128, 1, 1024),
         (256, 1, 1024), (1, 128, 128), (1, 1024, 1024), (1, 8192, 8192), (8, 1024, 1024), (1, 512, 8192)]  # fmt: skip


class LatentCase(Case):
    """A step's batch over caches of latents: a token's row takes the place of Case's keys and values of half the width."""

    def __init__(self, backend: Backend, n_seqs: int, n_rows: int, length: int, heads: int) -> None:
        layers = max(1, min(64, -(-COLD_BYTES // (n_seqs * length * 2 * (LATENT + ROPE)))))
        super().__init__(backend, n_seqs, n_rows, length, 1, 1, (LATENT + ROPE) // 2, BLOCK, layers)
        views = [View(self.give(random_halves(self.rows * w, w)), w, w) for w in (heads * LATENT, heads * PART, LATENT, ROPE)]
        out = View(self.give(random_halves(self.rows * heads * LATENT, 6)), heads * LATENT, heads * LATENT)
        batch = ctypes.addressof(self.batch)
        self.calls: list[Structure] = []
        for kv in self.kv:
            kv.n_kv_heads, kv.head_dim, kv.dtype = 0, LATENT + ROPE, BF16
            self.calls.append(STRUCTS["latent_attention_args"](batch, kv, heads, PART**-0.5, *views, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    backend = Backend(8192, 1024, "", (8192, 16, LATENT + ROPE))
    for n_seqs, n_rows, length in CASES:
        name = f"{n_seqs} x {n_rows} of {length}"
        if args.only not in name:
            continue
        case = LatentCase(backend, n_seqs, n_rows, length, args.heads)
        pairs = n_seqs * sum(range(length - n_rows + 1, length + 1))
        floor = max(n_seqs * length * 2 * (LATENT + ROPE) / READ, 2 * pairs * args.heads * (2 * LATENT + ROPE) / MATMUL)
        taken = statistics.median(case.seconds(latent_attention=case.calls) for _ in range(3))
        case.close()
        print(f"{name:24} {taken * 1e6:9.2f} us  {100 * floor / taken:5.1f} %", flush=True)


if __name__ == "__main__":
    main()
