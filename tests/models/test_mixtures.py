"""Mixtures of experts in engines: a request's tokens and logprobs are the same alone and in any batch."""

import math

import numpy as np
import pytest

from llmpy import LLM, SamplingParams
from llmpy.models import heads, registry, usual

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
    """The program has every element of the checkpoint once."""
    model = tiny(case)
    spec = oracle(model.directory).compiled.spec
    mine = sum(math.prod([weight["rows"], weight["cols"]]) for weight in spec["weights"])
    buffers = sum(b.numel() for name, b in model.model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert mine == model.model.num_parameters() + buffers


def far(cfg, m):
    """A Llama of one layer with logits that grow with the position: the factor is computed for wanted rows only."""
    x = m.embed("model.embed_tokens")
    layer = next(m.layers("model.layers", 1))
    q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", 1e-6))
    x = x + usual.out(cfg, layer, layer.attention(*layer.rope(q, k, cfg.rope), v))
    m.ignore("model.layers.1.*", "*.mlp.*", "*.post_attention_layernorm.weight")
    heads.head(cfg, m, m.scale_by_position(m.rms_norm(x, "model.norm", 1e-6), 4, 0.5), "model.")


def test_wanted_rows_keep_their_positions(tiny, oracle, prompts, device, monkeypatch):
    path = tiny("llama").directory
    monkeypatch.setitem(registry._REGISTRY, "LlamaForCausalLM", registry.Architecture(far, {}, registry.COMPUTED_BUFFERS))
    reference = oracle(path)
    with LLM(path, device=device, kv_cache_memory_bytes="4MiB", max_num_batched_tokens=24, **OPTIONS) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0]
        logits = reference.logits([*ids, *found.token_ids])[len(ids) - 1 : -1]
        shifted = logits - logits.max(-1, keepdims=True)
        wanted = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        assert np.abs(found.sampled.raw - wanted[np.arange(6), found.token_ids]).max() <= 1e-4 * np.abs(logits).max()


def test_queries_of_llama_4_grow_where_positions_reach(tiny, oracle, prompts, error_of):
    """Queries grow from position floor_scale - 1; if no position is that far, the operation is left out."""
    model = tiny("llama4")
    grown, plain = (oracle(model.directory, {"attn_temperature_tuning": on}) for on in (True, False))
    assert error_of(plain.logits(prompts[3][:3]), grown.logits(prompts[3][:3])) == 0
    assert error_of(plain.logits(prompts[3][:4]), grown.logits(prompts[3][:4])) > 1e-3
    short, long = (oracle(model.directory, {"floor_scale": 64}, max_model_len=length).compiled.spec for length in (63, 64))
    kinds = [[kind for kind, _ in spec["ops"]] for spec in (short, long)]
    assert [kind.count("position_scale") for kind in kinds] == [0, 1]
