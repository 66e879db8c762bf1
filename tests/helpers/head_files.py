"""Tiny random heads in the published layouts of files, and their drafts in NumPy, written from the papers' formulas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from llmpy import hub, models
from llmpy.models import ModelConfig, deepseek, draft_heads, glm4_moe, mixture, qwen2, qwen3_next
from llmpy.models.blocks import Block
from llmpy.models.interpret import Interpreter

Array = NDArray[Any]
EPS = 1e-5
HEAD: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": EPS, "rope_theta": 10000.0, "hidden_act": "silu", "vocab_size": 131,
    "max_position_embeddings": 64,
}  # fmt: skip


def matrix(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.standard_normal(shape) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)).astype(np.float32)


def layer_of(rng: np.random.Generator, prefix: str, config: dict[str, Any], width: int) -> dict[str, Array]:
    """A decoder layer of Llama's kind whose attention reads rows of `width`."""
    hidden, size, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    out = {f"{prefix}{name}.weight": matrix(rng, *shape) for name, shape in shapes.items()}
    return out | {f"{prefix}post_attention_layernorm.weight": 1 + matrix(rng, hidden)}


def write_head(
    path: Path, config: dict[str, Any], tensors: dict[str, Array], dtype: Any = np.float32
) -> tuple[Path, dict[str, Array]]:
    path.mkdir()
    save_file({name: x if x.dtype.kind in "ib" else x.astype(dtype) for name, x in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path, tensors


def eagle3(path: Path, draft_ids: list[int] | None = None, **changes: Any) -> tuple[Path, dict[str, Array]]:
    """A head of EAGLE-3 that drafts the given ids."""
    rng = np.random.default_rng(5)
    ids = np.asarray(sorted(draft_ids or range(HEAD["vocab_size"])))
    config = HEAD | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)} | changes
    hidden = config["hidden_size"]
    tensors = layer_of(rng, "midlayer.", config, 2 * hidden)
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + matrix(rng, hidden)
    tensors |= {"fc.weight": matrix(rng, hidden, 3 * HEAD["hidden_size"]), "lm_head.weight": matrix(rng, len(ids), hidden)}
    if draft_ids is not None:
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(HEAD["vocab_size"]), ids)
    return write_head(path, config, tensors)


def eagle(path: Path, **changes: Any) -> tuple[Path, dict[str, Array]]:
    """A head of EAGLE-1, with an embedding of its own."""
    rng = np.random.default_rng(6)
    config = HEAD | {"architectures": ["LlamaForCausalLM"]} | changes
    hidden = config["hidden_size"]
    tensors = layer_of(rng, "layers.0.", config, hidden) | {"fc.weight": matrix(rng, hidden, 2 * hidden)}
    tensors |= {"fc.bias": matrix(rng, hidden), "embed_tokens.weight": matrix(rng, config["vocab_size"], hidden) * 8}
    return write_head(path, config, tensors)


def medusa(path: Path, n_heads: int = 4, n_layers: int = 1, *, is_split: bool = False) -> tuple[Path, dict[str, Array]]:
    """Heads of Medusa, by the names of its release; is_split: by those of vLLM."""
    rng = np.random.default_rng(9)
    tensors = {}
    for j in range(n_heads):
        for i in range(n_layers):
            name = f"blocks.{j}.layers.{i}" if is_split else f"medusa_head.{j}.{i}.linear"
            tensors |= {f"{name}.weight": matrix(rng, 64, 64), f"{name}.bias": matrix(rng, 64)}
        tensors[f"lm_heads.{j}.weight" if is_split else f"medusa_head.{j}.{n_layers}.weight"] = matrix(rng, 131, 64)
    return write_head(path, {"medusa_num_heads": n_heads, "medusa_num_layers": n_layers}, tensors)


# ---- the drafts in NumPy ----


def rms(x: Array, weight: Array, eps: float = EPS) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x: Array, theta: float) -> Array:
    """Heads [n, heads, size] turned by their positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def decoder(w: dict[str, Array], prefix: str, config: dict[str, Any], x: Array, residual: Array) -> Array:
    """Attention and MLP of a layer behind its first norm, for all rows."""
    size, n = config["head_dim"], len(x)
    q, k, v = ((x @ w[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(n, -1, size) for name in "qkv")
    q, k = turned(q, config["rope_theta"]), turned(k, config["rope_theta"])
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) * size**-0.5
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, 1)).reshape(n, -1)
    y = residual + mixed @ w[f"{prefix}self_attn.o_proj.weight"].T
    h = rms(y, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (h @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return y + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def eagle3_rows(w: dict[str, Array], states: Array, e: Array, config: dict[str, Any], own: Array) -> tuple[Array, Array]:
    """States to go on from and logits of all rows. states: the model's three [n, 192]; own: the head's, behind those."""
    h = np.concatenate([states @ w["fc.weight"].T, own])
    normed = rms(h, w["midlayer.hidden_norm.weight"])
    both = np.concatenate([rms(e, w["midlayer.input_layernorm.weight"]), normed], 1)
    x = decoder(w, "midlayer.", config, both, normed if config.get("norm_before_residual") else h)
    few = rms(x, w["norm.weight"]) @ w["lm_head.weight"].T
    if "d2t" not in w:
        return x, few
    logits = np.full((len(x), config["vocab_size"]), -np.inf)
    logits[:, np.arange(few.shape[1]) + w["d2t"]] = few
    return x, logits


def medusa_logits(w: dict[str, Array], x: Array, j: int) -> Array:
    """Logits of head j for states x."""
    is_split = "lm_heads.0.weight" in w
    names = [f"blocks.{j}.layers.{{}}" if is_split else f"medusa_head.{j}.{{}}.linear"]
    n_layers = sum(f"{names[0].format(i)}.weight" in w for i in range(9))
    for i in range(n_layers):
        h = x @ w[f"{names[0].format(i)}.weight"].T + w[f"{names[0].format(i)}.bias"]
        x = x + h / (1 + np.exp(-h))
    logits: Array = x @ w[f"lm_heads.{j}.weight" if is_split else f"medusa_head.{j}.{n_layers}.weight"].T
    return logits


def eagle_rows(
    w: dict[str, Array], states: Array, e: Array, config: dict[str, Any], own: Array, lm_head: Array
) -> tuple[Array, Array]:
    h = np.concatenate([states, own])
    x = np.concatenate([e, h], 1) @ w["fc.weight"].T + w["fc.bias"]
    x = decoder(w, "layers.0.", config, x, x)
    return x, x @ lm_head.T


# ---- layers that predict further tokens ----

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": EPS, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "moe_intermediate_size": 48, "num_experts_per_tok": 2,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
MTP: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": DEEPSEEK | {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "Glm4MoeForCausalLM": DEEPSEEK | {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "MiMoForCausalLM": {"tie_word_embeddings": False, "rope_theta": 640000.0, "num_nextn_predict_layers": 1},
    "Qwen3NextForCausalLM": {
        "num_experts": 4, "shared_expert_intermediate_size": 40, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "norm_topk_prob": True,
    },
}  # fmt: skip


def mtp_model(path: Path, architecture: str) -> tuple[Path, dict[str, Array]]:
    """A model with a layer that predicts further tokens in its checkpoint; every tensor is random."""
    rng = np.random.default_rng(8)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SIZES | MTP[architecture] | {"architectures": [architecture]}))
    files = hub.resolve(path, weights=False)
    target = models.load(files, None).spec
    [head], _ = draft_heads.load("mtp", files, None, target)
    shapes = {part.source: part.shape for spec in (target, head) for weight in spec["weights"] for part in weight["parts"]}
    if architecture == "DeepseekV3ForCausalLM":
        shapes |= {f"model.layers.2.{name}.weight": (131, 64) for name in ("embed_tokens", "shared_head.head")}
    tensors = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1 and "norm" in name
        offset = 1 if is_norm and architecture != "Qwen3NextForCausalLM" else 0
        tensors[name] = (matrix(rng, *shape) * (0.4 if len(shape) == 1 else 1) + offset).astype(np.float32)
        tensors[name] *= 8 if "embed_tokens" in name else 1
    save_file(tensors, path / "model.safetensors")
    return path, tensors


def mtp_rows(
    w: dict[str, Array], architecture: str, config: ModelConfig, states: Array, e: Array, own: Array
) -> tuple[Array, Array]:
    """The decoder layer is that of the family, in float64 by the interpreter; the rest is written out here."""
    is_qwen, is_mimo = architecture == "Qwen3NextForCausalLM", architecture == "MiMoForCausalLM"
    prefix, offset = ("mtp.", 1) if is_qwen else ("model.mtp_layers.0." if is_mimo else "model.layers.2.", 0)
    norms = ["enorm", "hnorm", "eh_proj", "shared_head.norm"]
    norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"] if is_qwen else norms
    norms = ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"] if is_mimo else norms
    of_embedding, of_state, fc, last = (w[f"{prefix}{name}.weight"] for name in norms)
    h = np.concatenate([states, own])
    normed = [rms(e, of_embedding + offset), rms(h, of_state + offset)]
    x = np.concatenate(normed[::-1] if is_mimo else normed, 1) @ fc.T
    layer = "mtp.layers.0." if is_qwen else prefix
    head = draft_heads.Head(config, None, "", {"weights": [], "ops": [], "values": []})  # type: ignore[typeddict-item]
    block, kept = Block(head, layer), head.kept(64)
    if is_qwen:
        y = qwen3_next.decoder_layer(config, block, kept, is_full=True, is_sparse=True)
    elif architecture == "Glm4MoeForCausalLM":
        y = glm4_moe.decoder_layer(config, block, kept, is_dense=False)
    elif is_mimo:
        y = qwen2.decoder_layer(config, block, kept)
    else:
        y = deepseek.decoder_layer(config, block, kept, deepseek.rope_of_v3(config), mixture.deepseek3(config, "mlp.gate"))
    head.states(y)
    interpreter = Interpreter(head.spec, lambda name, shape: w[name].astype(np.float32).reshape(shape))
    interpreter.kept = {0: x}
    x = interpreter.states([0] * len(x))
    normed = rms(x, last + offset)
    lm_head = w["model.layers.2.shared_head.head.weight" if "model.layers.2.shared_head.head.weight" in w else "lm_head.weight"]
    return normed if is_qwen or is_mimo else x, normed @ lm_head.T
