"""Weight updates for an RL trainer on one H200: the Llama-3-8B shape, compared with the machine's ceilings.

    python benchmarks/rl.py [ROW ...] [--rounds 5] [--layers N] [--out DIR] [--commit ID]
    python benchmarks/rl.py --merge results.csv [...]

ROW is a name or a pattern ("rl.update.*"); none means all. The engine has random weights (load_format="dummy"), bfloat16; the
trainer's are torch tensors under the checkpoint's names, 291 of them. Medians over rounds. A time is that of the whole call
of update_weights(), from Python to the end of the commit; every update is checked by checksum once.

- device: from tensors on the same device, in bfloat16 as stored; f32: from float32 tensors; transposed: from bfloat16 tensors
  with matrices in column order.
- fp8: as device, into an engine with quantization="fp8".
- iterator: from model.named_parameters(), one tensor after the other.
- pinned: from pinned host memory, as a share of the link's rate, that of one copy of 1 GiB (rl.machine.link). pageable, f32:
  the same from plain memory, and from pinned float32.
- ipc: from buckets of 1 GiB of another process on the same device; the call opens and closes them.
- nccl: from a trainer on a second device, as a share of bare broadcasts of 1 GiB (rl.machine.broadcast); needs two devices.
- after: a decode step of 32 sequences right after an update, over the same step before the update.
- checksum: of all weights.
- sleep.1, wake.1: all of sleep(1) and wake_up(), from the second one on, as the rate of the weights' bytes over the link's;
  the same calls free the pool (0.4 of the memory less the weights) and allocate it again. first: the first sleep(1), which
  also pins the host's memory. after: a decode step right after the wake, over the same step before the sleep.
- sleep.2: all of sleep(2). freed: the memory that becomes free for another process, over the engine's weights and pages.
- pool.release, pool.remap: sleep and wake of the pool alone. Half a second passes between sleep and wake, here and in wake.1,
  but not in at_once: the driver clears freed memory in the background before it can be allocated again.

"floor" is the time of moving the bytes at the rate of a plain copy on the device, or of the link. --out DIR writes
results.csv; --merge adds such files to results_h200.csv and renews docs/use/rl.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cuda as table
import rl_trainer

PAGE = Path(__file__).parents[1] / "docs/use/rl.md"
MARKS = "<!-- begin: benchmarks/rl.py --merge -->\n", "<!-- end -->\n"
LINK_BYTES = 1 << 30
BROADCAST_ROUNDS = 5
WATCH = """
import sys
from llmpy import hardware
for line in sys.stdin:
    print(hardware.memory_bytes("cuda:0")[1], flush=True)
"""


class Bench:
    """An engine and the tensors of a trainer."""

    def __init__(self, layers: int = 0, model: str = "8b") -> None:
        import torch

        self.torch, self.model = torch, model
        self.engine = table.Engine(model, layers, gpu_memory_utilization=0.4)
        self.llm = self.engine.llm
        self.shapes = {info["name"]: info["shape"] for info in self.llm.weight_info()}
        self.num_values = sum(int(torch.Size(shape).numel()) for shape in self.shapes.values())
        self.checked: set[str] = set()

    def device_tensors(self, kind: str = "bfloat16") -> dict[str, Any]:
        """New ones on the device."""
        torch, dtype = self.torch, getattr(self.torch, kind)
        return {
            name: torch.empty(shape, dtype=dtype, device="cuda").normal_(0, 0.02) for name, shape in self.shapes.items()
        }

    def host_tensors(self, kind: str, pinned: bool) -> dict[str, Any]:
        """Views of one piece of host memory: the cost of a copy does not depend on its contents."""
        torch, dtype = self.torch, getattr(self.torch, kind)
        largest = max(self.torch.Size(shape).numel() for shape in self.shapes.values())
        memory = torch.empty(largest, dtype=dtype, pin_memory=pinned).normal_(0, 0.02)
        return {name: memory[: torch.Size(shape).numel()].view(shape) for name, shape in self.shapes.items()}

    def update(self, name: str, source: Callable[[], Any]) -> float:
        """Seconds of one update; the first update of a kind is compared with its source."""
        given = source()
        self.torch.cuda.synchronize()
        begin = time.perf_counter()
        self.llm.update_weights(given)
        seconds = time.perf_counter() - begin
        if name not in self.checked:
            self.checked.add(name)
            found = self.llm.compare_weights(source())
            assert found, f"{name}: {found}"
            assert not found.missing
        return seconds

    def updates(self, name: str, rounds: int, source: Callable[[], Any]) -> list[float]:
        """Seconds of some updates; the first update is a warm-up."""
        return [self.update(name, source) for _ in range(rounds + 1)][1:]

    @cached_property
    def copy_rate(self) -> float:
        """Bytes a second that a copy on the device reads and writes."""
        torch = self.torch
        a, b = (torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(8):
                b.copy_(a)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 8)
        return 2 * 2 * a.numel() / min(times)

    @cached_property
    def link_rate(self) -> float:
        """Bytes a second from pinned memory to the device."""
        torch = self.torch
        host = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return LINK_BYTES / min(times)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def from_device(self, rounds: int, kind: str = "bfloat16", transposed: bool = False) -> list[float]:
        given = self.device_tensors(kind)
        if transposed:
            given = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in given.items()}
        return [1e3 * s for s in self.updates(f"device {kind} {transposed}", rounds, lambda: given)]

    def from_iterator(self, rounds: int) -> list[float]:
        given = {name: self.torch.nn.Parameter(t) for name, t in self.device_tensors().items()}
        return [1e3 * s for s in self.updates("iterator", rounds, lambda: iter(given.items()))]

    def from_host(self, rounds: int, kind: str, pinned: bool) -> list[float]:
        given = self.host_tensors(kind, pinned)
        item = given[next(iter(given))].element_size()
        seconds = self.updates(f"host {kind} {pinned}", rounds, lambda: given)
        return [self.num_values * item / s / self.link_rate for s in seconds]

    def from_process(self, rounds: int) -> list[float]:
        trainer = rl_trainer.Trainer("ipc", "cuda:0", self.shapes, LINK_BYTES)
        buckets = trainer.answer()
        times = [1e3 * self.timed(buckets) for _ in range(rounds + 1)][1:]
        assert self.llm.compare_weights(rl_trainer.tensors(self.shapes, "cuda:0"))
        trainer.close()
        return times

    @cached_property
    def broadcasts(self) -> tuple[float, list[float]]:
        """Bytes a second of bare broadcasts, and seconds of updates by broadcast."""
        trainer = rl_trainer.Trainer("nccl", "cuda:1", self.shapes, LINK_BYTES)
        port, times = trainer.answer(), []
        trainer.tell("send")
        group = self.llm.init_weight_group(rl_trainer.HOST, port, 1, 2)
        for turn in range(BROADCAST_ROUNDS + 1):
            if turn:
                trainer.tell("send")
            times.append(self.timed(group))
            trainer.answer()
        assert self.llm.compare_weights(rl_trainer.tensors(self.shapes, "cuda:0"))
        bare = []
        for _ in range(3):
            trainer.tell("bare")
            bare.append(rl_trainer.bare(group._channel))
            trainer.answer()
        self.llm.destroy_weight_group()
        trainer.close()
        return rl_trainer.BARE_TIMES * rl_trainer.BARE_BYTES / min(bare), times[1:]

    def from_trainer(self) -> list[float]:
        rate, times = self.broadcasts
        return [2 * self.num_values / seconds / rate for seconds in times]

    def timed(self, source: Any) -> float:
        """Seconds of one update."""
        begin = time.perf_counter()
        self.llm.update_weights(source)
        return time.perf_counter() - begin

    def after(self, rounds: int) -> list[float]:
        given, found = self.device_tensors(), []
        for _ in range(rounds):
            before = self.engine.step(32, 64)
            self.update("after", lambda: given)
            found.append(self.engine.step(32, 64) / before)
        return found

    def checksum(self, rounds: int) -> list[float]:
        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            self.llm.weight_checksum()
            found.append(1e3 * (time.perf_counter() - begin))
        return found

    # ---- sleep ------------------------------------------------------------------------------------------------------

    @staticmethod
    def seconds(call: Callable[..., None], *args: Any) -> float:
        begin = time.perf_counter()
        call(*args)
        return time.perf_counter() - begin

    @cached_property
    def first_sleep(self) -> float:
        """Seconds of the first sleep."""
        seconds = self.seconds(self.llm.sleep)
        self.llm.wake_up()
        return seconds

    def share_of_link(self, seconds: float) -> float:
        return self.llm.memory()["weights"] / seconds / self.link_rate

    def sleep(self, rounds: int) -> list[float]:
        assert self.first_sleep
        found = []
        for _ in range(rounds):
            seconds = self.seconds(self.llm.sleep)
            self.llm.wake_up()
            found.append(self.share_of_link(seconds))
        return found

    def wake(self, rounds: int) -> list[float]:
        assert self.first_sleep
        found = []
        for _ in range(rounds):
            self.llm.sleep()
            time.sleep(0.5)
            found.append(self.share_of_link(self.seconds(self.llm.wake_up)))
        return found

    def after_wake(self, rounds: int) -> list[float]:
        found = []
        for _ in range(rounds):
            before = self.engine.step(32, 64)
            self.llm.sleep()
            self.llm.wake_up()
            found.append(self.engine.step(32, 64) / before)
        return found

    def pool(self, rounds: int, wakes: bool, pause_s: float = 0.5) -> list[float]:
        """Milliseconds of freeing the pages, or of allocating them again after a pause."""
        found = []
        for _ in range(rounds):
            slept = self.seconds(self.llm.sleep, 1, "keep", ["kv_cache"])
            time.sleep(pause_s)
            woke = self.seconds(self.llm.wake_up)
            found.append(1e3 * (woke if wakes else slept))
        return found

    def deep_sleep(self, rounds: int) -> list[float]:
        """Milliseconds of sleep(2); at the end the weights are complete again."""
        self.llm.sleep(2)  # frees the host's copy of earlier sleeps
        found = []
        for _ in range(rounds):
            self.llm.wake_up()
            found.append(1e3 * self.seconds(self.llm.sleep, 2))
        self.llm.wake_up(["weights"])
        self.llm.update_weights(self.device_tensors())
        self.torch.cuda.empty_cache()
        self.llm.wake_up()
        return found

    def freed(self, rounds: int) -> list[float]:
        """Share of weights and pages that becomes free for another process."""
        other = subprocess.Popen([sys.executable, "-c", WATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdin and other.stdout
        found = []
        with other, other.stdin as ask, other.stdout as answer:

            def free() -> int:
                print(file=ask, flush=True)
                return int(answer.readline())

            free()  # creates the other process's context before the measurement
            for _ in range(rounds):
                held, awake = self.llm.memory(), free()
                self.llm.sleep()
                found.append((free() - awake) / (held["weights"] + held["kv"]))
                self.llm.wake_up()
        return found

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Row:
    """One line of the table: `job` returns a value per round, `floor` the least time on this machine. model: of cuda.MODELS."""

    unit: str
    job: Callable[[Bench, int], list[float]]
    must: float | None = None
    aim: float | None = None
    floor: Callable[[Bench], float] | None = None
    devices: int = 1
    model: str = "8b"


def moved_ms(bytes_a_value: int) -> Callable[[Bench], float]:
    """Milliseconds of reading and writing this number of bytes for each weight."""
    return lambda b: 1e3 * b.num_values * bytes_a_value / b.copy_rate


ROWS = {
    "rl.machine.link": Row("GB/s", lambda b, _: [1e-9 * b.link_rate]),
    "rl.machine.copy": Row("GB/s", lambda b, _: [1e-9 * b.copy_rate]),
    "rl.update.device": Row("ms", lambda b, n: b.from_device(n), 50, 15, moved_ms(4)),
    "rl.update.iterator": Row("ms", lambda b, n: b.from_iterator(n), 50, 15, moved_ms(4)),
    "rl.update.device.f32": Row("ms", lambda b, n: b.from_device(n, "float32"), None, None, moved_ms(6)),
    "rl.update.device.transposed": Row("ms", lambda b, n: b.from_device(n, transposed=True), None, None, moved_ms(4)),
    "rl.update.pinned": Row("of link", lambda b, n: b.from_host(n, "bfloat16", True), 0.8, 0.95),
    "rl.update.pinned.f32": Row("of link", lambda b, n: b.from_host(n, "float32", True), 0.8, 0.95),
    "rl.update.pageable": Row("of link", lambda b, n: b.from_host(n, "bfloat16", False)),
    "rl.update.ipc": Row("ms", lambda b, n: b.from_process(n), 60, None, moved_ms(4)),
    "rl.machine.broadcast": Row("GB/s", lambda b, _: [1e-9 * b.broadcasts[0]], devices=2),
    "rl.update.nccl": Row("of bare", lambda b, _: b.from_trainer(), 0.8, 0.95, devices=2),
    "rl.update.after": Row("x", lambda b, n: b.after(n), 1.03, 1.01),
    "rl.checksum": Row("ms", lambda b, n: b.checksum(n)),
    "rl.sleep.first": Row("s", lambda b, _: [b.first_sleep]),
    "rl.sleep.1": Row("of link", lambda b, n: b.sleep(n), 0.8, 0.95),
    "rl.wake.1": Row("of link", lambda b, n: b.wake(n), 0.8, 0.95),
    "rl.wake.after": Row("x", lambda b, n: b.after_wake(n), 1.03, 1.01),
    "rl.pool.release": Row("ms", lambda b, n: b.pool(n, False), 100, 30),
    "rl.pool.remap": Row("ms", lambda b, n: b.pool(n, True), 100, 30),
    "rl.pool.remap.at_once": Row("ms", lambda b, n: b.pool(n, True, 0)),
    "rl.sleep.freed": Row("x", lambda b, n: b.freed(n), 0.99, 1),
    "rl.sleep.2": Row("ms", lambda b, n: b.deep_sleep(n), 300, 100),
    "rl.update.fp8": Row("ms", lambda b, n: b.from_device(n), 25, None, moved_ms(3), model="8b-fp8"),
}


def num_devices() -> int:
    """Number of CUDA devices."""
    from llmpy import devices

    return sum(device["available"] for device in devices()[1:])


def measure(names: list[str], args: argparse.Namespace) -> None:
    """Prints and writes each row as soon as it is measured."""
    from llmpy import devices

    path = args.out / "results.csv" if args.out else None
    lines = table.read_table(path) if path else []
    known = {
        "device": devices()[1]["name"],
        "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit,
        "command": "benchmarks/rl.py",
    }
    print(f"{known['device']}, {known['date']}, commit {args.commit or 'unknown'}")
    print(f"{'row':<28}{'measured':>10} {'unit':<8}{'must':>7}{'aim':>7}{'floor':>9}{'share':>7}")
    bench: Bench | None = None
    for name in names:
        row = ROWS[name]
        if bench is None or bench.model != row.model:
            if bench is not None:
                bench.close()
            bench = Bench(args.layers, row.model)
        values = row.job(bench, args.rounds)
        bench.torch.cuda.empty_cache()
        value, floor = statistics.median(values), row.floor(bench) if row.floor else None
        print(
            f"{name:<28}{value:>10.4g} {row.unit:<8}{row.must or '':>7}{row.aim or '':>7}"
            f"{f'{floor:.4g}' if floor else '':>9}{f'{100 * floor / value:.0f} %' if floor else '':>7}"
            f"  {min(values):.4g}..{max(values):.4g} of {len(values)}",
            flush=True,
        )
        lines.append(
            known
            | {"row": name, "value": f"{value:.5g}", "unit": row.unit, "must": row.must or "", "aim": row.aim or ""}
        )
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.write_table(path, lines)
    if bench is not None:
        bench.close()


def merge(paths: list[Path]) -> None:
    """Adds results to the table of all H200 results, and the last result of every row of this script to the page."""
    lines = table.merge_lines(paths)
    latest = {str(line["row"]): line for line in lines if line["row"] in ROWS}
    text = "| row | measured | must | aim | commit |\n|---|---|---|---|---|\n"
    for name in [name for name in ROWS if name in latest]:
        row, line = ROWS[name], latest[name]
        goals = " | ".join(f"{goal:g}" if goal else "" for goal in (row.must, row.aim))
        text += f"| {name} | {line['value']} {line['unit']} | {goals} | {line['commit']} |\n"
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + "\n" + text + "\n" + MARKS[1] + rest.partition(MARKS[1])[2])
    print(json.dumps(latest, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--merge", nargs="+", type=Path)
    args = parser.parse_args()
    if args.merge:
        merge(args.merge)
        return
    names = [name for name in ROWS if not args.rows or any(fnmatch.fnmatchcase(name, row) for row in args.rows)]
    count = num_devices()
    measure([name for name in names if ROWS[name].devices <= count], args)


if __name__ == "__main__":
    main()
