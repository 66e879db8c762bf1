"""PLaMo 2 in plain NumPy, float64, from the published formulas; transformers has no such class. Nothing of llmpy is in it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray
FIELDS = {
    "architectures": ["Plamo2ForCausalLM"],
    "model_type": "plamo2",
    "num_hidden_layers": 4,
    "hidden_size_per_head": 24,
    "mamba_num_heads": 6,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_step": 2,
    "attention_window_size": 8,
    "full_attention_idx": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def is_mamba(config: Mapping[str, object], i: int) -> bool:
    n, step = int(config["num_hidden_layers"]), int(config["mamba_step"])
    if not config.get("mamba_enabled", True):
        return False
    return i != n - 1 if n <= step // 2 else i % step != step // 2


def shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint."""
    h, v, inner = (int(config[name]) for name in ("hidden_size", "vocab_size", "intermediate_size"))
    heads, kv, size = (int(config[name]) for name in ("num_attention_heads", "num_key_value_heads", "hidden_size_per_head"))
    m, n, k = (int(config[name]) for name in ("mamba_num_heads", "mamba_d_state", "mamba_d_conv"))
    d, r = m * size, max(64, h // 16)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (-(-v // 16) * 16, h)
    for i in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.layers.{i}."
        for norm in ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"):
            out[f"{layer}{norm}.weight"] = (h,)
        out[f"{layer}mlp.gate_up_proj.weight"], out[f"{layer}mlp.down_proj.weight"] = (2 * inner, h), (h, inner)
        if is_mamba(config, i):
            mixer = {
                "in_proj.weight": (2 * d, h), "conv1d.weight": (d, 1, k), "bcdt_proj.weight": (2 * n + r, d),
                "dt_proj.weight": (m, r), "dt_bias": (m,), "A_log": (m,), "D": (m,), "dt_norm_weight": (r,),
                "B_norm_weight": (n,), "C_norm_weight": (n,), "out_proj.weight": (h, d),
            }  # fmt: skip
        else:
            mixer = {
                "qkv_proj.weight": ((heads + 2 * kv) * size, h), "o_proj.weight": (h, heads * size),
                "q_weight": (heads, size), "k_weight": (kv, size),
            }  # fmt: skip
        out |= {f"{layer}mixer.{name}": shape for name, shape in mixer.items()}
    return out


def random_value(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Noise with a size that depends on the tensor: norm weights stored as deviations are around 0, other norms around 1."""
    if name.endswith("A_log"):
        return np.log(random.uniform(1, 8, shape)).astype(np.float32)
    noise = random.standard_normal(shape)
    if name.endswith(("q_weight", "k_weight", "_norm_weight", ".D")):
        return (1 + 0.2 * noise).astype(np.float32)
    return (noise if "embed" in name else 0.15 * noise).astype(np.float32)


def rms(x: Array, eps: float = 1e-6) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def turned(x: Array, theta: float) -> Array:
    """Rotary embedding in halves of [tokens, heads, size]; the angles are products in float32."""
    half = x.shape[-1] // 2
    inv_freq = (1.0 / theta ** (np.arange(half, dtype=np.float32) / np.float32(half))).astype(np.float32)
    angles = (np.arange(len(x), dtype=np.float32)[:, None] * inv_freq).astype(np.float64)[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Plamo2:
    """A model with random weights, or with those given."""

    def __init__(self, config: Mapping[str, object], seed: int = 0) -> None:
        self.config, random = {**FIELDS, **config}, np.random.default_rng(seed)
        self.stored = {name: random_value(name, shape, random) for name, shape in shapes(self.config).items()}
        self.weights = {name: value.astype(np.float64) for name, value in self.stored.items()}

    def save(self, directory: Path) -> None:
        save_file(self.stored, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.config))

    def logits(self, ids: Sequence[int]) -> Array:
        """[tokens, vocab_size]."""
        w, vocab_size = self.weights, int(self.config["vocab_size"])
        h = w["model.embed_tokens.weight"][list(ids)]
        for i in range(int(self.config["num_hidden_layers"])):
            layer = f"model.layers.layers.{i}."
            mixer = self._mamba if is_mamba(self.config, i) else self._attention
            h = h + self._norm(mixer(self._norm(h, f"{layer}pre_mixer_norm", 1), i), f"{layer}post_mixer_norm", 1 / 5)
            gate, up = np.split(self._norm(h, f"{layer}pre_mlp_norm", 1) @ w[f"{layer}mlp.gate_up_proj.weight"].T, 2, -1)
            h = h + self._norm((silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T, f"{layer}post_mlp_norm", 5**-1.5)
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return (self._norm(h, "model.norm", 1) @ w[head].T)[:, :vocab_size]

    def _norm(self, x: Array, name: str, offset: float) -> Array:
        return rms(x, float(self.config["rms_norm_eps"])) * (self.weights[f"{name}.weight"] + offset)

    def _mamba(self, x: Array, i: int) -> Array:
        w = {name: self.weights[f"model.layers.layers.{i}.mixer.{name}"] for name in (
            "in_proj.weight", "conv1d.weight", "bcdt_proj.weight", "dt_proj.weight", "dt_bias", "A_log", "D",
            "dt_norm_weight", "B_norm_weight", "C_norm_weight", "out_proj.weight",
        )}  # fmt: skip
        t, m, size = len(x), int(self.config["mamba_num_heads"]), int(self.config["hidden_size_per_head"])
        n, k, eps = int(self.config["mamba_d_state"]), int(self.config["mamba_d_conv"]), float(self.config["rms_norm_eps"])
        zx = (x @ w["in_proj.weight"].T).reshape(t, m, 2 * size)  # of every head the gate z, then x
        z, x = zx[..., :size].reshape(t, -1), zx[..., size:].reshape(t, -1)
        padded = np.concatenate([np.zeros((k - 1, x.shape[1])), x])
        u = silu(sum(padded[j : j + t] * w["conv1d.weight"][:, 0, j] for j in range(k)))
        bcdt = u @ w["bcdt_proj.weight"].T
        b, c = rms(bcdt[:, :n], eps) * w["B_norm_weight"], rms(bcdt[:, n : 2 * n], eps) * w["C_norm_weight"]
        dt = np.logaddexp(0, rms(bcdt[:, 2 * n :], eps) * w["dt_norm_weight"] @ w["dt_proj.weight"].T + w["dt_bias"])
        u, state, y = u.reshape(t, m, size), np.zeros((m, size, n)), np.empty((t, m, size))
        for s in range(t):
            decay = np.exp(dt[s] * -np.exp(w["A_log"]))
            state = decay[:, None, None] * state + (dt[s, :, None] * u[s])[..., None] * b[s]
            y[s] = state @ c[s] + w["D"][:, None] * u[s]
        return (y.reshape(t, -1) * silu(z)) @ w["out_proj.weight"].T

    def _attention(self, x: Array, i: int) -> Array:
        w = {name: self.weights[f"model.layers.layers.{i}.mixer.{name}"]
             for name in ("qkv_proj.weight", "o_proj.weight", "q_weight", "k_weight")}  # fmt: skip
        config, t = self.config, len(x)
        heads, kv, size = (int(config[f]) for f in ("num_attention_heads", "num_key_value_heads", "hidden_size_per_head"))
        is_full = i in (config["full_attention_idx"] or [])
        theta = float(config.get("rope_theta" if is_full else "rope_local_theta") or 10000)
        q, k, v = np.split((x @ w["qkv_proj.weight"].T).reshape(t, -1, size), [heads, heads + kv], 1)
        q, k = turned(rms(q) * w["q_weight"], theta), turned(rms(k) * w["k_weight"], theta)
        k, v = k.repeat(heads // kv, 1), v.repeat(heads // kv, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * size**-0.5
        query, key = np.arange(t)[:, None], np.arange(t)
        window = t if is_full else int(config["attention_window_size"])  # a query sees one key more than that
        scores = np.where((key <= query) & (key >= query - window), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(t, -1)
        return out @ w["o_proj.weight"].T
