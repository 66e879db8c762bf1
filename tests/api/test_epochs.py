"""Weights replaced during requests: the weights that computed each token, and the blocks that the cache may still return."""

import asyncio

import numpy as np
import pytest
from async_help import PARAMS, bits, drain, run
from safetensors.numpy import load_file

from llmpy import RequestOutputKind

PROMPTS = [[5, 6, 7, 8, 9] * 7, [11, 12, 13], [5, 6, 7, 8, 9] * 7]
LONG = PARAMS.replace(max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture
def two_weights(long_model):
    """The model's weights, and others."""
    given, rng = load_file(str(long_model / "model.safetensors")), np.random.default_rng(5)
    return given, {name: value + 0.05 * rng.standard_normal(value.shape).astype(np.float32) for name, value in given.items()}


def columns(sample, first=0, end=None):
    """The bits of tokens: ids and all logprobs."""
    logprobs = sample.sampled
    arrays = (sample.token_ids_array, logprobs.raw, logprobs.full, logprobs.processed, logprobs.kept_mass, logprobs.rank)
    return [array[first:end].tobytes() for array in arrays]


@pytest.mark.parametrize("on_running", ["keep", "recompute"])
def test_a_commit_in_the_middle(open_tiny, long_model, two_weights, on_running):
    old, new = two_weights
    llm = open_tiny(long_model)
    before = [output.outputs[0] for output in llm.generate(PROMPTS, LONG)]
    names = [llm.add_request(prompt, LONG) for prompt in PROMPTS]
    for _ in range(20):
        llm.step()
    report = llm.update_weights(new, version="new", on_running=on_running)
    assert report.epoch == 1 == llm.weight_epoch and llm.weight_version == "new"
    assert llm.stats().num_preemptions == (3 if on_running == "recompute" else 0)
    late = llm.generate(PROMPTS[0], LONG)[0]  # runs beside them
    outputs = drain(llm)
    assert late.num_cached_tokens in ((0,) if on_running == "keep" else (0, 32))  # blocks that were recomputed are good
    for name, prompt, first in zip(names, PROMPTS, before, strict=True):
        sample = outputs[name].outputs[0]
        (_, cut, *label), (cut_again, end, *new_label) = sample.weight_versions
        assert (cut, end) == (cut_again, 60) and 15 <= cut <= 21 and (label, new_label) == ([0, 0], ["new", 1])
        assert columns(sample, 0, cut) == columns(first, 0, cut) and outputs[name].weight_version == "new"
        if on_running == "recompute":
            rest = llm.generate({"prompt_token_ids": prompt, "output_token_ids": sample.token_ids[:cut]}, LONG)[0].outputs[0]
            assert columns(sample, cut) == columns(rest)
    fresh = open_tiny(long_model)
    fresh.update_weights(new)
    assert columns(fresh.generate(PROMPTS[0], LONG)[0].outputs[0]) == columns(late.outputs[0])
    llm.update_weights(old)
    assert [columns(output.outputs[0]) for output in llm.generate(PROMPTS, LONG)] == [columns(sample) for sample in before]
    llm.check()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_prompt_that_a_commit_interrupts_is_computed_anew(open_tiny, long_model, two_weights, num_steps):
    """With "keep": a sample has one version, whatever part of its prompt the old weights had computed."""
    llm = open_tiny(long_model, max_num_batched_tokens=16)
    prompts = [[5, 6, 7, 8, 9] * 7, [5, 6, 7, 8, 9] * 7, [*PROMPTS[0], 11]]
    params = LONG.replace(max_tokens=8, prompt_logprobs=1)
    names = [llm.add_request(prompt, params) for prompt in prompts]
    for _ in range(num_steps):
        llm.step()
    llm.update_weights(two_weights[1], version="new", on_running="keep")
    outputs = drain(llm)
    fresh = open_tiny(long_model)
    fresh.update_weights(two_weights[1])
    wanted = fresh.generate(prompts, params)
    num_new = 0
    for name, want in zip(names, wanted, strict=True):
        sample = outputs[name].outputs[0]
        if len(sample.weight_versions) == 1:
            num_new += 1
            assert columns(sample) == columns(want.outputs[0]) and sample.weight_versions[0].version == "new"
            assert outputs[name].prompt_token_logprobs.tobytes() == want.prompt_token_logprobs.tobytes()
        else:
            assert [span.epoch for span in sample.weight_versions] == [0, 1]
    assert num_new >= (3 if num_steps < 3 else 1)
    llm.check()


def test_mixed_samples_that_are_preempted_are_counted(open_tiny, long_model, two_weights):
    llm = open_tiny(long_model, kv_cache_memory_bytes="1MiB", max_model_len=400)
    params = LONG.replace(max_tokens=300)
    names = [llm.add_request([i, *PROMPTS[0]], params) for i in range(8)]
    for _ in range(12):
        llm.step()
    assert llm.stats().num_preemptions == 0
    llm.update_weights(two_weights[1])
    outputs = drain(llm)
    stats = llm.stats()
    assert 0 < stats.num_mixed_preemptions <= stats.num_preemptions
    assert all([span.epoch for span in outputs[name].outputs[0].weight_versions] == [0, 1] for name in names)


def test_deltas_join_over_many_commits(open_async, two_weights):
    """Commits of equal weights change no bit, so every token can be compared; each token is in one span."""
    engine = open_async(fresh=True)
    params = PARAMS.replace(max_tokens=150, output_kind=RequestOutputKind.DELTA)

    async def read(prompt):
        return [output.outputs[0] async for output in engine.generate(prompt, params)]

    async def main():
        wanted = (await engine.generate(PROMPTS[0], params.replace(output_kind=RequestOutputKind.FINAL_ONLY))).outputs[0]
        reading = [asyncio.create_task(read(PROMPTS[0])) for _ in range(4)]
        score = engine.score(PROMPTS[0])
        for epoch in range(1, 6):
            await asyncio.sleep(0.01)
            await engine.update_weights(two_weights[0], version=f"v{epoch}", on_running=["keep", "recompute"][epoch % 2])
        for parts in await asyncio.gather(*reading):
            assert [token for part in parts for token in part.token_ids] == wanted.token_ids
            assert b"".join(part.sampled.raw.tobytes() for part in parts) == bits(wanted)[1]
            spans = [span for part in parts for span in part.weight_versions]
            assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]] and spans[-1].end == 150
            assert [span.epoch for span in spans] == sorted(span.epoch for span in spans)
            assert all(span.version == (f"v{span.epoch}" if span.epoch else 0) for span in spans)
        scored = await score
        assert scored.weight_version in [0, *[f"v{epoch}" for epoch in range(1, 6)]]
        assert engine.weight_version == "v5"
        engine.set_weight_version("v6")
        last = await engine.generate(PROMPTS[1], LONG)
        assert last.weight_version == "v6" and [tuple(span) for span in last.outputs[0].weight_versions] == [(0, 60, "v6", 5)]

    run(main())
    for label in (1.5, None, True):
        with pytest.raises(TypeError, match="version must be an int or a str"):
            engine.set_weight_version(label)
