"""Models with recurrent state: a request has the same bits alone, beside others, cut, cached, preempted and forked."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmpy import LLM, AsyncEngine, RequestOutput, RequestOutputKind, SamplingParams
from llmpy.outputs import CompletionOutput

Bits = tuple[bytes, bytes]


def open_llm(path: Path, device: str, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024, "device": device}
    return LLM(path, **(defaults | options))


def params(i: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": i % 2, "max_tokens": 16, "ignore_eos": True, "logprobs": 0, "seed": i} | changes))


def bits(sample: CompletionOutput) -> Bits:
    return sample.token_ids_array.tobytes(), sample.sampled.raw.tobytes()


def samples(output: RequestOutput) -> list[Bits]:
    return [bits(sample) for sample in output.outputs]


def run(llm: LLM, prompts: list[list[int]]) -> list[list[Bits]]:
    return [samples(o) for o in llm.generate(prompts, [params(i) for i in range(len(prompts))], use_tqdm=False)]


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 131, n).tolist() for n in lengths]


def page_bytes(path: Path, device: str) -> int:
    with open_llm(path, device) as llm:
        return int(llm._driver.model.describe()["page_bytes"])


def test_batches_chunks_and_hits(recurrent_model: Path, device: str) -> None:
    batch = random_prompts(1, [1, 16, 17, 31, 48, 64, 65, 90, 129, 150])
    with open_llm(recurrent_model, device, enable_prefix_caching=False, enforce_eager=True) as llm:
        alone = [samples(llm.generate([p], [params(i)], use_tqdm=False)[0]) for i, p in enumerate(batch)]
    small = {"max_num_batched_tokens": 20, "max_num_seqs": 5}
    for options in ({}, small, {"block_size": 32, "enforce_eager": True}, {"enable_prefix_caching": False} | small):
        with open_llm(recurrent_model, device, **options) as llm:
            assert run(llm, batch) == alone
            assert run(llm, batch) == alone
            stats = llm.stats()
            assert (stats.prefix_cache_hits > 0) == ("enable_prefix_caching" not in options)
            assert stats.allocations_since_warmup == 0
            assert llm.reset_prefix_cache()
            assert run(llm, batch) == alone
            llm.check()


async def joined(engine: AsyncEngine, prompt: list[int], i: int, cut: int) -> Bits:
    """A request's bits; the request is cancelled after `cut` tokens and continued as a new one."""
    done: list[Bits] = []
    ids: list[int] = []
    stream = engine.generate(prompt, params(i, max_tokens=24, output_kind=RequestOutputKind.DELTA))
    async for output in stream:
        done.append(bits(output.outputs[0]))
        ids += output.outputs[0].token_ids
        if cut and len(ids) >= cut:
            break
    if cut and len(ids) < 24:
        await engine.abort(stream.request_id)
        whole = {"prompt_token_ids": prompt, "output_token_ids": ids}
        done.append(bits((await engine.generate(whole, params(i, max_tokens=24))).outputs[0]))
    return b"".join(one[0] for one in done), b"".join(one[1] for one in done)


def finish(coroutine: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await coroutine

    asyncio.run(limited())


def test_a_crowd_that_is_preempted_and_cancelled(recurrent_model: Path, device: str) -> None:
    """64 long distinct requests through a pool that is too small for those that run."""
    batch = random_prompts(2, np.random.default_rng(2).integers(40, 200, 64).tolist())
    with open_llm(recurrent_model, device, enable_prefix_caching=False) as llm:
        settings = [params(i, max_tokens=24) for i in range(64)]
        alone = [bits(llm.generate([p], [s], use_tqdm=False)[0].outputs[0]) for p, s in zip(batch, settings, strict=True)]
    pool = 45 * page_bytes(recurrent_model, device)

    options: dict[str, Any] = {"kv_cache_memory_bytes": pool, "max_model_len": 256, "max_num_seqs": 16}
    with open_llm(recurrent_model, device, max_num_batched_tokens=100, **options) as llm:
        outputs = llm.generate(batch, [params(i, max_tokens=24) for i in range(64)], use_tqdm=False)
        assert [bits(output.outputs[0]) for output in outputs] == alone
        assert llm.stats().num_preemptions > 0 or llm.num_cache_groups == 0

    async def main() -> None:
        async with AsyncEngine(
            recurrent_model, skip_tokenizer_init=True, max_num_batched_tokens=100, device=device, **options
        ) as engine:
            found = await asyncio.gather(*(joined(engine, p, i, i % 5 * 4) for i, p in enumerate(batch)))
            assert list(found) == alone
            engine.check()
            stats = engine.stats()
            assert stats.allocations_since_warmup == 0 and stats.state_snapshots_taken > 64
            assert stats.kv_blocks_free == stats.kv_blocks_total

    finish(main())


def test_a_shared_prefix_hits_from_the_third_prompt_on(recurrent_model: Path, device: str) -> None:
    shared, *rests = random_prompts(3, [480] + [32] * 12)
    with open_llm(recurrent_model, device, enable_prefix_caching=False) as llm:
        alone = run(llm, [shared + rest for rest in rests])
    with open_llm(recurrent_model, device) as llm:
        hits = []
        for i, rest in enumerate(rests[:6]):
            output = llm.generate([shared + rest], [params(i)], use_tqdm=False)[0]
            assert samples(output) == alone[i]
            hits.append(output.num_cached_tokens)
        assert hits == [0, 0, 480, 480, 480, 480]
        outputs = llm.generate([shared + rest for rest in rests], [params(i) for i in range(12)], use_tqdm=False)
        assert [samples(o) for o in outputs] == alone
        assert all(o.num_cached_tokens >= 480 for o in outputs)
        assert llm.stats().state_snapshot_bytes > 0
        llm.check()
    with open_llm(recurrent_model, device, max_num_batched_tokens=2048) as llm:  # all at once
        outputs = llm.generate([shared + rest for rest in rests], [params(i) for i in range(12)], use_tqdm=False)
        assert [samples(o) for o in outputs] == alone
        assert sum(o.num_cached_tokens == 480 for o in outputs) == 10


def test_a_chat_goes_on_where_it_ended(recurrent_model: Path, device: str) -> None:
    prompt, question = random_prompts(4, [700, 40])
    with (
        open_llm(recurrent_model, device, max_model_len=2048) as llm,
        open_llm(recurrent_model, device, max_model_len=2048, enable_prefix_caching=False) as cold,
    ):
        for turn in range(3):
            output = llm.generate([prompt], [params(turn, max_tokens=150)], use_tqdm=False)[0]
            assert samples(output) == samples(cold.generate([prompt], [params(turn, max_tokens=150)], use_tqdm=False)[0])
            assert turn == 0 or len(prompt) - output.num_cached_tokens <= len(question) + 64
            prompt = prompt + output.outputs[0].token_ids + question
        assert llm.stats().allocations_since_warmup == 0


def test_samples_equal_requests(recurrent_model: Path, device: str) -> None:
    prompt = random_prompts(5, [77])[0]
    common: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24, "logprobs": 0, "seed": 9, "ignore_eos": True}
    with open_llm(recurrent_model, device) as llm:
        together = samples(llm.generate([prompt], n=6, use_tqdm=False, **common)[0])
        apart = [samples(llm.generate([prompt], sample_index=i, use_tqdm=False, **common)[0])[0] for i in range(6)]
        assert together == apart and len(set(together)) > 1
        assert llm.reset_prefix_cache()
        equal = llm.generate([prompt] * 6, [params(1, sample_index=i, **common) for i in range(6)], use_tqdm=False)
        assert [samples(o)[0] for o in equal] == apart
        assert [o.num_cached_tokens for o in equal] == [0] + [64] * 5  # one computes the prompt, the others wait for it


def test_scores_equal_draws(recurrent_model: Path, device: str) -> None:
    batch = random_prompts(6, [5, 64, 100])
    with open_llm(recurrent_model, device, max_num_batched_tokens=64) as llm:
        for _ in range(2):  # without a hit and with one
            outputs = llm.generate(batch, temperature=1, max_tokens=20, logprobs=0, ignore_eos=True, seed=5, use_tqdm=False)
            scores = llm.score([p + o.outputs[0].token_ids for p, o in zip(batch, outputs, strict=True)], use_tqdm=False)
            for p, o, s in zip(batch, outputs, scores, strict=True):
                assert s.token_logprobs[len(p) - s.start :].tobytes() == o.outputs[0].sampled.raw.tobytes()


@pytest.mark.parametrize("on_running", ["keep", "recompute"])
def test_a_commit_in_the_middle(recurrent_model: Path, device: str, on_running: str) -> None:
    """A commit of the same weights: a running request keeps or rebuilds its state, and no request finds an older state."""
    batch, settings = random_prompts(7, [100, 60]), params(1, max_tokens=60)
    with open_llm(recurrent_model, device) as llm:
        alone = [samples(o) for o in llm.generate(batch, settings, use_tqdm=False)]
        names = [llm.add_request(prompt, settings) for prompt in batch]
        for _ in range(20):
            llm.step()
        llm.update_weights(load_file(recurrent_model / "model.safetensors"), on_running=on_running)
        assert llm.stats().state_snapshots == 0
        assert llm.stats().num_preemptions == (2 if on_running == "recompute" else 0)
        late = llm.generate(batch[0], settings, use_tqdm=False)[0]
        assert samples(late) == alone[0] and late.num_cached_tokens in ((0,) if on_running == "keep" else (0, 64, 96))
        found = {}
        while llm.has_unfinished_requests():
            found |= {output.request_id: output for output in llm.step() if output.finished}
        assert [samples(found[name]) for name in names] == alone
        llm.check()
