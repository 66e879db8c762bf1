"""Time of a gather of CUDA ranks by size: the gather alone, and with the sum and the norm that follow it in a model.

    python benchmarks/gather.py                    # ranks on cuda:0, cuda:1
    python benchmarks/gather.py --devices 0,0      # both ranks on one device: no link, half the processors each
    python benchmarks/gather.py --devices 0,1,2,3 --kilobytes 8,64

A value has rows of 4,096 bfloat16 columns; each rank has an equal share of the columns. A rank's graph holds a chain of
gathers, so the launch of one hides behind the one before. "by stores" takes a way without packets (GATHER_WAYS), which larger
values take anyway. us a call: the median over rounds of the wall time of all ranks'
graphs, launched together, over the gathers in them. "norm alone" is the kernel of one rank for the same rows.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cuda
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from binding import Backend
from llmpy import hardware
from ranks import ARENA, COLUMNS, Ranks, view
from staging import address, struct

WIDTH, ITEM = 4096, 2  # columns of a row, bytes of one
GATHER_WAYS = 4  # enum way_table
GOALS = {  # of 2 ranks: must and aim, by row and KB
    ("gather", 8): (2.1, 1.6),
    ("add + gather + norm", 8): (2.7, 2.3),
    ("add + gather + norm", 256): (3.8, 3.2),
    ("meet", 8): (3, 2.2),
}
CHAIN, REPEATS, ROUNDS = 500, 10, 5  # gathers of a graph; times that it runs in a round


class Rank:
    """A rank's device memory: the value, the sum's other term, the norm's weight and result."""

    def __init__(self, device: str, n_rows: int) -> None:
        library = hardware.cuda_library()
        self.backend = Backend(device, max_rows=n_rows, vocab_size=64, dtype="bfloat16", library=library)
        self.functions = ctypes.CDLL(library)
        self.functions.llmpy_cuda_way.restype = ctypes.c_char_p
        self.functions.llmpy_cuda_put_first.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32]
        self.n_rows, self.n_bytes = n_rows, n_rows * WIDTH * ITEM
        self.value, self.other, self.normed = (self.backend.new_buffer(self.n_bytes) for _ in range(3))
        self.weight = self.backend.new_buffer(4 * WIDTH)
        ones = np.ones(WIDTH, np.float32)
        self.call("upload", self.weight, address(ones), ones.nbytes)
        start = np.random.default_rng(1).integers(0x3C00, 0x3F00, (n_rows, WIDTH)).astype(np.uint16)
        for memory in (self.value, self.other):
            self.call("upload", memory, address(start), start.nbytes)
        self.call("synchronize")

    def close(self) -> None:
        for memory, n_bytes in ((self.value, self.n_bytes), (self.other, self.n_bytes), (self.normed, self.n_bytes)):
            self.backend.table.function("buffer_destroy")(self.backend.ctx, memory, n_bytes)
        self.backend.table.function("buffer_destroy")(self.backend.ctx, self.weight, 4 * WIDTH)

    def call(self, name: str, *args: int) -> None:
        self.backend.table.call(name, self.backend.ctx, *args)

    def put_first(self, way: str | None) -> None:
        """Puts a row of GATHER_WAYS first, or none."""
        row = 0
        while way and self.functions.llmpy_cuda_way(GATHER_WAYS, row) != way.encode():
            row += 1
        self.functions.llmpy_cuda_put_first(self.backend.ctx, GATHER_WAYS, row + 1 if way else 0)

    def view(self, memory: int, first: int = 0, width: int = WIDTH) -> object:
        return view(memory + first * ITEM, width, WIDTH)

    def norm(self) -> object:
        return struct(
            "rms_norm_args", n_rows=self.n_rows, n_heads=1, x=self.view(self.value), weight=self.weight, eps=1e-5,
            out=self.view(self.normed),
        )  # fmt: skip

    def record(self, work: Callable[[], None]) -> ctypes.c_void_p:
        """A graph of CHAIN calls of work."""
        graph = ctypes.c_void_p()
        self.call("graph_begin")
        for _ in range(CHAIN):
            work()
        self.call("graph_end", ctypes.addressof(graph))
        return graph


def in_threads(ranks: Sequence[Rank], work: Callable[[int], None]) -> float:
    """Seconds until the work of all ranks, a thread each, has ended."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(ranks))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def time_chain(ranks: Sequence[Rank], work: Callable[[int], None]) -> float:
    """Microseconds of one call of work on all ranks."""

    def first(rank: int) -> None:
        work(rank)
        ranks[rank].call("synchronize")

    in_threads(ranks, first)  # all ranks end it before one makes a graph
    graphs = [one.record(functools.partial(work, rank)) for rank, one in enumerate(ranks)]

    def run(rank: int) -> None:
        for _ in range(REPEATS):
            ranks[rank].call("graph_launch", graphs[rank])  # type: ignore[arg-type]
        ranks[rank].call("synchronize")

    seconds = [in_threads(ranks, run) for _ in range(ROUNDS)]
    for one, graph in zip(ranks, graphs, strict=True):
        one.backend.table.function("graph_destroy")(one.backend.ctx, graph)
    return 1e6 * statistics.median(seconds) / CHAIN / REPEATS


def measure(devices: Sequence[str], n_rows: int) -> dict[str, float]:
    """Microseconds of each operation for rows of WIDTH columns."""
    members = [Rank(device, n_rows) for device in devices]
    share = WIDTH // len(members)

    def norm_alone(rank: int) -> None:
        norm = members[rank].norm()
        members[rank].call("rms_norm", ctypes.addressof(norm))

    found = {"norm alone": time_chain(members[:1], norm_alone)}
    team = Ranks([one.backend for one in members])
    team.share(ARENA, [one.value for one in members], members[0].n_bytes)

    def own(rank: int, **terms: object) -> None:
        fields = {"first": rank * share, "n_columns": share, "unit": share, **terms}
        team.gather(rank, COLUMNS, n_rows, members[rank].view(members[rank].value), **fields)

    def add_norm(rank: int) -> None:
        one, first = members[rank], rank * share
        own(rank, a=one.view(one.value, first, share), b=one.view(one.other, first, share), norm=one.norm())

    for name, work, way in (("gather", own, "push"), ("add + gather + norm", add_norm, "push_norm")):
        found[name] = time_chain(members, work)
        for one in members:
            one.put_first(way)
        found[f"{name}, by stores"] = time_chain(members, work)
        for one in members:
            one.put_first(None)
    found["meet"] = time_chain(members, lambda rank: team.meet(rank))
    for rank in range(len(members)):
        team.check(rank)
    team.close()
    for one in members:
        one.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="0,1", help="number of each rank's device")
    parser.add_argument("--kilobytes", default="8,64,256,1024,4096,16384", help="sizes of the whole value")
    parser.add_argument("--out", type=Path, help="directory for results.csv")
    parser.add_argument("--commit", default="", help="what is measured; default: git's HEAD, if there is one")
    args = parser.parse_args()
    devices = [f"cuda:{number}" for number in args.devices.split(",")]
    rows = {}
    for size in map(int, args.kilobytes.split(",")):
        rows[size] = measure(devices, max(size * 1024 // (WIDTH * ITEM), 1))
    print(f"{len(devices)} ranks on {', '.join(devices)}, us a call, rows of {WIDTH} bfloat16 columns")
    print("| KB | " + " | ".join(map(str, rows)) + " |\n|---|" + "---|" * len(rows))
    for name in next(iter(rows.values())):
        print(f"| {name} | " + " | ".join(f"{row[name]:.2f}" for row in rows.values()) + " |")
    lines: list[dict[str, object]] = []
    for size, row in rows.items():
        for name, value in row.items():
            goals = dict(zip(("must", "aim"), GOALS.get((name, size), ()), strict=False)) if len(devices) == 2 else {}
            lines.append({"row": f"{len(devices)} ranks.{name}.{size}KB", "value": f"{value:.2f}", "unit": "us", **goals})
    cuda.add_lines(args.out, args.commit, " ".join(["benchmarks/gather.py", *cuda.words_of(sys.argv)]), lines)


if __name__ == "__main__":
    main()
