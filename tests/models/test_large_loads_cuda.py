"""Loads of tensors of many MiB from a file to a CUDA device: whole rows, padded rows, quantised rows, and experts in MXFP4."""

import json
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from llmpy import LLM

COMMON = {
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 5000, "hidden_act": "silu"}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 1152, "intermediate_size": 1152,
    "num_local_experts": 16, "num_experts_per_tok": 16, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
PROMPTS = [np.random.default_rng(i).integers(3, 8192, 40).tolist() for i in range(6)]


def write(path: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A directory of random weights: norms about one, the packed halves of experts as bytes."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("_blocks"):
            tensors[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif name.endswith("_scales"):
            tensors[name] = rng.integers(118, 122, shape, dtype=np.uint8)
        else:
            tensors[name] = (rng.normal(0, 0.03, shape) + name.endswith("norm.weight")).astype(bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(COMMON | config))
    return path


def attention(hidden: int, biases: bool) -> dict[str, tuple[int, ...]]:
    """The shapes that both models have."""
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.self_attn.{part}_proj.weight": (rows, hidden)
                                          for part, rows in (("q", 512), ("k", 128), ("v", 128))}  # fmt: skip
    if biases:
        shapes |= {f"{layer}.self_attn.{part}_proj.bias": (rows,)
                   for part, rows in (("q", 512), ("k", 128), ("v", 128), ("o", hidden))}  # fmt: skip
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms}
    ends = {"model.embed_tokens.weight": (8192, hidden), "lm_head.weight": (8192, hidden)}
    return shapes | ends | {f"{layer}.self_attn.o_proj.weight": (hidden, 512)}


def open_llm(path: Path, device: str, **options: object) -> LLM:
    return LLM(path, device=device, skip_tokenizer_init=True, kv_cache_memory_bytes="64MiB", max_num_seqs=8, **options)


def logprobs(llm: LLM) -> np.ndarray:
    return np.array([score.token_logprobs for score in llm.score(PROMPTS, use_tqdm=False)])


def layer_sums(llm: LLM) -> dict[str, int]:
    """Checksums without those of the ends, which devices may store as different types of floats."""
    return {name: value for name, value in llm.weight_checksum().items() if ".layers." in name}


@pytest.mark.parametrize("hidden", [1024, 1028])
def test_rows_whole_and_padded(cuda: str, tmp_path: Path, hidden: int) -> None:
    """A load and an update write the same bits; rows of 1028 bfloat16 are padded on the device."""
    mlp = {f"model.layers.0.mlp.{part}_proj.weight": (5000, hidden) for part in ("gate", "up")}
    down = {"model.layers.0.mlp.down_proj.weight": (hidden, 5000)}
    path = write(tmp_path, LLAMA | {"hidden_size": hidden}, attention(hidden, False) | mlp | down)
    with open_llm(path, cuda) as llm:
        assert llm.compare_weights(path)
        loaded, sums = logprobs(llm), llm.weight_checksum()
    with open_llm(path, cuda, load_format="dummy") as llm:
        assert not llm.compare_weights(path)
        llm.update_weights(path)
        assert llm.weight_checksum() == sums
        assert logprobs(llm).tobytes() == loaded.tobytes()
    with open_llm(path, "cpu") as llm:
        assert llm.weight_checksum() == sums


@pytest.mark.parametrize(("scheme", "hidden"), [("fp8", 1024), ("fp8", 4096), ("int8", 1024), ("int4", 1024)])
def test_rows_quantised_at_load(cuda: str, tmp_path: Path, scheme: str, hidden: int) -> None:
    """The device holds the weights that the CPU holds. Rows of 4096 numbers in FP8 take as many bytes there as in a file."""
    mlp = {f"model.layers.0.mlp.{part}_proj.weight": (5000, hidden) for part in ("gate", "up")}
    down = {"model.layers.0.mlp.down_proj.weight": (hidden, 5000)}
    path = write(tmp_path, LLAMA | {"hidden_size": hidden}, attention(hidden, False) | mlp | down)
    with open_llm(path, "cpu", quantization=scheme) as llm:
        sums = layer_sums(llm)
    with open_llm(path, cuda, quantization=scheme) as llm:
        assert layer_sums(llm) == sums
        logprobs(llm)  # raises if they are not finite


def test_experts_in_mxfp4(cuda: str, tmp_path: Path) -> None:
    """Packed rows are read in several pieces; results equal the CPU's up to the rounding of bfloat16."""
    experts = "model.layers.0.mlp.experts"
    shapes: dict[str, tuple[int, ...]] = {"model.layers.0.self_attn.sinks": (8,)}
    for name, rows in (("gate_up_proj", 2304), ("down_proj", 1152)):
        shapes |= {f"{experts}.{name}_blocks": (16, rows, 36, 16), f"{experts}.{name}_scales": (16, rows, 36)}
        shapes[f"{experts}.{name}_bias"] = (16, rows)
    shapes |= {"model.layers.0.mlp.router.weight": (16, 1152), "model.layers.0.mlp.router.bias": (16,)}
    path = write(tmp_path, GPT_OSS, attention(1152, True) | shapes)
    with open_llm(path, cuda) as llm, open_llm(path, "cpu") as reference:
        error = logprobs(llm) - logprobs(reference)
        spread = logprobs(reference)[:, 1:].std()
    print(f"\nMXFP4: error {np.abs(error).max():.4f} at most; the logprobs spread by {spread:.3f}")
    assert np.abs(error).max() < 0.1 * spread
