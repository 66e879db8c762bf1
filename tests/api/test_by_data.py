"""Attention by data: ranks with sequences and pages of their own give the bits of one rank, however requests are computed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import adapter_files
import numpy as np
import pytest

from llmpy import LLM, AsyncEngine, BeamSearchParams, ConfigError, LoRARequest, SamplingParams, UnsupportedError

BASE = {
    "vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
    "max_position_embeddings": 256, "torch_dtype": "float32", "eos_token_id": 2, "num_experts_per_tok": 3,
}  # fmt: skip
MIXTURES = {
    "one kv head": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 7, "head_dim": 32,
                    "moe_intermediate_size": 32, "num_key_value_heads": 1},
    "latents": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 24,
                "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8,
                "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24,
                "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
}  # fmt: skip
PAGES = {"one kv head": 16 * 3 * 2 * 32 * 4, "latents": 16 * 3 * 24 * 4}  # bytes: tokens, layers, columns, float32
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 70, 100, 129]


def prompts(shared: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(3)
    head = rng.integers(3, 131, shared).tolist()
    return [head + rng.integers(3, 131, n).tolist() for n in LENGTHS]


def params(i: int) -> SamplingParams:
    """Greedy for even requests, everything that sampling has for odd ones."""
    common = {"max_tokens": 20, "logprobs": 3, "seed": 11 + i, "ignore_eos": True}
    if i % 2 == 0:
        return SamplingParams(temperature=0, **common)
    return SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, n=1 + i % 4 // 3, **common)


def open_ranks(path: Path, n_ranks: int, kind: type = LLM, **options: object) -> LLM:
    defaults = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB", "max_model_len": 256, "load_format": "dummy",
                "device": "cpu", "tensor_parallel_size": n_ranks, "enable_dp_attention": n_ranks > 1}  # fmt: skip
    return kind(path, **(defaults | options))


def bits(output: object) -> list[tuple[bytes, ...]]:
    """Ids, all three logprobs, and alternatives."""
    return [
        (o.token_ids_array.tobytes(), o.sampled.raw.tobytes(), o.sampled.full.tobytes(), o.sampled.processed.tobytes(),
         o.logprobs.ids.tobytes(), o.logprobs.values.tobytes())
        for o in output.outputs
    ]  # fmt: skip


def run(llm: LLM, batch: list[list[int]]) -> list[list[tuple[bytes, ...]]]:
    found = [bits(o) for o in llm.generate(batch, [params(i) for i in range(len(batch))], use_tqdm=False)]
    llm.check()
    return found


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, LLM]]:
    """A mixture, and one rank with it that has no prefix cache."""
    path = tmp_path_factory.mktemp("by_data")
    (path / "config.json").write_text(json.dumps(BASE | MIXTURES[request.param]))
    with open_ranks(path, 1, enable_prefix_caching=False) as one:
        yield request.param, path, one


@pytest.fixture(scope="module")
def wanted(mixture: tuple[str, Path, LLM]) -> list[list[tuple[bytes, ...]]]:
    """The bits of every prompt alone on one rank."""
    return [bits(mixture[2].generate([p], [params(i)], use_tqdm=False)[0]) for i, p in enumerate(prompts())]


@pytest.mark.parametrize(
    ("n_ranks", "options"),
    [
        (2, {}),
        (3, {"max_num_batched_tokens": 64}),
        (2, {"max_num_batched_tokens": 7, "max_num_seqs": 7}),
        (4, {"max_num_seqs": 3, "max_num_batched_tokens": 20}),
        (3, {"block_size": 32, "enable_prefix_caching": False, "max_num_seqs": 64}),
    ],
)
def test_batch_and_chunking(
    mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]], n_ranks: int, options: dict[str, object]
) -> None:
    with open_ranks(mixture[1], n_ranks, **options) as llm:
        assert run(llm, prompts()) == wanted
        assert run(llm, prompts()[:1]) == wanted[:1]  # the other ranks have no row


def test_every_rank_has_rows(mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]]) -> None:
    """Two ranks hold twice the tokens, and no rank could hold all of these."""
    page = PAGES[mixture[0]]
    options = {"kv_cache_memory_bytes": 14 * page, "max_model_len": 160, "enable_prefix_caching": False}
    with open_ranks(mixture[1], 2, **options) as llm:
        assert llm.stats().kv_blocks_total == 2 * 13
        outputs = llm.generate(prompts()[-2:], [params(8), params(9)], use_tqdm=False)
        assert [*map(bits, outputs)] == wanted[-2:]
        assert llm.stats().num_preemptions == 0
        assert max(step.blocks_used for step in llm.step_log(100)) > 13


def test_cache_hits(mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]]) -> None:
    """A prompt goes to the rank that has its blocks."""
    with open_ranks(mixture[1], 2) as llm:
        assert run(llm, prompts()) == wanted
        again = llm.generate(prompts(), [params(i) for i in range(len(LENGTHS))], use_tqdm=False)
        assert [bits(o) for o in again] == wanted
        assert [o.num_cached_tokens for o in again] == [n // 16 * 16 if n % 16 else n - 1 for n in LENGTHS]
        assert llm.reset_prefix_cache()
        assert run(llm, prompts()) == wanted


def test_events_of_each_ranks_cache(mixture: tuple[str, Path, LLM]) -> None:
    """Every rank's events are a history of its own: what is removed was stored there, and parents are on the same rank."""
    name, path, _ = mixture
    options = {"kv_cache_memory_bytes": 14 * PAGES[name], "max_model_len": 160, "kv_event_capacity": 4096}
    with open_ranks(path, 2, **options) as llm:
        run(llm, prompts(shared=40)[:8])
        run(llm, prompts(shared=40)[:8])
        assert llm.reset_prefix_cache()
        run(llm, prompts()[:1])  # events come with a step
        events, start = [], -1
        while len(events) != start:
            start = len(events)
            events += llm.kv_events(start)[1]
    kept: dict[int, dict[int, bytes]] = {0: {}, 1: {}}
    beginnings: dict[int, set[bytes]] = {0: set(), 1: set()}
    assert [event.number for event in events] == [*range(len(events))] and {event.kind for event in events} == {0, 1, 2}
    n_before = min(event.number for event in events if event.kind == 2)
    for event in events[:n_before]:
        if event.kind == 0:
            assert event.parent is None or event.parent in kept[event.replica]
            assert event.hash not in kept[1 - event.replica]
            kept[event.replica][event.hash] = event.token_ids
            beginnings[event.replica] |= {event.token_ids} if event.parent is None else set()
        else:
            assert event.kind == 1 and kept[event.replica].pop(event.hash)
    assert beginnings[0] & beginnings[1]  # the shared one, whose blocks have other hashes
    assert {(event.kind, event.replica) for event in events[n_before : n_before + 2]} == {(2, 0), (2, 1)}
    with pytest.raises(UnsupportedError, match=r"prefix_cache_seed=3 .* enable_dp_attention=True"):
        open_ranks(path, 2, kv_event_capacity=16, prefix_cache_seed=3)


def adapted(llm: LLM, adapters: list[LoRARequest]) -> list[list[tuple[bytes, ...]]]:
    """The bits of prompts with an adapter or none, twice: the slots hold fewer adapters than there are."""
    settings = [params(i) for i in range(len(LENGTHS))]
    chosen = [(*adapters, None)[i % 4] for i in range(len(LENGTHS))]
    outputs = [o for _ in range(2) for o in llm.generate(prompts(), settings, lora_request=chosen, use_tqdm=False)]
    return [*map(bits, outputs)]


def make_adapters(llm: LLM, to: Path) -> list[LoRARequest]:
    infos = [info for info in llm.weight_info() if len(info["shape"]) == 2 and "_proj" in info["name"]]
    infos = [info for info in infos if ".experts." not in info["name"] and "kv_b_proj" not in info["name"]]
    shapes = {info["name"].removesuffix(".weight"): tuple(info["shape"]) for info in infos}
    [(rows, columns)] = [info["shape"] for info in llm.weight_info() if info["name"] == "model.embed_tokens.weight"]
    rng, each = np.random.default_rng(5), [adapter_files.factors(shapes, 4, i) for i in range(3)]
    each[0]["model.embed_tokens.lora_embedding_A"] = rng.standard_normal((4, rows)).astype(np.float32)
    each[0]["model.embed_tokens.lora_embedding_B"] = rng.standard_normal((columns, 4)).astype(np.float32)
    each[1] |= adapter_files.factors({"lm_head": (rows, columns)}, 4, 7)
    found = [adapter_files.save(to / str(i), tensors) for i, tensors in enumerate(each)]
    return [LoRARequest(f"adapter {i}", i + 1, path) for i, path in enumerate(found)]


@pytest.mark.parametrize("config", [{"method": "ngram", "k": 3, "min": 1, "max": 2}, {"method": "suffix"}])
def test_drafts_from_texts(
    mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]], config: dict[str, object]
) -> None:
    """Rows of drafts lie among those of their rank, also where a rank has few pages."""
    name, path, _ = mixture
    few = {"kv_cache_memory_bytes": 14 * PAGES[name], "max_model_len": 160}
    for options in ({"max_num_batched_tokens": 64}, few):
        with open_ranks(path, 3, speculative_config=config, **options) as llm:
            assert run(llm, prompts()) == wanted
            assert run(llm, prompts()) == wanted
            assert llm.stats().draft_rows > 0


def test_adapters(mixture: tuple[str, Path, LLM], tmp_path: Path) -> None:
    """Sequences of every rank have adapters of their own."""
    adapters, found = make_adapters(mixture[2], tmp_path), []
    for n_ranks in (1, 3):
        options = {"enable_lora": True, "lora_embeddings": True, "max_loras": 2, "max_num_batched_tokens": 64}
        with open_ranks(mixture[1], n_ranks, **options) as llm:
            found.append(adapted(llm, adapters))
            llm.check()
    assert found[0] == found[1] and found[0][0] != bits(mixture[2].generate([prompts()[0]], [params(0)], use_tqdm=False)[0])


def test_shared_prefixes(mixture: tuple[str, Path, LLM]) -> None:
    batch = prompts(shared=70)
    wanted = run(mixture[2], batch)
    with open_ranks(mixture[1], 2, max_num_batched_tokens=64) as llm:
        assert run(llm, batch) == wanted
        assert llm.stats().prefix_cache_hits > 0


def test_preemption(mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]]) -> None:
    name, path, _ = mixture
    with open_ranks(path, 2, kv_cache_memory_bytes=14 * PAGES[name], max_model_len=160) as llm:
        assert run(llm, prompts()) == wanted
        stats = llm.stats()
        assert stats.num_preemptions > 0 and stats.allocations_since_warmup == 0


def test_scores_samples_and_pooling(mixture: tuple[str, Path, LLM]) -> None:
    """Prompts of more rows than the buffer of logits has, forks, and states of every rank."""
    _, path, one = mixture
    batch = prompts()[1:]
    settings = SamplingParams(temperature=1.5, n=4, max_tokens=12, logprobs=1, prompt_logprobs=2, seed=9)
    found = []
    for llm in (one, open_ranks(path, 3, max_num_seqs=5)):
        scores = [score.token_logprobs.tobytes() for score in llm.score(batch, use_tqdm=False)]
        outputs = llm.generate(batch, settings, use_tqdm=False)
        states = [one.outputs.data.tobytes() for one in llm.encode(batch, pooling_task="token_embed", use_tqdm=False)]
        beams = [output.sequences[0].tokens for output in llm.beam_search(batch[:3], BeamSearchParams(3, 6), use_tqdm=False)]
        found.append((scores, [*map(bits, outputs)], [o.prompt_token_logprobs.tobytes() for o in outputs], states, beams))
        llm.check()
    llm.close()
    assert found[0] == found[1]


def test_weights_taps_and_sleep(mixture: tuple[str, Path, LLM]) -> None:
    _, path, one = mixture
    with open_ranks(path, 2) as llm:
        assert llm.weight_checksum() == one.weight_checksum()
        names = llm.tap_names()
        taps = [each.tap([prompts()[5]], names)[0] for each in (one, llm)]
        assert all(taps[0][name].tobytes() == taps[1][name].tobytes() for name in names)
        bytes_of = [rank["weights_bytes"] for rank in llm.ranks()]
        assert max(bytes_of) < one.ranks()[0]["weights_bytes"]
        llm.sleep()
        llm.wake_up()
        assert run(llm, prompts()[:3]) == run(one, prompts()[:3])


def test_updates(mixture: tuple[str, Path, LLM]) -> None:
    """Each rank takes whole tensors, but of the experts only its own."""
    _, path, one = mixture
    rng = np.random.default_rng(5)
    weights = {info["name"]: rng.standard_normal(info["shape"]).astype(np.float32) * 0.2 for info in one.weight_info()}
    llms = [open_ranks(path, n) for n in (1, 2)]
    for llm in llms:
        llm.update_weights(weights)
    assert llms[0].weight_checksum() == llms[1].weight_checksum()
    assert run(llms[0], prompts()) == run(llms[1], prompts())
    for llm in llms:
        llm.close()


def test_grammars(mixture: tuple[str, Path, LLM], tiny_model: Path) -> None:
    """All ranks wait for one call that completes the masks; with prompt logprobs some wait in the midst of their logits."""
    pytest.importorskip("llguidance")
    kinds = [{"choice": ["yes", "no"]}, {"regex": "[a-f]{4,9}"}, {"json": {"type": "integer"}}, None, {"regex": "x{3,5}"}]
    params = [
        SamplingParams(max_tokens=9, seed=i, logprobs=1, structured_outputs=how, prompt_logprobs=None if how else 1)
        for i, how in enumerate(kinds)
    ]
    found = []
    for n_ranks in (1, 2, 3):
        options = {"tokenizer": str(tiny_model), "skip_tokenizer_init": False, "max_num_seqs": 5}
        with open_ranks(mixture[1], n_ranks, **options) as llm:
            outputs = llm.generate(["a", "bc", "d", "some longer text to score", "e"], params, use_tqdm=False)
            found.append(([*map(bits, outputs)], [output.outputs[0].text for output in outputs]))
    assert found[0] == found[1] == found[2] and found[0][1][4] == "xxxxx"[: len(found[0][1][4])]


def test_async_engine(mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]]) -> None:
    async def main(engine: AsyncEngine) -> list[object]:
        return await asyncio.gather(*(engine.generate(p, params(i)) for i, p in enumerate(prompts())))

    engine = open_ranks(mixture[1], 2, AsyncEngine)
    try:
        assert [*map(bits, asyncio.run(main(engine)))] == wanted
    finally:
        engine.close()


def test_replicas(mixture: tuple[str, Path, LLM], wanted: list[list[tuple[bytes, ...]]]) -> None:
    with open_ranks(mixture[1], 2, data_parallel_size=2) as llm:
        assert run(llm, prompts()) == wanted


def test_ranks_that_are_checked(mixture: tuple[str, Path, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gathered rows, their routes and the results of the experts are equal on all ranks."""
    monkeypatch.setenv("LLMPY_SYNC", "2")
    with open_ranks(mixture[1], 2) as llm:
        assert run(llm, prompts()[:6]) == run(mixture[2], prompts()[:6])


def test_what_is_refused(mixture: tuple[str, Path, LLM], tiny_model: Path) -> None:
    path = mixture[1]
    refused = {"host_cache_bytes": "1MiB", "nnodes": 2, "speculative_config": {"method": "draft", "model": str(path)}}
    for name, value in refused.items():
        others = {"node_rank": 0, "master_addr": "127.0.0.1", "master_port": 29999} if name == "nnodes" else {}
        with pytest.raises(UnsupportedError, match=f"enable_dp_attention=True is not supported yet with {name}"):
            open_ranks(path, 2, **{name: value}, **others)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be above 1 with enable_dp_attention=True"):
        open_ranks(path, 1, enable_dp_attention=True)
    with pytest.raises(ConfigError, match="experts must be 'auto' or 'rank'"):
        open_ranks(path, 2, experts="width")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=9: \d experts cannot be shared by 9 ranks"):
        open_ranks(path, 9)
    with pytest.raises(ConfigError, match="wants a mixture of experts, which ranks share; LlamaForCausalLM has none"):
        LLM(tiny_model, device="cpu", tensor_parallel_size=2, enable_dp_attention=True)
