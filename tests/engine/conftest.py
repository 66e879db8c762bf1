"""Tiny random models, written without any framework."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from modules import load
from packed_files import LAYOUTS, quantise, quantise_fp8
from safetensors.numpy import save_file

from llmpy import _core, hub, models
from llmpy.models.program import Spec

BASE = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2-mixed": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24,
        "max_window_layers": 1, "head_dim": 16,
    },
    "mistral-64": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24, "head_dim": 64},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-64": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
    },
}  # fmt: skip


FP8 = {
    "torch_dtype": "bfloat16", "hidden_size": 192, "intermediate_size": 288,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def in_blocks(of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with the linears of layers in FP8, and a scale for every 128 rows by 128 columns."""
    out = {}
    for name, value in of.items():
        if ".layers." not in name or value.ndim != 2 or ".gate." in name:
            out[name] = value
            continue
        rows, cols = (np.arange(size) // 128 for size in value.shape)
        scales = np.zeros((rows[-1] + 1, cols[-1] + 1), np.float32)
        np.maximum.at(scales, (rows[:, None], cols), np.abs(value.astype(np.float32)) / np.float32(448))
        out[name] = (value.astype(np.float32) / scales[rows[:, None], cols]).astype(ml_dtypes.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scales
    return out


def tensors(config: dict[str, object], family: str) -> dict[str, np.ndarray]:
    """Every parameter of the model, random."""
    rng = np.random.default_rng(7)
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (0.1 * rng.standard_normal((rows, cols))).astype(np.float32)

    def norm(n: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(n)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 1.5, "model.norm.weight": norm(hidden)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        for name, shape in shapes.items():
            out[f"{prefix}self_attn.{name}_proj.weight"] = matrix(*shape)
            if family.startswith("qwen2") and name != "o":
                out[f"{prefix}self_attn.{name}_proj.bias"] = matrix(1, shape[0])[0]
        names = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
        copies = [names]
        if family == "mixtral":
            stem, n_experts = "block_sparse_moe", config["num_local_experts"]
            out[f"{prefix}{stem}.gate.weight"] = matrix(n_experts, hidden)
            copies = [{"gate": f"{stem}.experts.{e}.w1", "up": f"{stem}.experts.{e}.w3", "down": f"{stem}.experts.{e}.w2"}
                      for e in range(n_experts)]  # fmt: skip
        for names in copies:
            for name, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
                out[f"{prefix}{names[name]}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = norm(hidden)
        if family.startswith("qwen3"):
            out[f"{prefix}self_attn.q_norm.weight"] = norm(size)
            out[f"{prefix}self_attn.k_norm.weight"] = norm(size)
    return out


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A directory with a tiny checkpoint of a family in a type.

    Types: "float32", "bfloat16", "float16", "fp8" or one of LAYOUTS with float32 beside, "fp8-bfloat16" with bfloat16 beside.
    """
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, dtype: str = "float32") -> Path:
        if (family, dtype) not in made and (dtype in LAYOUTS or dtype == "fp8"):
            plain, to = make(family), tmp_path_factory.mktemp(f"{family}-{dtype}")
            is_fp8 = dtype == "fp8"
            made[family, dtype] = quantise_fp8(plain, to / dtype) if is_fp8 else quantise(plain, to, LAYOUTS[dtype]) / "packed"
        if (family, dtype) not in made:
            path = tmp_path_factory.mktemp(f"{family}-{dtype}")
            config = BASE | FAMILIES[family] | (FP8 if dtype == "fp8-bfloat16" else {"torch_dtype": dtype})
            kinds = {"float32": np.float32, "float16": np.float16}
            kind = kinds.get(dtype, ml_dtypes.bfloat16)
            found = {name: value.astype(kind) for name, value in tensors(config, family).items()}
            save_file(in_blocks(found) if dtype == "fp8-bfloat16" else found, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(config))
            made[family, dtype] = path
        return made[family, dtype]

    return make


recurrent_models = sys.modules.get("recurrent_models") or load(Path(__file__).with_name("recurrent_models.py"))


@pytest.fixture(scope="session", params=["hybrid", "mamba"])
def recurrent_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny checkpoint of a model with recurrent state, with attention and without."""
    return recurrent_models.save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def open_model(
    device: str, core_options: Callable[[str], dict[str, str]], tiny_model: Callable[[str, str], Path]
) -> Callable[..., _core.Model]:
    """Opens a tiny model. An optional function changes the program first; keywords are options of the core."""
    files = hub.resolve(tiny_model("llama", "float32"))
    checkpoint = _core.Checkpoint([str(path) for path in files.weights])
    options = {
        **core_options(device), "num_threads": 1, "dtype": "auto", "kv_dtype": "auto", "activation_dtype": "auto",
        "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_bytes": 16 << 20,
        "fit_model_len": False, "dummy_seed": None, "dummy_mxfp4": False,
    }  # fmt: skip

    def make(change: Callable[[Spec], None] = lambda spec: None, **changes: object) -> _core.Model:
        spec = models.load(files, checkpoint).spec
        change(spec)
        return _core.Model(spec, checkpoint, options | changes)

    return make
