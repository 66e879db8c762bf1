"""Speculation changes no bit: ids and all logprobs with drafts equal those without, however a request is computed."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from speculating import PAGE, bits, open_llm, run, texts

from llmpy import LLM, SamplingParams

Make = Callable[[str, str], Path]
MODELS = [
    ("llama", "float32", 1), ("qwen3", "bfloat16", 1), ("mistral-window", "float16", 1), ("qwen2-mixed", "float32", 1),
    ("mixtral", "bfloat16", 1), ("llama", "fp8", 1), ("llama", "float32", 2), ("mixtral", "bfloat16", 2),
]  # fmt: skip
SOURCES: list[dict[str, Any]] = [
    {"method": "ngram", "k": 4, "min": 1, "max": 3},
    {"method": "ngram", "num_speculative_tokens": 9, "prompt_lookup_max": 2},
    {"method": "ngram", "k": "auto"},
    {"method": "suffix", "k": 5},
    {"method": "suffix", "k": "auto", "shared": False},
]
ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 21, "max_num_seqs": 3},
    {"kv_cache_memory_bytes": 24 * PAGE, "max_model_len": 160},
    {"enable_prefix_caching": False, "block_size": 32},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_bits_with_and_without(model: tuple[str, str, int], tiny_model: Make) -> None:
    path = tiny_model(*model[:2])
    with open_llm(path, enable_prefix_caching=False) as llm:
        wanted = run(llm)
        assert llm.stats().draft_rows == 0
    for engine in ENGINES if model[2] == 1 else ENGINES[:2]:
        for source in SOURCES if engine == {} else SOURCES[::3]:
            with open_llm(path, model[2], speculative_config=source, **engine) as llm:
                assert run(llm) == wanted
                again = run(llm)  # with a full cache, and for the suffixes with finished outputs
                assert again == wanted
                llm._driver.engine.check()
                stats = llm.stats()
                assert 0 < stats.accepted_rows <= stats.draft_rows
                assert stats.allocations_since_warmup == 0
                assert stats.num_unfinished == 0 and stats.kv_blocks_free == stats.kv_blocks_total


def test_updates_of_weights(tiny_model: Make) -> None:
    """The source keeps its texts across an update, and the outputs are those of the new weights."""
    path = tiny_model("llama", "float32")
    found = {}
    for source in (None, {"method": "suffix", "k": 4}, {"method": "ngram", "k": 4, "min": 1}):
        with open_llm(path, speculative_config=source) as llm:
            before = run(llm)
            name = "model.norm.weight"
            llm.update_weights({name: load_file(path / "model.safetensors")[name][::-1].copy()}, partial=True)
            found[str(source)] = before, run(llm)
    assert len(set(map(repr, found.values()))) == 1
    assert found["None"][0] != found["None"][1]


def test_counts_by_place(tiny_model: Make) -> None:
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logit_bias": {7: 1000.0}, "use_tqdm": False}
    with open_llm(tiny_model("llama", "float32"), speculative_config={"method": "ngram", "k": 4, "min": 1}) as llm:
        output = llm.generate([[7, 7, 7]], **how)[0]
        metrics, stats = output.metrics, llm.stats()
        assert metrics is not None and output.outputs[0].token_ids == [7] * 40
        assert metrics.drafts == metrics.accepted_drafts == stats.drafts == stats.accepted_drafts
        assert len(stats.drafts) == 4 and sum(stats.drafts) == stats.draft_rows == stats.accepted_rows == 40 - stats.num_steps
        assert stats.num_steps == 1 + 8  # the prompt's, then five tokens a step
        steps = llm.step_log()
        assert sum(step.accepted_drafts for step in steps) == stats.accepted_rows
        assert all(step.rows == step.prompt_rows + step.decode_rows + step.draft_rows for step in steps)
        plain = llm.generate([[7, 7, 7]], speculative=False, **how)[0]
        assert plain.metrics is not None and plain.metrics.drafts == () and plain.outputs[0].token_ids == [7] * 40
        assert llm.stats().draft_rows == stats.draft_rows


def test_counts_of_each_sample(tiny_model: Make) -> None:
    """Those of the samples sum up to the request's."""
    how: dict[str, Any] = {"n": 3, "seed": 4, "max_tokens": 30, "ignore_eos": True, "allowed_token_ids": [5, 6]}
    with open_llm(tiny_model("llama", "float32"), speculative_config={"method": "ngram", "k": 4, "min": 1}) as llm:
        output = llm.generate([[5, 6, 5]], **how, use_tqdm=False)[0]
        counts = [one.metrics for one in output.outputs if one.metrics is not None]
        assert output.metrics is not None and len(set(counts)) == len(counts) == 3
        for name in ("drafts", "accepted_drafts"):
            rows = itertools.zip_longest(*(getattr(one, name) for one in counts), fillvalue=0)
            assert tuple(map(sum, rows)) == getattr(output.metrics, name)
        plain = llm.generate([[5, 6, 5]], **how, speculative=False, use_tqdm=False)[0]
        assert [one.metrics for one in plain.outputs] == [((), ())] * 3


def test_recurrent_models(recurrent_model: Path) -> None:
    """A rejected draft takes the states back: the same bits with snapshots, short of pages, in chunks and after preemptions."""
    with open_llm(recurrent_model, enable_prefix_caching=False) as llm:
        wanted = run(llm)
        page = int(llm._driver.model.describe()["page_bytes"])
        n_state = llm.num_state_blocks
    tight = {"kv_cache_memory_bytes": (40 + 5 * n_state) * page, "max_model_len": 160, "max_num_seqs": 4}
    for engine in ({}, {"max_num_batched_tokens": 21, "max_num_seqs": 3}, tight, {"enable_prefix_caching": False}):
        for source in SOURCES if engine == {} else SOURCES[::3]:
            with open_llm(recurrent_model, speculative_config=source, **engine) as llm:
                assert run(llm) == wanted
                assert run(llm) == wanted
                llm.check()
                stats = llm.stats()
                if source.get("k") != "auto":  # a row of a tiny model costs so much that no draft may pay
                    assert 0 < stats.accepted_rows < stats.draft_rows
                    assert stats.redone_rows > 0
                assert stats.allocations_since_warmup == 0
                assert stats.num_unfinished == 0 and stats.kv_blocks_free == stats.kv_blocks_total


def test_grammars_and_stop_strings(tmp_path: Path, write_model: Any) -> None:
    pytest.importorskip("llguidance")
    path = write_model(tmp_path)
    engines: list[dict[str, Any]] = [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 20}]
    with LLM(path, device="cpu", kv_cache_memory_bytes="16MiB", enable_prefix_caching=False) as llm:
        wanted = texts(llm)
    for engine in engines:
        for source in ({"method": "suffix", "k": 4}, {"method": "ngram", "k": 3, "min": 1}):
            with LLM(path, device="cpu", kv_cache_memory_bytes="16MiB", speculative_config=source, **engine) as llm:
                assert texts(llm) == wanted
                assert texts(llm) == wanted
                stats = llm.stats()
                assert 0 < stats.accepted_rows < stats.draft_rows
                assert stats.allocations_since_warmup == 0


def test_grammars_draft_the_text_that_they_force(tmp_path: Path, write_model: Any) -> None:
    """The text repeats nothing, so that the source itself has no drafts."""
    pytest.importorskip("llguidance")
    path = write_model(tmp_path)
    found = []
    for source in (None, {"method": "ngram", "k": 6, "min": 4}):
        with LLM(path, device="cpu", kv_cache_memory_bytes="16MiB", speculative_config=source) as llm:
            settings = [
                SamplingParams(max_tokens=60, seed=3, logprobs=2, structured_outputs={"regex": text})
                for text in ("[abc]bcdefghijklmnopqrstuvw[xyz]", "(hello|hey) 0123456789", "[a-z]{8}")
            ]
            outputs = llm.generate(["x"] * 3, settings, use_tqdm=False)
            found.append([bits(output) for output in outputs])
            drafts = [output.metrics.accepted_drafts for output in outputs if output.metrics]
    assert found[0] == found[1]
    assert sum(drafts[0]) > 12 and sum(drafts[1]) > 6 and sum(drafts[2]) == 0


def test_a_short_match_gives_few_drafts(tiny_model: Make) -> None:
    """Where the number of drafts adapts, at most as many as tokens match, but for a match of `max` tokens."""
    found = {}
    for k in ("auto", 6):
        with open_llm(tiny_model("llama", "float32"), speculative_config={"method": "ngram", "k": k}) as llm:
            params = SamplingParams(max_tokens=9, allowed_token_ids=[20], ignore_eos=True)
            for n in (1, 2, 3):  # with the first output n + 1 tokens match those before 21
                n_before = len(llm.step_log(100))
                llm.generate([[*range(5, 40), 90, *range(20 - n, 20)]], params)
                found[k, n] = next(step.draft_rows for step in llm.step_log(100)[n_before:] if step.draft_rows)
    assert found["auto", 1] <= 2 and found["auto", 2] <= 3  # fewer where they do not pay
    assert all(found[6, n] == 6 for n in (1, 2, 3))


def test_after_a_rejected_draft_a_short_match_gives_none(tiny_model: Make) -> None:
    """Where the number of drafts adapts; a longer match, and an accepted draft, give drafts again."""
    found = {}
    for k in ("auto", 1):
        with open_llm(tiny_model("llama", "float32"), speculative_config={"method": "ngram", "k": k}) as llm:
            params = SamplingParams(max_tokens=5, allowed_token_ids=[20], ignore_eos=True)
            prompt = [5, 6, 20, 7, *range(30, 60), 6]  # with the first output "6 20" matches, and 7 is never drawn
            [output] = llm.generate([prompt], params)
            found[k] = output.metrics.drafts[0], output.metrics.accepted_drafts[0]
    assert found["auto"][0] < found[1][0] and found[1][1]
