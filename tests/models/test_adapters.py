"""Adapters (LoRA) against transformers with W + scale B A in place of W, in float64."""

import contextlib
import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from modules import load
from transformers.pytorch_utils import Conv1D

from llmpy import LLM, SamplingParams, UnsupportedError

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
vision = load(Path(__file__).with_name("vision_models.py"))
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


def made_by_peft(model: torch.nn.Module, folder: Path, **config: object) -> torch.nn.Module:
    """A model with a random adapter of rank 3, which the folder has, too."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = peft.LoraConfig(r=3, lora_alpha=12, init_lora_weights=False, **config)
    changed = peft.get_peft_model(copy.deepcopy(model), options)
    changed.save_pretrained(folder)
    return changed


def check(directory: Path, adapter: Path, ids: list[int], wanted: np.ndarray, device: str = "cpu", **options: object) -> None:
    """Fails unless an engine has the logprobs of a model with its adapter."""
    options |= {"skip_tokenizer_init": True, "max_model_len": 40, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32"}
    with LLM(directory, enable_lora=True, device=device, **options) as llm:
        llm.load_adapter("a", adapter)
        assert np.abs(served(llm, ids, "a") - wanted).max() <= BOUND
        assert np.abs(served(llm, ids, None) - wanted).max() > 20 * BOUND


HYBRIDS = {
    "mamba": ["in_proj", "x_proj"],
    "mamba2": ["in_proj"],
    "falcon_mamba": ["in_proj", "x_proj"],
    "jamba": ["in_proj", "x_proj", "q_proj", "o_proj", "feed_forward.gate_proj"],
    "bamba": ["in_proj", "q_proj", "o_proj", "gate_proj", "down_proj"],
    "granite_hybrid": ["in_proj", "q_proj", "v_proj", "shared_mlp.input_linear"],
    "falcon_h1": ["in_proj", "q_proj", "o_proj", "gate_proj", "down_proj"],
    "nemotron_h": ["in_proj", "q_proj", "o_proj", "mixer.up_proj", "mixer.down_proj"],
}


@pytest.mark.parametrize("case", HYBRIDS)
def test_hybrids_of_peft(case, tiny, prompts, tmp_path) -> None:
    """Adapters of mixers, attention and MLPs."""
    model, ids = tiny(case), prompts[2]
    changed = made_by_peft(model.model, tmp_path, target_modules=HYBRIDS[case])
    check(model.directory, tmp_path, ids, logprobs(changed, ids))


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2.5-vl", "gemma3", "pixtral"])
def test_models_with_images_of_peft(name, random_parameters, prompts, tmp_path) -> None:
    """transformers has other names of modules in memory than the checkpoint has."""
    model = vision.VisionModel(vision.FAMILIES[name], tmp_path / "model", random_parameters)
    targets = r".*language_model.*\.(q_proj|v_proj|o_proj|gate_proj|down_proj)"
    changed, ids = made_by_peft(model.model, tmp_path / "adapter", target_modules=targets), prompts[2]
    check(model.directory, tmp_path / "adapter", ids, logprobs(changed, ids))


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "qwen3_next", "deepseek2", "deepseek3"])
def test_projections_of_experts_of_peft(case, tiny, prompts, tmp_path) -> None:
    """PEFT makes gate_proj and up_proj one parameter of twice the rank."""
    model, ids = tiny(case), prompts[2]
    changed = made_by_peft(model.model, tmp_path, target_modules=["gate_proj", "up_proj", "down_proj"])
    for options in ({}, {"tensor_parallel_size": 2}):
        check(model.directory, tmp_path, ids, logprobs(changed, ids), lora_experts=True, **options)


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_of_peft(case, tiny, prompts, tmp_path, isa) -> None:
    """Adapters of experts, as PEFT makes them with target_parameters, against PEFT in float32."""
    model, ids = tiny(case), prompts[2]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    changed = made_by_peft(model.model, tmp_path, target_modules=["q_proj", "o_proj"], target_parameters=parameters)
    for sharing in ("rank", "width"):
        check(model.directory, tmp_path, ids, logprobs(changed, ids), f"cpu:{isa}", lora_experts=True, experts=sharing,
              tensor_parallel_size=2)  # fmt: skip
    check(model.directory, tmp_path, ids, logprobs(changed, ids), f"cpu:{isa}", lora_experts=True)
    options = {"skip_tokenizer_init": True, "device": f"cpu:{isa}", "kv_cache_memory_bytes": 16 << 20}
    with LLM(model.directory, enable_lora=True, **options) as llm, pytest.raises(ValueError, match="lora_experts=True"):
        llm.load_adapter("a", tmp_path)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "qwen2"])
def test_embeddings_and_heads_of_peft(case, tiny, prompts, tmp_path, each_device) -> None:
    """Factors of the embedding and, where it is a matrix of its own, of the head; PEFT saves copies of both beside them."""
    model, ids = tiny(case), prompts[2]
    names = ["wte", "c_attn"] if case == "gpt2" else ["embed_tokens", "q_proj"]
    changed = made_by_peft(model.model, tmp_path, target_modules=[*names, "lm_head"])
    check(model.directory, tmp_path, ids, logprobs(changed, ids), each_device, lora_embeddings=True)
    options = {"skip_tokenizer_init": True, "device": each_device, "kv_cache_memory_bytes": 16 << 20}
    with LLM(model.directory, enable_lora=True, **options) as llm, pytest.raises(ValueError, match="lora_embeddings=True"):
        llm.load_adapter("a", tmp_path)


@pytest.mark.parametrize(("case", "config"), [
    ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    ("llama-bias", {"bias": "all", "target_modules": ["q_proj", "down_proj"]}),
    ("llama", {"lora_bias": True, "target_modules": ["q_proj", "up_proj"]}),
    ("llama-bias", {"lora_bias": True, "target_modules": ["q_proj", "up_proj"]}),
])  # fmt: skip
def test_biases_of_peft(case, config, tiny, prompts, tmp_path, each_device) -> None:
    """Biases of the model's linears that were trained, and biases of B."""
    model, ids = tiny(case), prompts[2]
    before = copy.deepcopy(model.model)
    for name, parameter in before.named_parameters():
        is_trained = config.get("bias") == "all" or any(f"{target}." in name for target in config["target_modules"])
        if name.endswith("bias") and is_trained:
            parameter.data += 0.1 * torch.randn_like(parameter)
    kept = copy.deepcopy(model.model) if config.get("lora_bias") else before
    changed = made_by_peft(kept, tmp_path, **config)
    check(model.directory, tmp_path, ids, logprobs(changed, ids), each_device)


@pytest.mark.parametrize(("case", "saved"), [
    ("llama", ["lm_head", "embed_tokens"]), ("gemma2", ["embed_tokens"]), ("qwen2", ["lm_head", "o_proj"]),
])  # fmt: skip
def test_modules_to_save_of_peft(case, saved, tiny, prompts, tmp_path, each_device) -> None:
    """Whole matrices in place of the model's, on the CPU."""
    model, ids = tiny(case), prompts[2]
    changed = made_by_peft(model.model, tmp_path, target_modules=["q_proj"], modules_to_save=saved)
    for name, parameter in changed.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    changed.save_pretrained(tmp_path)
    with contextlib.nullcontext() if "cpu" in each_device else pytest.raises(UnsupportedError, match="modules_to_save"):
        check(model.directory, tmp_path, ids, logprobs(changed, ids), each_device, lora_embeddings=True)


def test_latent_attention_of_peft(tiny, prompts, tmp_path) -> None:
    """Every projection but kv_b_proj; that one and routers are refused."""
    model, ids = tiny("deepseek3"), prompts[2]
    changed = made_by_peft(model.model, tmp_path, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
    check(model.directory, tmp_path, ids, logprobs(changed, ids))
    with LLM(model.directory, enable_lora=True, skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20, device="cpu") as llm:
        for name in ("model.layers.0.self_attn.kv_b_proj", "model.layers.1.mlp.gate"):
            with pytest.raises(UnsupportedError, match=f"an adapter of {name}.weight is not supported yet, only linears"):
                llm.load_adapter("a", files.factors({name: (8, 8)}), {"r": 4, "lora_alpha": 8})
