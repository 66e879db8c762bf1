"""Heads that draft from the model's hidden states: they change no bit of an output, and draft what their formulas say."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from head_files import (
    MTP,
    Array,
    eagle,
    eagle3,
    eagle3_rows,
    eagle_rows,
    medusa,
    medusa_logits,
    mtp_model,
    mtp_rows,
    write_head,
)  # fmt: skip
from safetensors.numpy import load_file, save_file
from speculating import PAGE, check_run, open_llm, run, texts

from llmpy import LLM
from llmpy.engine.cores import update_of
from llmpy.errors import CheckpointError, ConfigError, UnsupportedError, WeightUpdateError
from llmpy.models import ModelConfig, registry

Make = Callable[[str, str], Path]
Rows = Callable[[Array, Array, Array], tuple[Array, Array]]
"""From the model's states, embeddings of the next tokens and the head's own states: states to go on from, and logits."""
Draft = Callable[[Array, list[int], int, list[int]], list[int]]
"""From the model's states, known ids, a number and allowed ids: so many greedy drafts."""
ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 21, "max_num_seqs": 3},
    {"kv_cache_memory_bytes": 2 * 18 * PAGE, "max_model_len": 160},
    {"enable_prefix_caching": False, "block_size": 32},
]


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def chain(rows: Rows, embedding: Array) -> Draft:
    """Drafts of a head that goes on from its own states."""

    def draft(states: Array, ids: list[int], k: int, allowed: list[int]) -> list[int]:
        known, own, drafts = list(ids), np.zeros((0, 64)), []
        for _ in range(k):
            x, logits = rows(states[: len(ids) - 1], embedding[known[1:]], own)
            own = x[len(ids) - 2 :]
            drafts.append(allowed[int(np.argmax(logits[-1][allowed]))])
            known.append(drafts[-1])
        return drafts

    return draft


def expected(draft: Draft, states: Array, ids: list[int], n: int, proposed: list[int], allowed: list[int]) -> list[int]:
    """Accepted drafts of each step with so many drafts, from n known ids on until all ids are known."""
    found = []
    for most in proposed:
        drafts = draft(states, ids[:n], most, allowed)
        found.append(next((i for i, draft in enumerate(drafts) if draft != ids[n + i]), most))
        n += found[-1] + 1
    assert n == len(ids)
    return found


def check_drafts(path: Path, head: dict[str, Any], taps: list[str], draft: Draft, n: int = 1) -> None:
    """Greedy answers with two allowed ids take the very steps that the drafts of the reference give; n samples are equal."""
    found = []
    with open_llm(path, speculative_config=head, enable_prefix_caching=False) as llm:
        for seed in range(8):
            rng, n_before = np.random.default_rng(seed), llm.stats().num_steps
            prompt, allowed = rng.integers(3, 131, 7 + 4 * seed).tolist(), sorted({4 + seed % 5, 20 + seed})
            options: dict[str, Any] = {"max_tokens": 12, "allowed_token_ids": allowed, "ignore_eos": True}
            options |= {"n": n, "temperature": 1e-4 * (n > 1)}
            [output] = llm.generate([prompt], **options, use_tqdm=False)
            log = llm.step_log()[1 + n_before - llm.stats().num_steps :]
            ids = prompt + list(output.outputs[0].token_ids)
            [states] = llm.tap([ids], taps)
            kept = np.concatenate([states[name] for name in taps], 1).astype(np.float64)
            assert all(step.draft_rows % n == step.accepted_drafts % n == 0 for step in log)
            proposed, accepted = [step.draft_rows // n for step in log], [step.accepted_drafts // n for step in log]
            assert accepted == expected(draft, kept, ids, len(prompt) + 1, proposed, allowed)
            found += list(zip(proposed, accepted, strict=True))
    assert max(n for n, _ in found) == head["k"]
    assert 0.1 < sum(n for _, n in found) / sum(n for n, _ in found) < 0.9


def wide(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors in float64, for the reference."""
    return {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("ids", "changes"), [(None, {}), ([*range(4, 9), *range(20, 40)], {}), (None, {"norm_before_residual": True})], ids=str
)
def test_eagle3_drafts_what_the_formulas_say(
    ids: list[int] | None, changes: dict[str, Any], tiny_model: Make, tmp_path: Path
) -> None:
    path = tiny_model("llama", "float32")
    folder, tensors = eagle3(tmp_path / "head", ids, **changes)
    w, config, target = wide(tensors), config_of(folder), wide(load_file(path / "model.safetensors"))
    head = {"method": "eagle3", "model": str(folder), "k": 3}
    names = ["model.layers.1", "model.layers.0", "model.embed_tokens"]  # inputs of layers 2, 1, 0
    check_drafts(
        path,
        head,
        names,
        chain(lambda states, e, own: eagle3_rows(w, states, e, config, own), target["model.embed_tokens.weight"]),
    )


def test_eagle_drafts_what_the_formulas_say(tiny_model: Make, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    folder, tensors = eagle(tmp_path / "head")
    w, config, target = wide(tensors), config_of(folder), wide(load_file(path / "model.safetensors"))
    lm_head = target["model.embed_tokens.weight"]
    head = {"method": "eagle", "model": str(folder), "k": 4}
    check_drafts(
        path,
        head,
        ["model.norm"],
        chain(lambda states, e, own: eagle_rows(w, states, e, config, own, lm_head), w["embed_tokens.weight"]),
        n=3,
    )


@pytest.mark.parametrize("architecture", MTP)
def test_layers_of_the_model_draft_what_the_formulas_say(architecture: str, tmp_path: Path) -> None:
    """The references differ from the models in everything but the decoder layer, which other tests compare."""
    path, tensors = mtp_model(tmp_path / "model", architecture)
    raw, w = config_of(path), wide(tensors)
    config = ModelConfig(registry.find(architecture).fields(raw), "config.json")
    embedding = w.get("model.layers.2.embed_tokens.weight", w["model.embed_tokens.weight"])
    check_drafts(
        path,
        {"method": "mtp", "k": 2},
        ["model.norm"],
        chain(lambda states, e, own: mtp_rows(w, architecture, config, states, e, own), embedding),
    )


@pytest.mark.parametrize("architecture", MTP)
def test_bits_of_models_with_such_layers(architecture: str, tmp_path: Path) -> None:
    path, _ = mtp_model(tmp_path / "model", architecture)
    with open_llm(path, enable_prefix_caching=False) as llm:
        wanted = run(llm)
    check_bits(path, wanted, speculative_config={"method": "deepseek_mtp", "k": 2}, max_num_batched_tokens=24, max_num_seqs=4)


@pytest.mark.parametrize("method", ["medusa", "eagle3", "mtp"])
def test_bits_with_several_ranks(method: str, tiny_model: Make, wanted: list[Any], tmp_path: Path) -> None:
    """Rank 0 runs a head that has all of its matrices."""
    path, config = tiny_model("llama", "float32"), {"method": method, "k": 2}
    if method == "mtp":
        path, _ = mtp_model(tmp_path / "model", "Glm4MoeForCausalLM")
        with open_llm(path, enable_prefix_caching=False) as llm:
            wanted = run(llm)
    else:
        folder, _ = HEADS[method](tmp_path / "head")
        tensors = load_file(folder / "model.safetensors")
        if method == "eagle3":
            tensors["embed_tokens.weight"] = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
        write_head(tmp_path / "own", config_of(folder), tensors)
        config["model"] = str(tmp_path / "own")
    with open_llm(path, 2, speculative_config=config) as llm:
        check_run(llm, wanted)
        assert llm.stats().draft_rows


def test_mimo_is_qwen2(tmp_path: Path) -> None:
    """But for the layer that drafts, which the model itself leaves out."""
    path, tensors = mtp_model(tmp_path / "mimo", "MiMoForCausalLM")
    raw = config_of(path) | {"architectures": ["Qwen2ForCausalLM"]}
    kept = {name: value for name, value in tensors.items() if "mtp_layers" not in name}
    assert len(kept) < len(tensors)
    found = []
    for each in (path, write_head(tmp_path / "qwen2", raw, kept)[0]):
        with open_llm(each) as llm:
            [output] = llm.generate([[5, 6, 7]], max_tokens=6, temperature=0, logprobs=2)
        found.append(output.outputs[0].logprobs.values.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("is_split", [False, True])
def test_medusa_drafts_what_the_formulas_say(is_split: bool, tiny_model: Make, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    folder, tensors = medusa(tmp_path / "head", n_layers=1 + is_split, is_split=is_split)
    w = wide(tensors)

    def draft(states: Array, ids: list[int], k: int, allowed: list[int]) -> list[int]:
        x = states[len(ids) - 2]
        return [allowed[int(np.argmax(medusa_logits(w, x, j)[allowed]))] for j in range(k)]

    check_drafts(path, {"method": "medusa", "model": str(folder), "k": 3}, ["model.norm"], draft)


HEADS: dict[str, Callable[[Path], tuple[Path, dict[str, Array]]]] = {"eagle3": eagle3, "eagle": eagle, "medusa": medusa}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A head of each method for tiny models of 64 columns."""
    folder = tmp_path_factory.mktemp("heads")
    return {method: str(write(folder / method)[0]) for method, write in HEADS.items()}


def check_bits(path: Path, wanted: list[Any], **options: Any) -> None:
    """All requests twice, the second time with a full cache."""
    with open_llm(path, **options) as llm:
        check_run(llm, wanted)


@pytest.fixture(scope="module")
def wanted(tiny_model: Make) -> list[Any]:
    """What the model answers without drafts."""
    with open_llm(tiny_model("llama", "float32"), enable_prefix_caching=False) as llm:
        return run(llm)


@pytest.mark.parametrize(("engine", "method", "k"), [
    (ENGINES[0], "eagle3", 4), (ENGINES[0], "medusa", 4), (ENGINES[0], "eagle", "auto"), (ENGINES[1], "eagle", 3),
    (ENGINES[1], "medusa", 3), (ENGINES[2], "eagle3", 4), (ENGINES[2], "medusa", "auto"), (ENGINES[3], "eagle", 2),
], ids=str)  # fmt: skip
def test_bits_with_and_without(
    engine: dict[str, Any], method: str, k: int | str, tiny_model: Make, heads: dict[str, str], wanted: list[Any]
) -> None:
    """Greedy and sampled requests of every kind: batched, chunked, preempted, and with full caches."""
    head = {"method": method, "model": heads[method], "k": k}
    check_bits(tiny_model("llama", "float32"), wanted, speculative_config=head, **engine)


@pytest.mark.parametrize(
    ("family", "dtype", "method"), [("qwen2-mixed", "bfloat16", "eagle"), ("mixtral", "float32", "eagle3")]
)
def test_bits_of_other_families(family: str, dtype: str, method: str, tiny_model: Make, heads: dict[str, str]) -> None:
    path = tiny_model(family, dtype)
    with open_llm(path, enable_prefix_caching=False) as llm:
        wanted = run(llm)
    head = {"method": method, "model": heads[method]}
    check_bits(path, wanted, speculative_config=head, max_num_batched_tokens=24, max_num_seqs=4)


def test_bits_of_recurrent_models(recurrent_model: Path, heads: dict[str, str]) -> None:
    config = config_of(recurrent_model)
    head = {"method": "eagle3", "model": heads["eagle3"], "k": 3}
    if config["vocab_size"] != 131 or config["hidden_size"] != 64:
        pytest.skip("heads of another size")
    with open_llm(recurrent_model, enable_prefix_caching=False) as llm:
        if not llm.num_cache_groups:
            with pytest.raises(UnsupportedError, match="full attention"):
                open_llm(recurrent_model, speculative_config=head)
            return
        wanted = run(llm)
    check_bits(recurrent_model, wanted, speculative_config=head)


def agreeing(folder: Path, path: Path) -> tuple[Path, Path]:
    """A model whose next token depends on the last one alone, and a head of EAGLE that computes the same."""
    target, config = load_file(path / "model.safetensors"), config_of(path)
    for name, x in target.items():
        target[name] = 0 * x if name.endswith(("o_proj.weight", "down_proj.weight")) else x
    rows = target["model.embed_tokens.weight"]
    target["model.embed_tokens.weight"] = (rows / np.sqrt((rows**2).mean(1, keepdims=True))).astype(np.float32)
    target["model.norm.weight"] = np.ones(64, np.float32)
    model, _ = write_head(folder / "model", config | {"rms_norm_eps": 1e-12}, target)
    head, tensors = eagle(folder / "head")
    tensors = {name: 0 * x if name.endswith(("o_proj.weight", "down_proj.weight")) else x for name, x in tensors.items()}
    tensors["fc.weight"], tensors["fc.bias"] = np.eye(64, 128, dtype=np.float32), np.zeros(64, np.float32)
    tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    return model, write_head(folder / "same", config_of(head), tensors)[0]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_head_that_agrees_is_always_right(engine: dict[str, Any], tiny_model: Make, tmp_path: Path) -> None:
    """Also at temperature 1, with penalties, several samples, chunked prompts, hits and preemptions: the draws are coupled."""
    path, head = agreeing(tmp_path, tiny_model("llama", "float32"))
    with open_llm(path, speculative_config={"method": "eagle", "model": str(head), "k": 4}, **engine) as llm:
        run(llm)
        run(llm)
        stats = llm.stats()
        assert 0 < stats.accepted_rows == stats.draft_rows
        n_before = stats.num_steps
        llm.generate([[7, 8, 9]], temperature=1, seed=1, max_tokens=41, ignore_eos=True, use_tqdm=False)
        assert llm.stats().num_steps - n_before == 1 + 8  # the prompt's, then five tokens a step


def test_sleep_updates_and_taps(tiny_model: Make, heads: dict[str, str]) -> None:
    """The head keeps its weights over sleep, takes new ones by its own names, and reads new ones of the model."""
    path = tiny_model("llama", "float32")
    with open_llm(path, speculative_config={"method": "eagle3", "model": heads["eagle3"], "k": 3}) as llm:
        before, stats = run(llm), llm.stats()
        llm.reset_prefix_cache()
        for level in (1, 2):
            llm.sleep(level, "keep")
            llm.wake_up()
            llm.update_weights(path)
            ids = llm.enqueue([[5, 6, 7]], temperature=0, max_tokens=9)
            llm.step()
            llm.tap([[5, 6, 7, 8]], ["model.norm"])
            assert len(llm.wait_for_completion()) == len(ids)
            llm.reset_prefix_cache()
            assert run(llm) == before
        again = llm.stats()
        assert again.draft_rows > 3 * stats.draft_rows - 9
        report = llm.update_drafter(heads["eagle3"])
        assert report.num_tensors == len(load_file(Path(heads["eagle3"]) / "model.safetensors"))
        assert run(llm) == before


def sums_of_drafter(llm: LLM) -> dict[str, int | None]:
    """Checksums of the drafter's weights."""
    cores = [update_of(model, llm._driver.engine, -1, True) for model in llm._weights.drafter]
    return {name: core.checksum(name) for core in cores for name in core.names("missing")}


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
def test_an_update_reaches_the_layers_of_mtp(architecture: str, tmp_path: Path) -> None:
    """By their names in the checkpoint; an update without them keeps them."""
    path, tensors = mtp_model(tmp_path / "model", architecture)
    changed, to = {name: (1.25 * x).astype(np.float32) for name, x in tensors.items()}, tmp_path / "changed"
    to.mkdir()
    save_file(changed, to / "model.safetensors")
    shutil.copy(path / "config.json", to)
    config = {"method": "mtp", "k": 2}
    with open_llm(to, speculative_config=config) as llm:
        wanted, sums, stats = run(llm), sums_of_drafter(llm), llm.stats()
    with open_llm(path, speculative_config=config) as llm:
        names, own = {info["name"] for info in llm.weight_info()}, sums_of_drafter(llm)
        infos = llm.weight_info("*eh_proj*", drafter=True) if "Deepseek" in architecture else llm.weight_info(drafter=True)
        assert infos and all(info["version"] == llm.weight_version and info["name"] not in names for info in infos)
        llm.update_weights({name: x for name, x in changed.items() if name in names}, version="one")
        assert sums_of_drafter(llm) == own and llm.weight_info(drafter=True)[0]["version"] == infos[0]["version"]
        assert run(llm) == wanted
        report = llm.update_weights(iter(changed.items()), version="two")
        assert report.missing == [] and report.num_tensors == len(changed)
        assert sums_of_drafter(llm) == sums != own and llm.weight_info(drafter=True)[0]["version"] == "two"
        before = llm.stats()
        assert run(llm) == wanted
        after = llm.stats()
        assert after.accepted_rows - before.accepted_rows == stats.accepted_rows
        with pytest.raises(WeightUpdateError, match="nonsense"):
            llm.update_weights({**changed, "nonsense.weight": changed["model.norm.weight"]})
        llm.check()


def test_updates_of_medusa(tiny_model: Make, heads: dict[str, str], tmp_path: Path) -> None:
    """All heads take their weights in one update, which wants all of them."""
    path, other = tiny_model("llama", "float32"), medusa(tmp_path / "other")[0]
    tensors = {name: 2 * x for name, x in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors")
    with open_llm(path, speculative_config={"method": "medusa", "model": str(other), "k": 3}) as llm:
        wanted, sums = run(llm), sums_of_drafter(llm)
    with open_llm(path, speculative_config={"method": "medusa", "model": heads["medusa"], "k": 3}) as llm:
        assert run(llm) == wanted and sums_of_drafter(llm) != sums
        first = {name: x for name, x in tensors.items() if name.startswith("0.")}
        with pytest.raises(WeightUpdateError, match="were not written"):
            llm.update_drafter(first)
        epoch = llm.weight_epoch
        report = llm.update_drafter(other, version="new")
        assert report.epoch == llm.weight_epoch == epoch and sums_of_drafter(llm) == sums
        assert {info["version"] for info in llm.weight_info(drafter=True)} == {"new"} and llm.weight_version != "new"
        assert run(llm) == wanted
        llm.check()


def test_grammars_and_stop_strings(tmp_path: Path, write_model: Any) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "model").mkdir()
    path = write_model(tmp_path / "model")
    config = config_of(path)
    sizes = {"vocab_size": config["vocab_size"], "hidden_size": config["hidden_size"]}
    head, _ = eagle(tmp_path / "head", **sizes)
    with LLM(path, device="cpu", kv_cache_memory_bytes="16MiB", enable_prefix_caching=False) as llm:
        wanted = texts(llm)
    config = {"method": "eagle", "model": str(head)}
    with LLM(path, device="cpu", kv_cache_memory_bytes="32MiB", speculative_config=config, max_num_seqs=3) as llm:
        assert texts(llm) == wanted
        assert texts(llm) == wanted
        stats = llm.stats()
        assert 0 < stats.accepted_rows < stats.draft_rows
        assert stats.allocations_since_warmup == 0


def test_what_does_not_fit_is_refused(tiny_model: Make, heads: dict[str, str], tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    head = {"method": "eagle3", "model": heads["eagle3"]}
    with pytest.raises(UnsupportedError, match="layers of full attention"):
        open_llm(tiny_model("mistral-window", "float32"), speculative_config=head)
    with pytest.raises(UnsupportedError, match=r"a head that uses the model's model.embed_tokens.weight is not"):
        open_llm(path, 2, speculative_config=head)
    with pytest.raises(ConfigError, match="k must be at most 4, the heads of"):
        open_llm(path, speculative_config={"method": "medusa", "model": heads["medusa"], "k": 5})
    with pytest.raises(UnsupportedError, match="'mtp' is not supported for LlamaForCausalLM; known: Deepseek"):
        open_llm(path, speculative_config={"method": "mtp"})
    with pytest.raises(CheckpointError, match=r"d2t: wanted 3 different token ids"):
        open_llm(path, speculative_config=head | {"model": str(eagle3(tmp_path / "out", [5, 6, 131])[0])})
    other = str(eagle3(tmp_path / "other", hidden_size=48)[0])
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: wanted \[131, 48\], have nothing"):
        open_llm(path, speculative_config=head | {"model": other})
    with pytest.raises(UnsupportedError, match="input of layer 7, the model has 3 layers"):
        other = str(eagle3(tmp_path / "deep", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 7]})[0])
        open_llm(path, speculative_config=head | {"model": other})
