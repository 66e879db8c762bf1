"""Chats that do not fit, in tiers of every kind: nothing may be lost, wrong or left behind.

    nice -n 10 python benchmarks/soak.py --minutes 30 [--chats 64] [--round 20] [--device cpu] [--seed 1] [--kinds host ...]

A round has one kind of tier and one of two small models with random weights, one of them with sliding windows. `chats` chats
take turns at random: a turn's prompt is all that was said before and new words, and its answer joins them. The pool holds an
eighth of them, host memory a quarter. One turn of six is aborted at a random token; a prefix cache is reset now and then. At
the end of a round an engine that is alone and has no cache computes some of the turns again: ids and logprobs must be the same
bits. All gauges must be 0, and nothing may be left in the folder of the tier. Behind the first rounds of every kind memory,
threads, descriptors and the core's allocations may not grow.

The kinds: host memory; with swaps; a private and a shared disk; a disk with pages of 64 KiB, which go past the page cache; a
store in Python (`llmpy.kv.Memory`); one in C from a library (`examples/connector`); and a peer, whose other side has computed
the first prompts and computes one of three others while this side loads its blocks. One of six of these is aborted halfway.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmpy import LLM, AsyncEngine, EngineStats, RequestOutput, SamplingParams, _core, get_include, kv
from llmpy.engine.feeds import RequestStream

KEPT_BYTES = 8 << 20
"""Allowed growth of the process behind its first rounds; Python's heap varies by this much."""
LONGEST, WORDS = 512, 900
MODELS = {"llama": {}, "qwen2": {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}}
DEEP = {"num_hidden_layers": 4}
"""Of the model with large pages."""
KINDS = ("host", "swap", "private disk", "shared disk", "large pages", "memory", "library", "peer")


@dataclass
class Soak:
    """What all rounds share."""

    device: str
    folder: Path
    chats: int
    random: random.Random
    done: Counter[str] = field(default_factory=Counter)
    first: AsyncEngine | None = None
    """The engine that computes prompts for the one with the chats."""
    store: kv.Memory = field(default_factory=lambda: kv.Memory(2 << 20))

    def model(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            shape |= {"num_key_value_heads": 2, "vocab_size": WORDS + 100, "max_position_embeddings": 2 * LONGEST}
            kind, more = name.split()[0], DEEP if name.endswith("deep") else MODELS[name]
            names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
            config = {"architectures": [names[kind]], "model_type": kind, "torch_dtype": "float32", **shape, **more}
            (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
        return path

    def options(self, name: str) -> dict[str, Any]:
        """Of an engine that holds an eighth of all chats, and in host memory a quarter."""
        token_bytes = 2 * 2 * 2 * 16 * 4
        all_bytes = token_bytes * LONGEST * self.chats
        return {
            "load_format": "dummy", "skip_tokenizer_init": True, "device": self.device, "max_model_len": LONGEST,
            "max_num_seqs": 16, "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": max(all_bytes // 8, token_bytes * 3 * LONGEST),
            "host_cache_bytes": max(all_bytes // 4, 1 << 20), "prefix_cache_seed": 5, "cache_loads": "always",
        }  # fmt: skip

    def library(self) -> str:
        """The connector of examples/connector."""
        target = self.folder / "shelf.so"
        if not target.exists():
            source = Path(__file__).parents[1] / "examples/connector/shelf.c"
            flags = ["-std=c11", "-O2", "-fPIC", "-shared", f"-I{get_include()}"]
            subprocess.run([os.environ.get("CC", "cc").split()[-1], *flags, source, "-o", target], check=True)
        return str(target)

    @asynccontextmanager
    async def engine(self, kind: str, name: str, tier: Path) -> AsyncIterator[AsyncEngine]:
        """An engine with tiers of a kind."""
        model, options, size = self.model(name), self.options(name), 2 << 20
        more: dict[str, dict[str, Any]] = {
            "host": {}, "swap": {"preemption": "swap"}, "memory": {"kv_connector": self.store},
            "private disk": {"disk_cache": {"path": tier, "bytes": size}, "prefix_cache_seed": None},
            "shared disk": {"disk_cache": {"path": tier, "bytes": size}},
            "large pages": {"disk_cache": {"path": tier, "bytes": 4 * size}, "block_size": 64},
            "library": {"kv_connector": {"name": self.library(), "folder": str(tier)}},
            "peer": {"kv_connector": {"name": "peer", "peers": [f"unix:soak-{os.getpid()}"], "bytes": size}},
        }  # fmt: skip
        if kind != "peer":
            async with AsyncEngine(model, **options | more[kind]) as engine:
                yield engine
            return
        other = {"name": "peer", "listen": f"unix:soak-{os.getpid()}", "bytes": size}
        async with (
            AsyncEngine(model, **options, kv_connector=other) as first,
            AsyncEngine(model, **options | more[kind]) as engine,
        ):
            for i in range(8):
                await first.prefill(opening(self.random.randrange(1 << 30), i))
            self.first = first
            yield engine
            self.first = None
            await settle(first)


def opening(seed: int, chat: int) -> list[int]:
    """What every chat of a number begins with, and some words of its own."""
    shared, own = random.Random(chat % 8), random.Random(f"{seed}/{chat}")
    return [shared.randrange(3, WORDS) for _ in range(64)] + [own.randrange(3, WORDS) for _ in range(own.randrange(1, 80))]


@dataclass(frozen=True)
class Turn:
    """A turn that has ended."""

    prompt: tuple[int, ...]
    params: SamplingParams
    result: tuple[bytes, ...]


def bits(output: RequestOutput) -> tuple[bytes, ...]:
    sample = output.outputs[0]
    assert sample.sampled is not None
    return sample.token_ids_array.tobytes(), sample.sampled.raw.tobytes()


async def begin(
    soak: Soak, engine: AsyncEngine, prompt: list[int], params: SamplingParams, rng: random.Random
) -> RequestStream:
    """Begins a turn; a prompt may be computed on the other engine."""
    if soak.first is None or rng.random() > 1 / 3:
        return engine.generate(prompt, params)
    prefill = await soak.first.begin_prefill(prompt, params)
    stream = engine.decode(prefill, params, patience_s=5)
    if rng.random() < 1 / 6:
        await asyncio.sleep(rng.random() * 0.02)
        prefill.abort()
    soak.done["handed over"] += 1
    return stream


async def chat(soak: Soak, engine: AsyncEngine, number: int, end: float, turns: list[Turn]) -> None:
    """Talks until the end."""
    rng = random.Random(soak.random.randrange(1 << 30))
    history = opening(rng.randrange(1 << 30), number)
    while time.monotonic() < end:
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1 << 30),
            max_tokens=rng.randrange(1, 40),
            ignore_eos=True,
            logprobs=0,
        )
        if len(history) + 40 > LONGEST:
            history = opening(rng.randrange(1 << 30), number)
        stream = await begin(soak, engine, list(history), params, rng)
        stop = rng.randrange(40) if rng.random() < 1 / 6 else None
        output = None
        async for output in stream:
            if stop is not None and len(output.outputs[0].token_ids) > stop:
                break
        if output is None or not output.finished:
            await stream.aclose()
            soak.done["aborted"] += 1
        else:
            soak.done["ended"] += 1
            if len(turns) < 400:
                turns.append(Turn(tuple(history), params, bits(output)))
            history += [*output.outputs[0].token_ids, *(rng.randrange(3, WORDS) for _ in range(rng.randrange(1, 30)))]
        if rng.random() < 0.001:
            await engine.reset_prefix_cache()
            soak.done["resets"] += 1
        await asyncio.sleep(rng.random() * 0.02)


async def settle(engine: AsyncEngine) -> EngineStats:
    """Waits until nothing runs, and checks every gauge."""
    until = time.monotonic() + 60
    while (stats := engine.stats()).num_unfinished or stats.kv_blocks_free != stats.kv_blocks_total:
        assert time.monotonic() < until, f"still held: {stats}"
        await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.check)
    assert stats.num_running == stats.num_waiting == stats.host_blocks_swapped == 0, stats
    assert stats.allocations_since_warmup == stats.disk_errors == stats.disk_bad_files == 0, stats
    return stats


async def play(soak: Soak, kind: str, name: str, seconds: float) -> None:
    """Runs one round."""
    tier, name = soak.folder / "tier", "llama deep" if kind == "large pages" else name
    tier.mkdir(exist_ok=True)
    turns: list[Turn] = []
    async with soak.engine(kind, name, tier) as engine:
        end = time.monotonic() + seconds
        await asyncio.gather(*(chat(soak, engine, number, end, turns) for number in range(soak.chats)))
        stats = await settle(engine)
    for count in ("host_cache_hits", "disk_cache_hits", "num_swaps", "num_preemptions", "disk_misses", "disk_evictions"):
        soak.done[f"{kind}: {count}"] += getattr(stats, count)
    left = sorted(path.name for path in tier.rglob("*") if path.is_file())
    assert not left or kind in ("shared disk", "large pages", "library"), (kind, left)
    sizes = [path.stat().st_size for path in tier.rglob("*") if path.is_file()]
    assert kind != "large pages" or all(size % 4096 == 0 and size > 64 << 10 for size in sizes), sizes
    assert not [one for one in left if "tmp" in one], left
    shutil.rmtree(tier)
    with LLM(soak.model(name), **soak.options(name) | {"enable_prefix_caching": False, "host_cache_bytes": 0}) as llm:
        for turn in soak.random.sample(turns, min(len(turns), 12)):
            found = llm.generate([list(turn.prompt)], [turn.params], use_tqdm=False)[0]
            assert bits(found) == turn.result, (kind, name, turn)
            soak.done["compared"] += 1


def footprint() -> dict[str, int]:
    """Resources of the process while no engine is open."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "allocations": _core.held_count(),
    }


def run(soak: Soak, minutes: float, seconds: float, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Runs the soak; returns its counts."""
    end, marks, rounds = time.monotonic() + 60 * minutes, [], 0
    cycle = [(kind, name) for name in MODELS for kind in kinds]
    while time.monotonic() < end or rounds < len(kinds) + 1:
        asyncio.run(play(soak, *cycle[rounds % len(cycle)], seconds))
        soak.store.clear(b"")
        rounds += 1
        if rounds >= len(kinds):
            marks.append(footprint())
    first = marks[0]
    for mark in marks[1:]:
        assert all(mark[what] <= first[what] for what in ("threads", "descriptors", "allocations")), (first, mark)
    grown = marks[-1]["resident"] - max(mark["resident"] for mark in marks[: max(1, len(marks) // 4)])
    assert grown < KEPT_BYTES, marks
    return {"rounds": rounds, "grown_bytes": grown, **marks[-1], "done": dict(sorted(soak.done.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--round", type=float, default=20, help="seconds of a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmpy-soak-") as place:
        soak = Soak(given.device, Path(place), given.chats, random.Random(given.seed))
        print(json.dumps(run(soak, given.minutes, given.round, given.kinds), indent=1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
