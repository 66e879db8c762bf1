"""What AsyncEngine costs beside the model: the event loop's share of a core, and steps with many requests in flight.

    python benchmarks/async_engine.py [--streams 256] [--tokens 200] [--rate 20000] [--in-flight 4096]

Runs a tiny random model, so that the engine's own costs show. The loop's processor time per output object does not depend
on how fast the model is; its share of a core at a rate of tokens does, and is computed from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from llmpy import AsyncEngine, RequestOutputKind, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 256,
    "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def open_engine(folder: str, seqs: int) -> AsyncEngine:
    """An engine of random weights without a tokenizer."""
    (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "256MiB", "device": "cpu"}
    return AsyncEngine(folder, max_num_seqs=seqs, max_num_batched_tokens=max(512, seqs), **options)


def params(tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=1.0, **fields)


async def count(stream: object) -> int:
    """Reads a stream as a trainer or server would, and counts its objects."""
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
    """Median milliseconds of a step with all slots taken and the rest waiting."""
    await engine.pause("keep")
    given = params(120, output_kind=RequestOutputKind.FINAL_ONLY)
    opened = [engine.generate([i % 1000, 1, 2], given) for i in range(in_flight)]
    await engine.resume()
    while sum(record.running == seqs for record in engine.step_log(100)) < 90 and engine.stats().num_unfinished:
        await asyncio.sleep(0.01)
    times = [r.host_us + r.device_us for r in engine.step_log(90) if r.running == seqs and r.prompt_rows == 0]
    await engine.abort()
    del opened
    return statistics.median(times) / 1e3


async def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(folder, given.streams)
        kinds = {"plain": params(given.tokens), "logprobs=0": params(given.tokens, logprobs=0)}
        print(f"{'loop, ' + str(given.streams) + ' streams':28s} {'us/object':>10s} {'tok/object':>11s} {'tok/s':>9s} "
              f"{'core at ' + str(given.rate) + ' objects/s':>24s}")
        for name, base in kinds.items():
            for kind in RequestOutputKind:
                runs = [await loop_cost(engine, given.streams, base.replace(output_kind=kind)) for _ in range(3)]
                cost, merged, rate = (statistics.median(column) for column in zip(*runs, strict=True))
                share = f"{cost * given.rate * 100:.1f} %" if kind is not RequestOutputKind.FINAL_ONLY else ""
                print(f"{name + ' ' + kind.name:28s} {cost * 1e6:10.2f} {merged:11.2f} {rate:9.0f} {share:>24s}")
        few, many = [], []
        for _ in range(3):
            few.append(await step_times(engine, given.streams, given.streams))
            many.append(await step_times(engine, given.in_flight, given.streams))
        alone, crowded = statistics.median(few), statistics.median(many)
        print(f"step with {given.streams} running: {alone:.3f} ms; with {given.in_flight} in flight {crowded:.3f} ms "
              f"({(crowded / alone - 1) * 100:+.1f} %)")
        await engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=int, default=20000)
    parser.add_argument("--in-flight", type=int, default=4096)
    asyncio.run(main(parser.parse_args()))
