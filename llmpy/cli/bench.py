"""`llmpy bench`: throughput, latency and startup of an engine, and a server under load."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import adapters
from .common import model_path
from .engine_options import engine_options

if TYPE_CHECKING:
    from ..outputs import EngineStats

PERCENTILES = (10, 25, 50, 75, 90, 99)
STARTUP = """
import json, sys, time
sys.path.insert(0, sys.argv[3])
times = [time.perf_counter()]
from llmpy import LLM
times.append(time.perf_counter())
from llmpy.cli.imports import import_file
for path in sys.argv[4:]:
    import_file(path)
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
times.append(time.perf_counter())
llm.generate([[1]], max_tokens=1, temperature=0, detokenize=False, use_tqdm=False)
times.append(time.perf_counter())
print(json.dumps(times))
"""


def run(chosen: Namespace) -> int:
    """Measures, and prints a table or JSON."""
    if chosen.what == "sweep":
        return _sweep(chosen)
    measure = {"throughput": _throughput, "latency": _latency, "startup": _startup, "serve": _serve}[chosen.what]
    figures = measure(chosen)
    if chosen.json:
        print(json.dumps(figures))
    else:
        width = max(map(len, figures))
        for name, value in figures.items():
            print(f"{name:<{width}}  {_shown(value)}")
    return int(figures.get("completed") == 0)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _serve(chosen: Namespace) -> dict[str, Any]:
    """Measures a running server under load."""
    from .bench_serve import serve

    return serve(chosen)


def _sweep(chosen: Namespace) -> int:
    """Measures several loads one after another; prints CSV."""
    import csv

    from .bench_serve import sweep

    rows = sweep(chosen)
    writer = csv.DictWriter(sys.stdout, [name for name in rows[0] if name != "server"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return 0


def _prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random ids, so that no two prompts share a block."""
    import numpy as np

    rows = np.random.default_rng(seed).integers(0, vocab_size, (count, length))
    prompts: list[list[int]] = rows.tolist()
    return prompts


def _open(chosen: Namespace, **defaults: Any) -> Any:
    from .. import LLM

    wanted = adapters.modules(chosen)
    llm = LLM(model_path(chosen), **{**defaults, **engine_options(chosen)})
    adapters.load(llm, wanted, (llm.name,))
    return llm


def _by_turns(chosen: Namespace, count: int) -> list[str] | None:
    """The adapter of each of several prompts."""
    names = [*adapters.modules(chosen)]
    return [names[i % len(names)] for i in range(count)] if names else None


def _drafts(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """What speculation did, if there was any."""
    drafted, accepted = after.draft_rows - before.draft_rows, after.accepted_rows - before.accepted_rows
    drawn = after.generation_tokens - before.generation_tokens
    return {"draft_tokens": drafted, "tokens_per_step": drawn / (drawn - accepted)} if drafted else {}


def _throughput(chosen: Namespace) -> dict[str, Any]:
    """Measures throughput with all requests queued at once."""
    with _open(chosen, max_model_len=chosen.input_len + chosen.output_len) as llm:
        prompts = _prompts(llm._frontend.vocab_size, chosen.num_prompts, chosen.input_len, int(time.time()))
        lora, before, begun = _by_turns(chosen, len(prompts)), llm.stats(), time.perf_counter()
        outputs = llm.generate(prompts, max_tokens=chosen.output_len, ignore_eos=True, detokenize=False, lora_request=lora)
        took = time.perf_counter() - begun
        tokens = outputs.num_generation_tokens
        return {
            "model": llm.name,
            "device": str(llm.config.device),
            "requests": len(prompts),
            "seconds": took,
            "requests_per_s": len(prompts) / took,
            "output_tokens_per_s": tokens / took,
            "total_tokens_per_s": (tokens + outputs.num_prompt_tokens) / took,
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            **_drafts(before, llm.stats()),
        }


def _latency(chosen: Namespace) -> dict[str, Any]:
    """Measures the latency of one batch after another, without prefix caching."""
    length = chosen.input_len + chosen.output_len
    with _open(chosen, max_model_len=length, enable_prefix_caching=False) as llm:
        prompts = _prompts(llm._frontend.vocab_size, chosen.batch_size, chosen.input_len, 0)
        times, options = [], {"lora_request": _by_turns(chosen, len(prompts)), "detokenize": False, "use_tqdm": False}
        for _ in range(chosen.warmups + chosen.runs):
            begun = time.perf_counter()
            llm.generate(prompts, max_tokens=chosen.output_len, ignore_eos=True, **options)
            times.append(time.perf_counter() - begun)
        return {
            "model": llm.name,
            "device": str(llm.config.device),
            "batch_size": chosen.batch_size,
            **_spread(times[chosen.warmups :]),
        }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {"mean_s": statistics.fmean(seconds), **{f"p{p}_s": cuts[p - 1] for p in PERCENTILES}}


def _output(words: list[str]) -> str:
    """Runs a process and returns its output.

    Raises:
        ConfigError: The process failed; the message is its last line.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"the process ended with {done.returncode}"]
        raise ConfigError(lines[-1].partition(": ")[2] or lines[-1], option="model")
    return done.stdout


def _startup(chosen: Namespace) -> dict[str, Any]:
    """Measures the startup of fresh processes, one after another; returns medians."""
    names = ("import_s", "load_s", "first_token_s")
    here = str(Path(__file__).parents[2])  # import this llmpy, not one in the working directory
    words = [sys.executable, "-P", "-c", STARTUP, model_path(chosen), json.dumps(engine_options(chosen)), here, *chosen.imports]
    runs = [json.loads(_output(words)) for _ in range(chosen.runs)]
    phases = {name: [run[i + 1] - run[i] for run in runs] for i, name in enumerate(names)}
    medians = {name: statistics.median(times) for name, times in phases.items()}
    return {**medians, "total_s": statistics.median(run[-1] - run[0] for run in runs)}
