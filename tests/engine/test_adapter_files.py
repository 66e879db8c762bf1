"""What of an adapter's files is refused, and what the errors say."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load
from safetensors.numpy import save_file

from llmpy import LLM, CheckpointError, InvalidRequestError, LoRARequest, ModelNotFoundError, UnsupportedError

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
Q = "model.layers.0.self_attn.q_proj"
PLAIN = {Q: (128, 64)}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str, str], Path]) -> Iterator[LLM]:
    with LLM(tiny_model("llama", "float32"), enable_lora=True, max_lora_rank=4, **OPTIONS) as llm:
        yield llm


def test_a_loaded_adapter_is_compared(llm: LLM, tmp_path: Path) -> None:
    tensors, config = files.factors(PLAIN), {"r": 4, "lora_alpha": 8}
    llm.load_adapter("compared", files.save(tmp_path, tensors))
    assert llm.compare_adapter("compared", tmp_path) and llm.compare_adapter("compared", tensors, config)
    assert not llm.compare_adapter("compared", tensors, {**config, "lora_alpha": 9})
    assert not llm.compare_adapter("compared", files.factors(PLAIN, seed=1), config)
    llm.remove_adapter("compared")
    with pytest.raises(InvalidRequestError, match="there is no adapter 'compared'"):
        llm.compare_adapter("compared", tmp_path)


def test_the_same_tensors_again(llm: LLM, tmp_path: Path) -> None:
    """A trainer's tensors have other values each time. Their names and shapes are not read again, their types are."""
    shapes = {Q: (128, 64), "model.layers.1.self_attn.q_proj": (128, 64), "model.layers.1.mlp.up_proj": (96, 64)}
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    for seed in (0, 1):
        tensors = files.factors(shapes, seed=seed)
        llm.load_adapter("again", tensors, config)
        assert llm.compare_adapter("again", files.save(tmp_path / str(seed), tensors))
    config["lora_alpha"] = 9
    llm.load_adapter("again", tensors, config)
    assert not llm.compare_adapter("again", tmp_path / "1")
    name = next(iter(tensors))
    for wrong in (tensors[name].astype(np.int8), tensors[name][:, 1:], "x"):
        with pytest.raises(CheckpointError, match="wanted"):
            llm.load_adapter("again", {**tensors, name: wrong}, config)
    llm.remove_adapter("again")
    assert not llm._frontend.adapters._lent


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"use_dora": True}, "DoRA of the adapter"),
        ({"bias": "some"}, "bias='some' of the adapter"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ],
)
def test_features(llm: LLM, tmp_path: Path, config: dict[str, Any], text: str) -> None:
    files.save(tmp_path, files.factors(PLAIN), **config)
    with pytest.raises(UnsupportedError, match=f"{text} is not supported.*merge the adapter"):
        llm.load_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "error", "text"),
    [
        ("base_model.model.lm_head.lora_magnitude_vector", (4,), UnsupportedError, "magnitudes"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 131), CheckpointError, "lora_B.weight: wanted one beside"),
        ("base_model.model.model.embed_tokens.weight", (131, 64), InvalidRequestError, "engine with lora_embeddings=True"),
        (f"base_model.model.{Q}.lora_B.bias", (128,), CheckpointError, "wanted a name base_model"),
        (f"base_model.model.{Q}.bias", (128,), CheckpointError, "wanted a name base_model"),
        ("base_model.model.model.norm.weight", (64,), CheckpointError, "wanted a name base_model"),
        ("base_model.model.layers.1.mlp.up_proj.lora_A.weight", (4, 64), CheckpointError, "up_proj.lora_B.weight: wanted"),
    ],
)
def test_tensors(llm: LLM, tmp_path: Path, name: str, shape: tuple[int, ...], error: type[Exception], text: str) -> None:
    files.save(tmp_path, files.factors(PLAIN) | {name: np.zeros(shape, np.float32)})
    with pytest.raises(error, match=text):
        llm.load_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        ({Q: (64, 64)}, CheckpointError, r"q_proj.lora_B.weight: wanted \[128, 4\], have \[64, 4\]"),
        ({Q: (128, 65)}, CheckpointError, r"q_proj.lora_A.weight: wanted \[4, 64\], have \[4, 65\]"),
        ({"model.layers.9.mlp.up_proj": (96, 64)}, CheckpointError, "9.mlp.up_proj.weight, which the model does not have"),
        ({"model.embed_tokens": (131, 64)}, InvalidRequestError, "embed_tokens.weight; .* lora_embeddings=True"),
        ({"model.norm": (64, 64)}, UnsupportedError, "an adapter of model.norm.weight is not supported yet, only linears"),
        ({}, CheckpointError, "wanted factors of linears"),
    ],
)
def test_shapes_and_names(
    llm: LLM, tmp_path: Path, shapes: dict[str, tuple[int, int]], error: type[Exception], text: str
) -> None:
    files.save(tmp_path, files.factors(shapes))
    with pytest.raises(error, match=text):
        llm.load_adapter("a", tmp_path)
    assert llm.list_adapters() == []


def test_ranks(llm: LLM, tmp_path: Path) -> None:
    files.save(tmp_path / "large", files.factors(PLAIN, 5), 5)
    with pytest.raises(InvalidRequestError, match="rank 5, max_lora_rank is 4"):
        llm.load_adapter("a", tmp_path / "large")
    files.save(tmp_path / "unlike", files.factors(PLAIN, 3), 4)
    with pytest.raises(CheckpointError, match=r"wanted \[4, columns\].*have \[3, 64\]"):
        llm.load_adapter("a", tmp_path / "unlike")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 0}, "r of .*: wanted a whole number of at least 1, have 0"),
        ({"r": None}, "r of .*: wanted a whole number of at least 1, have None"),
        ({"r": 4.5}, "wanted a whole number of at least 1, have 4.5"),
        ({"lora_alpha": float("nan")}, "lora_alpha of .*: wanted a finite number, have nan"),
        ({"lora_alpha": "8"}, "lora_alpha of .*: wanted a finite number, have '8'"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern: wanted regular expressions, have '.*\(.*'"),
    ],
    ids=str,
)
def test_numbers_of_the_config(llm: LLM, config: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        llm.load_adapter("a", files.factors(PLAIN), {"r": 4, "lora_alpha": 8} | config)
    assert llm.list_adapters() == []


@pytest.mark.parametrize("dtype", ["int8", "complex64", "str", "bool"])
def test_types_of_tensors(llm: LLM, dtype: str) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in files.factors(PLAIN).items()}
    with pytest.raises(CheckpointError, match="wanted float32, bfloat16, float16, float64, have"):
        llm.load_adapter("a", tensors, {"r": 4, "lora_alpha": 8})


def test_two_adapters_in_one(llm: LLM) -> None:
    tensors = files.factors(PLAIN)
    tensors |= {name.replace("lora_A", "lora_A.other"): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"wanted one lora_A of .*, have several"):
        llm.load_adapter("a", tensors, {"r": 4, "lora_alpha": 8})
    with pytest.raises(TypeError, match=r"config must be the content of adapter_config.json"):
        llm.load_adapter("a", files.factors(PLAIN), [4])


def test_missing_and_damaged_files(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"have no adapter_config.json"):
        llm.load_adapter("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(ModelNotFoundError, match=r"have no adapter_model.safetensors"):
        llm.load_adapter("a", tmp_path)
    save_file(files.factors(PLAIN), tmp_path / "adapter_model.safetensors")
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    for n in (0, 7, 100, len(whole) - 1):
        (tmp_path / "adapter_model.safetensors").write_bytes(whole[:n])
        with pytest.raises(CheckpointError):
            llm.load_adapter("a", tmp_path)


def test_names_and_tensors_in_memory(llm: LLM, tmp_path: Path) -> None:
    tensors = files.factors(PLAIN)
    files.save(tmp_path, tensors)
    with pytest.raises(TypeError, match=r"adapter_config.json"):
        llm.load_adapter("a", tensors)
    llm.load_adapter("a", tensors, {"r": 4, "lora_alpha": 8})
    llm.load_adapter("b", tmp_path)
    found = [llm.generate([5, 6, 7], max_tokens=4, temperature=0, logprobs=1, lora_request=name)[0] for name in "ab"]
    assert found[0].outputs[0].sampled.raw.tobytes() == found[1].outputs[0].sampled.raw.tobytes()
    assert [(one.name, one.path) for one in llm.list_adapters()] == [("a", ""), ("b", str(tmp_path))]
    with pytest.raises(InvalidRequestError, match="was loaded from memory"):
        llm.generate([5], lora_request=LoRARequest("a", 1, tmp_path))
    with pytest.raises(InvalidRequestError, match="there is no adapter 'c'"):
        llm.generate([5], lora_request="c")
    with pytest.raises(TypeError, match="must be a LoRARequest or a name"):
        llm.generate([5], lora_request=3)
    for name in "ab":
        llm.remove_adapter(name)
    with pytest.raises(InvalidRequestError, match="there is no adapter 'a'"):
        llm.remove_adapter("a")


def test_biases_and_embeddings(tiny_model: Callable[[str, str], Path]) -> None:
    """What is wrong with them, and where they are not served."""
    name, config = f"base_model.model.{Q}", {"r": 4, "lora_alpha": 8, "lora_bias": True, "bias": "all"}
    both: dict[str, Any] = {"enable_lora": True, "lora_embeddings": True}
    with LLM(tiny_model("llama", "float32"), **both, **OPTIONS) as llm:
        for more, error, text in (
            (f"{name}.lora_B.bias", CheckpointError, r"a bias of model.*q_proj.weight: wanted \[128\], have \[9\]"),
            (f"{name}.base_layer.bias", CheckpointError, r"a bias of model.*q_proj.weight: wanted \[128\], have \[9\]"),
            ("base_model.model.model.norm.bias", UnsupportedError, "model.norm.weight is not supported yet, only linears"),
            ("base_model.model.lm_head.weight", CheckpointError, r"lm_head.weight: wanted \[131, 64\], have \[9\]"),
            ("model.embed_tokens.base_layer.weight", CheckpointError, r"wanted \[131, 64\], have \[9\]"),
        ):
            with pytest.raises(error, match=text):
                llm.load_adapter("a", files.factors(PLAIN) | {more: np.zeros(9, np.float32)}, config)
        assert llm.list_adapters() == []
        for module, shape, error, text in (
            ("model.norm", (64,), UnsupportedError, "model.norm.weight is not supported yet, only linears"),
            ("lm_head", (140, 64), CheckpointError, r"lm_head.weight: wanted \[131, 64\], have \[140, 64\]"),
        ):
            more = {f"base_model.model.{module}.weight": np.zeros(shape, np.float32)}
            with pytest.raises(error, match=text):
                llm.load_adapter("a", files.factors(PLAIN) | more, config | {"modules_to_save": [module]})


def test_requests_are_checked() -> None:
    with pytest.raises(InvalidRequestError, match="lora_name must be a name"):
        LoRARequest("", 1, "x")
    with pytest.raises(InvalidRequestError, match="lora_int_id must be at least 1"):
        LoRARequest("a", 0, "x")


def test_engines_without(tiny_model: Callable[[str, str], Path]) -> None:
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True}
    with pytest.raises(UnsupportedError, match="not supported yet with lora_experts=True and enable_dp_attention=True"):
        LLM(tiny_model("mixtral", "float32"), enable_lora=True, lora_experts=True, **ranks, **OPTIONS)
    with LLM(tiny_model("llama", "float32"), **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="enable_lora=True"):
        llm.load_adapter("a", "x")


def test_replicas(tiny_model: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Each replica has every adapter."""
    to = files.save(tmp_path, files.factors({Q: (128, 64)}))
    with LLM(tiny_model("llama", "float32"), enable_lora=True, data_parallel_size=2, max_num_seqs=1, **OPTIONS) as llm:
        each = llm.generate([[5, 6, 7]] * 6, max_tokens=4, temperature=0, logprobs=1, lora_request=LoRARequest("a", 1, to))
        assert len({one.outputs[0].sampled.raw.tobytes() for one in each}) == 1
        assert all(one.num_steps for one in llm.replica_stats())
        plain = llm.generate([5, 6, 7], max_tokens=4, temperature=0, logprobs=1)[0]
        assert plain.outputs[0].sampled.raw.tobytes() != each[0].outputs[0].sampled.raw.tobytes()
