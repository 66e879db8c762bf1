"""Tiny checkpoints as GGUF files, as llama.cpp's converter writes them: names of the gguf package, a table of what changes."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

Changed = list[tuple[str, np.ndarray]]
Rule = Callable[[str, np.ndarray, Mapping[str, object]], Changed]


class Kind(NamedTuple):
    """The conversion of a tiny case to a file.

    Attributes:
        case: Of conftest.py.
        arch: general.architecture.
        fields: Changes to the tiny configuration for fields that the format or llama.cpp does not support.
        more: Metadata besides the usual, by the configuration; None takes a usual key away.
        rules: Patterns of names -> conversion of the tensor; the first match applies.
        bound: Greatest relative difference from llama.cpp; None: it does not run the tiny file, or computes something else.
        name: Name of the file, if the case has several.
        joined: Whether gate and up of experts are one tensor, and q, k and v.
    """

    case: str
    arch: str
    fields: Mapping[str, object] = {}
    more: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda cfg: {}
    rules: Sequence[tuple[str, Rule]] = ()
    bound: float | None = 2e-5
    name: str = ""
    joined: bool = False


def plus(offset: float) -> Rule:
    """An offset that is added."""
    return lambda name, values, cfg: [(name, values + np.float32(offset))]


def renamed(old: str, new: str) -> Rule:
    """Another name."""
    return lambda name, values, cfg: [(name.replace(old, new), values)]


def dropped(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """No tensor at all."""
    return []


def squeezed(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Without dimensions of 1."""
    return [(name, values.squeeze())]


def column(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Numbers of heads as a column."""
    return [(name, values[:, None])]


def decay(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """A instead of its logarithm."""
    return [(name, -np.exp(values))]


def decay_column(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """A as a column instead of its logarithm, for Mamba-2."""
    return [(name, -np.exp(values)[:, None])]


def in_groups(field: str) -> Rule:
    """A norm's weights group by group."""
    return lambda name, values, cfg: [(name, values.reshape(int(cfg[field]), -1))]


def turned(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Rows of q or k in the order of interleaved rope."""
    heads = int(cfg["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"])
    return [(name, values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))]


def halves(first: str, second: str) -> Rule:
    """Gate above up, as two tensors of the layer."""

    def rule(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
        layer = re.match(r".*?\.\d+\.", name)[0]
        parts = np.split(values, 2, axis=values.ndim - 2)
        return [(f"{layer}{new}.weight", part) for new, part in zip((first, second), parts, strict=True)]

    return rule


def experts_of_llama(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Nemotron-H's experts under the names of most families."""
    return [(name.replace("backbone", "model").replace("mixer.experts", "mlp.experts"), values)]


def apart(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Baichuan's q, k and v; the rows of q and k are reordered for rope."""
    cfg = {**cfg, "num_key_value_heads": cfg["num_attention_heads"]}
    q, k, v = ((name.replace("W_pack", f"{part}_proj"), rows) for part, rows in zip("qkv", np.split(values, 3), strict=True))
    return [*turned(*q, cfg), *turned(*k, cfg), v]


def grouped(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """InternLM 2's q, k and v, which are packed by groups; the rows of q and k are reordered for rope."""
    n, size = int(cfg["num_key_value_heads"]), int(cfg["hidden_size"]) // int(cfg["num_attention_heads"])
    groups = values.reshape(n, -1, size, values.shape[1])
    parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
    found = []
    for part, rows in parts.items():
        whole = f"{name.removesuffix('attention.wqkv.weight')}self_attn.{part}_proj.weight", rows.reshape(-1, values.shape[1])
        found += [whole] if part == "v" else turned(*whole, cfg)
    return found


def heads_apart(field: str) -> Rule:
    """All heads of q, then of k, then of v, from a tensor packed in groups."""

    def rule(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
        size = int(cfg["hidden_size"]) // int(cfg["num_attention_heads"])
        groups = values.reshape(int(cfg[field]) if field else 1, -1, size, *values.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return [(name, np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts]))]

    return rule


def transposed(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Rows for columns."""
    return [(name, values.T)]


def heads_of_latents(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """The keys' rows of every head transposed, and the values' rows."""
    heads = values.reshape(int(cfg["num_attention_heads"]), -1, values.shape[1])
    keys = int(cfg["qk_nope_head_dim"])
    return [(name.replace("kv_b", "k_b"), heads[:, :keys].swapaxes(1, 2)), (name.replace("kv_b", "v_b"), heads[:, keys:])]


def key_heads(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Qwen3-Next's q, k, v and gate, each of all heads."""
    n, size = int(cfg["linear_num_key_heads"]), int(cfg["linear_key_head_dim"])
    width = int(cfg["linear_num_value_heads"]) // n * int(cfg["linear_value_head_dim"])
    parts = np.split(values.reshape(n, -1, values.shape[1]), [size, 2 * size, 2 * size + width], axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    stem = name.rpartition("linear_attn.")[0]
    return [(f"{stem}self_attn.qkv_proj.weight", np.concatenate([q, k, v])), (f"{stem}self_attn.gate_proj.weight", z)]


def columns(*names: str) -> Rule:
    """Transposed stacked experts: the checkpoint's columns in equal contiguous parts, or every n-th column."""

    def rule(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
        stem = name.rpartition(".")[0]
        is_bias = name.endswith("_bias")
        rows = values if is_bias else values.swapaxes(1, 2)
        kind = "bias" if is_bias else "weight"
        if names[0] == "alternating":
            return [(f"{stem}.{new}.{kind}", rows[:, i :: len(names) - 1]) for i, new in enumerate(names[1:])]
        parts = np.split(rows, len(names), axis=1)
        return [(f"{stem}.{new}.{kind}", part) for new, part in zip(names, parts, strict=True)]

    return rule


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with stacked experts and heads."""
    found: dict[str, np.ndarray] = {}
    many: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        inside = re.fullmatch(r"(.+\.(?:experts|norms))\.(\d+)\.(.+)", name)
        if inside is None:
            found[name] = values
        else:
            whole = f"{inside[1]}.{inside[3]}".replace(".norms.", ".")
            many.setdefault(whole, {})[int(inside[2])] = values
    return found | {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in many.items()}


def joined(tensors: Mapping[str, np.ndarray], is_meant: bool) -> dict[str, np.ndarray]:
    """The tensors; if the kind is joined, gate and up of each expert are one tensor, and so are q, k and v."""
    found = dict(tensors)
    for name in tensors if is_meant else ():
        if ".experts.gate_proj." in name:
            parts = [found.pop(each) for each in (name, name.replace("gate_proj", "up_proj"))]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(parts, 1)
        elif ".self_attn.q_proj." in name:
            parts = [found.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
    return found


OLD_NAMES = {
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"), **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"), "padded_vocab_size": "vocab_size",
    **dict.fromkeys(("n_inner", "ffn_hidden_size"), "intermediate_size"), "layernorm_epsilon": "rms_norm_eps",
    "multi_query_group_num": "num_key_value_heads", "norm_epsilon": "layer_norm_eps",
}  # fmt: skip


def usual(cfg: Mapping[str, object]) -> dict[str, object]:
    """The metadata that most families have."""
    heads = int(cfg.get("num_attention_heads", 0))
    head_dim = int(cfg.get("head_dim") or int(cfg["hidden_size"]) // max(heads, 1))
    rope = cfg.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    values = {
        "block_count": cfg["num_hidden_layers"], "context_length": 128, "embedding_length": cfg["hidden_size"],
        "feed_forward_length": cfg.get("intermediate_size"), "attention.head_count": heads,
        "attention.head_count_kv": cfg.get("num_key_value_heads"), "vocab_size": cfg["vocab_size"],
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or cfg.get("partial_rotary_factor") or 1)),
        "attention.sliding_window": cfg.get("sliding_window"),
    }  # fmt: skip
    for field in ("layer_norm_eps", "norm_eps", "layer_norm_epsilon"):
        if field in cfg:
            values["attention.layer_norm_epsilon"] = cfg[field]
    if "rms_norm_eps" in cfg:
        values["attention.layer_norm_rms_epsilon"] = cfg["rms_norm_eps"]
    n_experts = next((cfg[field] for field in ("num_local_experts", "num_experts", "n_routed_experts") if cfg.get(field)), 0)
    if n_experts:
        values |= {"expert_count": n_experts, "expert_used_count": cfg["num_experts_per_tok"]}
    if "moe_intermediate_size" in cfg:
        values["expert_feed_forward_length"] = cfg["moe_intermediate_size"]
    return values


def write(kind: Kind, cfg: Mapping[str, object], tensors: Mapping[str, np.ndarray], path: Path, dtype: str = "F32") -> Path:
    """The file, its matrices in a type; MXFP4 is for experts alone."""
    fields = {OLD_NAMES.get(field, field): value for field, value in cfg.items()}
    cfg = {"num_hidden_layers": len(cfg.get("layers_block_type", ())), "tensors": tensors, **fields}
    n_layers = int(cfg["num_hidden_layers"])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.arch)
    names = gguf.get_tensor_name_map(arch, n_layers)
    writer = gguf.GGUFWriter(path, kind.arch)
    writer.add_tokenizer_model("no_vocab")
    for key, value in (usual(cfg) | kind.more(cfg)).items():
        if value is not None:
            add(writer, key if key.startswith("xielu") else f"{kind.arch}.{key}", value)
    for name, values in joined(stacked(tensors), kind.joined).items():
        rule = next((rule for pattern, rule in kind.rules if re.search(pattern, name)), None)
        for new, x in rule(name, values, cfg) if rule else [(name, values)]:
            places = [names.get_name(each, (".weight", ".bias")) for each in (new, new.removeprefix("transformer."))]
            found = places[0] or places[1]
            assert found, new
            is_matrix = x.ndim > 1 and min(x.shape) > 1 and not re.search("norm|conv|ssm_a|ssm_d$|bias", found)
            is_meant = is_matrix and (dtype != "MXFP4" or found.endswith("_exps.weight"))
            raw = gguf.GGMLQuantizationType[dtype if is_meant else "F32"]
            writer.add_tensor(found, gguf.quants.quantize(np.ascontiguousarray(x, np.float32), raw), raw_dtype=raw)
    for name, values in divisors(cfg).items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def divisors(cfg: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Divisors of rope's frequencies, for the scaling kinds that GGUF files store as tensors."""
    rope = cfg.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"]) for name in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / lengths - low) / (high - low)
    return {"rope_freqs.weight": 1 / np.clip((1 - smooth) / rope["factor"] + smooth, 1 / rope["factor"], 1)}


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """A key-value of the type that it has in Python."""
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        put = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}
        put[type(value)](key, value)
