"""GPTQ and pack-quantized checkpoints whose groups have columns that are not adjacent (act-order)."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from packed_files import SORTED, Layout, answers, change, groups_of, open_llm, quantise, words

from llmpy import SamplingParams, UnsupportedError, _core

RAGGED = {"hidden_size": 160, "intermediate_size": 288}  # 128 + 32 and 2 * 128 + 32 columns and rows


def scheme(layout: Layout) -> str:
    return "gptq_v2" if layout.config.get("checkpoint_format") == "gptq_v2" else str(layout.config["quant_method"])


def is_linear(name: str, value: np.ndarray) -> bool:
    return value.ndim == 2 and ".layers." in name


@pytest.fixture
def make(tiny, tmp_path: Path) -> Callable[..., Path]:
    return lambda layout="gptq", case="llama", chosen=is_linear, **fields: quantise(
        tiny(case, **({**RAGGED, **fields} if case == "llama" else fields)).directory, tmp_path, SORTED[layout], chosen
    )


def logprobs(path: Path, prompts: list[list[int]], **options: object) -> list[np.ndarray]:
    with open_llm(path, dtype="float32", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([prompt[:50] for prompt in prompts], params, use_tqdm=False)
    return [each.prompt_token_logprobs[1:] for each in outputs]


@pytest.mark.parametrize("layout", SORTED)
def test_values(make: Callable[..., Path], layout: str) -> None:
    """A tensor's columns are sorted by their groups, and its values are exact."""
    path = make(layout)
    (file,) = (path / "packed").glob("*.safetensors")
    reader = _core.Checkpoint([str(file)], scheme=scheme(SORTED[layout]))
    for name, value in safetensors.numpy.load_file(path / "plain" / file.name).items():
        order = np.frombuffer(reader.column_order(name), np.uint32)
        if not is_linear(name, value):
            assert not order.size
            continue
        assert np.array_equal(order, np.argsort(groups_of(SORTED[layout], value.shape[1]), kind="stable"))
        read = np.frombuffer(reader.read_float32(name), np.float32).reshape(value.shape)
        assert np.array_equal(read, value[:, order])


@pytest.mark.parametrize("layout", SORTED)
@pytest.mark.parametrize("case", ["llama", "qwen3", "phi3", "gemma2"])
def test_answers(make: Callable[..., Path], layout: str, case: str, prompts, device: str) -> None:
    """Near the same weights in float32, whose sums have another order; equal bits alone, in a batch and in chunks."""
    path = make(layout, case)
    for got, want in zip(*(logprobs(path / kind, prompts, device=device) for kind in ("packed", "plain")), strict=True):
        assert np.abs(got - want).max(initial=0) < 1e-3
    options: dict[str, object] = {"dtype": "float32", "device": device}
    wanted = answers(path / "packed", prompts, **options)
    assert answers(path / "packed", prompts, **options, max_num_batched_tokens=16, max_num_seqs=2) == wanted
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], **options) == [one]


def test_bfloat16(make: Callable[..., Path], prompts, cuda: str) -> None:
    path = make(hidden_size=192, intermediate_size=320)
    options: dict[str, object] = {"dtype": "bfloat16", "device": cuda}
    wanted = answers(path / "packed", prompts, **options)
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], **options) == [one]


def test_ranks(make: Callable[..., Path], prompts) -> None:
    path = make()
    ranks = {"tensor_parallel_size": 2, "dtype": "float32"}
    assert answers(path / "packed", prompts, **ranks) == answers(path / "packed", prompts, dtype="float32")


def test_the_head(make: Callable[..., Path], prompts) -> None:
    path = make(chosen=lambda name, value: "lm_head" in name, vocab_size=160)
    for got, want in zip(*(logprobs(path / kind, prompts) for kind in ("packed", "plain")), strict=True):
        assert np.abs(got - want).max(initial=0) < 1e-3


def test_unlike_orders_of_one_input(make: Callable[..., Path], prompts) -> None:
    """q, k and v with groups of their own are three multiplications."""
    path = make()
    before = answers(path / "packed", prompts, dtype="float32")
    columns = np.random.default_rng(1).permutation(160)
    name = "model.layers.0.self_attn.k_proj"

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        q = tensors[f"{name}.qweight"].numpy().view(np.uint32)
        numbers = (q[:, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None] & 15).reshape(160, -1)
        tensors[f"{name}.qweight"] = torch.from_numpy(words(numbers[columns].T, 4).T.copy())
        tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][torch.from_numpy(columns)]

    with open_llm(path / "packed") as llm:
        assert sum("take" in line for line in llm.program()) == 8
    change(path / "packed", turn)
    with open_llm(path / "packed") as llm:
        assert sum("take" in line for line in llm.program()) == 9
    assert answers(path / "packed", prompts, dtype="float32") != before


def test_experts(make: Callable[..., Path]) -> None:
    """Each expert has an order of its own, but all experts read one input."""
    path = make("rows", "mixtral", lambda name, value: is_linear(name, value) and ".gate.weight" not in name)
    with pytest.raises(UnsupportedError) as caught:
        open_llm(path / "packed")
    file, _, rest = str(caught.value).partition(": tensor ")
    assert file == str(next((path / "packed").glob("*.safetensors")))
    wanted = r"model\.layers\.0\..*experts\.\d\.w\d\.weight \(compressed-tensors\): wanted groups of adjacent columns"
    assert re.match(rf"{wanted} in experts, have others by act-order .*desc_act=false", rest)


def test_unlike_groups(make: Callable[..., Path]) -> None:
    """Groups of other numbers of columns do not fit the blocks of a type."""
    path, name = make(), "model.layers.1.mlp.down_proj.g_idx"
    change(path / "packed", lambda tensors: tensors.update({name: torch.arange(288, dtype=torch.int32) % 3}))
    with pytest.raises(UnsupportedError, match="groups of unlike numbers of columns"):
        open_llm(path / "packed")


@pytest.mark.parametrize("is_saved", [False, True])
def test_adapters(is_saved: bool, make: Callable[..., Path], prompts, device: str) -> None:
    """A has its columns in the order of the weight's, and so have matrices in place of the model's."""
    if is_saved and not device.startswith("cpu"):
        pytest.skip("modules_to_save: on the CPU")
    path, random = make(), np.random.default_rng(2)
    modules = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")]
    config: dict[str, object] = {"r": 4, "lora_alpha": 8, "modules_to_save": ["down_proj"] if is_saved else None}
    found = []
    for kind in ("packed", "plain"):
        with open_llm(path / kind, dtype="float32", device=device, enable_lora=True) as llm:
            shapes = {info["name"]: info["shape"] for info in llm.weight_info()}
            tensors = {}
            for name, (rows, columns) in ((each, shapes[f"{each}.weight"]) for each in modules):
                if is_saved and name.endswith("down_proj"):
                    tensors[f"{name}.weight"] = random.standard_normal((rows, columns), np.float32)
                    continue
                tensors[f"{name}.lora_A.weight"] = 0.2 * random.standard_normal((4, columns), np.float32)
                tensors[f"{name}.lora_B.weight"] = 0.2 * random.standard_normal((rows, 4), np.float32)
            llm.load_adapter("one", tensors, config)
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            for name in ("one", None):
                outputs = llm.generate([ids[:50] for ids in prompts], params, lora_request=name)
                found.append(np.concatenate([each.prompt_token_logprobs[1:] for each in outputs]))
        random = np.random.default_rng(2)
    ours, without, theirs, _ = found
    assert np.abs(ours - theirs).max() < 1e-3 < 0.1 < np.abs(theirs - without).max()


def test_options_that_need_the_columns_in_order(make: Callable[..., Path]) -> None:
    path = make()
    with open_llm(path / "packed") as llm, pytest.raises(UnsupportedError, match="act-order"):
        llm.update_weights([("model.norm.weight", np.ones(160, np.float32))], partial=True)
