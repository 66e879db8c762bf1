"""Law 2 through AsyncEngine: in any company, a request has the bits of an LLM that runs it alone.

Also cases with two engines or two processes. test_exactness.py has the cases of LLM.
"""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load

from llmpy import AsyncEngine, RequestOutputKind

lone = load(Path(__file__).with_name("test_exactness.py"), "test_exactness_shared")
Bits = list[tuple[bytes, ...]]
Case = tuple[Path, str, list[Bits]]
PAGE = 16 * 3 * 2 * 2 * 32 * 4
PARAMS = [lone.params(i) for i in range(len(lone.LENGTHS))]


@pytest.fixture(scope="module", params=[("llama", "float32"), ("qwen3", "bfloat16")], ids="-".join)
def case(request: pytest.FixtureRequest, device: str, tiny_model: Callable[[str, str], Path]) -> Case:
    """A model, a device, and an LLM's outputs for every prompt alone."""
    path = tiny_model(*request.param)
    return path, device, lone.alone(path, lone.prompts(), device)


def open_engine(case: Case, **options: Any) -> AsyncEngine:
    common = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256, "device": case[1]}
    return AsyncEngine(case[0], **(common | options))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(limited())


async def all_at_once(engine: AsyncEngine, order: list[int]) -> list[Bits]:
    """Sends all prompts in an order; returns the outputs by number."""
    streams = {i: engine.generate(lone.prompts()[i], PARAMS[i]) for i in order}
    found = {i: lone.bits(await stream) for i, stream in streams.items()}
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_seqs": 3, "max_num_batched_tokens": 20, "enable_prefix_caching": False},
        {"kv_cache_memory_bytes": 24 * PAGE, "max_model_len": 160},
    ],
    ids=str,
)
def test_company_order_chunks_cache_and_preemption(case: Case, options: dict[str, Any]) -> None:
    if "kv_cache_memory_bytes" in options and "bfloat16" in case[0].name:
        options = options | {"kv_cache_memory_bytes": options["kv_cache_memory_bytes"] // 2}

    async def main() -> None:
        async with open_engine(case, **options) as engine:
            numbers = list(range(len(PARAMS)))
            for order in (numbers, numbers[::-1], numbers[::2] + numbers[1::2]):
                assert await all_at_once(engine, order) == case[2]
            engine.check()
            stats = engine.stats()
            assert stats.num_preemptions or "max_model_len" not in options
            assert stats.prefix_cache_hits or "enable_prefix_caching" in options or stats.num_preemptions
            assert stats.allocations_since_warmup == 0

    run(main())


def test_samples_and_equal_requests(case: Case) -> None:
    """n = 16, 16 requests sent together, and one after the other; the prompt is computed once."""
    prompt, common = lone.prompts()[8], {"temperature": 1.2, "max_tokens": 12, "logprobs": 2, "seed": 9, "ignore_eos": True}

    async def main() -> None:
        async with open_engine(case, max_num_seqs=16) as engine:
            together = lone.bits(await engine.generate(prompt, n=16, **common))
            await engine.reset_prefix_cache()
            streams = [engine.generate(prompt, sample_index=i, **common) for i in range(16)]
            outputs = [await stream for stream in streams]
            assert [lone.bits(output)[0] for output in outputs] == together and len(set(together)) > 12
            assert sorted(output.num_cached_tokens for output in outputs) == [0] + [len(prompt) - 4] * 15
            for i in (3, 15):
                assert lone.bits(await engine.generate(prompt, sample_index=i, **common))[0] == together[i]

    run(main())


def test_scores_and_prompts(case: Case) -> None:
    async def main() -> None:
        async with open_engine(case, max_num_batched_tokens=64) as engine:
            params = lone.SamplingParams(temperature=0.7, max_tokens=20, logprobs=0, ignore_eos=True, seed=5)
            outputs = [await engine.generate(prompt, params) for prompt in lone.prompts()]
            whole = [prompt + output.token_ids for prompt, output in zip(lone.prompts(), outputs, strict=True)]
            for temperature, name in ((1.0, "raw"), (0.7, "full")):
                pairs = zip(whole, lone.LENGTHS, strict=True)
                pending = [engine.score(ids, start=n, temperature=temperature) for ids, n in pairs]
                for score, output in zip([await one for one in pending], outputs, strict=True):
                    assert score.token_logprobs.tobytes() == getattr(output.outputs[0].sampled, name).tobytes()
            again = [engine.generate(ids, max_tokens=1, prompt_logprobs=1) for ids in whole]
            for output, wanted, n in zip([await stream for stream in again], outputs, lone.LENGTHS, strict=True):
                assert output.prompt_token_logprobs[n:].tobytes() == wanted.outputs[0].sampled.raw.tobytes()

    run(main())


async def joined(engine: AsyncEngine, i: int, turn: asyncio.Lock, disturb: Callable[[], Coroutine[Any, Any, None]]) -> Bits:
    """A prompt's bits from joined deltas; calls a function after every few deltas."""
    parts = []
    async for output in engine.generate(lone.prompts()[i], PARAMS[i].replace(output_kind=RequestOutputKind.DELTA)):
        parts.append(lone.bits(output)[0])
        if len(parts) % 4 == 1:
            async with turn:
                await disturb()
    return [tuple(b"".join(column) for column in zip(*parts, strict=True))]


def test_paused_slept_and_updated_to_the_same(case: Case) -> None:
    """During a request: pauses, sleeps, a reset of the cache, and an update with the same weights."""
    from safetensors import safe_open

    async def main() -> None:
        async with open_engine(case) as engine:

            async def pause() -> None:
                await engine.pause("keep", clear_cache=True)
                await engine.resume()

            async def reset() -> None:
                await engine.reset_prefix_cache(True)

            async def sleep() -> None:
                await engine.sleep(1, mode="keep")
                await engine.wake_up()

            async def doze() -> None:
                await engine.sleep(1, mode="keep", tags="kv_cache")
                await engine.wake_up()

            with safe_open(case[0] / "model.safetensors", "np") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

            async def keep() -> None:
                await engine.update_weights(weights)

            async def recompute() -> None:
                await engine.update_weights(weights, on_running="recompute")

            for disturb in (pause, reset, sleep, doze, keep, recompute):
                turn = asyncio.Lock()
                found = await asyncio.gather(*[joined(engine, i, turn, disturb) for i in (4, 5, 7)])
                assert found == [case[2][i] for i in (4, 5, 7)], disturb.__name__
            assert engine.weight_epoch > 3

    run(main())


def test_aborted_and_continued(case: Case) -> None:
    async def main() -> None:
        async with open_engine(case) as engine:
            n_continued = 0
            for i in (3, 6, 9) * 100:  # until one is caught before its end
                if n_continued:
                    break
                prompt, wanted = lone.prompts()[i], case[2][i]
                stream = engine.generate(prompt, PARAMS[i], "rollout")
                await anext(stream)
                await engine.pause("keep")
                partials = await engine.abort("rollout")
                await engine.resume()
                for partial in partials:
                    again = {"prompt_token_ids": prompt, "output_token_ids": partial.token_ids}
                    parts = lone.bits(partial)[0], lone.bits(await engine.generate(again, PARAMS[i]))[0]
                    assert [tuple(map(b"".join, zip(*parts, strict=True)))] == wanted
                    n_continued += 0 < len(partial.token_ids) < 20
            assert n_continued

    run(main())


def test_an_updated_engine_is_a_fresh_one(case: Case, tmp_path: Path) -> None:
    """Updates to other weights and back, by both kinds of update, with requests before and after."""
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "other"
    path.mkdir()
    (path / "config.json").write_text((case[0] / "config.json").read_text())
    weights = load_file(case[0] / "model.safetensors")
    other = {name: (value.astype(np.float32) * 0.9 + 0.01).astype(value.dtype) for name, value in weights.items()}
    save_file(other, path / "model.safetensors")
    wanted = lone.alone(path, lone.prompts(), case[1])
    assert wanted != case[2]

    async def main() -> None:
        async with open_engine(case) as engine:
            numbers = list(range(len(PARAMS)))
            for how in ("keep", "recompute"):
                await engine.update_weights(reversed(other.items()), on_running=how)
                assert await all_at_once(engine, numbers) == wanted
                await engine.update_weights(weights, on_running=how)
                assert await all_at_once(engine, numbers) == case[2]

    run(main())


DIGEST = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../helpers"]
import test_exactness_async as shared
print(shared.digest(sys.argv[2], sys.argv[3], sys.argv[4]))
"""


def digest(path: str, device: str, kind: str) -> str:
    """A digest of all outputs of an engine for the prompts."""
    if kind == "LLM":
        with lone.open_llm(Path(path), device, max_num_seqs=4) as llm:
            found = lone.run(llm, lone.prompts())
    else:
        engine = open_engine((Path(path), device, []), max_num_batched_tokens=50)
        found = run(all_at_once(engine, list(range(len(PARAMS)))))
        engine.close()
    return hashlib.sha256(repr(found).encode()).hexdigest()


def test_two_processes(case: Case) -> None:
    path, device, wanted = case
    expected = hashlib.sha256(repr(wanted).encode()).hexdigest()
    for kind in ("LLM", "AsyncEngine"):
        command = [sys.executable, "-c", DIGEST, str(Path(__file__).parent), str(path), device, kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
        assert done.stdout.strip() == expected, done.stderr
        assert digest(str(path), device, kind) == expected
