"""Adapters (LoRA) against transformers with W + scale B A in place of W, in float64."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from modules import load
from transformers.pytorch_utils import Conv1D

from llmpy import LLM, SamplingParams

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
CASES = ["llama", "llama-bias", "qwen2", "qwen3", "phi3-longrope", "gemma2", "gpt2", "olmo2", "falcon", "mistral"]
BOUND = 1e-4  # of a logprob


def linears(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the linears of all layers."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and "lm_head" not in name:
            shape = tuple(module.weight.shape)
            found[name] = shape[::-1] if isinstance(module, Conv1D) else shape
    return found


def merged(model: torch.nn.Module, tensors: dict[str, np.ndarray], scale: dict[str, float]) -> torch.nn.Module:
    model = copy.deepcopy(model).double()
    for name in linears(model):
        a, b = (torch.from_numpy(tensors[f"base_model.model.{name}.lora_{letter}.weight"]).double() for letter in "AB")
        module = model.get_submodule(name)
        change = scale.get(name, scale[""]) * (b @ a)
        module.weight.data += change.T if isinstance(module, Conv1D) else change
    return model


def logprobs(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    found = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return found.numpy()


def served(llm: LLM, ids: list[int], adapter: str | None) -> np.ndarray:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    return llm.generate([ids], params, lora_request=adapter)[0].prompt_token_logprobs[1:]


@pytest.mark.parametrize("case", CASES)
def test_logprobs(case, tiny, prompts, tmp_path, isa) -> None:
    model, ids = tiny(case), prompts[2]
    shapes = linears(model.model)
    options = {"skip_tokenizer_init": True, "max_model_len": 40, "device": f"cpu:{isa}", "kv_cache_memory_bytes": 16 << 20}
    with LLM(model.directory, enable_lora=True, max_loras=2, **options) as llm:
        for seed, rank in enumerate((4, 7)):
            tensors = files.factors(shapes, rank, seed, 0.1)
            llm.load_adapter(str(seed), files.save(tmp_path / str(seed), tensors, rank))
            wanted = logprobs(merged(model.model, tensors, {"": 2.0}), ids)
            assert np.abs(served(llm, ids, str(seed)) - wanted).max() <= BOUND
            assert np.abs(served(llm, ids, None) - wanted).max() > 20 * BOUND


def test_patterns_and_rslora(tiny, prompts, tmp_path) -> None:
    """Ranks and alphas by module; s = alpha / sqrt(rank)."""
    model, ids = tiny("llama"), prompts[2]
    shapes = linears(model.model)
    of_down = {name: shape for name, shape in shapes.items() if name.endswith("layers.1.mlp.down_proj")}
    tensors = files.factors(shapes, 4, 1, 0.1) | files.factors(of_down, 2, 2, 0.1)
    files.save(
        tmp_path, tensors, 4, use_rslora=True, rank_pattern={r"layers\.1\.mlp\.down_proj": 2}, alpha_pattern={"q_proj": 3}
    )
    scale = {"": 8 / 2.0} | dict.fromkeys(of_down, 8 / 2**0.5)
    scale |= {name: 3 / 2.0 for name in shapes if name.endswith("q_proj")}
    with LLM(model.directory, enable_lora=True, skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20, device="cpu") as llm:
        llm.load_adapter("a", tmp_path)
        wanted = logprobs(merged(model.model, tensors, scale), ids)
        assert np.abs(served(llm, ids, "a") - wanted).max() <= BOUND


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_of_peft(case, tiny, prompts, tmp_path, isa) -> None:
    """Adapters of experts, as PEFT makes them with target_parameters, against PEFT in float32."""
    peft = pytest.importorskip("peft")
    model, ids = tiny(case), prompts[2]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=3, lora_alpha=12, target_modules=["q_proj", "o_proj"], target_parameters=parameters, init_lora_weights=False
    )
    torch.manual_seed(1)
    changed = peft.get_peft_model(copy.deepcopy(model.model), config)
    changed.save_pretrained(tmp_path)
    wanted = logprobs(changed, ids)
    options = {"skip_tokenizer_init": True, "max_model_len": 40, "device": f"cpu:{isa}", "kv_cache_memory_bytes": 16 << 20}
    with LLM(model.directory, enable_lora=True, lora_experts=True, **options) as llm:
        llm.load_adapter("a", tmp_path)
        assert np.abs(served(llm, ids, "a") - wanted).max() <= BOUND
        assert np.abs(served(llm, ids, None) - wanted).max() > 20 * BOUND
    with LLM(model.directory, enable_lora=True, **options) as llm, pytest.raises(ValueError, match="lora_experts=True"):
        llm.load_adapter("a", tmp_path)
