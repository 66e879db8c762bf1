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
    """How a tiny case becomes a file.

    Attributes:
        case: Of conftest.py.
        arch: general.architecture.
        fields: Changes to the tiny configuration: what the format, or llama.cpp, has no room for.
        more: Metadata besides the usual, by the configuration; None takes a usual key away.
        rules: Patterns of names, and what the converter does with them; the first that fits.
        bound: Greatest relative difference from llama.cpp; None: it does not run the tiny file.
    """

    case: str
    arch: str
    fields: Mapping[str, object] = {}
    more: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda cfg: {}
    rules: Sequence[tuple[str, Rule]] = ()
    bound: float | None = 2e-5


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
    """The same of Mamba-2."""
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
    """Baichuan's q, k and v."""
    return [(name.replace("W_pack", f"{part}_proj"), rows) for part, rows in zip("qkv", np.split(values, 3), strict=True)]


def heads_of_latents(name: str, values: np.ndarray, cfg: Mapping[str, object]) -> Changed:
    """Keys' rows of every head turned, and its values' rows."""
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
    """Stacked experts whose rows are columns in the checkpoint: its columns in equal parts, or every so-many-th of them."""

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
    """The tensors, those of experts one above the other, those of heads in one."""
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
    cfg = {"num_hidden_layers": len(cfg.get("layers_block_type", ())), "tensors": tensors, **cfg}
    n_layers = int(cfg["num_hidden_layers"])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.arch)
    names = gguf.get_tensor_name_map(arch, n_layers)
    writer = gguf.GGUFWriter(path, kind.arch)
    writer.add_tokenizer_model("no_vocab")
    for key, value in (usual(cfg) | kind.more(cfg)).items():
        if value is not None:
            add(writer, key if key.startswith("xielu") else f"{kind.arch}.{key}", value)
    for name, values in stacked(tensors).items():
        rule = next((rule for pattern, rule in kind.rules if re.search(pattern, name)), None)
        for new, x in rule(name, values, cfg) if rule else [(name, values)]:
            found = names.get_name(new, try_suffixes=(".weight", ".bias"))
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
    """What frequencies of rope are divided by, for those kinds that such files have as tensors."""
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


TURNED = (r"\.[qk]_proj\.", turned)
TABLE_GELU = 5e-4  # llama.cpp looks gelu up in a table of float16
TIED = (r"lm_head", dropped)
BIAS_OF_CHOICE = (r"e_score_correction_bias", renamed("e_score_correction_bias", "e_score_correction.bias"))
PLAMO = [(r"(pre_mixer|pre_mlp)_norm\.", plus(1.0)), (r"post_mixer_norm\.", plus(1 / 5)), (r"post_mlp_norm\.", plus(5**-1.5))]
MIXER = [(r"\.A_log", decay_column), (r"\.D$", column), (r"dt_bias", renamed("dt_bias", "dt_proj.bias")),
         (r"conv1d\.weight", squeezed)]  # fmt: skip
SINGLE = [(r"\.A_log", decay), (r"conv1d\.weight", squeezed)]


def scales(cfg):
    return {"attention.scale": cfg["attention_multiplier"], "embedding_scale": cfg["embedding_multiplier"],
            "residual_scale": cfg["residual_multiplier"], "logit_scale": cfg["logits_scaling"]}  # fmt: skip


def slides(cfg):
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in cfg["layer_types"]]}


def attends(cfg, *names):
    return {"attention.head_count_kv": [cfg["num_key_value_heads"] if kind in names else 0 for kind in cfg["layer_types"]]}


def mamba2(cfg):
    return {"ssm.conv_kernel": cfg["mamba_d_conv"], "ssm.state_size": cfg["mamba_d_state"],
            "ssm.group_count": cfg["mamba_n_groups"], "ssm.time_step_rank": cfg["mamba_n_heads"],
            "ssm.inner_size": cfg["mamba_n_heads"] * cfg["mamba_d_head"]}  # fmt: skip


def mamba(cfg):
    return {"attention.head_count": 0, "feed_forward_length": 0, "attention.key_length": None, "attention.value_length": None,
            "rope.dimension_count": None, "ssm.conv_kernel": cfg["conv_kernel"], "ssm.state_size": cfg["state_size"],
            "attention.layer_norm_rms_epsilon": cfg["layer_norm_epsilon"], "attention.layer_norm_epsilon": None}  # fmt: skip


def routing(cfg):
    return {"expert_group_count": cfg["n_group"], "expert_group_used_count": cfg["topk_group"],
            "expert_weights_scale": cfg["routed_scaling_factor"], "expert_weights_norm": cfg["norm_topk_prob"],
            "expert_gating_func": 2, "expert_shared_count": cfg["n_shared_experts"],
            "leading_dense_block_count": cfg["first_k_dense_replace"]}  # fmt: skip


def latent(cfg):
    n, r, d, v = (cfg[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rope = cfg["rope_parameters"]
    group = {"expert_group_count": cfg.get("n_group"), "expert_group_used_count": cfg.get("topk_group")}
    far = {} if rope["rope_type"] == "default" else {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}  # fmt: skip
    return {**group, "attention.head_count_kv": 1, "attention.key_length": n + r, "attention.value_length": n,
            "rope.dimension_count": r,
            "attention.key_length_mla": d + r, "attention.value_length_mla": v, "attention.kv_lora_rank": n,
            "attention.q_lora_rank": cfg["q_lora_rank"], "expert_shared_count": cfg["n_shared_experts"],
            "leading_dense_block_count": cfg["first_k_dense_replace"], "expert_weights_norm": cfg["norm_topk_prob"],
            "expert_weights_scale": cfg["routed_scaling_factor"], **far}  # fmt: skip


def jamba(cfg):
    kinds = [i % cfg["attn_layer_period"] == cfg["attn_layer_offset"] for i in range(cfg["num_hidden_layers"])]
    return {"attention.head_count_kv": [2 if kind else 0 for kind in kinds], "ssm.conv_kernel": cfg["mamba_d_conv"],
            "ssm.state_size": cfg["mamba_d_state"], "ssm.inner_size": cfg["mamba_expand"] * cfg["hidden_size"],
            "ssm.time_step_rank": cfg["mamba_dt_rank"]}  # fmt: skip


def nemotron(cfg):
    kinds = cfg["layers_block_type"]
    return {"attention.head_count_kv": [2 if kind in ("attention", "full_attention") else 0 for kind in kinds],
            "feed_forward_length": [24 if kind == "moe" else 96 if kind == "mlp" else 0 for kind in kinds],
            "ssm.conv_kernel": cfg["conv_kernel"], "ssm.state_size": cfg["ssm_state_size"], "ssm.group_count": cfg["n_groups"],
            "ssm.time_step_rank": cfg["mamba_num_heads"], "ssm.inner_size": cfg["mamba_num_heads"] * cfg["mamba_head_dim"],
            "attention.layer_norm_rms_epsilon": cfg["layer_norm_epsilon"]}  # fmt: skip


def experts_of_nemotron(cfg):
    return {**nemotron(cfg), "expert_group_count": cfg["n_group"], "expert_group_used_count": cfg["topk_group"],
            "expert_shared_feed_forward_length": cfg["moe_shared_expert_intermediate_size"], "expert_shared_count": 1,
            "expert_weights_norm": True, "expert_weights_scale": cfg["routed_scaling_factor"], "expert_gating_func": 2,
            "moe_latent_size": cfg.get("moe_latent_size")}  # fmt: skip


def falcon_h1(name, values, cfg):
    """Its factors are in the weights."""
    enter, leave, inner, states = 1.3, 0.8, 64, 16
    if "in_proj" in name:
        sizes, on = [inner, inner, states, states, 4], cfg["ssm_multipliers"]
        factors = np.repeat(np.float32(on), sizes)[:, None] * np.float32(cfg["ssm_in_multiplier"])
    else:
        factors = np.float32({"up_proj": 1,
            "down_proj": cfg["mlp_multipliers"][1], "gate_proj": cfg["mlp_multipliers"][0], "q_proj": enter, "v_proj": enter,
            "k_proj": enter * cfg["key_multiplier"], "o_proj": leave, "out_proj": cfg["ssm_out_multiplier"],
            "lm_head": cfg["lm_head_multiplier"], "embed_tokens": cfg["embedding_multiplier"],
        }[name.split(".")[-2]])  # fmt: skip
    return [(name, values * factors)]


def plamo2(cfg):
    kinds = [i % 2 == 1 for i in range(cfg["num_hidden_layers"])]
    return {"attention.head_count": [4 if kind else 0 for kind in kinds],
            "attention.head_count_kv": [2 if kind else 0 for kind in kinds],
            "attention.key_length": 24, "attention.value_length": 24, "rope.freq_base": 20000.0, "rope.dimension_count": None,
            "ssm.state_size": 8, "ssm.conv_kernel": 4, "ssm.time_step_rank": 6, "ssm.inner_size": 144,
            "ssm.group_count": 0}  # fmt: skip


HYBRID_RULES = [*MIXER, (r"mamba\.norm\.", in_groups("mamba_n_groups")), TURNED]
KINDS = {kind.case: kind for kind in [
    Kind("smollm3", "smollm3", rules=[TURNED, TIED]),
    Kind("arcee", "arcee", {"attention_bias": False, "mlp_bias": False}, rules=[TURNED]),
    Kind("seed_oss", "seed_oss", {"attention_out_bias": False, "mlp_bias": False}),
    Kind("olmo", "olmo", {"attention_bias": False},
         lambda cfg: {"attention.clamp_kqv": 0.5, "attention.layer_norm_epsilon": 1e-5}, [TURNED]),
    Kind("olmo2", "olmo2"),
    Kind("olmo3", "olmo2", {"attention_bias": False},
         lambda cfg: {**slides(cfg), "rope.freq_base_swa": 5e5, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                      "rope.scaling.original_context_length": 32}),
    Kind("exaone4", "exaone4", more=slides, bound=None),
    Kind("exaone4-full", "exaone4"),
    Kind("granite", "granite", more=scales, rules=[TURNED]),
    Kind("granite_moe", "granitemoe", {"shared_intermediate_size": None}, scales,
         [TURNED, (r"input_linear", halves("mlp.experts.gate_proj", "mlp.experts.up_proj"))]),
    Kind("gemma", "gemma", {"attention_bias": False}, rules=[(r"norm\.weight", plus(1.0)), TIED], bound=TABLE_GELU),
    Kind("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16},
         lambda cfg: {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
         [(r"norm\.weight", plus(1.0)), TIED], 10 * TABLE_GELU),  # its capped logits are small
    Kind("gemma3", "gemma3", {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6, "num_hidden_layers": 6},
         lambda cfg: {"rope.freq_base_swa": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
         [(r"norm\.weight", plus(1.0)), TIED], TABLE_GELU),
    Kind("phi", "phi2", {"num_key_value_heads": 4}, bound=TABLE_GELU),
    Kind("phi3", "phi3", {"sliding_window": None}),
    Kind("phi3-longrope", "phi3",
         more=lambda cfg: {"rope.scaling.original_context_length": 16,
                           "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(8) / np.log(16)))}),
    Kind("cohere", "command-r", {"attention_bias": False}, lambda cfg: {"logit_scale": 0.3}, [TIED], None),
    Kind("cohere-plain", "command-r", more=lambda cfg: {"logit_scale": 0.0625}, rules=[TIED]),
    Kind("cohere2", "cohere2", more=lambda cfg: {"logit_scale": 0.3}, rules=[TIED]),
    Kind("glm", "chatglm"),
    Kind("glm4", "glm4"),
    Kind("nemotron", "nemotron", {"head_dim": 16, "attention_bias": False, "mlp_bias": False},
         rules=[(r"norm\.weight", plus(1.0))]),
    Kind("stablelm", "stablelm"),
    Kind("stablelm-norms", "stablelm"),
    Kind("stablelm-parallel", "stablelm", more=lambda cfg: {"use_parallel_residual": True}),
    Kind("apertus", "apertus", {"attention_bias": False},
         lambda cfg: {f"xielu.{name}": [float(cfg["tensors"][f"model.layers.{i}.mlp.act_fn.{name}"].item()) for i in range(2)]
                      for name in ("alpha_p", "alpha_n", "beta", "eps")}, [(r"act_fn", dropped)]),
    Kind("ernie4_5", "ernie4_5", {"use_bias": False}, rules=[TIED]),
    Kind("ernie4_5_moe", "ernie4_5-moe",
         more=lambda cfg: {"expert_count": 6, "expert_used_count": 2, "interleave_moe_layer_step": 1, "expert_shared_count": 2,
                           "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 64},
         rules=[TIED, BIAS_OF_CHOICE]),
    Kind("plamo2", "plamo2", {"full_attention_idx": [1, 3], "rope_local_theta": 20000.0}, plamo2,
         [*PLAMO, (r"model\.norm\.", plus(1.0)), *SINGLE, (r"dt_bias", renamed("dt_bias", "dt_proj.bias")),
          (r"_norm_weight", renamed("_norm_weight", "_norm.weight")), (r"\.[qk]_weight", renamed("_weight", ".weight")), TIED],
         None),
    Kind("plamo3", "plamo3",
         more=lambda cfg: {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6,
                           "rope.freq_base_swa": 10000.0},
         rules=[*PLAMO, (r"(q|k|model\.)_?norm\.", plus(1.0))]),
    Kind("baichuan-13b", "baichuan",
         more=lambda cfg: {"attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": 40,
                           "rope.dimension_count": None},
         rules=[(r"W_pack", apart)], bound=None),
    Kind("mamba", "mamba", {"intermediate_size": 64},
         lambda cfg: {**mamba(cfg), "ssm.inner_size": 64, "ssm.time_step_rank": 4}, [*SINGLE, TIED]),
    Kind("falcon_mamba", "mamba", {"intermediate_size": 64, "mixer_rms_eps": 1e-6, "layer_norm_epsilon": 1e-6},
         lambda cfg: {**mamba(cfg), "ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.dt_b_c_rms": True}, [*SINGLE, TIED]),
    Kind("mamba2", "mamba2",
         more=lambda cfg: {**mamba(cfg), "ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2},
         rules=[*MIXER, (r"mixer\.norm\.", in_groups("n_groups"))]),
    Kind("jamba", "jamba", more=jamba, rules=SINGLE),
    Kind("granite_hybrid", "granitehybrid", {"position_embedding_type": "nope"},
         lambda cfg: {**mamba2(cfg), **scales(cfg), **attends(cfg, "attention", "full_attention"),
                      "rope.scaling.finetuned": False, "expert_shared_feed_forward_length": 40},
         [*HYBRID_RULES, (r"shared_mlp\.input_linear", halves("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
          (r"input_linear", halves("mlp.experts.gate_proj", "mlp.experts.up_proj"))]),
    Kind("granite_hybrid-nope", "granitehybrid",
         more=lambda cfg: {**mamba2(cfg), **scales(cfg), **attends(cfg, "attention", "full_attention"),
                           "feed_forward_length": 40, "rope.scaling.finetuned": False, "expert_used_count": None},
         rules=[*HYBRID_RULES, TIED, (r"input_linear", halves("mlp.gate_proj", "mlp.up_proj")),
                (r"output_linear", renamed("shared_mlp.output_linear", "mlp.down_proj"))]),
    Kind("nemotron_h", "nemotron_h", {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4},
         lambda cfg: {**nemotron(cfg), "expert_count": None, "expert_used_count": None},
         [*MIXER, (r"mixer\.norm\.", in_groups("n_groups"))]),
    Kind("nemotron_h-latent", "nemotron_h_moe", {"mlp_bias": False}, experts_of_nemotron,
         [*MIXER, (r"mixer\.norm\.", in_groups("n_groups")), (r"mixer\.experts", experts_of_llama),
          BIAS_OF_CHOICE]),
    Kind("lfm2", "lfm2", {"block_auto_adjust_ff_dim": False},
         lambda cfg: {**attends(cfg, "full_attention"), "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5,
                      "attention.layer_norm_epsilon": None}, [TIED, (r"conv\.conv", squeezed)]),
    Kind("falcon_h1", "falcon-h1", {"head_dim": 16},
         lambda cfg: {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4,
                      "ssm.inner_size": 64},
         [*MIXER, (r"mamba\.norm\.", in_groups("mamba_n_groups")), (r"_proj\.weight|lm_head|embed_tokens", falcon_h1)]),
    Kind("qwen3_next", "qwen3next", {"linear_value_head_dim": 16},
         lambda cfg: {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4,
                      "ssm.inner_size": 64, "expert_shared_feed_forward_length": 32, "rope.dimension_count": 4},
         [(r"\.A_log", decay), (r"dt_bias", renamed("dt_bias", "dt_proj.bias")), (r"conv1d\.weight", squeezed),
          (r"in_proj_qkvz", key_heads), (r"shared_expert_gate", squeezed), (r"linear_attn\.norm", plus(0.0)),
          (r"norm\.weight", plus(1.0))]),
    Kind("glm4_moe", "glm4moe", more=routing,
         rules=[BIAS_OF_CHOICE]),
    Kind("llama4", "llama4", {"attention_chunk_size": 8192},
         lambda cfg: {"feed_forward_length": 96, "expert_feed_forward_length": 48, "interleave_moe_layer_step": 2},
         [(r"experts\.gate_up_proj", columns("gate_proj", "up_proj")), (r"experts\.down_proj", columns("down_proj"))]),
    Kind("deepseek2", "deepseek2", {"attention_bias": False}, latent, [(r"kv_b_proj", heads_of_latents)], None),
    Kind("deepseek2-groups", "deepseek2", more=latent, rules=[(r"kv_b_proj", heads_of_latents)], bound=None),
    Kind("deepseek3", "deepseek2",
         {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                              "original_max_position_embeddings": 16}},
         lambda cfg: {**latent(cfg), "expert_gating_func": 2},
         [(r"kv_b_proj", heads_of_latents), BIAS_OF_CHOICE]),
    Kind("gpt_oss", "gpt-oss", {"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
         lambda cfg: {"expert_feed_forward_length": 48},
         [(r"sinks", renamed("sinks", "sinks.weight")), (r"gate_up_proj", columns("alternating", "gate_proj", "up_proj")),
          (r"experts\.down_proj", columns("down_proj"))]),
    Kind("qwen2_moe", "qwen2moe", {"decoder_sparse_step": 1, "norm_topk_prob": False},
         lambda cfg: {"expert_shared_feed_forward_length": 40}, [(r"shared_expert_gate", squeezed)]),
    Kind("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
    Kind("olmoe", "olmoe", {"clip_qkv": None, "num_key_value_heads": 4}),
    Kind("mixtral", "llama", rules=[TURNED]),
]}  # fmt: skip
