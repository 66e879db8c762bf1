"""Adapters on a CUDA device, at sizes of its fast kernels: each request as alone, and near the values of the processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load

from llmpy import LLM, RequestOutput

exact = load(Path(__file__).with_name("test_exactness_cuda.py"))
files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
MODELS = ["llama-bfloat16", "qwen3-bfloat16", "llama-float16", "deepseek2-bfloat16", "qwen3_moe-bfloat16", "plamo2-bfloat16"]
CHOSEN = [0, 1, 3, 7, 30, 64, 99, 100]
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}


def lora(path: Path) -> dict[str, Any]:
    """Options; adapters of a mixture change its experts, too."""
    return LORA | {"lora_experts": "moe" in path.name}


def adapter_of(i: int) -> str | None:
    return (None, "a", "b", "c", None, "a", "c", "d")[i % 8]


def load_adapters(llm: LLM) -> None:
    """Four adapters of unlike ranks; the third changes the second layer alone."""
    named = {info["name"]: info["shape"] for info in llm.weight_info() if "proj" in info["name"] and "bias" not in info["name"]}
    taken = {place[0] for place in llm._driver.model.adapter_places()[1]}
    shapes = {name.removesuffix(".weight"): tuple(shape) for name, shape in named.items() if name in taken}
    for seed, (name, rank) in enumerate({"a": 16, "b": 4, "c": 8, "d": 1}.items()):
        chosen = {key: shape for key, shape in shapes.items() if name != "c" or ".1." in key}
        tensors = files.factors(chosen, rank, seed, 0.05)
        llm.load_adapter(name, tensors, {"r": rank, "lora_alpha": 2 * rank})


def bits(output: RequestOutput) -> tuple[bytes, ...]:
    return exact.bits(output)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact.write(tmp_path_factory.mktemp(request.param), (exact.MODELS | exact.HYBRIDS)[request.param])


@pytest.fixture(scope="module")
def alone(model: Path, cuda: str) -> dict[int, tuple[bytes, ...]]:
    """Outputs of some of the requests alone; those without an adapter are made by an engine without adapters."""
    prompts, params = exact.requests()
    found = {}
    for has_adapters in (False, True):
        with exact.open_llm(model, cuda, enable_prefix_caching=False, **(lora(model) if has_adapters else {})) as llm:
            if has_adapters:
                load_adapters(llm)
            for i in CHOSEN:
                if (adapter_of(i) is not None) == has_adapters:
                    chosen = {"lora_request": adapter_of(i)} if has_adapters else {}
                    found[i] = bits(llm.generate([prompts[i]], [params[i]], use_tqdm=False, **chosen)[0])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 300, "max_loras": 4},
        {"tensor_parallel_size": 2, "device_ids": (0, 0)},
    ],
    ids=str,
)
def test_a_request_among_a_hundred(
    options: dict[str, Any], model: Path, cuda: str, alone: dict[int, tuple[bytes, ...]]
) -> None:
    if "tensor_parallel_size" in options and lora(model)["lora_experts"]:
        pytest.skip("adapters of experts want one rank")
    prompts, params = exact.requests()
    adapters = [adapter_of(i) for i in range(len(prompts))]
    with exact.open_llm(model, cuda, **lora(model) | options) as llm:
        load_adapters(llm)
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            assert {i: bits(outputs[i]) for i in CHOSEN} == alone
        assert llm.stats().allocations_since_warmup == 0
        assert any(step.replayed for step in llm.step_log(4096)) != bool(options.get("enforce_eager"))
        llm.check()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_values_of_the_processor(name: str, cuda: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In float32 both devices give the same logprobs, but for the order of sums."""
    config = exact.MODELS[f"{name}-bfloat16"] | {"torch_dtype": "float32"}
    path, ids = exact.write(tmp_path_factory.mktemp(name), config), np.random.default_rng(1).integers(3, 8192, 60).tolist()
    found = []
    for device in ("cpu", cuda):
        with exact.open_llm(
            path, device, dtype="float32", kv_cache_memory_bytes=64 << 20, max_model_len=128, **lora(path)
        ) as llm:
            load_adapters(llm)
            found.append([np.array(llm.score(ids, lora_request=name)[0].token_logprobs) for name in (None, "a", "c")])
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours - theirs).max() < 2e-3
    assert np.abs(found[1][0] - found[1][1]).max() > 0.02 < np.abs(found[1][1] - found[1][2]).max()
