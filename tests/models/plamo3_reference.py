"""PLaMo 3 in plain NumPy, float64, from the published formulas; transformers has no such class. Nothing of llmpy is in it."""

import json
from collections.abc import Mapping, Sequence
from math import log, pi, sqrt
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray
FIELDS = {
    "architectures": ["Plamo3ForCausalLM"],
    "model_type": "plamo3",
    "num_hidden_layers": 4,
    "head_dim": 24,
    "window_size": 8,
    "sliding_window_pattern": 2,
    "rope_theta": 1000000.0,
    "rope_local_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
OFFSETS = {"pre_mixer_norm": 1.0, "post_mixer_norm": 0.2, "pre_mlp_norm": 1.0, "post_mlp_norm": 5**-1.5}


def shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint."""
    h, v, inner = (int(config[name]) for name in ("hidden_size", "vocab_size", "intermediate_size"))
    heads, kv, size = (int(config[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (-(-v // 16) * 16, h)
    for i in range(int(config["num_hidden_layers"])):
        parts = dict.fromkeys((f"{norm}.weight" for norm in OFFSETS), (h,)) | {
            "mixer.qkv_proj.weight": ((heads + 2 * kv) * size, h), "mixer.o_proj.weight": (h, heads * size),
            "mixer.q_norm.weight": (size,), "mixer.k_norm.weight": (size,),
            "mlp.gate_up_proj.weight": (2 * inner, h), "mlp.down_proj.weight": (h, inner),
        }  # fmt: skip
        out |= {f"model.layers.layers.{i}.{name}": shape for name, shape in parts.items()}
    return out


def yarn(theta: float, half: int, factor: float, original: float) -> tuple[Array, float]:
    """Frequencies, and the factor on cosine and sine: beta 32 and 1, ends of the ramp not rounded."""
    plain = theta ** -(np.arange(half) / half)
    low, high = (half * log(original / (turns * 2 * pi)) / log(theta) for turns in (32, 1))
    ramp = np.clip((np.arange(half) - max(low, 0)) / (min(high, 2 * half - 1) - max(low, 0)), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 0.1 * log(factor) + 1


def turned(x: Array, inv_freq: Array, magnitude: float) -> Array:
    """Rotary embedding in halves of [tokens, heads, size]; the angles are products in float32."""
    half = len(inv_freq)
    angles = (np.arange(len(x), dtype=np.float32)[:, None] * inv_freq.astype(np.float32)).astype(np.float64)[:, None]
    cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


class Plamo3:
    """A model with random weights."""

    def __init__(self, config: Mapping[str, object], seed: int = 0) -> None:
        self.config, random = {**FIELDS, **config}, np.random.default_rng(seed)
        scale = {name: 1.0 if "embed" in name else 0.15 for name in shapes(self.config)}
        self.stored = {
            name: (scale[name] * random.standard_normal(shape)).astype(np.float32)
            for name, shape in shapes(self.config).items()
        }
        self.weights = {name: value.astype(np.float64) for name, value in self.stored.items()}

    def save(self, directory: Path) -> None:
        save_file(self.stored, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.config))

    def logits(self, ids: Sequence[int]) -> Array:
        """[tokens, vocab_size]."""
        config, w = self.config, self.weights
        h = w["model.embed_tokens.weight"][list(ids)]
        if config.get("scale_embedding"):
            h = h * sqrt(int(config["hidden_size"]))
        for i in range(int(config["num_hidden_layers"])):
            layer = f"model.layers.layers.{i}."
            mixed = self._attention(self._norm(h, f"{layer}pre_mixer_norm"), i)
            h = h + self._norm(mixed, f"{layer}post_mixer_norm")
            gate, up = np.split(self._norm(h, f"{layer}pre_mlp_norm") @ w[f"{layer}mlp.gate_up_proj.weight"].T, 2, -1)
            mixed = (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}mlp.down_proj.weight"].T
            h = h + self._norm(mixed, f"{layer}post_mlp_norm")
        head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        return (self._norm(h, "model.norm") @ w[head].T)[:, : int(config["vocab_size"])]

    def _norm(self, x: Array, name: str) -> Array:
        unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + float(self.config["rms_norm_eps"]))
        return unit * (self.weights[f"{name}.weight"] + OFFSETS.get(name.rsplit(".", 1)[1], 1.0))

    def window(self, i: int) -> int:
        given = self.config.get("sliding_window")
        if isinstance(given, list):
            return given[i] or 0
        is_full = (i + 1) % int(self.config["sliding_window_pattern"]) == 0
        return 0 if is_full else int(given or self.config["window_size"])

    def _attention(self, x: Array, i: int) -> Array:
        config, t, layer, window = self.config, len(x), f"model.layers.layers.{i}.mixer.", self.window(i)
        heads, kv, size = (int(config[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        theta = float(config["rope_local_theta" if window else "rope_theta"])
        inv_freq, magnitude = theta ** -(np.arange(size // 2) / (size // 2)), 1.0
        if not window and config.get("rope_scaling_factor", 1) != 1:
            original = float(config["initial_context_length"])
            inv_freq, magnitude = yarn(theta, size // 2, float(config["rope_scaling_factor"]), original)
        qkv = (x @ self.weights[f"{layer}qkv_proj.weight"].T).reshape(t, -1, size)
        q, k, v = np.split(qkv, [heads, heads + kv], 1)
        q, k = self._norm(q, f"{layer}q_norm"), self._norm(k, f"{layer}k_norm")
        q, k = turned(q, inv_freq, magnitude), turned(k, inv_freq, magnitude).repeat(heads // kv, 1)
        v = v.repeat(heads // kv, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / sqrt(size)
        row, column = np.arange(t)[:, None], np.arange(t)
        scores = np.where((column <= row) & (column > row - (window or t)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(t, -1)
        return out @ self.weights[f"{layer}o_proj.weight"].T
