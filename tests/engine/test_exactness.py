"""Law 2: a request's tokens and logprob bits are the same however it is computed. Everything here is compared byte for byte."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from modules import load

from llmpy import LLM, RequestOutput, SamplingParams, devices, export
from llmpy.engine import loading

Make = Callable[[str, str], Path]
Case = tuple[Path, str, list[list[tuple[bytes, ...]]]]
# Model, type, number of ranks, type of the cache if it is not "auto"; "tiers": little host memory and files behind the cache.
MODELS = [
    ("llama", "float32", 1), ("qwen3", "bfloat16", 1), ("mistral-window", "float16", 1), ("qwen2-mixed", "float32", 1),
    ("llama", "float32", 2), ("qwen3", "bfloat16", 3), ("mixtral", "bfloat16", 2),
    ("llama", "fp8", 1), ("llama", "fp8-bfloat16", 1), ("qwen3", "gptq-32", 1), ("llama", "rows-asym", 1),
    ("mixtral", "int8", 4), ("llama", "int8", 1),
    ("llama", "float32", 1, "fp8"), ("mistral-64", "bfloat16", 2, "fp8"), ("qwen3-64", "bfloat16", 1, "int8"),
    ("llama", "float32", 2, "int8"), ("llama", "float32", 1, "tiers"),
]  # fmt: skip
FILES = tempfile.TemporaryDirectory(prefix="llmpy-exactness")
TIERS = {
    "host_cache_bytes": "256KiB", "disk_cache": {"path": FILES.name, "bytes": "64MiB"}, "preemption": "swap",
    "cache_loads": "always",
}  # fmt: skip
# Classes that only transformers has, with their programs as `llmpy export` writes them: a dense one, and a mixture.
EXPORTED = [("exported-helium", "float32", 1), ("exported-mellum", "float32", 2)]
N_GPUS = sum(device["available"] for device in devices() if device["device"].startswith("cuda"))
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 70, 100, 129]


def prompts(shared: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(3)
    head = rng.integers(3, 131, shared).tolist()
    return [head + rng.integers(3, 131, n).tolist() for n in LENGTHS]


def params(i: int = 0, **changes: object) -> SamplingParams:
    """Greedy for even requests, everything that sampling has for odd ones."""
    common = {"max_tokens": 20, "logprobs": 3, "seed": 11 + i, "ignore_eos": True, **changes}
    if i % 2 == 0:
        return SamplingParams(temperature=0, **common)
    return SamplingParams(
        temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.2, **common
    )


def device_ids(device: str, n_ranks: int) -> list[int]:
    n_devices = N_GPUS if device.startswith("cuda") else 1
    return [rank % n_devices for rank in range(n_ranks)]


def open_llm(path: Path, device: str, **options: object) -> LLM:
    """device: such as "cuda:0", or "cpu x 2" for two ranks; "cpu x 2 with int8" names the cache's type, or tiers.

    Each rank has a GPU of its own. If there are fewer GPUs than ranks, ranks share them.
    """
    place, _, cache = device.partition(" with ")
    name, _, n_ranks = place.partition(" x ")
    defaults = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256, "device": name}
    if n_ranks:
        defaults |= {"tensor_parallel_size": int(n_ranks), "device_ids": device_ids(name, int(n_ranks))}
    if cache and cache != "tiers":
        defaults["kv_cache_dtype"] = cache
    elif cache and options.get("enable_prefix_caching", True):
        defaults |= TIERS
    return LLM(path, **(defaults | options))


def bits(output: RequestOutput) -> list[tuple[bytes, ...]]:
    """All values of a request that must not change."""
    found = []
    for sample in output.outputs:
        s = sample.sampled
        arrays = [
            s.raw,
            s.full,
            s.processed,
            s.kept_mass,
            s.rank,
            sample.logprobs.ids,
            sample.logprobs.values,
            sample.logprobs.ranks,
        ]
        found.append((sample.token_ids_array.tobytes(), *(a.tobytes() for a in arrays)))
    return found


def run(llm: LLM, batch: list[list[int]]) -> list[list[tuple[bytes, ...]]]:
    return [bits(o) for o in llm.generate(batch, [params(i) for i in range(len(batch))], use_tqdm=False)]


def alone(path: Path, batch: list[list[int]], device: str, **changes: object) -> list[list[tuple[bytes, ...]]]:
    with open_llm(path, device, enable_prefix_caching=False) as llm:
        return [bits(llm.generate([p], [params(i, **changes)], use_tqdm=False)[0]) for i, p in enumerate(batch)]


def exported(folder: Path, kind: str) -> Path:
    """A tiny model of transformers with its converted program in its folder."""
    pytest.importorskip("torch")
    helpers = load(Path(__file__).parents[1] / "export/conftest.py")
    sizes = json.dumps({"vocab_size": 131, "max_position_embeddings": 512, "num_hidden_layers": 3})
    found = helpers.checkpoint(folder, kind, sizes)
    (found.path / export.FILE).write_text(json.dumps(helpers.convert(found.raw)))
    return found.path


@pytest.fixture(
    scope="module",
    params=[*MODELS, *(pytest.param(each, marks=pytest.mark.slow) for each in EXPORTED)],
    ids=lambda params: "-".join(map(str, params)),
)
def case(
    request: pytest.FixtureRequest, each_device: str, tiny_model: Make, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """A model, a device or several ranks, and the outputs of one rank for every prompt alone. Ranks cut all matrices."""
    *which, n_ranks, cache = (*request.param, "")[:4]
    kind = which[0].removeprefix("exported-")
    path = tiny_model(*which) if kind == which[0] else exported(tmp_path_factory.mktemp(kind), kind)
    suffix = f" with {cache}" if cache else ""
    wanted = alone(path, prompts(), each_device + suffix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmpy.models.shard.default_replicate_bytes", lambda n_ranks: 0)
        yield path, (f"{each_device} x {n_ranks}" if n_ranks > 1 else each_device) + suffix, wanted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_seqs": 3, "max_num_batched_tokens": 20},
        {"block_size": 32},
        {"block_size": 64, "max_num_batched_tokens": 100},
        {"enable_prefix_caching": False},
        {"enforce_eager": True, "max_num_seqs": 5, "max_num_batched_tokens": 33},
    ],
    ids=str,
)
def test_batch_and_chunking(case: Case, options: dict[str, object]) -> None:
    path, device, wanted = case
    with open_llm(path, device, **options) as llm:
        assert run(llm, prompts()) == wanted
        llm._driver.engine.check()


def test_ranks_share_out_many_rows(case: Case) -> None:
    path, device, wanted = case
    if " x " not in device:
        pytest.skip("one rank samples all rows")
    with open_llm(path, device, max_num_seqs=64) as llm:
        which = [i % len(LENGTHS) for i in range(45)]
        outputs = llm.generate([prompts()[i] for i in which], [params(i) for i in which], use_tqdm=False)
        assert [bits(o) for o in outputs] == [wanted[i] for i in which]
        assert llm.stats().num_preemptions == 0


def test_order_of_requests(case: Case) -> None:
    path, device, wanted = case
    with open_llm(path, device) as llm:
        order = list(reversed(range(len(LENGTHS))))
        outputs = llm.generate([prompts()[i] for i in order], [params(i) for i in order], use_tqdm=False)
        assert [bits(o) for o in outputs] == [wanted[i] for i in order]


def test_cache_hits(case: Case) -> None:
    path, device, wanted = case
    with open_llm(path, device) as llm:
        assert run(llm, prompts()) == wanted
        again = llm.generate(prompts(), [params(i) for i in range(len(LENGTHS))], use_tqdm=False)
        assert [bits(o) for o in again] == wanted
        assert [o.num_cached_tokens for o in again] == [n // 16 * 16 if n % 16 else n - 1 for n in LENGTHS]
        assert llm.reset_prefix_cache()
        assert run(llm, prompts()) == wanted


def test_shared_prefixes(case: Case) -> None:
    path, device, _ = case
    batch = prompts(shared=70)
    wanted = alone(path, batch, device, max_tokens=8)
    with open_llm(path, device, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(batch, [params(i, max_tokens=8) for i in range(len(batch))], use_tqdm=False)
        assert [bits(o) for o in outputs] == wanted
        assert sum(o.num_cached_tokens >= 64 for o in outputs) >= len(batch) - 1


@pytest.mark.parametrize("length", [17, 65, 129])
def test_equal_prompts_in_one_step(case: Case, length: int) -> None:
    """All but the first compute one row, over keys that the first one computes in the same step."""
    path, device, _ = case
    prompt = np.random.default_rng(length).integers(3, 131, length).tolist()
    batch = [prompt] * 12
    wanted = alone(path, batch, device, max_tokens=5)
    with open_llm(path, device) as llm:
        outputs = llm.generate(batch, [params(i, max_tokens=5) for i in range(len(batch))], use_tqdm=False)
        assert [bits(o) for o in outputs] == wanted
        assert sum(o.num_cached_tokens == length - 1 for o in outputs) == len(batch) - 1


def test_preemption(case: Case) -> None:
    path, device, wanted = case
    page = 16 * 3 * 2 * 2 * 32 * (1 if device.endswith("8") else 4)  # tokens, layers, keys and values, heads, head size, bytes
    with open_llm(path, device, kv_cache_memory_bytes=24 * page, max_model_len=160) as llm:
        outputs = llm.generate(prompts(), [params(i) for i in range(len(LENGTHS))], use_tqdm=False)
        assert [bits(o) for o in outputs] == wanted
        llm._driver.engine.check()


def plain(i: int) -> SamplingParams:
    """Requests that need no token's value on the host before the next sampling; most end by a token's value."""
    common = {"max_tokens": 30, "logprobs": 3, "seed": 5 + i, "stop_token_ids": list(range(3 + i, 131, 12))}
    return SamplingParams(temperature=1.0 if i % 2 else 0.0, top_p=0.95, min_tokens=i % 4, **common)


def test_overlap_and_graphs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    path, device, _ = case
    batch = [p for p in prompts() for _ in range(3)]
    settings = [plain(i) for i in range(len(batch))]
    engine_options = loading._engine_options
    found = {}
    page = 16 * 3 * 2 * 2 * 32 * 4
    pools: list[dict[str, object]] = [{}, {"kv_cache_memory_bytes": 24 * page, "max_model_len": 160}]
    on_cuda = device.startswith("cuda")
    for small, pool in enumerate(pools):
        for serial in (False, True):
            for eager in (False, True) if on_cuda else (serial,):  # the CPU has no graphs and no overlap
                with monkeypatch.context() as patch:
                    patch.setattr(loading, "_engine_options", lambda x, s=serial: engine_options(x) | {"is_serial": s})
                    llm = open_llm(path, device, enforce_eager=eager, max_num_seqs=11, max_num_batched_tokens=60, **pool)
                with llm:
                    outputs = llm.generate(batch, settings, use_tqdm=False)
                    found[small, serial, eager] = [bits(o) for o in outputs]
                    llm._driver.engine.check()
                    stats, steps = llm.stats(), llm.step_log(4096)
                assert stats.max_steps_in_flight == (2 if on_cuda and not serial else 1)
                assert (stats.num_replayed_steps > 0) == (on_cuda and not eager)
                assert (stats.wasted_rows > 0) == (stats.max_steps_in_flight == 2)
                assert max(s.in_flight for s in steps) == stats.max_steps_in_flight
                assert stats.allocations_since_warmup == 0
    assert all(value == found[0, True, True] for value in found.values())


def test_threads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    path, device, wanted = case
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("LLMPY_NUM_THREADS", threads)
        with open_llm(path, device) as llm:
            assert run(llm, prompts()) == wanted


def test_score_equals_generate(case: Case) -> None:
    path, device, _ = case
    with open_llm(path, device) as llm:
        outputs = llm.generate(
            prompts(), temperature=0.7, max_tokens=20, logprobs=0, ignore_eos=True, seed=5, use_tqdm=False
        )
        whole = [p + o.token_ids for p, o in zip(prompts(), outputs, strict=True)]
        for temperature, name in ((1.0, "raw"), (0.7, "full")):
            for chunked in (False, True):
                scores = llm.score(
                    whole if not chunked else list(reversed(whole)), temperature=temperature, use_tqdm=False
                )
                scores = list(reversed(scores)) if chunked else scores
                for p, o, s in zip(prompts(), outputs, scores, strict=True):
                    got = s.token_logprobs[len(p) - s.start :]
                    assert got.tobytes() == getattr(o.outputs[0].sampled, name).tobytes()


def test_prompt_logprobs_equal_score(case: Case) -> None:
    path, device, _ = case
    batch = [p for p in prompts() if len(p) > 1]
    with open_llm(path, device, max_num_batched_tokens=64) as llm:
        scores = llm.score(batch, logprobs=2, use_tqdm=False)
        for _ in range(2):
            outputs = llm.generate(batch, temperature=0, max_tokens=1, prompt_logprobs=2, use_tqdm=False)
            for o, s in zip(outputs, scores, strict=True):
                assert np.isnan(o.prompt_token_logprobs[0])
                assert o.prompt_token_logprobs[1:].tobytes() == s.token_logprobs.tobytes()


def test_samples_equal_requests(case: Case) -> None:
    path, device, _ = case
    prompt, common = prompts()[6], {"temperature": 1.5, "max_tokens": 24, "logprobs": 2, "seed": 9, "ignore_eos": True}
    with open_llm(path, device) as llm:
        together = bits(llm.generate([prompt], n=4, use_tqdm=False, **common)[0])
        apart = [bits(llm.generate([prompt], sample_index=i, use_tqdm=False, **common)[0])[0] for i in range(4)]
        assert together == apart
        assert len(set(together)) > 1


def test_continuation(case: Case) -> None:
    path, device, _ = case
    batch, settings = prompts(), [params(i) for i in range(len(LENGTHS))]
    with open_llm(path, device) as llm:
        wholes = [output.outputs[0] for output in llm.generate(batch, settings, use_tqdm=False)]
        for cut in (1, 7, 19):
            begun = [
                {"prompt_token_ids": prompt, "output_token_ids": whole.token_ids[:cut]}
                for prompt, whole in zip(batch, wholes, strict=True)
            ]
            for rest, whole in zip(llm.generate(begun, settings, use_tqdm=False), wholes, strict=True):
                sample = rest.outputs[0]
                assert sample.token_ids == whole.token_ids[cut:]
                assert sample.sampled.raw.tobytes() == whole.sampled.raw[cut:].tobytes()


def test_allocations_and_small_pool(device: str, tiny_model: Make) -> None:
    """Law 4, and a thousand requests through a pool of 40 blocks."""
    page = 16 * 3 * 2 * 2 * 32 * 4
    with open_llm(tiny_model("llama", "float32"), device, kv_cache_memory_bytes=40 * page, max_model_len=128) as llm:
        rng = np.random.default_rng(1)
        batch = [rng.integers(3, 131, int(rng.integers(1, 60))).tolist() for _ in range(1000)]
        wanted = {}
        for i in (0, 17, 500, 999):
            wanted[i] = llm.generate([batch[i]], temperature=0, max_tokens=12, ignore_eos=True, use_tqdm=False)[
                0
            ].token_ids
        outputs = llm.generate(batch, temperature=0, max_tokens=12, ignore_eos=True, use_tqdm=False)
        assert all(len(o.token_ids) == 12 for o in outputs)
        assert all(outputs[i].token_ids == ids for i, ids in wanted.items())
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.allocations_since_warmup == 0
        assert stats.num_unfinished == 0
        llm._driver.engine.check()
