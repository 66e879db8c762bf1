"""The table of a GGUF architecture, and functions that several tables use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .metadata import Metadata

Field = str | int | float | bool | Callable[[Metadata], object]
Fields = Mapping[str, Field]
Names = Mapping[str, str | tuple[str, ...]]

# Names after "model.layers.N." in Hugging Face checkpoints -> names after "blk.N." in GGUF files. ".weight" or ".bias" follows
# a stem in both. A name that ends with "weight", "A_log", "D" or "bias" is a whole name.
USUAL: Names = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
USUAL_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the GGUF files of an architecture differ from the checkpoints from which they were converted.

    Attributes:
        name: general.architecture.
        architecture: The Hugging Face class with these tensors.
        when: Selects files of that name; None: all files that no earlier table matches.
        fields: Fields of the configuration besides the usual ones: a metadata key, a value, or a function that computes it.
        rope: Rope parameters that are in no metadata key.
        layers: Prefix of a layer's tensor names, "#" for the layer's number.
        names: Names after that prefix, besides the usual ones -> the stem or whole name in the file, or several names for
            tensors that are stacked.
        outer: Stems of tensors outside the layers, besides the usual ones.
        metadata: Tensors with one element per layer that the file stores as lists in the metadata: name after `layers` -> key.
        interleaved: Whether rows of q and k are ordered for interleaved rope.
        has_offsets: Whether the offsets are already added to the weights of norms.
        has_factors: Whether the factors of the configuration are already multiplied into the matrices.
        grouped: Modules of several parts with rows in order of heads, as in the checkpoint.
    """

    name: str
    architecture: str
    when: Callable[[Metadata], bool] | None = None
    fields: Fields = field(default_factory=dict)
    rope: Mapping[str, object] = field(default_factory=dict)
    layers: str = "model.layers.#."
    names: Names = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    has_offsets: bool = False
    has_factors: bool = False
    grouped: Sequence[str] = ()


def has(tensor: str) -> Callable[[Metadata], bool]:
    """Whether the file has a tensor; "#" stands for any layer."""
    return lambda meta: meta.has(tensor)


def has_head_bias(meta: Metadata) -> bool:
    """Whether q, k and v have biases."""
    return meta.has("blk.#.attn_q.bias") or meta.has("blk.#.attn_qkv.bias")


def given(key: str) -> Callable[[Metadata], bool]:
    """Whether a key is present and not zero."""
    return lambda meta: bool(meta.raw(key))


def kinds(key: str, other: str, zero: str) -> Callable[[Metadata], list[str]]:
    """The kind of every layer: `zero` if the layer's value of the key is zero, else `other`."""
    return lambda meta: [other if value else zero for value in meta.each(key)]


def layer_types(meta: Metadata) -> list[str] | None:
    """The kinds of layers from the metadata: a bool per layer, or a period p (every p-th layer is full). None: the family's
    default."""
    pattern = meta.raw("attention.sliding_window_pattern")
    if not pattern or not meta.raw("attention.sliding_window"):
        return None
    step = pattern if isinstance(pattern, int) else 1
    slides = meta.each("attention.sliding_window_pattern") if isinstance(pattern, list) else [
        (layer + 1) % step > 0 for layer in range(meta.n_layers)
    ]  # fmt: skip
    return ["sliding_attention" if each else "full_attention" for each in slides]


def or_else(key: str, default: object) -> Callable[[Metadata], object]:
    """The value of a key, or the default if the file does not have it."""
    return lambda meta: default if meta.raw(key) is None else meta.raw(key)


def ratio(key: str, by: str) -> Callable[[Metadata], int]:
    """An integer key divided by another."""
    return lambda meta: meta.need(key, int) // max(meta.need(by, int), 1)


def score_scale(meta: Metadata) -> float:
    """The factor on scores: the file's, or head_dim^-0.5."""
    heads = max(meta.need("attention.head_count", int), 1)
    head_dim = meta.get("attention.key_length", int, meta.need("embedding_length", int) // heads)
    return float(meta.get("attention.scale", float, 0.0) or head_dim**-0.5)
