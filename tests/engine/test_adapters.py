"""Adapters (LoRA): a row has the bits that its request has alone, beside other adapters, and after preemption."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load
from safetensors import safe_open

from llmpy import LLM, AsyncEngine, LoRARequest, SamplingParams
from llmpy.engine import adapter_images

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
Make = Callable[[str, str], Path]
LENGTHS = [1, 5, 16, 17, 33, 70, 40, 64]
CHOICES = [None, 0, 1, None, 2, 0, 1, 2]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    head = rng.integers(3, 131, 16).tolist()
    return [head + rng.integers(3, 131, n).tolist() for n in LENGTHS]


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (i % 2), max_tokens=24, logprobs=2, seed=11 + i, ignore_eos=True)


def linears(path: Path) -> dict[str, tuple[int, int]]:
    """Shapes of the linears of all layers."""
    with safe_open(path / "model.safetensors", "numpy") as file:
        names = [name for name in file.keys() if "_proj.weight" in name]  # noqa: SIM118
        return {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in names}


def open_llm(path: Path, device: str, **options: Any) -> LLM:
    common = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256, "device": device}
    return LLM(path, **(common | {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8} | options))


def bits(output: Any) -> list[tuple[bytes, ...]]:
    return [(one.token_ids_array.tobytes(), one.sampled.raw.tobytes(), one.logprobs.values.tobytes()) for one in output.outputs]


Case = tuple[Path, str, list[LoRARequest], list[Any]]


@pytest.fixture(
    scope="module", params=[("llama", "float32"), ("qwen2-mixed", "bfloat16"), ("qwen3", "float32"), ("llama", "fp8")],
    ids="-".join,
)  # fmt: skip
def case(
    request: pytest.FixtureRequest, isa: str, tiny_model: Make, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """A model, a device, three adapters, and the outputs of every prompt alone."""
    path, to = tiny_model(*request.param), tmp_path_factory.mktemp("adapters")
    plain = linears(tiny_model(request.param[0], "float32"))
    adapters = []
    for i, rank in enumerate((4, 8, 1)):
        chosen = {name: shape for name, shape in plain.items() if i != 2 or "layers.1" in name}
        files.save(to / str(i), files.factors(chosen, rank, i), rank)
        adapters.append(LoRARequest(f"adapter {i}", i + 1, to / str(i)))
    wanted = []
    for i, (prompt, choice) in enumerate(zip(prompts(), CHOICES, strict=True)):
        with open_llm(path, f"cpu:{isa}", enable_prefix_caching=False) as llm:
            chosen = None if choice is None else adapters[choice]
            wanted.append(bits(llm.generate([prompt], params(i), lora_request=chosen)[0]))
    yield path, f"cpu:{isa}", adapters, wanted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_seqs": 3, "max_num_batched_tokens": 20},
        {"max_loras": 1},
        {"max_loras": 2, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": 25, "max_model_len": 128},  # pages
        {"max_lora_rank": 64},
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "k": 3, "min": 1, "max": 3}},
    ],
    ids=str,
)
def test_mixed_as_alone(case: Case, options: dict[str, Any]) -> None:
    path, device, adapters, wanted = case
    if (pages := options.get("kv_cache_memory_bytes")) is not None:
        with open_llm(path, device) as llm:
            options = options | {"kv_cache_memory_bytes": pages * llm._driver.model.describe()["page_bytes"]}
    chosen = [None if choice is None else adapters[choice] for choice in CHOICES]
    each = [params(i) for i in range(len(LENGTHS))]
    with open_llm(path, device, **options) as llm:
        for _ in range(2):  # the second time with cached prompts
            outputs = llm.generate(prompts(), each, lora_request=chosen, use_tqdm=False)
            assert [bits(output) for output in outputs] == wanted
            assert [output.lora_request for output in outputs] == chosen
            llm._driver.engine.check()
        assert outputs[5].num_cached_tokens or options.get("kv_cache_memory_bytes")
        assert llm.stats().num_preemptions or "kv_cache_memory_bytes" not in options


def test_without_an_adapter_as_without_adapters(case: Case) -> None:
    path, device, _, wanted = case
    with open_llm(path, device, enable_lora=False) as llm:
        for i, choice in enumerate(CHOICES):
            same = bits(llm.generate([prompts()[i]], params(i))[0]) == wanted[i]
            assert same == (choice is None)


def test_score_and_stream(case: Case) -> None:
    """A score has the bits that the adapter's requests drew with, also beside other adapters; a stream has them too."""
    path, device, adapters, wanted = case
    chosen = [None if choice is None else adapters[choice] for choice in CHOICES]
    ids = [np.frombuffer(each[0][0], np.int32).tolist() for each in wanted]
    greedy = [i for i in range(len(ids)) if i % 2 == 0]
    with open_llm(path, device) as llm:
        whole = [prompts()[i] + ids[i] for i in greedy]
        starts = [len(prompts()[i]) for i in greedy]
        scores = llm.score(whole, start=starts, lora_request=[chosen[i] for i in greedy], use_tqdm=False)
        for i, score in zip(greedy, scores, strict=True):
            raw = np.frombuffer(wanted[i][0][1], np.float32)
            assert np.asarray(score.token_logprobs[-len(raw) :], np.float32).tobytes() == raw.tobytes()
        plain = llm.score(whole[1], start=starts[1], use_tqdm=False)[0]
        assert plain.sum_logprob != scores[1].sum_logprob  # prompt 2 has an adapter
        chunks = list(llm.stream(prompts()[1], params(1), lora_request=adapters[0]))
        assert bits(chunks[-1].output) == wanted[1] and chunks[-1].output.lora_request == adapters[0]
        with pytest.raises(ValueError, match="there is no adapter"):
            llm.stream(prompts()[1], params(1), lora_request="unknown")


def test_samples_share_the_prompt(case: Case) -> None:
    path, device, adapters, _ = case
    each = SamplingParams(temperature=1, n=3, max_tokens=8, logprobs=2, seed=5)
    with open_llm(path, device) as llm:
        wanted = [bits(llm.generate([prompts()[4]], each, lora_request=adapter)[0]) for adapter in [None, *adapters]]
        together = llm.generate([prompts()[4]] * 4, each, lora_request=[None, *adapters], use_tqdm=False)
        assert [bits(output) for output in together] == wanted
    assert len({str(one) for one in wanted}) == 4


def test_an_arriving_adapter_stops_no_step(case: Case) -> None:
    """Beside other requests it is copied between steps: the first step after its arrival has their rows alone."""
    path, device, adapters, wanted = case
    with open_llm(path, device, max_loras=1) as llm:
        outputs = {}
        for first, second in ((0, 1), (3, 2)):  # the second time in the place of the other adapter, which no sample uses
            running = llm.add_request(prompts()[first], params(first))
            for _ in range(3):
                llm.step()
            arrived = llm.add_request(prompts()[second], params(second), lora_request=adapters[CHOICES[second]])
            llm.step()
            assert llm.step_log(1)[-1].rows == 1
            outputs |= {first: running, second: arrived}
            found = {}
            while llm.has_unfinished_requests():
                found |= {output.request_id: output for output in llm.step() if output.finished}
            assert all(bits(found[outputs[i]]) == wanted[i] for i in (first, second))
            llm._driver.engine.check()
        llm.add_request(prompts()[1], params(1), lora_request=adapters[0])
        llm.step()
        assert llm.step_log(1)[-1].prompt_rows  # nobody else runs: the step loads it
        llm.add_request(prompts()[2], params(2), lora_request=adapters[1])
    with open_llm(path, device) as llm:  # closed while a load may be on
        llm.add_request(prompts()[0], params(0))
        llm.step()
        for i in (0, 1):
            llm.add_request(prompts()[i], params(i), lora_request=adapters[i])
        llm.step()


def test_images_in_memory_of_torch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for tensors on a GPU: torch makes the image, which the core borrows until nobody has the adapter."""
    torch = pytest.importorskip("torch")
    path, device, adapters, wanted = case
    own = adapter_images.device_of
    with open_llm(path, device, max_loras=1) as llm:
        for n, i in enumerate((1, 2, 1)):
            folder = Path(adapters[CHOICES[i]].path)
            with safe_open(folder / "adapter_model.safetensors", "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            config = json.loads((folder / "adapter_config.json").read_text())
            monkeypatch.setattr(adapter_images, "device_of", lambda *_: torch.device("cpu"))
            llm.load_adapter("mine", tensors, config)
            assert llm.compare_adapter("mine", tensors, config)
            monkeypatch.setattr(adapter_images, "device_of", own)
            assert llm.compare_adapter("mine", adapters[CHOICES[i]].path)
            tensors[sorted(tensors)[0]][0, 0] += 1
            assert not llm.compare_adapter("mine", tensors, config)
            running = llm.add_request(prompts()[i], params(i), lora_request="mine")
            llm.step()
            assert len(llm._frontend.adapters._lent) == (2 if n else 1)  # a slot has the one before until this step
            found = {}
            while llm.has_unfinished_requests():
                found |= {output.request_id: output for output in llm.step() if output.finished}
            assert bits(found[running]) == wanted[i]


def test_random_arrivals(case: Case) -> None:
    """Requests come, are aborted, and adapters are replaced and pinned at random; what ends has the bits that it has alone."""
    path, device, adapters, wanted = case
    rng, live, finished = np.random.default_rng(1), {}, 0
    with open_llm(path, device, max_loras=2, max_num_seqs=4, max_num_batched_tokens=40) as llm:
        for _ in range(100):
            action = rng.integers(0, 12)
            if action < 3 and len(live) < 12:
                i = int(rng.integers(0, len(LENGTHS)))
                chosen = None if CHOICES[i] is None else adapters[CHOICES[i]]
                live[llm.add_request(prompts()[i], params(i), lora_request=chosen)] = i
            elif action == 3 and live:
                gone = str(rng.choice(list(live)))
                llm.abort_request(gone)
                del live[gone]
            elif action == 4 and llm.list_adapters():
                one = adapters[int(rng.integers(0, 3))]
                moves = "recompute" if rng.integers(0, 2) else "keep"
                llm.load_adapter(one.name, one.path, pinned=one is adapters[0], on_running=moves)
            for output in llm.step() if llm.has_unfinished_requests() else []:
                if output.finished and output.request_id in live:
                    assert bits(output) == wanted[live.pop(output.request_id)]
                    finished += 1
            llm._driver.engine.check()
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished and output.request_id in live:
                    assert bits(output) == wanted[live.pop(output.request_id)]
                    finished += 1
    assert finished > 5 and not live


def test_a_pinned_adapter_keeps_its_slot(case: Case) -> None:
    path, device, adapters, wanted = case
    with open_llm(path, device, max_loras=2) as llm:
        llm.load_adapter("mine", adapters[0].path, pinned=True)
        with pytest.raises(ValueError, match="wanted fewer pinned adapters than max_loras"):
            llm.load_adapter("another", adapters[1].path, pinned=True)
        llm.generate(prompts()[1], params(1), lora_request="mine")
        for i in (2, 4, 2):  # the others take turns in the other slot
            assert bits(llm.generate([prompts()[i]], params(i), lora_request=adapters[CHOICES[i]])[0]) == wanted[i]
        llm.add_request(prompts()[0], params(0))
        llm.step()
        for name, is_there in (("mine", True), (adapters[2], False)):
            llm.add_request(prompts()[4], params(4), lora_request=name)
            llm.step()
            assert bool(llm.step_log(1)[-1].prompt_rows) == is_there
        llm.remove_adapter("mine")
        while llm.has_unfinished_requests():
            llm.step()
        llm._driver.engine.check()


def test_a_replaced_adapter_is_another(case: Case) -> None:
    """Blocks that the former one computed are not found again."""
    path, device, adapters, wanted = case
    with open_llm(path, device, max_loras=1) as llm:
        for i in (1, 2):  # prompts of adapters 0 and 1
            llm.load_adapter("mine", adapters[CHOICES[i]].path)
            assert bits(llm.generate([prompts()[i]], params(i), lora_request="mine")[0]) == wanted[i]
        first = llm.generate([prompts()[5]], params(5), lora_request="mine")[0]
        llm.load_adapter("mine", adapters[0].path)
        second = llm.generate([prompts()[5]], params(5), lora_request="mine")[0]
        assert bits(second) == wanted[5] != bits(first) and second.num_cached_tokens == 0


def test_requests_in_flight_move(case: Case) -> None:
    """After the step in which they move, their tokens are those of a request that has the new adapter from there on."""
    path, device, adapters, _ = case
    plain = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    with open_llm(path, device, max_loras=2, max_num_batched_tokens=48) as llm:
        with pytest.raises(ValueError, match="on_running must be 'keep' or 'recompute', got 'move'"):
            llm.load_adapter("mine", adapters[0].path, on_running="move")
        llm.load_adapter("mine", adapters[0].path, on_running="recompute")  # there is none to replace
        moved = [llm.add_request(prompts()[i], plain, lora_request=name) for i, name in ((1, "mine"), (4, "mine"), (2, None))]
        for _ in range(9):
            llm.step()
        late = llm.add_request(prompts()[6], plain, lora_request="mine")  # it has not begun
        llm.load_adapter("mine", adapters[1].path, on_running="recompute")
        found, counts = {}, {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                counts.setdefault(output.request_id, len(output.outputs[0].token_ids))
                if output.finished:
                    found[output.request_id] = output
            llm._driver.engine.check()
        for i, name in ((1, moved[0]), (4, moved[1])):
            ids = found[name].outputs[0].token_ids
            n = counts[name] - 1  # tokens before the move
            assert 0 < n < 20
            for adapter, first, end in ((adapters[0], 0, n), (adapters[1], n, 24)):
                [score] = llm.score([prompts()[i] + ids[:end]], start=len(prompts()[i]) + first, lora_request=adapter)
                scored = np.asarray(score.token_logprobs[first - end :], np.float32)
                assert scored.tobytes() == found[name].outputs[0].sampled.raw[first:end].tobytes()
        alone = llm.generate([prompts()[2], prompts()[6]], plain, lora_request=[None, adapters[1]], use_tqdm=False)
        assert [bits(found[moved[2]]), bits(found[late])] == [bits(one) for one in alone]
        assert len(llm._frontend.adapters._lent) == 3  # the replaced one is gone


@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_in_flight_move_in_an_async_engine(replicas: int, tiny_model: Make) -> None:
    """The replaced adapter is used no longer, once its requests have gone on with the new one."""
    path = tiny_model("llama", "float32")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "device": "cpu"}
    each = [files.factors(linears(path), 4, seed) for seed in (0, 1)]
    config, greedy = {"r": 4, "lora_alpha": 8}, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def run() -> None:
        async with AsyncEngine.create(path, enable_lora=True, max_loras=2, data_parallel_size=replicas, **options) as engine:
            engine.load_adapter("b", each[0], config)
            alone = (await engine.generate([5, 6, 7], greedy, lora_request="b")).outputs[0].token_ids
            ids = alone
            for _ in range(20):  # a request may end before it can move
                engine.load_adapter("a", each[0], config)
                has_moved = False
                async for output in engine.generate([5, 6, 7], greedy, lora_request="a"):
                    if not has_moved:
                        await engine.pause("keep")
                        await asyncio.to_thread(engine.load_adapter, "a", each[1], config, on_running="recompute")
                        await engine.resume()
                    has_moved, ids = True, output.outputs[0].token_ids
                assert len(ids) == 200 and ids[0] == alone[0]
                if ids != alone:
                    break
            assert ids != alone
            engine.check()

    asyncio.run(run())


def test_a_removed_adapter_serves_its_requests(case: Case) -> None:
    path, device, adapters, wanted = case
    with open_llm(path, device) as llm:
        llm.add_request(prompts()[1], params(1), "a", lora_request=adapters[0])
        llm.remove_adapter(adapters[0].name)
        with pytest.raises(ValueError, match="there is no adapter"):
            llm.add_request(prompts()[1], params(1), "b", lora_request=adapters[0].name)
        found = []
        while llm.has_unfinished_requests():
            found += llm.step()
        assert bits(found[-1]) == wanted[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts(dtype: str, isa: str, tiny_model: Make) -> None:
    """Adapters of experts, by the names of a checkpoint: mixed, in chunks and cached as alone, and beside none."""
    path, name = tiny_model("mixtral", dtype), "block_sparse_moe.experts"
    with safe_open(path / "model.safetensors", "numpy") as file:
        shapes = {n.removesuffix(".weight"): tuple(file.get_slice(n).get_shape()) for n in file.keys() if name in n}  # noqa: SIM118
    chosen = [None, "all", "some", None, "all", "some"]

    def load(llm: LLM) -> None:
        for seed, (label, rank) in enumerate({"all": 5, "some": 8}.items()):
            own = {n: shape for n, shape in shapes.items() if label == "all" or (".1." in n and "w2" in n)}
            llm.load_adapter(label, files.factors(own, rank, seed, 0.2), {"r": rank, "lora_alpha": rank})

    def generate(llm: LLM, numbers: list[int]) -> list[Any]:
        given = [prompts()[i] for i in numbers], [params(i) for i in numbers]
        return [bits(one) for one in llm.generate(*given, lora_request=[chosen[i] for i in numbers], use_tqdm=False)]

    with open_llm(path, f"cpu:{isa}", lora_experts=True, enable_prefix_caching=False) as llm:
        load(llm)
        wanted = [generate(llm, [i])[0] for i in range(len(chosen))]
    for options in (
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"max_loras": 1},
        {"tensor_parallel_size": 2, "experts": "rank"},
        {"tensor_parallel_size": 2, "experts": "width"},
        {"tensor_parallel_size": 3, "max_num_batched_tokens": 9},
    ):
        with open_llm(path, f"cpu:{isa}", lora_experts=True, **options) as llm:
            load(llm)
            assert [generate(llm, [*range(len(chosen))]) for _ in range(2)] == [wanted, wanted]
    with open_llm(path, f"cpu:{isa}", enable_lora=False) as llm:
        for i, choice in enumerate(chosen):
            assert (bits(llm.generate([prompts()[i]], params(i))[0]) == wanted[i]) == (choice is None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_heads_and_biases(dtype: str, each_device: str, tiny_model: Make) -> None:
    """Mixed, in chunks, cached, preempted and drafted as alone; a request without an adapter as without adapters."""
    path, rng = tiny_model("llama", dtype), np.random.default_rng(1)
    shapes = linears(tiny_model("llama", "float32"))
    config = {"r": 4, "lora_alpha": 6, "lora_bias": True, "bias": "all"}
    has_whole = "cpu" in each_device

    def factors(seed: int) -> dict[str, Any]:
        rows, columns = 131, 64
        found = files.factors(shapes | {"lm_head": (rows, columns)} if seed else {"lm_head": (rows, columns)}, 4, seed)
        if seed and has_whole:
            found["model.embed_tokens.weight"] = rng.standard_normal((rows, columns), np.float32)
        else:
            found["model.embed_tokens.lora_embedding_A"] = rng.standard_normal((4, rows), np.float32)
            found["model.embed_tokens.lora_embedding_B"] = rng.standard_normal((columns, 4), np.float32)
        found |= {f"{name}.lora_B.bias": rng.standard_normal(shape[0], np.float32) for name, shape in shapes.items() if seed}
        return found | {f"{name}.bias": 0.1 * rng.standard_normal(shape[0], np.float32) for name, shape in shapes.items()}

    tensors = [factors(0), factors(1)]
    choices = [None, "0", "1", None, "0", "1", None, "1"]

    def generate(numbers: list[int], **options: Any) -> list[Any]:
        with open_llm(path, each_device, lora_embeddings=True, **options) as llm:
            for name in "01":
                saved = {"modules_to_save": ["embed_tokens"]} if name == "1" and has_whole else {}
                llm.load_adapter(name, tensors[int(name)], config | saved)
            given = [prompts()[i] for i in numbers], [params(i) for i in numbers]
            chosen = [choices[i] for i in numbers]
            found = [[bits(one) for one in llm.generate(*given, lora_request=chosen, use_tqdm=False)] for _ in range(2)]
            llm._driver.engine.check()
            assert found[0] == found[1]
            return found[0]

    wanted = [generate([i], enable_prefix_caching=False)[0] for i in range(len(choices))]
    for options in (
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_loras": 1},
        {"speculative_config": {"method": "ngram", "k": 3, "min": 1, "max": 3}},
        {"tensor_parallel_size": 2} | ({} if has_whole else {"device_ids": (0, 0)}),
    ):
        assert generate([*range(len(choices))], **options) == wanted
    with open_llm(path, each_device, enable_lora=False) as llm:
        for i, choice in enumerate(choices):
            assert (bits(llm.generate([prompts()[i]], params(i))[0]) == wanted[i]) == (choice is None)


@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_factors_rounded_to_bfloat16(family: str, is_torch: bool, each_device: str, tiny_model: Make) -> None:
    """lora_dtype="bfloat16" gives the bits of factors that were rounded before; biases are not."""
    torch = pytest.importorskip("torch")
    path, rng = tiny_model(family, "bfloat16"), np.random.default_rng(2)
    plain = tiny_model(family, "float32") / "model.safetensors"
    with safe_open(plain, "numpy") as file:
        names = [name for name in file.keys() if "_proj.weight" in name or ".experts." in name]  # noqa: SIM118
        shapes = {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in names}
    exact = {name: torch.from_numpy(tensor) for name, tensor in files.factors(shapes, 8, 3, 0.2).items()}
    rounded = {name: tensor.bfloat16().float() for name, tensor in exact.items()}
    if family == "llama":
        biases = {f"{name}.lora_B.bias": torch.from_numpy(rng.standard_normal(n[0], np.float32)) for name, n in shapes.items()}
        exact, rounded = exact | biases, rounded | biases
    config = {"r": 8, "lora_alpha": 8, "lora_bias": family == "llama"}
    options = {"lora_experts": family == "mixtral", "enable_prefix_caching": False}

    def generate(tensors: dict[str, Any], lora_dtype: str) -> list[Any]:
        with open_llm(path, each_device, lora_dtype=lora_dtype, **options) as llm:
            given = tensors if is_torch else {name: tensor.numpy() for name, tensor in tensors.items()}
            for _ in range(2):  # the second time by the plan of the first
                llm.load_adapter("a", given, config)
            outputs = llm.generate(prompts()[:4], [params(i) for i in range(4)], lora_request="a", use_tqdm=False)
            return [bits(one) for one in outputs]

    found = generate(exact, "bfloat16")
    assert found == generate(rounded, "float32") != generate(exact, "float32")


@pytest.mark.parametrize("has_bias", [False, True])
def test_embeddings_in_memory_of_torch(has_bias: bool, tiny_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of embeddings stay on the device; an adapter with a bias is made in host memory. Both have the same bits."""
    torch = pytest.importorskip("torch")
    path, rng, own = tiny_model("llama", "float32"), np.random.default_rng(5), adapter_images.device_of
    shapes = linears(path)
    tensors = files.factors(shapes | {"lm_head": (131, 64)})
    tensors["model.embed_tokens.lora_embedding_A"] = rng.standard_normal((4, 131), np.float32)
    tensors["model.embed_tokens.lora_embedding_B"] = rng.standard_normal((64, 4), np.float32)
    if has_bias:
        tensors |= {f"{name}.bias": rng.standard_normal(shape[0], np.float32) for name, shape in shapes.items()}
    config = {"r": 4, "lora_alpha": 6, "bias": "all"}
    with open_llm(path, "cpu", lora_embeddings=True) as llm:
        for _ in range(2):  # the second time by the plan of the first
            monkeypatch.setattr(adapter_images, "device_of", lambda *_: torch.device("cpu"))
            llm.load_adapter("a", {name: torch.from_numpy(each) for name, each in tensors.items()}, config)
            monkeypatch.setattr(adapter_images, "device_of", own)
            made = [*llm._frontend.adapters._lent.values()][-1]
            assert torch.is_tensor(made.image) != has_bias
            assert llm.compare_adapter("a", tensors, config)


def test_steps_allocate_nothing(case: Case) -> None:
    path, device, adapters, _ = case
    with open_llm(path, device, max_loras=1) as llm:
        llm.generate(prompts()[:2], params(0), lora_request=adapters[:2], use_tqdm=False)
        llm.generate(prompts()[:3], params(0), lora_request=[adapters[1], adapters[0], adapters[2]], use_tqdm=False)
        assert llm.stats().allocations_since_warmup == 0


def test_finished_outputs_draft_for_their_adapter_alone(tiny_model: Make) -> None:
    """Also for its later revisions. One text by both adapters, so that only the name can keep them apart."""
    path = tiny_model("llama", "float32")
    tensors = files.factors(linears(path))
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "use_tqdm": False}
    with open_llm(path, "cpu", speculative_config={"method": "suffix", "k": 4}) as llm:

        def accepted(name: str | None) -> int:
            metrics = llm.generate([prompts()[3]], lora_request=name, **how)[0].metrics
            return sum(metrics.accepted_drafts)

        for name in ("a", "b"):
            llm.load_adapter(name, tensors, {"r": 4, "lora_alpha": 8})
        alone = accepted("a")
        assert accepted("a") > alone + 20
        assert accepted("b") == alone
        llm.load_adapter("a", tensors, {"r": 4, "lora_alpha": 8})
        assert accepted("a") > alone + 20
