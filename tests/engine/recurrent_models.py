"""Tiny random models with recurrent state: a hybrid of every kind of layer that the cache knows, and a Mamba."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from llmpy.models.blocks import Block, Model, Value
from llmpy.models.config import ModelConfig
from llmpy.models.registry import architecture

HEADS, SIZE, STATE, TAPS = 4, 16, 24, 4
INNER = HEADS * SIZE
HYBRID = {
    "architectures": ["TestHybridForCausalLM"], "model_type": "test_hybrid", "vocab_size": 131, "hidden_size": 64,
    "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip
MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 131, "hidden_size": 48, "state_size": 8,
    "num_hidden_layers": 3, "expand": 2, "intermediate_size": 96, "conv_kernel": 4, "time_step_rank": 3, "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_bias": False, "use_conv_bias": True, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float32", "max_position_embeddings": 8192,
}  # fmt: skip


def _ssm(layer: Block, x: Value) -> Value:
    u, b, c, dt = layer.linear(x, ["u", "b", "c", "dt"], [INNER, STATE, STATE, HEADS])
    return layer.linear(layer.ssm(layer.conv(u, "conv", TAPS, act="silu"), dt, b, c, "ssm"), "out", x.width)


def _delta(layer: Block, x: Value) -> Value:
    q, k, v, a, b = layer.linear(x, ["q", "k", "v", "a", "b"], [INNER // 2, INNER // 2, INNER, HEADS, HEADS])
    return layer.linear(layer.delta(q, k, v, a, b, "delta", key_heads=HEADS // 2), "out", x.width)


def _attention(layer: Block, x: Value, window: int) -> Value:
    q, k, v = layer.linear(x, ["q", "k", "v"], [128, 64, 64])
    return layer.linear(layer.attention(q, k, v, window=window), "out", x.width)


@architecture("TestHybridForCausalLM")
def hybrid(cfg: ModelConfig, m: Model) -> None:
    """A convolution and a state space, full attention, a delta rule, a sliding window."""
    x = m.embed("embed")
    mixers = [_ssm, lambda layer, x: _attention(layer, x, 0), _delta, lambda layer, x: _attention(layer, x, 24)]
    for layer, mixer in zip(m.layers("layers", 4), mixers, strict=True):
        x = x + mixer(layer, layer.rms_norm(x, "norm", 1e-6))
    m.logits(m.rms_norm(x, "norm", 1e-6), "head", tied_to="embed")


def _hybrid_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (131, 64), "norm.weight": (64,)}
    linears = [
        {"u": INNER, "b": STATE, "c": STATE, "dt": HEADS}, {"q": 128, "k": 64, "v": 64},
        {"q": INNER // 2, "k": INNER // 2, "v": INNER, "a": HEADS, "b": HEADS}, {"q": 128, "k": 64, "v": 64},
    ]  # fmt: skip
    for i, parts in enumerate(linears):
        shapes |= {f"layers.{i}.{name}.weight": (rows, 64) for name, rows in parts.items()}
        shapes |= {f"layers.{i}.norm.weight": (64,), f"layers.{i}.out.weight": (64, INNER if i % 2 == 0 else 128)}
    shapes |= {"layers.0.conv.weight": (INNER, 1, TAPS), "layers.0.conv.bias": (INNER,)}
    shapes |= {f"layers.0.ssm.{name}": (HEADS,) for name in ("A_log", "dt_bias", "D")}
    return shapes | {f"layers.2.delta.{name}": (HEADS,) for name in ("A_log", "dt_bias")}


def _mamba_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (131, 48), "backbone.norm_f.weight": (48,)}
    for i in range(3):
        shapes |= {
            f"backbone.layers.{i}.{name}": shape
            for name, shape in {
                "norm.weight": (48,), "mixer.in_proj.weight": (192, 48), "mixer.conv1d.weight": (96, 1, 4),
                "mixer.conv1d.bias": (96,), "mixer.x_proj.weight": (19, 96), "mixer.dt_proj.weight": (96, 3),
                "mixer.dt_proj.bias": (96,), "mixer.A_log": (96, 8), "mixer.D": (96,), "mixer.out_proj.weight": (48, 96),
            }.items()
        }  # fmt: skip
    return shapes


def save(path: Path, kind: str) -> Path:
    """Writes the "hybrid" or the "mamba", every parameter random, and gives its folder."""
    rng = np.random.default_rng(5)
    path.mkdir(parents=True, exist_ok=True)
    shapes = _hybrid_shapes() if kind == "hybrid" else _mamba_shapes()
    tensors = {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        tensor += 1 if "norm" in name else 0
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(HYBRID if kind == "hybrid" else MAMBA))
    return path
