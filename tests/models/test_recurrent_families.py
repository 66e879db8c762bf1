"""Families with recurrent state in a crowd: shared beginnings, snapshots, preemption, samples; bits are those of a lone run."""

import numpy as np
import pytest

from llmpy import LLM, SamplingParams

OTHERS = ["mamba", "falcon_mamba", "mamba2", "jamba", "granite_hybrid", "nemotron_h"]


def params(i):
    return SamplingParams(temperature=i % 2, max_tokens=20, ignore_eos=True, logprobs=0, seed=i)


def bits(output):
    return [(sample.token_ids, sample.sampled.raw.tobytes()) for sample in output.outputs]


@pytest.mark.parametrize("case", ["bamba", *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)])
def test_a_crowd_equals_lone_runs(case, tiny, device):
    path = tiny(case).directory
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 90, 60).tolist()
    batch = [shared[: int(rng.integers(0, 60))] + rng.integers(3, 90, int(rng.integers(1, 45))).tolist() for _ in range(20)]
    common = {"skip_tokenizer_init": True, "max_model_len": 128, "device": device}
    with LLM(path, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, **common) as llm:
        alone = [bits(llm.generate([p], [params(i)], use_tqdm=False)[0]) for i, p in enumerate(batch)]
        chosen = llm._driver.model.describe()
        samples = bits(llm.generate([batch[0]], params(1).replace(n=3), use_tqdm=False)[0])
    least = 2 + chosen["state_pages"] + 8 * chosen["num_groups"]
    for pages, rows in ((2 * least, 64), (20 * least, 256)):
        options = {"kv_cache_memory_bytes": pages * chosen["page_bytes"], "max_num_batched_tokens": rows, "max_num_seqs": 16}
        with LLM(path, **common, **options) as llm:
            for _ in range(2):
                outputs = llm.generate(batch, [params(i) for i in range(20)], use_tqdm=False)
                assert [bits(output) for output in outputs] == alone
            assert bits(llm.generate([batch[0]], params(1).replace(n=3), use_tqdm=False)[0]) == samples
            stats = llm.stats()
            assert stats.state_snapshots_taken > 0 and stats.allocations_since_warmup == 0
            assert stats.prefix_cache_hits > 0 or pages == 2 * least  # where what runs leaves no room
            llm.check()


@pytest.mark.parametrize("case", ["plamo2", "qwen3_next"])
def test_most_of_a_shared_prefix_hits(case, tiny, device):
    """480 of 512 tokens are shared: from the third prompt on at least 90 % of them hit; snapshots are counted."""
    path = tiny(case, max_position_embeddings=1024).directory
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 90, 480).tolist()
    batch = [shared + rng.integers(3, 90, 32).tolist() for _ in range(5)]
    common = {"skip_tokenizer_init": True, "max_model_len": 600, "device": device, "kv_cache_memory_bytes": 64 << 20}
    with LLM(path, enable_prefix_caching=False, **common) as llm:
        alone = [bits(llm.generate([p], [params(i)], use_tqdm=False)[0]) for i, p in enumerate(batch)]
    with LLM(path, **common) as llm:
        outputs = [llm.generate([p], [params(i)], use_tqdm=False)[0] for i, p in enumerate(batch)]
        assert [bits(output) for output in outputs] == alone
        assert min(output.num_cached_tokens for output in outputs[2:]) >= 0.9 * 480
        assert 0 < llm.stats().state_snapshot_bytes < 64 << 20
