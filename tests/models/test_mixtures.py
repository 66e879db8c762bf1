"""Mixtures of experts in whole engines: a request's tokens and logprobs are the same alone and in any company."""

import math

import numpy as np
import pytest

from llmpy import LLM, SamplingParams, UnsupportedError

OPTIONS = {"skip_tokenizer_init": True, "generation_config": "none", "block_size": 16, "max_model_len": 112}
CASES = ["qwen2_moe"] + [pytest.param(case, marks=pytest.mark.slow) for case in ("mixtral", "glm4_moe", "granite_moe")]


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=20, ignore_eos=True, logprobs=3)


def bits(output):
    one = output.outputs[0]
    return one.token_ids, one.sampled.raw.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_company_chunks_hits_and_preemption(case, tiny, device):
    """Prompts that share beginnings, through a pool too small for all of them, in steps of a few rows."""
    path = tiny(case).directory
    rng = np.random.default_rng(1)
    start = rng.integers(3, 99, 40).tolist()
    prompts = [start[: int(rng.integers(0, 41))] + rng.integers(3, 99, int(rng.integers(1, 50))).tolist() for _ in range(16)]
    settings = [params(i) for i in range(len(prompts))]
    with LLM(path, device=device, kv_cache_memory_bytes="4MiB", enable_prefix_caching=False, **OPTIONS) as llm:
        alone = [bits(llm.generate([p], [s], use_tqdm=False)[0]) for p, s in zip(prompts, settings, strict=True)]
        assert len({row.tobytes() for row in map(np.array, (ids for ids, _ in alone))}) > 12
    for rows, pool in ((512, "4MiB"), (24, "176KiB")):
        with LLM(path, device=device, max_num_batched_tokens=rows, kv_cache_memory_bytes=pool, **OPTIONS) as llm:
            for _ in range(2):
                assert [bits(o) for o in llm.generate(prompts, settings, use_tqdm=False)] == alone
            stats = llm.stats()
            assert stats.prefix_cache_hits > 0 and (stats.num_preemptions > 0) == (rows == 24)
            assert stats.allocations_since_warmup == 0


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "granite_moe", "olmoe"])
def test_parameters_are_counted(case, tiny, oracle):
    """Every element of the checkpoint lies in the program once."""
    model = tiny(case)
    spec = oracle(model.directory).compiled.spec
    mine = sum(math.prod([weight["rows"], weight["cols"]]) for weight in spec["weights"])
    buffers = sum(b.numel() for name, b in model.model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert mine == model.model.num_parameters() + buffers


def test_temperature_of_llama_4_begins_where_positions_do(tiny, oracle):
    """Queries without rope are scaled from position floor_scale - 1 on, which is refused; before it nothing is."""
    directory = tiny("llama4").directory
    fields = {"attn_temperature_tuning": True, "floor_scale": 64}
    with pytest.raises(UnsupportedError, match="attn_temperature_tuning is not supported from position 63 on"):
        oracle(directory, fields, max_model_len=64)
    assert oracle(directory, fields, max_model_len=63).compiled.spec == oracle(directory, max_model_len=63).compiled.spec
