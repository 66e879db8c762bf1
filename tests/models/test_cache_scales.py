"""Scales of FP8 caches in checkpoints, by every name that writers give them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packed_files import answers, change, configure, open_llm, quantise_fp8

from llmpy import CheckpointError, UnsupportedError

K, V = 0.25, 8.0
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "proj": ("k_proj.k_scale", "v_proj.v_scale"),
    "output": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.fixture
def make(tiny, tmp_path: Path) -> Callable[..., Path]:
    return lambda case="llama": quantise_fp8(tiny(case).directory, tmp_path / case)


def add_scales(path: Path, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str] = ("k_scale", "v_scale")) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for layer in {name.split("self_attn.")[0] for name in tensors if "self_attn." in name}:
            tensors[f"{layer}self_attn.{names[0]}"], tensors[f"{layer}self_attn.{names[1]}"] = k.clone(), v.clone()

    change(path, edit)


def multiply(path: Path, factors: dict[str, float]) -> None:
    """Multiplies the scales of weights, and biases of inputs of attention."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            for module, factor in factors.items():
                is_bias = name.endswith("bias") and module != "o_proj"
                if f".{module}." in name and (name.endswith("weight_scale") or module.endswith("norm") or is_bias):
                    tensor *= factor

    change(path, edit)


@pytest.mark.parametrize(("case", "names", "ranks"), [
    ("llama", "compressed-tensors", 1), ("llama", "compressed-tensors", 2), ("llama", "output", 1), ("qwen3", "proj", 1),
    ("gemma2", "compressed-tensors", 1),
])  # fmt: skip
def test_scales(make: Callable[..., Path], tmp_path: Path, case: str, names: str, ranks: int, prompts, device: str) -> None:
    """Scales that are powers of two give the bits of a model whose keys and values are so much smaller."""
    path = make(case)
    options = {"kv_cache_dtype": "fp8", "dtype": "float32", "device": device, "tensor_parallel_size": ranks}
    if ranks > 1 and device != "cpu":
        pytest.skip("one device")
    add_scales(path, torch.tensor([K]), torch.tensor(V), NAMES[names])
    scaled = answers(path, prompts, **options)
    add_scales(path, torch.ones(1), torch.ones(1), NAMES[names])
    assert scaled != answers(path, prompts, **options)
    k = ("q_norm", "k_norm") if case == "qwen3" else ("q_proj", "k_proj")
    multiply(path, {k[0]: K, k[1]: 1 / K, "v_proj": 1 / V, "o_proj": V})
    assert scaled == answers(path, prompts, **options)


def test_other_caches_ignore_scales(make: Callable[..., Path], prompts) -> None:
    path = make()
    wanted = answers(path, prompts)
    add_scales(path, torch.tensor([K]), torch.tensor([V]))
    assert answers(path, prompts) == wanted


def test_one_scale_for_both(make: Callable[..., Path], prompts) -> None:
    path, options = make(), {"kv_cache_dtype": "fp8"}
    add_scales(path, torch.tensor([K]), torch.tensor([K]))
    wanted = answers(path, prompts, **options)
    change(path, lambda tensors: [
        tensors.update({name.replace("k_scale", "kv_scale"): tensors.pop(name)} if name.endswith("k_scale") else {})
        for name in sorted(tensors) if name.endswith(".k_scale") or (name.endswith(".v_scale") and tensors.pop(name) is None)
    ])  # fmt: skip
    assert answers(path, prompts, **options) == wanted


LAYER = "model.layers.1.self_attn"


@pytest.mark.parametrize(("change_one", "text"), [
    ({"k_scale": torch.tensor([0.0])}, r"k_scale: wanted a scale from 2\^-100 to 2\^100, have 0.0"),
    ({"v_scale": torch.tensor([-1.0])}, r"v_scale: wanted a scale from .*, have -1.0"),
    ({"k_scale": torch.tensor([torch.nan])}, "k_scale: wanted a scale from .*, have nan"),
    ({"v_scale": torch.ones(2)}, r"v_scale: wanted one number of type .* have float32 \[2\]"),
    ({"k_scale": torch.ones(1, dtype=torch.int32)}, "k_scale: wanted one number of type .* have int32"),
    ({"v_scale": None}, "k_scale: wanted the scale of v beside it"),
    ({"k_scale": None, "v_scale": None}, "k_scale: wanted cache scales for each layer with attention"),
])  # fmt: skip
def test_malformed(make: Callable[..., Path], change_one: dict[str, torch.Tensor | None], text: str) -> None:
    path = make()
    add_scales(path, torch.tensor([K]), torch.tensor([V]))

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in change_one.items():
            tensors.pop(f"{LAYER}.{name}")
            tensors.update({} if value is None else {f"{LAYER}.{name}": value})

    change(path, edit)
    with pytest.raises(CheckpointError, match=text) as caught:
        open_llm(path, kv_cache_dtype="fp8")
    assert str(caught.value.tensor).startswith(LAYER)
    assert Path(caught.value.file or "").suffix == ".safetensors"


def test_a_layer_without_a_cache(make: Callable[..., Path]) -> None:
    path = make()
    add_scales(path, torch.tensor([K]), torch.tensor([V]))
    change(path, lambda tensors: tensors.update({f"model.layers.9.self_attn.{each}_scale": torch.ones(1) for each in "kv"}))
    with pytest.raises(CheckpointError, match=r"layers\.9.self_attn\.k_scale: wanted a layer with attention"):
        open_llm(path, kv_cache_dtype="fp8")


@pytest.mark.parametrize("changes", [{"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"dynamic": True}])
def test_other_schemes(make: Callable[..., Path], changes: dict[str, object]) -> None:
    """Only a cache in FP8 reads the scheme."""
    path = make()
    scheme = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": {**SCHEME, **changes},
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"},
            "input_activations": {"type": "float", "num_bits": 8, "dynamic": False}}},
    }  # fmt: skip
    configure(path, quantization_config=scheme)
    open_llm(path).close()
    with pytest.raises(UnsupportedError, match=r"kv_cache_scheme .* wanted .*or kv_cache_dtype='auto'"):
        open_llm(path, kv_cache_dtype="fp8")
