"""The four numbers of every sampled token against float64, at every place that edits, bans or cuts.

The logits are those of the engine itself: its raw logprobs of the whole vocabulary, which prompt_logprobs gives for the same
tokens with the same bits, plus the logarithm of the sum that they lack, from the float64 interpreter of the program (a constant
of the row, which only the repetition penalty can see). Steps 1 to 8 of docs/use/sampling.md are then done in float64.

Bound: a raw logprob r was rounded once, by |r| 2^-24 or less; the temperature divides that error, and the engine's own
subtraction, division and logarithm of a sum of float32 err by as much again. With T >= 1/2 that is less than 8 * 2^-24 times
|r|, or times 4 where r is smaller than the parts that it is the difference of; kept_mass is a sum of such exponentials and errs
relatively by as much. Where a cut is nearer than 1e-5 to a token rounding decides, and the token is passed over.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load

from llmpy import LLM, AsyncEngine, CompletionOutput, SamplingParams

UNIT = 2.0**-21
VOCAB = 99
OPTIONS = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_logprobs": VOCAB}
MODES = ("raw_logprobs", "full_logprobs", "processed_logprobs")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5, "temperature": 1.7},
    "min_p": {"min_p": 0.1},
    "all cuts": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.3, "top_p": 0.8},
    "repetition, greedy": {"repetition_penalty": 1.3, "temperature": 0.0},
    "bias": {"logit_bias": {5: 3.0, 17: -2.0, 18: float("-inf"), 40: 1.5}, "top_p": 0.95},
    "allowed": {"allowed_token_ids": [3, 9, 27, 50, 51, 52, 90], "top_k": 4},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [4, 8, 15, 16, 23, 42], "top_p": 0.9},
    "everything": {
        "temperature": 0.9, "top_p": 0.85, "top_k": 30, "min_p": 0.01, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logit_bias": {7: 2.0, 8: float("-inf")}, "bad_token_ids": [[11], [12]],
    },
}  # fmt: skip


sampler = load(Path(__file__).parents[1] / "kernels/test_sample.py", "sample_reference")


def task_of(params: SamplingParams, prompt: list[int], output: list[int]) -> dict[str, Any]:
    """The sampler's task after a prefix of the output."""
    seen = sorted({*prompt, *output})
    banned = [ids[0] for ids in params.bad_token_ids or ()]
    if len(output) < params.min_tokens:
        banned += params.stop_token_ids or ()
    return {
        "is_greedy": params.is_greedy, "temperature": 1.0 if params.is_greedy else params.temperature, "top_p": params.top_p,
        "top_k": params.top_k, "min_p": params.min_p, "bias": list((params.logit_bias or {}).items()),
        "allowed": list(params.allowed_token_ids or ()), "banned": banned, "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty,
        "seen": [(i, output.count(i), i in prompt) for i in seen],
    }  # fmt: skip


def tables(llm: LLM, reference: Any, sequence: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Raw logprobs float32 [N - 1, VOCAB] of the tokens after each position, and the logits that they stand for, float64."""
    found = llm.generate([sequence], max_tokens=1, prompt_logprobs=VOCAB, use_tqdm=False)[0].prompt_logprobs
    assert found is not None
    raw = np.full((len(sequence) - 1, VOCAB), np.nan, np.float32)
    np.put_along_axis(raw, found.ids[1:, 1:].astype(np.int64), found.values[1:, 1:], 1)
    assert not np.isnan(raw).any()
    exact = raw.astype(np.float64)
    return raw, exact + (reference.logits(sequence)[:-1] - exact).mean(1, keepdims=True)


def check(sample: CompletionOutput, params: SamplingParams, prompt: list[int], raw: np.ndarray, logits: np.ndarray) -> int:
    """Compares a sample; returns the number of tokens that rounding could not decide."""
    have, output, n_checked = sample.sampled, sample.token_ids, 0
    assert have is not None and sample.logprobs is not None and sample.token_logprobs is not None
    mode = MODES.index(params.logprobs_mode or MODES[0])
    assert sample.token_logprobs.tobytes() == have[mode].tobytes() == sample.logprobs.values[:, 0].tobytes()
    for i, token in enumerate(output):
        row = len(prompt) - 1 + i
        want = sampler.reference(logits[row], task_of(params, prompt, output[:i]))
        assert have.raw[i] == raw[row, token], "the same bits in a prompt"
        if want["margin"] < 1e-5:
            continue
        n_checked += 1
        bound = UNIT * max(4.0, *np.abs(sample.logprobs.values[i, np.isfinite(sample.logprobs.values[i])]))
        mass = np.exp(want["full"][want["kept"]]).sum()
        assert want["kept"][token]
        for name in ("raw", "full", "processed"):
            assert abs(float(getattr(have, name)[i]) - want[name][token]) <= bound, (name, i)
            assert getattr(have, name)[i] <= 0
        assert abs(have.kept_mass[i] - mass) <= bound * mass + 2**-24 and have.kept_mass[i] <= 1
        assert abs(have.processed[i] - (have.full[i] - np.log(float(have.kept_mass[i])))) <= 2 * bound
        values = want[("raw", "full", "processed")[mode]]
        near = np.abs(values - values[token]) <= 2 * bound
        assert abs(int(have.rank[i]) - 1 - int((values > values[token]).sum())) < near.sum()
        best = sample.logprobs.ids[i, 1:]
        kept = best[best < VOCAB]
        assert len(kept) == min(params.logprobs or 0, int((values > -np.inf).sum()))
        wanted = np.sort(values)[::-1][: len(kept)]
        assert np.abs(sample.logprobs.values[i, 1 : 1 + len(kept)] - wanted).max(initial=0) <= bound
        assert np.abs(values[kept] - wanted).max(initial=0) <= 2 * bound
    return n_checked


def requests(dtype: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """A prompt for each case and mode. In two bytes the interpreter's logits are no match for the engine's own."""
    rng = np.random.default_rng(4)
    cases = [case for name, case in CASES.items() if dtype == "float32" or case.get("repetition_penalty", 1.0) == 1.0]
    params = [
        SamplingParams(**{"max_tokens": 24, "seed": i, "ignore_eos": True, "logprobs": 6, "logprobs_mode": mode} | case)
        for i, (case, mode) in enumerate((case, mode) for case in cases for mode in MODES)
    ]
    return [rng.integers(3, VOCAB, int(rng.integers(1, 30))).tolist() for _ in params], params


@pytest.mark.parametrize(("case", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("qwen2", "float16")])
def test_sampled_logprobs(case: str, dtype: str, device: str, tiny: Callable[..., Any], oracle: Any) -> None:
    path, reference = tiny(case, dtype).directory, oracle(tiny(case, dtype).directory)
    prompts, params = requests(dtype)
    n_checked = n_tokens = 0
    with LLM(path, device=device, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, own, prompt in zip(outputs, params, prompts, strict=True):
            sample = output.outputs[0]
            raw, logits = tables(llm, reference, prompt + sample.token_ids)
            n_checked += check(sample, own, prompt, raw, logits)
            n_tokens += len(sample.token_ids)
    assert n_checked > 0.99 * n_tokens > 500

    async def main() -> None:
        async with AsyncEngine(path, device=device, **OPTIONS) as engine:
            streams = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
            for stream, output in zip(streams, outputs, strict=True):
                found, wanted = (await stream).outputs[0], output.outputs[0]
                assert found.token_ids == wanted.token_ids
                for mine, theirs in zip(found.sampled or (), wanted.sampled or (), strict=True):
                    assert mine.tobytes() == theirs.tobytes()

    asyncio.run(main())
