"""GGUF files: tables of the known architectures, and the conversion of metadata to a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...errors import CheckpointError, UnsupportedError
from .. import rope
from ..config import Raw
from ..program import Tensors
from ..registry import similar
from ..source import Source
from . import classics, dense, hybrids, mixtures
from .family import Family, has_head_bias
from .metadata import Metadata
from .names import NO_WEIGHTS, GgufSource

NORM_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
FAMILIES: tuple[Family, ...] = (*dense.TABLES, *mixtures.TABLES, *hybrids.TABLES, *classics.TABLES)

# Metadata that changes the arithmetic. A key that no table reads is refused; zero means absent.
_ARITHMETIC = (
    "expert_group_count",
    "expert_weights_scale",
    "leading_dense_block_count",
    "interleave_moe_layer_step",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.sliding_window_pattern",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "use_parallel_residual",
    "rope.scaling.yarn_log_multiplier",
    "rope.dimension_sections",
)


def read(
    values: Mapping[str, object], tensors: Tensors, read_float32: Callable[[str], bytes], file: str
) -> tuple[Raw, Source, tuple[str, ...]]:
    """Reads a GGUF file: its configuration as config.json would have it, the places of its tensors, and the unused tensors.

    Args:
        values: Metadata.
        tensors: Name to (dtype, shape, file).
        read_float32: Gives a tensor's values as float32 bytes.
        file: Path, for messages.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
        UnsupportedError: an architecture or a feature that is not supported.
    """
    meta = Metadata(values, tensors, file)
    family = _family(meta)
    raw = _usual(meta, family, read_float32)
    for name, wanted in family.fields.items():
        raw[name] = wanted(meta) if callable(wanted) else meta.raw(wanted) if isinstance(wanted, str) else wanted
    raw["rope_parameters"] = _rope_parameters(meta, raw, read_float32) | dict(family.rope)
    head_dim = raw.get("head_dim")
    alternating = head_dim if family.interleaved and isinstance(head_dim, int) else 0
    separates = _separates(meta, alternating)
    raw["rope_interleaved"] = family.interleaved and not separates
    for key in _ARITHMETIC:
        if key not in meta.seen and meta.raw(key):
            raise UnsupportedError(f"{file}: metadata {meta.architecture}.{key} is not supported")
    further = range(meta.n_layers, meta.need("block_count", int))  # layers for multi-token prediction
    source = GgufSource(family, meta, read_float32, alternating, separates)
    return raw, source, (*NO_WEIGHTS, *(f"blk.{layer}.*" for layer in further))


def _family(meta: Metadata) -> Family:
    """The first table that matches the file."""
    for family in FAMILIES:
        if family.name == meta.architecture and (family.when is None or family.when(meta)):
            return family
    near = similar(meta.architecture, {family.name for family in FAMILIES})
    raise UnsupportedError(
        f"{meta.file}: GGUF architecture {meta.architecture!r} is not supported{near}; docs/use/models.md lists those that are"
    )


def _usual(meta: Metadata, family: Family, read_float32: Callable[[str], bytes]) -> Raw:
    """The fields that most families have."""
    window = meta.get("attention.sliding_window", int, 0)
    raw: Raw = {
        "architectures": [family.architecture],
        "vocab_size": _vocab_size(meta),
        "hidden_size": meta.need("embedding_length", int),
        "intermediate_size": meta.get("feed_forward_length", int),
        "num_hidden_layers": meta.n_layers,
        "max_position_embeddings": meta.need("context_length", int),
        "tie_word_embeddings": not meta.has("output.weight"),
        "attention_bias": has_head_bias(meta),
        "qkv_bias": has_head_bias(meta),
        "mlp_bias": meta.has("blk.#.ffn_down.bias"),
        "eos_token_id": meta.values.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": meta.values.get("tokenizer.ggml.bos_token_id"),
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
        "max_window_layers": 0,
        **_norm_eps(meta),
    }
    if "num_attention_heads" not in family.fields:
        raw |= _heads(meta, family)
    if meta.get("expert_count", int, 0):
        raw |= _experts(meta)
    if meta.has("rope_freqs.weight"):
        raw["rope_divisors"] = np.frombuffer(read_float32("rope_freqs.weight"), dtype=np.float32)
    return raw


def _heads(meta: Metadata, family: Family) -> Raw:
    """The numbers of heads, and their size in elements."""
    heads, hidden = meta.need("attention.head_count", int), meta.need("embedding_length", int)
    head_dim = meta.get("attention.key_length", int, hidden // heads if heads > 0 else 0)
    if heads < 1 or head_dim < 1:
        raise CheckpointError(
            f"{meta.file}: metadata: wanted heads of at least 1 element, have {heads} of {head_dim}", file=meta.file
        )
    if "v_head_dim" not in family.fields and meta.get("attention.value_length", int, head_dim) != head_dim:
        key = f"{meta.architecture}.attention.value_length"
        raise UnsupportedError(f"{meta.file}: metadata {key} differs from key_length")
    kv_heads = meta.get("attention.head_count_kv", int, heads)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _norm_eps(meta: Metadata) -> Raw:
    """The norms' eps, under all names that families have for it."""
    is_rms = meta.get("attention.layer_norm_epsilon", float) is None
    eps = meta.need("attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon", float)
    return dict.fromkeys(NORM_EPS, eps)


def _experts(meta: Metadata) -> Raw:
    """The fields of a mixture of experts, under all names that families have for them."""
    n_experts, n_chosen = meta.need("expert_count", int), meta.need("expert_used_count", int)
    width = meta.get("feed_forward_length", int, 0)
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), n_experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), n_chosen),
        "moe_intermediate_size": meta.get("expert_feed_forward_length", int, width),
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", int, width),
    }


def _vocab_size(meta: Metadata) -> int:
    """Number of tokens in the tokenizer; the vocab_size key if the file has no tokenizer."""
    tokens = meta.values.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else meta.need("vocab_size", int)


def _separates(meta: Metadata, alternating: int) -> bool:
    """Whether rope turns only a part of heads of this size. Neighbouring rows are pairs of the whole head, which interleaved
    rope would turn, so the program separates the halves."""
    return alternating > 0 and meta.get("rope.dimension_count", int) not in (None, 0, alternating)


def _rope_parameters(meta: Metadata, raw: Raw, read_float32: Callable[[str], bytes]) -> Raw:
    """The rope keys as `rope_parameters` of transformers."""
    head_dim = raw.get("head_dim")
    turned = meta.get("rope.dimension_count", int)
    factor = meta.get("rope.scaling.factor", float) or meta.get("rope.scale_linear", float, 0.0)
    kind = meta.get("rope.scaling.type", str, "linear" if factor else "none")
    parameters: Raw = {
        "rope_type": "default" if kind == "none" or (kind == "linear" and not factor) else kind,
        "rope_theta": meta.get("rope.freq_base", float, 10000.0),
        "partial_rotary_factor": turned / head_dim if turned and isinstance(head_dim, int) else 1.0,
        "factor": factor or None,
    }
    if meta.has("rope_factors_long.weight"):
        return parameters | _longrope(meta, read_float32)
    return parameters | _yarn(meta, factor) if kind == "yarn" else parameters


def _longrope(meta: Metadata, read_float32: Callable[[str], bytes]) -> Raw:
    """Two lists of divisors, one for long sequences."""
    lists = {name: f"rope_factors_{name.partition('_')[0]}.weight" for name in ("long_factor", "short_factor")}
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "original_max_position_embeddings": meta.get(
            "rope.scaling.original_context_length", int, meta.need("context_length", int)
        ),
        "attention_factor": meta.get("rope.scaling.attn_factor", float, 1.0),
        **{name: np.frombuffer(read_float32(tensor), np.float32).tolist() for name, tensor in lists.items()},
    }


def _yarn(meta: Metadata, factor: float) -> Raw:
    """YaRN's fields; the file's log multiplier acts on the scores, so the length of rows does not change."""
    if meta.get("rope.scaling.yarn_ext_factor", float, 1.0) not in (1.0, -1.0):  # -1: not set
        raise UnsupportedError(f"{meta.file}: metadata {meta.architecture}.rope.scaling.yarn_ext_factor other than 1")
    on_scores = 10 * meta.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    whole = meta.get("rope.scaling.yarn_attn_factor", float, 1.0)  # 1: not set
    magnitude = whole if whole != 1 else 1.0 if on_scores else rope.yarn_magnitude(factor)
    return {
        "factor": factor or 1.0,
        "original_max_position_embeddings": meta.get("rope.scaling.original_context_length", int),
        "mscale_all_dim": on_scores or None,
        "attention_factor": meta.get("rope.scaling.attn_factor", float, 1.0) * magnitude,
        "beta_fast": meta.get("rope.scaling.yarn_beta_fast", float),
        "beta_slow": meta.get("rope.scaling.yarn_beta_slow", float),
    }
