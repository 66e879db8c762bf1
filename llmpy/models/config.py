"""A model's configuration in Hugging Face's words, from config.json or from the metadata of a GGUF file."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Generic, NoReturn, TypeVar, overload

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from . import rope
from .rope import Parameters, Rope

T = TypeVar("T", bound=int | float | str | bool)
Raw = dict[str, object]

# general.architecture -> the Hugging Face class with the same tensors, and whether the rows of q and k are ordered for
# interleaved rope.
GGUF_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "qwen2moe": ("Qwen2MoeForCausalLM", False),
    "qwen3moe": ("Qwen3MoeForCausalLM", False),
    "olmoe": ("OlmoeForCausalLM", False),
    "internlm2": ("LlamaForCausalLM", True),
    "baichuan": ("LlamaForCausalLM", True),
    "gpt2": ("GPT2LMHeadModel", False),
    "starcoder": ("GPTBigCodeForCausalLM", False),
    "starcoder2": ("Starcoder2ForCausalLM", False),
    "gptneox": ("GPTNeoXForCausalLM", False),
    "qwen": ("QWenLMHeadModel", False),
    "chatglm": ("ChatGLMModel", True),
    "bloom": ("BloomForCausalLM", False),
    "mpt": ("MptForCausalLM", False),
    "falcon": ("FalconForCausalLM", False),
}
# Keys of _GGUF_REFUSED that a family has.
_GGUF_ALLOWED = {"gptneox": ("use_parallel_residual",), "mpt": ("attention.clamp_kqv", "attention.max_alibi_bias")}
# Of those with experts: whether the weights of the chosen ones are made to add up to 1, which no metadata says.
_GGUF_NORMALISED = {
    "MixtralForCausalLM": True,
    "Qwen2MoeForCausalLM": False,
    "Qwen3MoeForCausalLM": True,
    "OlmoeForCausalLM": False,
}
# Metadata that would change the arithmetic of these families in a way that they do not have; zero means absent.
_GGUF_REFUSED = (
    "expert_group_count",
    "expert_weights_scale",
    "leading_dense_block_count",
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
)


_KINDS = ("full_attention", "sliding_attention")


def _typed(value: object, kind: type[T]) -> T | None:
    """The value if it has the type; a whole number serves as a float, a truth value not as a number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300:
        value = float(value)
    return value if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) else None


class _Field(Generic[T]):
    """A required field, checked when it is used; a whole number is a size."""

    def __init__(self, kind: type[T], name: str | None = None) -> None:
        self.kind, self.name = kind, name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    def __get__(self, config: "ModelConfig", owner: type | None = None) -> T:
        value = config.need(str(self.name), self.kind)
        return value if self.kind is not int else self.kind(config.size(str(self.name), int(value)))


class ModelConfig:
    """What an architecture function reads. Absent and null are the same; a wrong type raises CheckpointError.

    Attributes:
        raw: Every field, Hugging Face names, defaults of the architecture and `hf_overrides` applied.
        file: Where the fields come from, for messages.
        dtype: How the checkpoint stores its matrices: "float32", "float16", "bfloat16" or "quantized".
        counts_rope_scaling: Whether max_position_embeddings of the file counts the scaling of the rope already.
        unused_positions: Of max_position_embeddings, those at the front that no token has.
    """

    vocab_size = _Field(int)
    hidden_size = _Field(int)
    intermediate_size = _Field(int)
    num_layers = _Field(int, "num_hidden_layers")
    num_attention_heads = _Field(int)
    rms_norm_eps = _Field(float)
    hidden_act = _Field(str)

    def __init__(self, raw: Raw, file: str, max_model_len: int | None = None) -> None:
        self.raw, self.file, self.dtype = raw, file, "float32"
        self._max_model_len = max_model_len
        self.counts_rope_scaling = False
        self.unused_positions = 0

    def need(self, name: str, kind: type[T]) -> T:
        """A required field; CheckpointError names it when it is missing or of another type."""
        value = self.raw.get(name)
        found = _typed(value, kind)
        if found is None:
            have = "nothing" if value is None else repr(value)
            raise CheckpointError(
                f"{self.file}: {name}: wanted {kind.__name__}, have {have}; hf_overrides can set it", file=self.file
            )
        return found

    def get(self, name: str, default: T) -> T:
        """An optional field; absent and null give the default, whose type the field must have."""
        return default if self.raw.get(name) is None else self.need(name, type(default))

    def size(self, name: str, default: int) -> int:
        """A whole number of at least 1 that fits 31 bits."""
        value = self.get(name, default)
        if not 1 <= value < 2**31:
            raise CheckpointError(
                f"{self.file}: {name}: wanted 1 to 2147483647, have {value}; hf_overrides can set it", file=self.file
            )
        return value

    def positive(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.get(name, default)
        if not 1e-30 < value < 1e30:
            raise CheckpointError(
                f"{self.file}: {name}: wanted a number above 0, have {value}; hf_overrides can set it", file=self.file
            )
        return value

    @property
    def architecture(self) -> str:
        """Name under which the architecture is registered."""
        names = self.raw.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.file}: architectures: wanted a list with one name, have {names!r}; hf_overrides can set it",
                file=self.file,
            )
        return names[0]

    @property
    def num_key_value_heads(self) -> int:
        """Heads of k and v; as many as query heads where the field is absent."""
        return self.size("num_key_value_heads", self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        """Elements of a head; hidden_size / num_attention_heads where the field is absent."""
        return self.size("head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the embedding matrix is the head too."""
        return self.get("tie_word_embeddings", False)

    @property
    def num_labels(self) -> int:
        """Classes of a classifier; 1 for a reward model."""
        labels = self.raw.get("id2label")
        return self.size("num_labels", len(labels) if isinstance(labels, Mapping) and labels else 2)

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a sequence, as the configuration has them; may be empty."""
        value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
            raise CheckpointError(f"{self.file}: eos_token_id: wanted ids, have {value!r}", file=self.file)
        return list(ids)

    def without(self, *names: str) -> None:
        """Refuses fields that the architecture function has no operation for; absent, null, false and 0 are no such thing."""
        for name in names:
            if self.raw.get(name):
                raise UnsupportedError(
                    f"{self.file}: {name}={self.raw[name]!r} is not supported by {self.architecture}; hf_overrides can set it"
                )

    def only(self, name: str, value: float | str) -> None:
        """Refuses every other value of a field that the architecture function has no operation for."""
        if self.get(name, value) != value:
            raise UnsupportedError(
                f"{self.file}: {name}={self.raw[name]!r} is not supported by {self.architecture}, only {value!r}; "
                "hf_overrides can set it"
            )

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens, rope scaling counted (`raw` has the file's number)."""
        if self.counts_rope_scaling:
            return self._max_position
        parameters = Parameters(self.raw, self.file, "full_attention")
        return rope.context_length(parameters, self._max_position, self._max_model_len) - self.unused_positions

    @property
    def served_length(self) -> int:
        """Longest sequence that will be served, in tokens."""
        return min(self._max_model_len or self.max_position_embeddings, self.max_position_embeddings)

    _max_position = _Field(int, "max_position_embeddings")

    @cached_property
    def rope(self) -> Rope:
        """The rotary embedding; it depends on max_model_len for rope_types "dynamic" and "longrope" only."""
        return self.rope_of(self.head_dim)

    def rope_of(self, head_dim: int) -> Rope:
        """The rotary embedding of heads of so many elements."""
        return self._make_rope(Parameters(self.raw, self.file), head_dim)

    def layer_ropes(self, local_theta: float) -> dict[str, Rope]:
        """The rotary embeddings of "full_attention" and "sliding_attention" layers.

        Args:
            local_theta: The base of sliding layers, which nothing scales, where `rope_parameters` are not given for each type.
        """
        given = self.raw.get("rope_parameters")
        raw = dict(self.raw)
        if not (isinstance(given, Mapping) and isinstance(given.get("sliding_attention"), Mapping)):
            raw |= {"rope_parameters": {"rope_theta": local_theta}, "rope_scaling": None}
        return {
            "full_attention": self._make_rope(Parameters(self.raw, self.file, "full_attention")),
            "sliding_attention": self._make_rope(Parameters(raw, self.file, "sliding_attention")),
        }

    def _make_rope(self, parameters: Parameters, head_dim: int | None = None) -> Rope:
        divisors = self.raw.get("rope_divisors")
        return rope.make(
            parameters,
            head_dim or self.head_dim,
            self._max_position,
            self.served_length,
            interleaved=self.get("rope_interleaved", False),
            divisors=None if divisors is None else np.asarray(divisors, dtype=np.float32),
        )

    def layer_windows(self) -> Iterator[int]:
        """Attention window of every layer, 0 for full attention, from `layer_types` or `max_window_layers`."""
        window = self.get("sliding_window", 0) if self.get("use_sliding_window", False) else 0
        if self.raw.get("layer_types") is None:
            first = self.get("max_window_layers", 0)
            return (window if i >= first else 0 for i in range(self.num_layers))
        return (window if kind == "sliding_attention" else 0 for kind in self.layer_kinds(1))

    def layer_kinds(self, pattern: int) -> Iterator[str]:
        """"full_attention" or "sliding_attention" for every layer, from `layer_types`.

        Args:
            pattern: Without that field, every so-many-th layer is full and the others slide, if `sliding_window_pattern` does
                not say otherwise.
        """
        kinds = self.raw.get("layer_types")
        if kinds is None:
            given = self.raw.get("sliding_window_pattern")
            is_word = isinstance(given, str) and given.strip("L") == "G"  # as in LLLG
            step = len(str(given)) if is_word else self.size("sliding_window_pattern", pattern)
            return (_KINDS[(i + 1) % step > 0] for i in range(self.num_layers))
        if not isinstance(kinds, list) or len(kinds) < self.num_layers:
            raise CheckpointError(
                f"{self.file}: layer_types: wanted a list of {self.num_layers} names, have {kinds!r}", file=self.file
            )
        for kind in kinds:
            if kind not in _KINDS:
                raise UnsupportedError(f"layer_types: {kind!r} is not supported by {self.architecture}")
        return iter(kinds[: self.num_layers])

    def layer_flags(self, name: str, default: Callable[[int], bool]) -> Iterator[bool]:
        """A truth value for every layer from a list of 0 and 1; without that field what `default` gives for its number."""
        flags = self.raw.get(name)
        if flags is None:
            return (default(i) for i in range(self.num_layers))
        if not isinstance(flags, list) or len(flags) < self.num_layers or any(flag not in (0, 1) for flag in flags):
            raise CheckpointError(
                f"{self.file}: {name}: wanted a list of {self.num_layers} of 0 or 1, have {flags!r}", file=self.file
            )
        return (bool(flag) for flag in flags[: self.num_layers])


class _Metadata:
    """The key-values of a GGUF file, checked as they are read."""

    def __init__(self, values: Mapping[str, object], file: str) -> None:
        self.values, self.file = values, file
        self.architecture = str(values.get("general.architecture"))

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """A scalar under the architecture's prefix; a list whose items agree counts as one."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UnsupportedError(f"{self.file}: {self.architecture}.{key} differs between layers")
            value = value[0]
        if value is None:
            return default
        found = _typed(value, kind)
        if found is None:
            self._refuse(key, kind, repr(value))
        return found

    def need(self, key: str, kind: type[T]) -> T:
        """A scalar that must be there."""
        value = self.get(key, kind)
        if value is None:
            self._refuse(key, kind, "nothing")
        return value

    def _refuse(self, key: str, kind: type[T], have: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file}: metadata {self.architecture}.{key}: wanted {kind.__name__}, have {have}", file=self.file
        )


def from_gguf(
    values: Mapping[str, object],
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]],
    read: Callable[[str], bytes],
    file: str,
) -> Raw:
    """The configuration of a GGUF file as config.json would have it.

    Args:
        values: Metadata.
        tensors: Name to (dtype, shape, file).
        read: Gives a tensor's values as float32 bytes.
        file: Path, for messages.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
        UnsupportedError: an architecture or a feature that is not supported.
    """
    meta = _Metadata(values, file)
    if meta.architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedError(
            f"{file}: GGUF architecture {meta.architecture!r} is not supported; known: {', '.join(GGUF_ARCHITECTURES)}"
        )
    for key in _GGUF_REFUSED:
        if values.get(f"{meta.architecture}.{key}") and key not in _GGUF_ALLOWED.get(meta.architecture, ()):
            raise UnsupportedError(f"{file}: metadata {meta.architecture}.{key} is not supported")
    name, interleaved = GGUF_ARCHITECTURES[meta.architecture]
    window = meta.get("attention.sliding_window", int, 0)
    if name == "LlamaForCausalLM" and meta.get("expert_count", int, 0):
        name = "MixtralForCausalLM"
    elif name == "LlamaForCausalLM" and window:
        name = "MistralForCausalLM"
    heads, hidden = meta.need("attention.head_count", int), meta.need("embedding_length", int)
    head_dim = meta.get("attention.key_length", int, hidden // heads if heads > 0 else 0)
    if heads < 1 or head_dim < 1:
        raise CheckpointError(
            f"{file}: metadata: wanted heads of at least 1 element, have {heads} of {head_dim}", file=file
        )
    if meta.get("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedError(f"{file}: metadata {meta.architecture}.attention.value_length differs from key_length")
    raw: Raw = {
        "architectures": [name],
        "vocab_size": _vocab_size(meta),
        "hidden_size": hidden,
        "intermediate_size": meta.need("feed_forward_length", int),
        "num_hidden_layers": meta.need("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        **_norm_eps(meta),
        "max_position_embeddings": meta.need("context_length", int),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
        "max_window_layers": 0,
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "rope_parameters": _rope_parameters(meta, head_dim),
        "rope_interleaved": interleaved,
    }
    if meta.get("expert_count", int, 0):
        raw |= _experts(meta, name)
    if meta.architecture == "baichuan" and heads == 40:
        raise UnsupportedError(f"{file}: Baichuan 13B, which has slopes instead of rope, is not supported in this format")
    raw |= _older(meta, tensors)
    if "rope_freqs.weight" in tensors:
        raw["rope_divisors"] = np.frombuffer(read("rope_freqs.weight"), dtype=np.float32)
    return raw


def _norm_eps(meta: _Metadata) -> Raw:
    """What is added to variances, under all names that families have for it."""
    is_rms = meta.get("attention.layer_norm_epsilon", float) is None
    eps = meta.need("attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon", float)
    return dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"), eps)


def _older(meta: _Metadata, tensors: Mapping[str, object]) -> Raw:
    """Fields that only older families have."""
    has_bias = "blk.0.attn_qkv.bias" in tensors
    if meta.architecture == "gptneox":
        return {"use_parallel_residual": meta.get("use_parallel_residual", bool, True), "attention_bias": has_bias}
    if meta.architecture == "mpt":
        bounds = {"clip_qkv": "attention.clamp_kqv", "alibi_bias_max": "attention.max_alibi_bias"}
        return {"attn_config": {name: meta.get(key, float) for name, key in bounds.items()}}
    if meta.architecture == "falcon":
        n_kv_heads, n_norms = meta.get("attention.head_count_kv", int, 1), 1 + ("blk.0.attn_norm_2.weight" in tensors)
        is_new = n_kv_heads > 1
        return {"new_decoder_architecture": is_new, "num_kv_heads": n_kv_heads, "num_ln_in_parallel_attn": n_norms}
    if meta.architecture == "starcoder2":
        return {"use_bias": "blk.0.attn_q.bias" in tensors}
    if meta.architecture == "chatglm":
        return {"add_qkv_bias": has_bias, "rope_ratio": meta.get("rope.freq_base", float, 10000.0) / 10000.0}
    return {}


def _experts(meta: _Metadata, name: str) -> Raw:
    """The fields of a mixture of experts."""
    if name not in _GGUF_NORMALISED:
        raise UnsupportedError(f"{meta.file}: metadata {meta.architecture}.expert_count is not supported")
    n_experts, width = meta.need("expert_count", int), meta.need("feed_forward_length", int)
    return {
        "num_experts": n_experts,
        "num_local_experts": n_experts,
        "num_experts_per_tok": meta.need("expert_used_count", int),
        "moe_intermediate_size": meta.get("expert_feed_forward_length", int, width),
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", int, width),
        "norm_topk_prob": _GGUF_NORMALISED[name],
    }


def _vocab_size(meta: _Metadata) -> int:
    """Number of tokens; the vocab_size key only where the file has no tokenizer."""
    tokens = meta.values.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else meta.need("vocab_size", int)


def _rope_parameters(meta: _Metadata, head_dim: int) -> Raw:
    """The rope keys as `rope_parameters` of transformers."""
    factor = meta.get("rope.scaling.factor", float) or meta.get("rope.scale_linear", float, 0.0)
    kind = meta.get("rope.scaling.type", str, "linear" if factor else "none")
    if kind == "longrope":
        raise UnsupportedError(f"{meta.file}: metadata {meta.architecture}.rope.scaling.type 'longrope' is not supported")
    parameters: Raw = {
        "rope_type": "default" if kind == "none" or (kind == "linear" and not factor) else kind,
        "rope_theta": meta.get("rope.freq_base", float, 10000.0),
        "partial_rotary_factor": meta.get("rope.dimension_count", int, head_dim) / head_dim,
        "factor": factor or None,
    }
    if kind == "yarn":
        if meta.get("rope.scaling.yarn_ext_factor", float, 1.0) not in (1.0, -1.0):  # -1: not set
            raise UnsupportedError(
                f"{meta.file}: metadata {meta.architecture}.rope.scaling.yarn_ext_factor other than 1"
            )
        given = meta.get("rope.scaling.attn_factor", float, 1.0) * meta.get("rope.scaling.yarn_attn_factor", float, 1.0)
        parameters |= {
            "factor": factor or 1.0,
            "original_max_position_embeddings": meta.get("rope.scaling.original_context_length", int),
            "attention_factor": given * rope.yarn_magnitude(factor),
            "beta_fast": meta.get("rope.scaling.yarn_beta_fast", float),
            "beta_slow": meta.get("rope.scaling.yarn_beta_slow", float),
        }
    return parameters
