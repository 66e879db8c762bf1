"""A model's configuration with Hugging Face's names, from config.json or from the metadata of a GGUF file (gguf/)."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from . import rope
from .rope import Parameters, Rope

T = TypeVar("T", bound=int | float | str | bool)
Raw = dict[str, object]

_KINDS = ("full_attention", "sliding_attention")


def typed(value: object, kind: type[T]) -> T | None:
    """The value if it has the type, else None. An int is accepted as a float; a bool is not accepted as a number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300:
        value = float(value)
    return value if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) else None


class _Field(Generic[T]):
    """A required field, checked when it is read; an int field is a size (`ModelConfig.size`)."""

    def __init__(self, kind: type[T], name: str | None = None) -> None:
        self.kind, self.name = kind, name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    def __get__(self, config: "ModelConfig", owner: type | None = None) -> T:
        value = config.need(str(self.name), self.kind)
        return value if self.kind is not int else self.kind(config.size(str(self.name), int(value)))


class ModelConfig:
    """The configuration that an architecture function reads. Absent and null are equal; a wrong type raises CheckpointError.

    Attributes:
        raw: Every field by its Hugging Face name; defaults of the architecture and `hf_overrides` are applied.
        file: Path of the configuration, for messages.
        dtype: Stored type of the checkpoint's matrices: "float32", "float16", "bfloat16" or "quantized".
        processor: Of a model that takes images: the configuration of its image processor.
        counts_rope_scaling: Whether max_position_embeddings of the file already includes rope scaling.
        unused_positions: Number of leading positions in max_position_embeddings that no token uses.
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
        self.processor: Mapping[str, object] = {}
        self._max_model_len = max_model_len
        self.counts_rope_scaling = False
        self.unused_positions = 0

    def need(self, name: str, kind: type[T]) -> T:
        """A required field; CheckpointError names it when it is missing or of another type."""
        value = self.raw.get(name)
        found = typed(value, kind)
        if found is None:
            have = "nothing" if value is None else repr(value)
            raise CheckpointError(
                f"{self.file}: {name}: wanted {kind.__name__}, have {have}; hf_overrides can set it", file=self.file
            )
        return found

    def get(self, name: str, default: T) -> T:
        """An optional field; absent and null give the default. The field must have the default's type."""
        return default if self.raw.get(name) is None else self.need(name, type(default))

    def size(self, name: str, default: int) -> int:
        """An integer from 1 to 2^31 - 1."""
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
        """Heads of k and v; by default the number of query heads."""
        return self.size("num_key_value_heads", self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        """Elements of a head; by default hidden_size / num_attention_heads."""
        return self.size("head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the embedding matrix is also the head."""
        return self.get("tie_word_embeddings", False)

    @property
    def num_labels(self) -> int:
        """Classes of a classifier; 1 for a reward model."""
        labels = self.raw.get("id2label")
        return self.size("num_labels", len(labels) if isinstance(labels, Mapping) and labels else 2)

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a sequence, in the configuration's order; may be empty."""
        value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
            raise CheckpointError(f"{self.file}: eos_token_id: wanted ids, have {value!r}", file=self.file)
        return list(ids)

    def without(self, *names: str) -> None:
        """Refuses fields that the architecture function does not support; absent, null, false and 0 pass."""
        for name in names:
            if self.raw.get(name):
                raise UnsupportedError(
                    f"{self.file}: {name}={self.raw[name]!r} is not supported by {self.architecture}; hf_overrides can set it"
                )

    def only(self, name: str, value: float | str) -> None:
        """Refuses every value of a field but the one that the architecture function supports."""
        if self.get(name, value) != value:
            raise UnsupportedError(
                f"{self.file}: {name}={self.raw[name]!r} is not supported by {self.architecture}, only {value!r}; "
                "hf_overrides can set it"
            )

    def sub(self, name: str, renames: Mapping[str, str], defaults: Mapping[str, object]) -> "ModelConfig":
        """The configuration of a part of the model, such as "vision_config".

        Args:
            name: The field.
            renames: Names of fields -> the common names.
            defaults: Fields that it may leave out.
        """
        given = self.raw.get(name)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{self.file}: {name}: wanted an object, have {given!r}", file=self.file)
        fields = {key: value for key, value in given.items() if value is not None}
        fields |= {new: fields[old] for old, new in renames.items() if old in fields}
        raw = {"vocab_size": 1, **defaults, **fields, "architectures": self.raw["architectures"]}
        return ModelConfig(raw, f"{self.file}: {name}")

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens, rope scaling included (`raw` has the file's number)."""
        if self.counts_rope_scaling:
            return self._max_position
        parameters = Parameters(self.raw, self.file, "full_attention")
        return rope.context_length(parameters, self._max_position, self._max_model_len) - self.unused_positions

    @property
    def served_length(self) -> int:
        """Longest sequence that this engine serves, in tokens."""
        return min(self._max_model_len or self.max_position_embeddings, self.max_position_embeddings)

    _max_position = _Field(int, "max_position_embeddings")

    @cached_property
    def rope(self) -> Rope:
        """The rotary embedding; only rope_types "dynamic" and "longrope" depend on max_model_len."""
        return self.rope_of(self.head_dim)

    def rope_of(self, head_dim: int) -> Rope:
        """The rotary embedding for heads of `head_dim` elements."""
        return self._make_rope(Parameters(self.raw, self.file), head_dim)

    def layer_ropes(self, local_theta: float) -> dict[str, Rope]:
        """The rotary embeddings of "full_attention" and "sliding_attention" layers.

        Args:
            local_theta: Base of sliding layers, without rope scaling, if `rope_parameters` has no entry for each layer type.
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
        """ "full_attention" or "sliding_attention" for every layer, from `layer_types`.

        Args:
            pattern: Without `layer_types`, every `pattern`-th layer is full and the others slide; the field
                `sliding_window_pattern` overrides it.
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
        """A bool for every layer from a list of 0 and 1; if the list is absent or empty, `default(layer number)`."""
        flags = self.raw.get(name)
        if flags is None or flags == []:
            return (default(i) for i in range(self.num_layers))
        if not isinstance(flags, list) or len(flags) < self.num_layers or any(flag not in (0, 1) for flag in flags):
            raise CheckpointError(
                f"{self.file}: {name}: wanted a list of {self.num_layers} of 0 or 1, have {flags!r}", file=self.file
            )
        return (bool(flag) for flag in flags[: self.num_layers])
