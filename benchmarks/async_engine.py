"""The cost of AsyncEngine: compared with LLM, the event loop's share of a core, steps with many requests in flight.

    python benchmarks/async_engine.py [--device cpu] [--streams 256] [--tokens 200] [--rate 20000] [--in-flight 4096]
    python benchmarks/async_engine.py --model 8b --device cuda:0 [--out DIR] [--commit ID]

- loop: processor time of the event loop's thread per output object (one object per stream and step), its share of a core at
  a rate of tokens, and the rate that the engine reached. The time per object does not depend on the model's speed.
- step: a step with all sequences running, alone and with many requests in flight.
- slow: eight streams of a few requests, alone and beside eight streams whose readers sleep.
- n8: 32 prompts of 512 tokens, n = 8, 512 new tokens, logprobs: LLM and AsyncEngine in turns on the same weights.

The tiny model shows the engine's own costs; 8b is the shape of Llama-3-8B with random weights. --out writes results.csv for
`benchmarks/cuda.py --merge`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from llmpy import LLM, AsyncEngine, RequestOutputKind, SamplingParams

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 256,
    "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
DELTA = RequestOutputKind.DELTA


def options(folder: str, given: argparse.Namespace) -> dict[str, object]:
    """A model of random weights without a tokenizer, and the engine's options."""
    config: dict[str, object] = TINY
    if given.model != "tiny":
        from cuda import MODELS

        config = MODELS[given.model].config()
    (Path(folder) / "config.json").write_text(json.dumps(config))
    tiny = given.model == "tiny"
    budget = max(512, given.streams) if tiny else 8192
    return {
        "load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "256MiB" if tiny else "48GiB",
        "device": given.device, "max_num_seqs": given.streams, "max_num_batched_tokens": budget, "max_model_len": 2048,
    }  # fmt: skip


def params(tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=1.0, **fields)


async def count(stream: object) -> int:
    """Reads a stream like a trainer or server, and counts its objects."""
    n = 0
    async for output in stream:
        n += len(output.outputs) > 0
    return n


async def loop_cost(engine: AsyncEngine, streams: int, given: SamplingParams) -> tuple[float, float, float]:
    """Processor seconds of the loop per object, tokens per object, tokens per second."""
    await engine.pause("keep")
    opened = [engine.generate([i % 1000, 1, 2], given) for i in range(streams)]
    tasks = [asyncio.ensure_future(count(stream)) for stream in opened]
    await asyncio.sleep(0)
    await engine.resume()
    begin, cpu = time.perf_counter(), time.thread_time()
    objects = sum(await asyncio.gather(*tasks))
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - begin
    tokens = streams * (given.max_tokens or 0)
    return cpu / objects, tokens / objects, tokens / wall


async def step_times(engine: AsyncEngine, in_flight: int, seqs: int) -> float:
    """Median milliseconds from step to step while `seqs` requests run and the others wait."""
    await engine.pause("keep")
    given = params(120, output_kind=RequestOutputKind.FINAL_ONLY)
    opened = [engine.generate([i % 1000, 1, 2], given) for i in range(in_flight)]
    first = engine.stats().num_steps
    await engine.resume()
    while True:
        await asyncio.sleep(0.01)
        log = [r for r in engine.step_log(200) if r.number > first and r.decode_rows == r.rows == seqs]
        if len(log) > 90 or not engine.stats().num_unfinished:
            break
    await engine.abort()
    del opened
    return statistics.median(1e3 * (b.start - a.start) for a, b in itertools.pairwise(log))


async def slow_readers(engine: AsyncEngine) -> tuple[float, float]:
    """Seconds of eight streams alone, and beside eight streams whose readers sleep."""
    quick, slow = params(100, output_kind=DELTA), params(100, output_kind=DELTA)

    async def timed() -> float:
        begin = time.perf_counter()
        await asyncio.gather(*[count(engine.generate([i, 5, 6], quick)) for i in range(8)])
        return time.perf_counter() - begin

    times: tuple[list[float], list[float]] = [], []
    for _ in range(5):
        for beside in (False, True):
            await engine.pause("keep")
            opened = [engine.generate([i, 7, 8], slow) for i in range(8)]
            task = asyncio.ensure_future(timed())
            if beside:  # each reader takes one object and then sleeps
                sleepers = [asyncio.ensure_future(anext(stream)) for stream in opened]
            else:  # the same work for the device, without slow readers
                sleepers = [asyncio.ensure_future(count(stream)) for stream in opened]
            await asyncio.sleep(0)
            await engine.resume()
            times[beside].append(await task)
            await asyncio.gather(*sleepers)
            await engine.wait_for_requests_to_drain()
            del opened
    return statistics.median(times[0]), statistics.median(times[1])


async def groups(llm: LLM, engine: AsyncEngine, rounds: int) -> dict[str, float]:
    """Seconds of 32 prompts with eight samples each, by LLM and by AsyncEngine with the output kinds of trainers."""
    found: dict[str, list[float]] = {"LLM": [], "FINAL_ONLY": [], "DELTA": []}
    rng = np.random.default_rng(3)

    async def once(kind: str, tokens: int) -> float:
        prompts = rng.integers(10, 8000, (32, 512)).tolist()
        common = params(tokens, n=8, logprobs=0)
        begin = time.perf_counter()
        if kind == "LLM":
            outputs = await asyncio.to_thread(llm.generate, prompts, common, use_tqdm=False)
        else:
            streams = [engine.generate(prompt, common.replace(output_kind=RequestOutputKind[kind])) for prompt in prompts]
            outputs = await asyncio.gather(*[last_of(stream) for stream in streams])
        seconds = time.perf_counter() - begin
        assert all(output.finished for output in outputs)
        return seconds

    for kind in found:
        await once(kind, 8)
    for i in range(rounds):
        for kind in found:
            if kind != "DELTA" or i == 0:
                found[kind].append(await once(kind, 512))
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


async def last_of(stream: object) -> object:
    """Reads everything."""
    async for output in stream:
        last = output
    return last


class Report:
    """Prints figures, and keeps them as rows of the table of benchmarks/cuda.py."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.lines: list[dict[str, object]] = []

    def add(self, row: str, value: float, unit: str, must: float | str = "", note: str = "") -> None:
        print(f"{row:36s} {value:10.4g} {unit:14s} {note}", flush=True)
        self.lines.append({"row": f"async.{row}", "value": f"{value:.5g}", "unit": unit, "must": must, "aim": ""})

    def write(self) -> None:
        if not self.given.out:
            return
        from cuda import write_table

        from llmpy import devices

        known = {"device": devices()[1]["name"], "date": time.strftime("%Y-%m-%d"), "commit": self.given.commit}
        command = f"benchmarks/async_engine.py --model {self.given.model}"
        Path(self.given.out).mkdir(parents=True, exist_ok=True)
        write_table(Path(self.given.out) / "results.csv", [known | {"command": command} | line for line in self.lines])


async def main(given: argparse.Namespace) -> None:
    report = Report(given)
    with tempfile.TemporaryDirectory() as folder:
        engine = AsyncEngine(folder, **options(folder, given))
        kinds = {"plain": params(given.tokens), "logprobs": params(given.tokens, logprobs=0)}
        await loop_cost(engine, given.streams, params(20, output_kind=DELTA))
        for name, base in kinds.items():
            for kind in (RequestOutputKind if given.model == "tiny" else [DELTA]):
                runs = [await loop_cost(engine, given.streams, base.replace(output_kind=kind)) for _ in range(3)]
                cost, merged, rate = (statistics.median(column) for column in zip(*runs, strict=True))
                note = f"{merged:.2f} tokens an object, {rate:.0f} tok/s reached"
                report.add(f"loop.{name}.{kind.name.lower()}", cost * 1e6, "us/object", note=note)
                if kind is DELTA:
                    must = 25 if name == "plain" else ""
                    report.add(f"core.{name}", cost * given.rate * 100, "% of a core", must, f"at {given.rate} objects/s")
        if given.loop_only:
            await engine.shutdown()
            return report.write()
        few, many = [], []
        for _ in range(3):
            few.append(await step_times(engine, given.streams, given.streams))
            many.append(await step_times(engine, given.in_flight, given.streams))
        alone, crowded = statistics.median(few), statistics.median(many)
        report.add("step.alone", alone, "ms", note=f"{given.streams} running")
        note = f"{given.in_flight} in flight: x {crowded / alone:.3f}"
        report.add("step.crowded", crowded, "ms", round(alone * 1.1, 4), note)
        quick, beside = await slow_readers(engine)
        report.add("slow.none", quick, "s")
        report.add("slow.beside", beside, "s", round(quick * 1.03, 4), f"x {beside / quick:.3f}")
        if given.model != "tiny":
            llm = LLM(folder, **options(folder, given))
            seconds = await groups(llm, engine, given.rounds)
            report.add("n8.llm", seconds["LLM"], "s")
            for kind in ("FINAL_ONLY", "DELTA"):
                must = round(seconds["LLM"] * 1.03, 3)
                report.add(f"n8.{kind.lower()}", seconds[kind], "s", must, f"x {seconds[kind] / seconds['LLM']:.3f}")
            llm.close()
        await engine.shutdown()
    report.write()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=int, default=20000)
    parser.add_argument("--in-flight", type=int, default=4096)
    parser.add_argument("--loop-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    asyncio.run(main(parser.parse_args()))
