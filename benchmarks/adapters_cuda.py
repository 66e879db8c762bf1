"""The time of a step with adapters on one GPU, against the same step without: 8B shape, random weights, adapters of rank 16.

    python benchmarks/adapters_cuda.py [--rounds 3] [--sequences 1,32,256] [--lora-dtype bfloat16]
    python benchmarks/adapters_cuda.py [--profile N] [--loads] [--update]

Every linear of every layer has an adapter. A row of the table has N sequences; "with" gives them up to 8 adapters in turn,
"without" is the same engine without adapters in use, "off" an engine made without enable_lora. Prompts of 128 tokens, greedy;
milliseconds from the start of a step to that of the next while all sequences decode (as benchmarks/cuda.py); medians over
rounds that take turns. All engines live at the same time, and each round has every engine.
--profile prints the kernels' times of steps with N sequences instead.
--loads prints how long steps of 32 sequences with four adapters take while requests with other adapters arrive, whose
adapters are in a slot or must be loaded into one.
--update prints how long load_adapter takes for a trainer's tensors on the GPU.
--lora-dtype stores A and B in this type; rows of bfloat16 have names of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda import Engine, print_kernels
from results import Results

MUST = {1: 1.12, 32: 1.18, 256: 1.15}
"""What a step with adapters may cost, by sequences: specs/speculation.md 2."""
ADAPTERS, RANK = 8, 16


def random_tensors(engine: Engine, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An adapter of all linears, and its config."""
    taken = {place[0] for place in engine.llm._driver.model.adapter_places()[1]}
    shapes = {info["name"]: info["shape"] for info in engine.llm.weight_info() if info["name"] in taken}
    rng, tensors = np.random.default_rng(seed), {}
    for name, (rows, columns) in shapes.items():
        module = name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, columns), np.float32) * 0.01
        tensors[f"{module}.lora_B.weight"] = rng.standard_normal((rows, RANK), np.float32) * 0.01
    return tensors, {"r": RANK, "lora_alpha": 2 * RANK}


def load(engine: Engine, n: int = ADAPTERS) -> None:
    """Loads the adapters from memory, and tells how long one takes."""
    model, begin = engine.llm._driver.model, 0.0
    for i in range(n):
        tensors, config = random_tensors(engine, i)
        begin = time.perf_counter()
        engine.llm.load_adapter(str(i), tensors, config)
    print(f"one adapter: {model.adapter_places()[0] / 1e6:.0f} MB, loaded in {1e3 * (time.perf_counter() - begin):.0f} ms")


def step(engine: Engine, batch: int, has_adapters: bool, new_tokens: int) -> float:
    """Milliseconds of a step."""
    chosen = [str(i % ADAPTERS) if has_adapters else None for i in range(batch)]
    before = engine.llm.stats().num_steps
    params = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "use_tqdm": False}
    engine.llm.generate(engine.prompts(batch, 128), lora_request=chosen if has_adapters else None, **params)
    full = [s for s in engine.llm.step_log(4096) if s.number > before and s.decode_rows == s.rows == batch]
    return 1e3 * (full[-1].start - full[0].start) / (full[-1].number - full[0].number)


def begin(engine: Engine, batch: int, new_tokens: int, n_adapters: int = ADAPTERS) -> None:
    """Queues requests with adapters, and steps until all of them decode."""
    for i, prompt in enumerate(engine.prompts(batch, 128)):
        engine.llm.add_request(
            prompt, temperature=0.0, max_tokens=new_tokens, ignore_eos=True, lora_request=str(i % n_adapters)
        )
    while (last := engine.llm.step_log(1)) == [] or last[-1].decode_rows != batch:
        engine.llm.step()


def end(engine: Engine) -> None:
    engine.llm.abort_request(list(engine.llm._named))
    while engine.llm.has_unfinished_requests():
        engine.llm.step()


def profile(engine: Engine, batch: int, n: int = 8) -> None:
    """Prints the time of every kernel of n decode steps with adapters."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    begin(engine, batch, 64)
    with record(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(n):
            engine.llm.step()
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    found.export_chrome_trace(str(trace))
    print_kernels(json.loads(trace.read_text())["traceEvents"], n)
    end(engine)


def arrivals(engine: Engine, n_adapters: int, n: int = 12) -> tuple[float, float, float]:
    """Milliseconds of a step while 32 sequences have the first four adapters: median, and the longest two of those from one
    arrival to 20 steps later. A request with one of n_adapters adapters in turn arrives every 20 steps, for one token."""
    begin(engine, 32, 20 * n + 100, 4)
    first = engine.llm.step_log(1)[-1].number
    for i in range(n):
        name = str(4 + i % n_adapters)
        engine.llm.add_request(engine.prompts(1, 1)[0], temperature=0.0, max_tokens=1, ignore_eos=True, lora_request=name)
        for _ in range(20):
            engine.llm.step()
    starts = [one.start for one in engine.llm.step_log(4096) if one.number > first]
    times = sorted(1e3 * (b - a) for a, b in itertools.pairwise(starts))
    end(engine)
    return statistics.median(times), times[-2], times[-1]


def update(engine: Engine) -> None:
    """Times load_adapter of torch's tensors, float32 and bfloat16, while nothing runs; then a request takes the adapter."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        times = []
        for seed in range(9):
            tensors, config = random_tensors(engine, seed)
            moved = {name: torch.from_numpy(one).to("cuda:0", dtype) for name, one in tensors.items()}
            torch.cuda.synchronize()
            begun = time.perf_counter()
            engine.llm.load_adapter("0", moved, config)
            times.append(1e3 * (time.perf_counter() - begun))
            engine.run(engine.prompts(1, 8), 2, lora_request="0")
        same = engine.llm.compare_adapter("0", {name: one.cpu() for name, one in moved.items()}, config)
        spread = f"{statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"
        print(f"load_adapter from {dtype}: {spread}, same bits: {same}")


def loads(engine: Engine) -> None:
    for text, n in ("in a slot", 1), ("to be loaded", ADAPTERS - 4):
        arrivals(engine, n, 4)
        print(f"adapters {text}: a step %.3f ms, the longest two %.3f and %.3f ms" % arrivals(engine, n))


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", default="1,32,256")
    parser.add_argument("--profile", type=int)
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--lora-dtype", default="float32", choices=["float32", "bfloat16"])
    results = Results("benchmarks/adapters_cuda.py", parser)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sequences.split(",")]
    found: dict[tuple[int, str], list[float]] = {}
    engine = Engine("8b", kv_cache_memory_bytes="12GiB", enable_lora=True, max_loras=5 if args.loads else ADAPTERS,
                    max_lora_rank=RANK, lora_dtype=args.lora_dtype)  # fmt: skip
    load(engine)
    if args.profile or args.loads or args.update:
        if args.profile:
            profile(engine, args.profile)
        if args.loads:
            loads(engine)
        if args.update:
            update(engine)
        return
    off = Engine("8b", kv_cache_memory_bytes="12GiB")
    for i in range(args.rounds + 1):
        for size in sizes:
            for kind in ("with", "without", "off"):
                ms = step(off if kind == "off" else engine, size, kind == "with", 256 if size < 64 else 128)
                if i:
                    found.setdefault((size, kind), []).append(ms)
    for size in sizes:
        none, without, used = (statistics.median(found[size, kind]) for kind in ("off", "without", "with"))
        print(
            f"{size:4} sequences: off {none:.3f}, without {without:.3f}, with {used:.3f} ms: {used / without:.3f} x "
            f"(must {MUST.get(size, 0):.2f}), without / off {without / none:.3f}"
        )
        stem = "adapters" if args.lora_dtype == "float32" else f"adapters.{args.lora_dtype}"
        results.add(f"{stem}.step.{size}", used / without, "x", MUST.get(size))
        results.add(f"{stem}.unused.{size}", without / none, "x", 1.005)
    results.write(args)


if __name__ == "__main__":
    main()
