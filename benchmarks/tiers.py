"""Tiers of the cache on GPUs: the first token behind a prompt that they hold, steps beside their copies, and what they cost.

    python benchmarks/tiers.py [ROW ...] [--model 8b] [--length 8192] [--rounds 5] [--device cuda:0] [--other cuda:1]
        [--connectors device peer] [--address unix:tiers] [--folder FOLDER] [--users 64]

Random weights in the shape of `--model` (benchmarks/cuda.py, or "small" for CPUs), bfloat16. ROW is first, decode, idle, turns,
both, disk, chats, peer or early; none means all but turns and early. The pool holds three prompts of `length` tokens, host
memory eight.

- first: wall time of generate() for one new token behind a prompt that no cache has (recomputed), that the pool has (device),
  or that host memory alone has (host). Ids and logprobs must be those of the first time. Copies: bytes over the time of the
  copies themselves, each way (`stats()`). Steps: of the last hit in host memory, ms from its beginning to the start of a step,
  and the step's time on the device.
- decode: time between the starts of steps that decode 32 sequences and nothing else: alone, and while requests come whose
  prompts are in host memory. Medians.
- idle: the same steps, and prefill of the 32 prompts, in a pool that holds everything: without a host cache, with one of 4 GiB,
  with one of twice the pool, to which blocks are copied at once, and without one again. The engines take turns.
- turns: whole calls of step() that decode 32 sequences, of three such engines of which each makes one step in turn. For CPUs:
  other work of the machine slows all three alike.
- both: copies of one engine that goes to sleep while another one of the device loads prompts: GB/s of each way.
- disk: the same token behind a prompt that only files in a folder of `--folder` have, and what dd reads there past the page
  cache. The result must have the bits of the first time.
- chats: 64 users with contexts of `length` tokens, of which a quarter fits the pool, get answers of 64 tokens, all at once.
  Tokens a second where every context is computed, and where host memory has the contexts from the turn before.
- peer: an engine on `--device` computes a prompt, one on `--other` goes on with it in the same process, by each of
  `--connectors`. Medians of: a prompt that is only computed (recomputed); prefill(); the first token of decode(); the same
  prompt once more on the second engine, which has it (there); and what handing over costs (beyond): prefill and decode without
  recomputed and there. The result must have the bits of the first engine.
- early: the connector peer; prompts in steps of `--chunk` tokens. The time until the second engine has the first token, and how
  much more that is than on the first engine alone, if decode() is called behind prefill() (behind), or at once, with what
  begin_prefill() gives (at once). A llmpy without begin_prefill() has no last row.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda
import numpy as np
from results import Results

from llmpy import LLM, AsyncEngine, RequestOutput, SamplingParams

SEQUENCES, NEW, TURN = 32, 160, 64
SMALL = cuda.Shape("Llama", 4, 256, 16, 16, 256, 4096, True)
"""Much cache for little to compute."""
MODELS = {**cuda.MODELS, "small": SMALL}
ONE = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)


def model_folder(model: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="llmpy-tiers-"))
    (path / "config.json").write_text(json.dumps(MODELS[model].config()))
    return path


def engine_options(model: str, length: int) -> dict[str, Any]:
    shape = MODELS[model]
    prompt_bytes = length * shape.kv_bytes
    return {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": length + 128, "max_num_seqs": 64,
        "kv_cache_memory_bytes": int(prompt_bytes * 3.3), "host_cache_bytes": 8 * prompt_bytes,
        "quantization": shape.quantization,
    }  # fmt: skip


def open_engine(model: str, length: int, device: str, **options: Any) -> LLM:
    return LLM(model_folder(model), device=device, **engine_options(model, length) | options)


def result_bits(output: RequestOutput) -> tuple[bytes, bytes]:
    sample = output.outputs[0]
    return sample.token_ids_array.tobytes(), sample.sampled.raw.tobytes()


def prompts(length: int, vocab: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(1)
    while True:
        yield rng.integers(3, vocab, length).tolist()


def first(llm: LLM, prompt: list[int]) -> tuple[float, int, tuple[bytes, bytes]]:
    """Milliseconds, cached tokens, and the bits of the result."""
    begun = time.perf_counter()
    output = llm.generate([prompt], ONE, use_tqdm=False)[0]
    ms = 1000 * (time.perf_counter() - begun)
    return ms, output.num_cached_tokens, result_bits(output)


def decode(llm: LLM, waiting: list[list[int]], shorts: list[list[int]]) -> tuple[float, float, int]:
    """Median and 90th percentile of the ms between steps that only decode, and their number, while `waiting` comes in turn."""
    settings = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    before = llm.stats().num_steps
    names = {llm.add_request(prompt, settings) for prompt in shorts}
    queue, loading = list(waiting), ""
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                names.discard(output.request_id)
                loading = "" if output.request_id == loading else loading
        if queue and not loading and llm.stats().num_steps > before + 20:
            loading = str(llm.add_request(queue.pop(), ONE))
    steps = [step for step in llm.step_log(4096) if step.number > before]
    times = [
        1000 * (b.start - a.start)
        for a, b in itertools.pairwise(steps)
        if not a.prompt_rows and not b.prompt_rows and a.decode_rows == b.decode_rows == SEQUENCES
    ]
    return statistics.median(times), statistics.quantiles(times, n=10)[-1], len(times)


def measure_first(llm: LLM, chosen: argparse.Namespace, texts: list[list[int]], source: Iterator[list[int]]) -> None:
    for _ in range(2):
        first(llm, next(source))
    bits, times = {}, {"recomputed": [], "device": [], "host": []}
    for i, text in enumerate(texts):
        ms, _, bits[i] = first(llm, text)
        times["recomputed"].append(ms)
        ms, cached, again = first(llm, text)
        times["device"].append(ms)
        if again != bits[i] or cached < chosen.length - 16:
            raise SystemExit(f"device: {cached} cached tokens, bits {'equal' if again == bits[i] else 'differ'}")
    for number in range(chosen.rounds):
        i, before, begun = number % 6, llm.stats(), time.monotonic()
        ms, cached, again = first(llm, texts[i])
        after = llm.stats()
        if again != bits[i] or cached < chosen.length - 16:
            raise SystemExit(f"host: {cached} cached tokens, bits {'equal' if again == bits[i] else 'differ'}")
        if after.host_cache_hits - before.host_cache_hits > chosen.length // 2:
            times["host"].append(ms)
            load_ms = 1000 * (after.host_load_s - before.host_load_s)
            steps = [step for step in llm.step_log(8) if step.number > before.num_steps]
            log = [f"{1000 * (step.start - begun):.1f} + {step.device_us / 1000:.1f}" for step in steps]
    for name, found in times.items():
        chosen.results.add(f"tiers.first.{name}", statistics.median(found), "ms", 30 if name == "host" else None)
        print(f"{name:12}{statistics.median(found):9.1f} ms, least {min(found):.1f}, most {max(found):.1f}, {len(found)} times")
    print(f"steps       {', '.join(log)} ms; copies in {load_ms:.1f} ms")
    stats = llm.stats()
    for name, size, seconds in (
        ("copies out", stats.host_stored_bytes, stats.host_store_s),
        ("copies in", stats.host_loaded_bytes, stats.host_load_s),
    ):
        chosen.results.add(f"tiers.{name.replace(' ', '.')}", size / seconds / 1e9, "GB/s")
        print(f"{name:12}{size / seconds / 1e9:9.1f} GB/s, {size / 1e9:.2f} GB")
    print(f"skipped     {stats.skipped_load_tokens} tokens")


def measure_decode(llm: LLM, chosen: argparse.Namespace, texts: list[list[int]], source: Iterator[list[int]]) -> None:
    shorts = [[next(source)[:128] for _ in range(SEQUENCES)] for _ in range(4)]
    ratios = []
    for round_ in range(2):
        hits = llm.stats().host_cache_hits
        quiet = decode(llm, [], shorts[2 * round_])
        busy = decode(llm, texts, shorts[2 * round_ + 1])
        alone = f"{quiet[0]:9.3f} ms (p90 {quiet[1]:.3f}, {quiet[2]} steps)"
        beside = f"{busy[0]:.3f} (p90 {busy[1]:.3f}, {busy[2]} steps): {busy[0] / quiet[0]:.3f}x"
        print(f"decode      {alone}, with copies {beside}; {llm.stats().host_cache_hits - hits} tokens loaded")
        ratios.append(busy[0] / quiet[0])
    chosen.results.add("tiers.decode.beside", max(ratios), "x", 1.05)


def idle_pool_bytes(chosen: argparse.Namespace, n_tokens: int) -> int:
    """Bytes of a pool that holds all rounds, of SEQUENCES times so many tokens; with less the oldest blocks are copied out."""
    return int(1.1 * (2 * chosen.rounds + 3) * SEQUENCES * n_tokens * MODELS[chosen.model].kv_bytes)


def measure_idle(chosen: argparse.Namespace, source: Iterator[list[int]]) -> None:
    """What a host cache costs while no request needs it."""
    pool_bytes = idle_pool_bytes(chosen, 256 + NEW)
    sizes = {"off": 0, "on": 4 << 30, "at once": int(2.1 * pool_bytes)}
    engines = {
        name: open_engine(chosen.model, chosen.length, chosen.device, host_cache_bytes=size, kv_cache_memory_bytes=pool_bytes)
        for name, size in sizes.items()
    }
    engines["off again"] = engines["off"]
    steps: dict[str, list[float]] = {name: [] for name in engines}
    prefills: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(chosen.rounds + 1):
        for name, llm in engines.items():
            shorts = [next(source)[:128] for _ in range(SEQUENCES)]
            begun = time.perf_counter()
            llm.generate(shorts, ONE, use_tqdm=False)
            spent = 1000 * (time.perf_counter() - begun)
            step = decode(llm, [], [next(source)[:128] for _ in range(SEQUENCES)])[0]
            if round_:
                prefills[name].append(spent)
                steps[name].append(step)
    for what, found in (("a step", steps), ("prefill", prefills)):
        off = statistics.median(found["off"])
        parts = [f"{name} {statistics.median(ms):.3f} ms ({statistics.median(ms) / off:.4f}x)" for name, ms in found.items()]
        print(f"idle, {what}: {', '.join(parts)}")
        chosen.results.add(f"tiers.idle.{what.split()[-1]}", statistics.median(found["on"]) / off, "x", 1.01)
    for name in sizes:
        print(f"idle, {name}: {engines[name].stats().host_stored_bytes / 1e6:.0f} MB copied")
        engines[name].close()


def measure_turns(chosen: argparse.Namespace, source: Iterator[list[int]]) -> None:
    sizes = {"off": 0, "on": 4 << 30, "off again": 0}
    options = {"kv_cache_memory_bytes": idle_pool_bytes(chosen, 128 + NEW)}
    engines = {
        name: open_engine(chosen.model, chosen.length, chosen.device, host_cache_bytes=size, **options)
        for name, size in sizes.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sizes}
    settings = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for round_ in range(chosen.rounds + 1):
        for llm in engines.values():
            for _ in range(SEQUENCES):
                llm.add_request(next(source)[:128], settings)
            while llm.stats().num_running < SEQUENCES or llm.step_log(1)[-1].prompt_rows:
                llm.step()
        for _ in range(NEW - 40):
            for name, llm in engines.items():
                begun = time.perf_counter()
                llm.step()
                if round_:
                    times[name].append(1000 * (time.perf_counter() - begun))
        for llm in engines.values():
            while llm.has_unfinished_requests():
                llm.step()
    off = statistics.median(times["off"])
    parts = [f"{name} {statistics.median(ms):.3f} ms ({statistics.median(ms) / off:.4f}x)" for name, ms in times.items()]
    copied = engines["on"].stats().host_stored_bytes / 1e6
    print(f"turns, {len(times['off'])} steps each: {', '.join(parts)}; {copied:.0f} MB copied")
    for llm in engines.values():
        llm.close()


def measure_both(chosen: argparse.Namespace, source: Iterator[list[int]]) -> None:
    """One engine copies its pool out, because it goes to sleep, while another of the device loads prompts."""
    size_bytes = chosen.length * MODELS[chosen.model].kv_bytes
    with (
        open_engine(chosen.model, chosen.length, chosen.device) as reader,
        open_engine(chosen.model, chosen.length, chosen.device, host_cache_bytes=3 * size_bytes) as sleeper,
    ):
        texts = [next(source) for _ in range(7)]
        for text in texts:
            first(reader, text)
        for _ in range(4):
            first(sleeper, next(source))
        before = [reader.stats(), sleeper.stats()]
        thread = threading.Thread(target=sleeper.sleep, args=(1,))
        thread.start()
        for text in texts[:2]:
            first(reader, text)
        thread.join()
        after = [reader.stats(), sleeper.stats()]
    for name, way, i in (("in", "load", 0), ("out", "store", 1)):
        kind = f"host_{'loaded' if way == 'load' else 'stored'}_bytes"
        size, seconds = (getattr(after[i], field) - getattr(before[i], field) for field in (kind, f"host_{way}_s"))
        rate = f"{size / 1e9:.2f} GB at {size / seconds / 1e9:.1f} GB/s" if seconds else "no block had to be copied"
        print(f"both ways, {name}: {rate}")


def read_rate(folder: Path, size_bytes: int) -> float:
    """GB/s of dd for a file of this folder, past the page cache."""
    file = folder / "dd"
    count = f"count={size_bytes >> 21}"
    for words in (["if=/dev/zero", f"of={file}", "oflag=direct"], [f"if={file}", "of=/dev/null", "iflag=direct"]):
        begun = time.perf_counter()
        subprocess.run(["dd", "bs=2M", count, *words], check=True, capture_output=True)
        rate = (size_bytes >> 21 << 21) / (time.perf_counter() - begun) / 1e9
    file.unlink()
    return rate


def measure_disk(chosen: argparse.Namespace, source: Iterator[list[int]]) -> None:
    size_bytes, texts = chosen.length * MODELS[chosen.model].kv_bytes, [next(source) for _ in range(6)]
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        options: dict[str, Any] = {"disk_cache": {"path": folder, "bytes": 16 * size_bytes}, "cache_loads": "always"}
        options["prefix_cache_seed"] = 1
        rates, spent = [read_rate(Path(folder), size_bytes)], []
        with open_engine(chosen.model, chosen.length, chosen.device, **options) as llm:
            bits = [first(llm, text)[2] for text in texts]
        with open_engine(chosen.model, chosen.length, chosen.device, **options) as llm:  # the first has saved all at its end
            for text, wanted in zip(texts, bits, strict=True):
                ms, cached, found = first(llm, text)
                if found != wanted or cached < chosen.length - 16:
                    raise SystemExit(f"disk: {cached} cached tokens, bits {'equal' if found == wanted else 'differ'}")
                spent.append(ms)
            stats = llm.stats()
        rates.append(read_rate(Path(folder), size_bytes))
    wall = size_bytes / statistics.median(spent) / 1e6
    print(f"disk        {statistics.median(spent):9.1f} ms, least {min(spent):.1f}, {len(spent)} times: {wall:.2f} GB/s")
    rate = stats.disk_loaded_bytes / stats.disk_load_s / 1e9
    chosen.results.add("tiers.disk", rate, "GB/s", 0.8 * max(rates))
    print(f"reads       {rate:9.2f} GB/s, {stats.disk_loaded_bytes / 1e9:.2f} GB; dd {rates[0]:.2f} and {rates[1]:.2f} GB/s")


def talk(llm: LLM, chats: list[list[int]]) -> tuple[float, int, list[list[int]]]:
    """Answers of TURN tokens to all chats at once: seconds, cached tokens, answers."""
    begun = time.perf_counter()
    outputs = llm.generate(chats, SamplingParams(temperature=0, max_tokens=TURN, ignore_eos=True), use_tqdm=False)
    spent = time.perf_counter() - begun
    return spent, sum(output.num_cached_tokens or 0 for output in outputs), [list(o.outputs[0].token_ids) for o in outputs]


def measure_chats(chosen: argparse.Namespace, source: Iterator[list[int]]) -> None:
    size_bytes = chosen.length * MODELS[chosen.model].kv_bytes
    chats, turns = [next(source) for _ in range(chosen.users)], [next(source)[:TURN] for _ in range(chosen.users)]
    rates = {}
    for name, host in (("recomputed", 0), ("host memory", int(1.1 * chosen.users * size_bytes))):
        options = {"kv_cache_memory_bytes": chosen.users * size_bytes // 4, "host_cache_bytes": host}
        with open_engine(chosen.model, chosen.length + 2 * TURN, chosen.device, **options) as llm:
            talk(llm, [next(source)])
            spent, cached, answers = talk(llm, chats)
            if host:  # the next turn of every chat
                again = [chat + answer + turn for chat, answer, turn in zip(chats, answers, turns, strict=True)]
                spent, cached, _ = talk(llm, again)
        rates[name] = chosen.users * TURN / spent
        print(f"chats, {name}: {rates[name]:.0f} tokens a second, {spent:.2f} s, {cached} tokens cached", flush=True)
    print(f"chats, {rates['host memory'] / rates['recomputed']:.2f}x")
    chosen.results.add("tiers.chats.recomputed", rates["recomputed"], "tok/s")
    chosen.results.add("tiers.chats.host", rates["host memory"], "tok/s", 3 * rates["recomputed"])


def stores(chosen: argparse.Namespace, connector: str) -> list[dict[str, Any]]:
    """Connectors of the engine that computes prompts and of the one that goes on."""
    if connector == "device":
        return [{"name": "device"}] * 2
    size_bytes = 3 * chosen.length * MODELS[chosen.model].kv_bytes
    return [
        {"name": "peer", "listen": chosen.address, "bytes": size_bytes},
        {"name": "peer", "peers": [chosen.address], "bytes": 1 << 20},
    ]


async def measure_peer(chosen: argparse.Namespace, source: Iterator[list[int]], connector: str) -> None:
    own = model_folder(chosen.model)
    options = engine_options(chosen.model, chosen.length) | {"prefix_cache_seed": 1}
    options["kv_cache_memory_bytes"] *= 3  # fresh pages for every round
    times: dict[str, list[float]] = {"recomputed": [], "prefill": [], "decode": [], "beyond": [], "there": []}
    first_store, second_store = stores(chosen, connector)
    async with (
        AsyncEngine(own, device=chosen.device, kv_connector=first_store, **options) as one,
        AsyncEngine(own, device=chosen.other, kv_connector=second_store, **options) as two,
    ):
        for round_ in range(chosen.rounds + 1):
            prompts_ = [next(source) for _ in range(2)]
            marks = [time.perf_counter()]
            await one.generate(prompts_[0], ONE)
            marks.append(time.perf_counter())
            handle = await one.prefill(prompts_[1], ONE)
            marks.append(time.perf_counter())
            found = await two.decode(handle, ONE)
            marks.append(time.perf_counter())
            again = await two.generate(prompts_[1], ONE)
            marks.append(time.perf_counter())
            wanted = await one.generate(prompts_[1], ONE)
            if result_bits(found) != result_bits(wanted) or found.num_cached_tokens < chosen.length - 16:
                told = f"{handle.saved_tokens} tokens saved, {found.num_cached_tokens} cached"
                raise SystemExit(f"{connector}: {told}, or other bits; {one.stats()}; {two.stats()}")
            spent = [1000 * (b - a) for a, b in itertools.pairwise(marks)]
            if round_ and result_bits(again) == result_bits(wanted):
                for name, ms in zip(times, (*spent[:3], spent[1] + spent[2] - spent[0] - spent[3], spent[3]), strict=True):
                    times[name].append(ms)
        stats = two.stats()
    for name, ms in times.items():
        chosen.results.add(f"tiers.{connector}.{name}", statistics.median(ms), "ms")
        print(f"{connector}, {name}: {statistics.median(ms):.1f} ms, least {min(ms):.1f}, most {max(ms):.1f}")
    for name, size, seconds in (
        ("fetched from the pool", stats.fetched_bytes, stats.fetch_s),
        ("fetched from the store", stats.disk_loaded_bytes, stats.disk_load_s),
        ("copied to the device", stats.host_loaded_bytes, stats.host_load_s),
    ):
        if size:
            print(f"{connector}, {name}: {size / 1e9:.2f} GB at {size / seconds / 1e9:.1f} GB/s")


async def measure_early(chosen: argparse.Namespace, source: Iterator[list[int]]) -> None:
    own = model_folder(chosen.model)
    options = engine_options(chosen.model, chosen.length) | {"prefix_cache_seed": 1, "cache_loads": "always"}
    options |= {"kv_cache_memory_bytes": 3 * options["kv_cache_memory_bytes"], "max_num_batched_tokens": chosen.chunk}
    first_store, second_store = stores(chosen, "peer")
    times: dict[str, list[float]] = {"alone": [], "behind": [], "at once": []}
    async with (
        AsyncEngine(own, device=chosen.device, kv_connector=first_store, **options) as one,
        AsyncEngine(own, device=chosen.other, kv_connector=second_store, **options) as two,
    ):
        ways = [way for way in times if way != "at once" or hasattr(one, "begin_prefill")]
        for round_ in range(chosen.rounds + 1):
            for way in ways:
                prompt, begun = next(source), time.perf_counter()
                if way == "alone":
                    found = await one.generate(prompt, ONE)
                elif way == "behind":
                    found = await two.decode(await one.prefill(prompt, ONE), ONE)
                else:
                    found = await two.decode(await one.begin_prefill(prompt, ONE), ONE)
                if round_:
                    times[way].append(1000 * (time.perf_counter() - begun))
                wanted = await one.generate(prompt, ONE)
                if result_bits(found) != result_bits(wanted):
                    raise SystemExit(f"{way}: other bits")
                if way != "alone" and found.num_cached_tokens < chosen.length - 16:
                    raise SystemExit(f"{way}: {found.num_cached_tokens} tokens cached; {one.stats()}; {two.stats()}")
    for way in ways:
        beyond = [ms - alone for ms, alone in zip(times[way], times["alone"], strict=True)]
        more = f"{statistics.median(beyond):.1f} more than alone, {min(beyond):.1f} to {max(beyond):.1f}"
        print(f"early, {way}: {statistics.median(times[way]):.1f} ms" + (f", {more}" if way != "alone" else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=["first", "decode", "idle", "both", "disk", "chats", "peer"])
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--other", default="cuda:1")
    kinds = ["device", "peer"]
    parser.add_argument("--connectors", nargs="+", default=kinds, choices=kinds, help="of the row peer")
    parser.add_argument("--folder", help="of the row disk")
    parser.add_argument("--chunk", type=int, default=256, help="of the row early")
    parser.add_argument("--users", type=int, default=64, help="of the row chats")
    parser.add_argument("--address", default="unix:tiers", help="of the peer")
    results = Results("benchmarks/tiers.py", parser)
    chosen = parser.parse_args()
    chosen.results = results
    source = prompts(chosen.length, MODELS[chosen.model].vocab)
    if {"first", "decode"} & set(chosen.rows):
        with open_engine(chosen.model, chosen.length, chosen.device) as llm:
            texts = [next(source) for _ in range(6)]
            measure_first(llm, chosen, texts, source)  # fills host memory
            if "decode" in chosen.rows:
                measure_decode(llm, chosen, texts, source)
            llm.check()
    if "idle" in chosen.rows:
        measure_idle(chosen, source)
    if "turns" in chosen.rows:
        measure_turns(chosen, source)
    if "both" in chosen.rows:
        measure_both(chosen, source)
    if "disk" in chosen.rows:
        measure_disk(chosen, source)
    if "chats" in chosen.rows:
        measure_chats(chosen, source)
    if "peer" in chosen.rows:
        for connector in chosen.connectors:
            asyncio.run(measure_peer(chosen, source, connector))
    if "early" in chosen.rows:
        asyncio.run(measure_early(chosen, source))
    results.write(chosen)


if __name__ == "__main__":
    main()
