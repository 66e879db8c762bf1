"""Drafts by a second model: they change no bit, and a drafter equal to the model is always right."""

import asyncio
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from speculating import PAGE, bits, check_run, open_llm, params, prompts, run, texts

from llmpy import LLM, AsyncEngine, SamplingParams
from llmpy.engine.drafter import Drafter
from llmpy.errors import ConfigError, EngineBusyError, UnsupportedError

Make = Callable[[str, str], Path]


def blurred(path: Path, to: Path, share: float = 0.1) -> Path:
    """A copy of a checkpoint with noise, so that it drafts well but not always right."""
    rng = np.random.default_rng(1)
    tensors = load_file(path / "model.safetensors")
    noisy = {name: (x + share * x.std() * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in tensors.items()}
    to.mkdir()
    save_file(noisy, to / "model.safetensors")
    (to / "config.json").write_text((path / "config.json").read_text())
    return to


def drafts(path: Path, k: int | str = 4) -> dict[str, Any]:
    return {"method": "draft", "model": str(path), "k": k}


ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 21, "max_num_seqs": 3},
    {"kv_cache_memory_bytes": 2 * 24 * PAGE, "max_model_len": 160},
    {"enable_prefix_caching": False, "block_size": 32},
]


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
def test_bits_with_and_without(family: str, tiny_model: Make, tmp_path: Path) -> None:
    path = tiny_model(family, "float32")
    other = blurred(path, tmp_path / "blurred")
    with open_llm(path, enable_prefix_caching=False) as llm:
        wanted = run(llm)
    for engine in ENGINES if family == "llama" else ENGINES[:1]:
        for drafter, k in [(path, 4), (other, 3)] if engine == {} else [(other, 4)]:
            with open_llm(path, speculative_config=drafts(drafter, k), **engine) as llm:
                assert run(llm) == wanted
                assert run(llm) == wanted  # with a full cache
                llm.check()
                stats = llm.stats()
                assert 0 < stats.accepted_rows <= stats.draft_rows
                assert stats.allocations_since_warmup == 0
                assert stats.num_unfinished == 0 and stats.kv_blocks_free == stats.kv_blocks_total


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_drafter_equal_to_the_model_is_always_right(engine: dict[str, Any], tiny_model: Make) -> None:
    """Also at temperature 1, with penalties, several samples, chunked prompts, hits and preemptions: the draws are coupled."""
    path = tiny_model("llama", "float32")
    with open_llm(path, speculative_config=drafts(path), **engine) as llm:
        run(llm)
        run(llm)
        stats = llm.stats()
        assert 0 < stats.accepted_rows == stats.draft_rows
        assert stats.accepted_drafts == stats.drafts


@pytest.mark.parametrize("is_equal", [True, False])
def test_the_distribution_of_samples(is_equal: bool, tiny_model: Make, tmp_path: Path) -> None:
    """Chi-square test of all texts of three tokens; drafts are for the second and third one."""
    path, prompt, choices, n = tiny_model("llama", "float32"), [7, 8, 9], [5, 60, 99], 3000
    every = list(itertools.product(choices, repeat=3))
    with open_llm(path) as llm:
        scores = llm.score([prompt + list(each) for each in every])
    # [first, second, third token]: the chance of each token after those before it
    logprobs = np.stack([one.token_logprobs[-3:] for one in scores], -1).astype(np.float64)
    first, second, third = np.exp(logprobs).reshape(3, 3, 3, 3)
    first, second = first / first[:, :1, :1].sum(0), second / second[:, :, :1].sum(1, keepdims=True)
    chances = (first * second * third / third.sum(2, keepdims=True)).ravel()
    drafter = path if is_equal else blurred(path, tmp_path / "blurred", 2.0)
    how = SamplingParams(temperature=1, max_tokens=4, n=50, allowed_token_ids=choices, ignore_eos=True)
    with open_llm(path, speculative_config=drafts(drafter, 2)) as llm:
        outputs = llm.generate([prompt] * (n // 50), [how.replace(seed=i) for i in range(n // 50)], use_tqdm=False)
        stats = llm.stats()
    assert stats.draft_rows >= 2 * n and (stats.accepted_rows == stats.draft_rows) == is_equal
    counts = Counter(tuple(one.token_ids[:3]) for output in outputs for one in output.outputs)
    have = np.array([counts[each] for each in every])

    def chi_square(p: np.ndarray) -> float:
        return float(((have - n * p) ** 2 / (n * p)).sum())

    # 26 degrees of freedom, one in a thousand
    assert have.sum() == n and chi_square(chances) < 54.1 < chi_square(np.full(27, 1 / 27))


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_few_samples_take_few_steps(n_ranks: int, tiny_model: Make) -> None:
    path = tiny_model("llama", "float32")
    with open_llm(path, n_ranks, speculative_config=drafts(path)) as llm:
        llm.generate([[7, 8, 9]], temperature=1, seed=1, max_tokens=41, ignore_eos=True, use_tqdm=False)
        assert llm.stats().num_steps == 1 + 8  # the prompt's, then five tokens a step


@pytest.mark.parametrize(("level", "tags"), [(0, None), (1, None), (1, ["weights"]), (1, ["kv_cache"]), (2, None)])
def test_both_models_sleep(level: int, tags: Any, tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches are freed; on the CPU weights with a copy on the host stay where they are. Awake, the drafter is as right as
    before, also for requests that were frozen."""
    opened: list[Any] = []
    open_drafter = Drafter.open

    def watched(*args: Any) -> Any:
        opened.extend(open_drafter(*args))
        return tuple(opened)

    monkeypatch.setattr(Drafter, "open", watched)
    path = tiny_model("llama", "float32")
    with open_llm(path, speculative_config=drafts(path)) as llm:
        before, (model,) = run(llm), opened
        memory = model.memory()[0]
        ids = llm.enqueue(prompts(), [params(i) for i in range(len(before))])
        llm.step()
        llm.sleep(level, "keep", tags)
        assert (model.memory()[0]["kv"] == 0) == (level > 0 and tags != ["weights"])
        if level == 1:
            llm.sleep(2, "keep")
            assert model.memory()[0]["kv"] == 0
        llm.wake_up()
        if level:
            llm.update_weights(path)
        assert model.memory()[0]["kv"] == memory["kv"]
        assert [bits(output) for output in llm.wait_for_completion()] == before and len(ids) == len(before)
        assert run(llm) == before
        stats = llm.stats()
        assert 0 < stats.accepted_rows == stats.draft_rows
        llm.check()


def test_updates_of_the_drafter(tiny_model: Make, tmp_path: Path) -> None:
    """It drafts with its new weights, also for requests in flight; no bit of an output changes."""
    path = tiny_model("llama", "float32")
    other = blurred(path, tmp_path / "blurred")
    with open_llm(path, speculative_config=drafts(other)) as llm:
        before, stats = run(llm), llm.stats()
        assert stats.accepted_rows < stats.draft_rows
        llm.reset_prefix_cache()  # cached blocks have the old drafter's keys and values
        ids = llm.enqueue(prompts(), [params(i) for i in range(len(before))])
        llm.step()
        update = llm._weights.begin(drafts=True)
        update.write_all(list(load_file(path / "model.safetensors").items())[:3])
        with pytest.raises(EngineBusyError, match="a weight update is open"):
            llm.update_weights(path)
        update.abort()  # no step needs the drafter's weights
        epoch, missed = llm.weight_epoch, llm.stats().draft_rows - llm.stats().accepted_rows
        report = llm.update_drafter(path)
        assert report.num_tensors == len(llm.weight_info()) and report.epoch == epoch == llm.weight_epoch
        assert [bits(output) for output in llm.wait_for_completion()] == before and len(ids) == len(before)
        assert run(llm) == before and llm.weight_epoch == epoch
        stats = llm.stats()
        assert stats.draft_rows - stats.accepted_rows == missed  # from the update on all drafts were right
        llm.update_drafter(other)
        assert run(llm) == before and llm.stats().draft_rows - llm.stats().accepted_rows > missed
        llm.check()
    with open_llm(path) as llm, pytest.raises(UnsupportedError, match=r"update_drafter\(\) wants an engine with a drafter"):
        llm.update_drafter(path)


def test_an_async_engine_updates_its_drafter(tiny_model: Make) -> None:
    path = tiny_model("llama", "float32")
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}

    async def main() -> None:
        async with AsyncEngine.create(path, speculative_config=drafts(path), **options) as engine:
            ask: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
            wanted = (await engine.generate([7, 8, 9], **ask)).token_ids
            stream = engine.generate([7, 8, 9], **ask)
            report = await engine.update_drafter(path)
            assert report.num_tensors > 20 and engine.weight_epoch == 0
            assert (await stream).token_ids == wanted
            stats = engine.stats()
            assert 0 < stats.accepted_rows == stats.draft_rows

    asyncio.run(main())


def test_recurrent_models(recurrent_model: Path, tiny_model: Make, tmp_path: Path) -> None:
    """The target's states go back after a rejected draft; the drafter has attention alone."""
    vocab_size = json.loads((recurrent_model / "config.json").read_text())["vocab_size"]
    drafter = blurred(tiny_model("llama", "float32"), tmp_path / "blurred")
    if vocab_size != 131:
        pytest.skip("another vocabulary")
    with open_llm(recurrent_model, enable_prefix_caching=False) as llm:
        if not llm.num_cache_groups:
            with pytest.raises(UnsupportedError, match="full attention"):
                open_llm(recurrent_model, speculative_config=drafts(drafter))
            return
        wanted = run(llm)
        page = int(llm._driver.model.describe()["page_bytes"])
        n_state = llm.num_state_blocks
    with open_llm(drafter) as llm:
        page += int(llm._driver.model.describe()["page_bytes"])
    tight = {"kv_cache_memory_bytes": (40 + 5 * n_state) * page, "max_model_len": 160, "max_num_seqs": 4}
    for engine in ({}, tight):
        with open_llm(recurrent_model, speculative_config=drafts(drafter), **engine) as llm:
            check_run(llm, wanted)


def test_grammars_and_stop_strings(tmp_path: Path, write_model: Any) -> None:
    """The drafter draws with the grammar's masks, so that an equal one is always right."""
    pytest.importorskip("llguidance")
    path = write_model(tmp_path)
    with LLM(path, device="cpu", kv_cache_memory_bytes="16MiB", enable_prefix_caching=False) as llm:
        wanted = texts(llm)
    for engine in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 20}):
        with LLM(path, device="cpu", kv_cache_memory_bytes="32MiB", speculative_config=drafts(path), **engine) as llm:
            assert texts(llm) == wanted
            assert texts(llm) == wanted
            stats = llm.stats()
            assert 0 < stats.accepted_rows == stats.draft_rows
            assert stats.allocations_since_warmup == 0


def test_what_does_not_fit_is_refused(tiny_model: Make, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    with pytest.raises(UnsupportedError, match="layers of full attention"):
        open_llm(tiny_model("mistral-window", "float32"), speculative_config=drafts(path))
    with pytest.raises(UnsupportedError, match="data_parallel_size=2"):
        open_llm(path, data_parallel_size=2, speculative_config=drafts(path))
    short = tmp_path / "short"
    short.mkdir()
    save_file(load_file(path / "model.safetensors"), short / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    with pytest.raises(ConfigError, match="max_model_len must be at most 128"):
        open_llm(path, speculative_config=drafts(short))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = np.pad(tensors["model.embed_tokens.weight"], ((0, 9), (0, 0)))
    save_file(tensors, short / "model.safetensors")
    (short / "config.json").write_text(json.dumps(config | {"vocab_size": 140}))
    with pytest.raises(ConfigError, match="token ids"):
        open_llm(path, speculative_config=drafts(short))


def test_the_ids_of_both_vocabularies_mean_the_same(tmp_path: Path, write_model: Any) -> None:
    path, other = write_model(tmp_path), tmp_path / "other"
    shutil.copytree(path, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"the token '[ab]' has the id"):
        LLM(path, device="cpu", kv_cache_memory_bytes="16MiB", speculative_config=drafts(other))
