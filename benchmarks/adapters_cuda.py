"""The time of a step with adapters on one GPU, against the same step without: 8B shape, random weights, adapters of rank 16.

    python benchmarks/adapters_cuda.py [--rounds 3] [--sequences 1,32,256] [--profile N]

Every linear of every layer has an adapter. A row of the table has N sequences; "with" gives them up to 8 adapters in turn,
"without" is the same engine without adapters in use, "off" an engine made without enable_lora. Prompts of 128 tokens, greedy;
milliseconds from the start of a step to that of the next while all sequences decode (as benchmarks/cuda.py); medians over
rounds that take turns.
--profile prints the kernels' times of steps with N sequences instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from cuda import Engine

MUST = {1: 1.12, 32: 1.18, 256: 1.15}
"""What a step with adapters may cost, by sequences: specs/speculation.md 2."""
ADAPTERS, RANK = 8, 16


def load(engine: Engine) -> None:
    """Loads the adapters from memory, and tells how long one takes."""
    model = engine.llm._driver.model
    taken = {place[0] for place in model.adapter_places()[1]}
    shapes = {info["name"]: info["shape"] for info in engine.llm.weight_info() if info["name"] in taken}
    rng, begin = np.random.default_rng(0), 0.0
    for i in range(ADAPTERS):
        tensors: dict[str, Any] = {}
        for name, (rows, columns) in shapes.items():
            module = name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, columns), np.float32) * 0.01
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((rows, RANK), np.float32) * 0.01
        begin = time.perf_counter()
        engine.llm.load_adapter(str(i), tensors, {"r": RANK, "lora_alpha": 2 * RANK})
    print(f"one adapter: {model.adapter_places()[0] / 1e6:.0f} MB, loaded in {1e3 * (time.perf_counter() - begin):.0f} ms")


def step(engine: Engine, batch: int, has_adapters: bool, new_tokens: int) -> float:
    """Milliseconds of a step."""
    chosen = [str(i % ADAPTERS) if has_adapters else None for i in range(batch)]
    before = engine.llm.stats().num_steps
    params = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "use_tqdm": False}
    engine.llm.generate(engine.prompts(batch, 128), lora_request=chosen if has_adapters else None, **params)
    full = [s for s in engine.llm.step_log(4096) if s.number > before and s.decode_rows == s.rows == batch]
    return 1e3 * (full[-1].start - full[0].start) / (full[-1].number - full[0].number)


def profile(engine: Engine, batch: int) -> None:
    """Prints the time of every kernel of a few steps with adapters, prefill included."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step(engine, batch, True, 16)
    with record(activities=[ProfilerActivity.CUDA]) as found:
        step(engine, batch, True, 16)
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=60))


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", default="1,32,256")
    parser.add_argument("--profile", type=int)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sequences.split(",")]
    found: dict[tuple[int, str], list[float]] = {}
    engine = Engine("8b", enable_lora=True, max_loras=ADAPTERS, max_lora_rank=RANK)
    load(engine)
    if args.profile:
        profile(engine, args.profile)
        return
    for i in range(args.rounds + 1):
        for size in sizes:
            for kind in ("with", "without"):
                ms = step(engine, size, kind == "with", 256 if size < 64 else 128)
                if i:
                    found.setdefault((size, kind), []).append(ms)
    engine.close()
    engine = Engine("8b")
    for i in range(args.rounds + 1):
        for size in sizes:
            ms = step(engine, size, False, 256 if size < 64 else 128)
            if i:
                found.setdefault((size, "off"), []).append(ms)
    engine.close()
    for size in sizes:
        off, without, used = (statistics.median(found[size, kind]) for kind in ("off", "without", "with"))
        print(
            f"{size:4} sequences: off {off:.3f}, without {without:.3f}, with {used:.3f} ms: {used / without:.3f} x "
            f"(must {MUST.get(size, 0):.2f}), without / off {without / off:.3f}"
        )


if __name__ == "__main__":
    main()
