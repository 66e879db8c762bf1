"""Rotary position embedding: the frequencies and the magnitude of every scaling kind, from a configuration's fields.

Formulas as in Hugging Face transformers, rounded to float32 where it rounds. Both spellings of the fields are read:
`rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (transformers 4).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, UnsupportedError

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation of the heads of q and k: pair i at position p is rotated by the angle p * inv_freq[i].

    Args:
        inv_freq: float32 [n_freqs], radians per position; the first 2 * n_freqs elements of a head are rotated.
        magnitude: Factor on cosine and sine.
        interleaved: Pairs are (2i, 2i + 1) instead of (i, i + n_freqs).
        axes: int32 [n_freqs]: the axis whose position turns each pair, if positions have several axes; None: they have one.
    """

    inv_freq: Floats
    magnitude: float = 1.0
    interleaved: bool = False
    axes: NDArray[np.int32] | None = None


class Parameters:
    """The rope fields of a configuration, normalised.

    Args:
        raw: The configuration.
        file: Path of the configuration, for messages.
        layer_type: The layer type to read if the fields are given per layer type; None: such fields are refused.
    """

    def __init__(self, raw: Mapping[str, object], file: str, layer_type: str | None = None) -> None:
        new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
        if isinstance(new, Mapping) and layer_type and isinstance(new.get(layer_type), Mapping):
            new, old = new[layer_type], {}
        if not (isinstance(new, Mapping) and isinstance(old, Mapping)):
            raise CheckpointError(f"{file}: rope_parameters: wanted an object, have {new or old!r}", file=file)
        fields: dict[str, object] = dict(old or new)
        if any(isinstance(value, Mapping) for value in fields.values()):
            raise UnsupportedError(f"rope_parameters per layer type ({', '.join(fields)}) are not supported")
        self.file = file
        kind = str(fields.get("rope_type") or fields.get("type") or "default")
        is_longrope = kind == "su" or (kind == "yarn" and bool(fields.get("long_factor")))  # old names in Phi-3
        self.kind = "longrope" if is_longrope else kind
        for name in ("rope_theta", "partial_rotary_factor"):
            fields.setdefault(name, new.get(name) or raw.get(name))
        if raw.get("original_max_position_embeddings") is not None:
            fields["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        self.fields = fields
        self.theta = self.positive("rope_theta", 10000.0)
        self.partial = self.positive("partial_rotary_factor", 1.0)

    def number(self, name: str, default: float | None = None) -> float:
        """A numeric field; CheckpointError if it is no number, negative, or missing without a default."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
            self._refuse(name, "a number", value)
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A numeric field above 0."""
        value = self.number(name, default)
        if value == 0:
            self._refuse(name, "a number above 0", value)
        return value

    def _refuse(self, name: str, wanted: str, value: object) -> NoReturn:
        have = "nothing" if value is None else repr(value)
        raise CheckpointError(
            f"{self.file}: rope field {name} of rope_type {self.kind!r}: wanted {wanted}, have {have}; "
            "hf_overrides can set rope_parameters",
            file=self.file,
        )

    def numbers(self, name: str, n: int) -> Floats:
        """A list of n numbers above 0."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) != n:
            self._refuse(name, f"a list of {n} numbers", value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float) or not 0 < item < 1e30:
                self._refuse(name, "numbers above 0", item)
        return np.asarray(value, np.float32)

    def original_length(self, max_position: int) -> float:
        """The training length before rope scaling, in tokens."""
        return self.positive("original_max_position_embeddings", float(max_position))

    def factor(self, max_position: int) -> float:
        """The scaling factor; if absent, max_position / original length for yarn and longrope."""
        if self.kind in ("yarn", "longrope") and self.fields.get("factor") is None:
            return max_position / self.original_length(max_position)
        return self.positive("factor")


def base_frequencies(theta: float, n_dims: int) -> Floats:
    """theta^(-2i / n_dims) for i < n_dims / 2, rounded to float32 after each step."""
    exponents = np.arange(0, n_dims, 2, dtype=np.float32) / np.float32(n_dims)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    return (np.float32(1) / powers).astype(np.float32)


Scaled = tuple[Floats, float]


def _default(p: Parameters, n_dims: int, max_position: int, length: int) -> Scaled:
    return base_frequencies(p.theta, n_dims), 1.0


def _linear(p: Parameters, n_dims: int, max_position: int, length: int) -> Scaled:
    return base_frequencies(p.theta, n_dims) / np.float32(p.factor(max_position)), 1.0


def _dynamic(p: Parameters, n_dims: int, max_position: int, length: int) -> Scaled:
    """Uses the base for the longest length that this engine serves. It is fixed, so that no request changes another's bits."""
    factor = p.factor(max_position)
    stretch = factor * max(length, max_position) / max_position - (factor - 1)
    return base_frequencies(p.theta * stretch ** (n_dims / (n_dims - 2)), n_dims), 1.0


def _llama3(p: Parameters, n_dims: int, max_position: int, length: int) -> Scaled:
    factor, original = p.factor(max_position), p.original_length(max_position)
    low, high = p.positive("low_freq_factor"), p.positive("high_freq_factor")
    plain = base_frequencies(p.theta, n_dims)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (np.float32(original) / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    long = np.where(wavelength > original / low, plain / factor, blended)
    return np.where(wavelength < original / high, plain, long).astype(np.float32), 1.0


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """1 + 0.1 * scale * ln(factor); 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(p: Parameters, n_dims: int, max_position: int, length: int) -> Scaled:
    factor, original = p.factor(max_position), p.original_length(max_position)
    full, all_dims = p.number("mscale", 0.0), p.number("mscale_all_dim", 0.0)
    if full and all_dims:
        magnitude = yarn_magnitude(factor, full) / yarn_magnitude(factor, all_dims)
    else:
        magnitude = yarn_magnitude(factor)

    def dimension(rotations: float) -> float:
        return n_dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(p.theta))

    low, high = dimension(p.number("beta_fast", 0.0) or 32.0), dimension(p.number("beta_slow", 0.0) or 1.0)
    if p.fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n_dims - 1)
    high += 0.001 if low == high else 0.0
    ramp = np.clip((np.arange(n_dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    plain = base_frequencies(p.theta, n_dims)
    stretched = plain / np.float32(factor)
    return stretched * ramp + plain * (1 - ramp), p.number("attention_factor", magnitude)


def _longrope(p: Parameters, n_dims: int, max_position: int, length: int) -> Scaled:
    """Uses one list of divisors for all lengths that this engine serves, so that no request changes another's bits."""
    factor, original = p.factor(max_position), p.original_length(max_position)
    divisors = p.numbers("long_factor" if length > original else "short_factor", n_dims // 2)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return base_frequencies(p.theta, n_dims) / divisors, p.number("attention_factor", magnitude)


_KINDS: dict[str, Callable[[Parameters, int, int, int], Scaled]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def make(
    p: Parameters,
    head_dim: int,
    max_position: int,
    length: int,
    *,
    interleaved: bool = False,
    divisors: Floats | None = None,
) -> Rope:
    """The rope of a model.

    Args:
        p: The rope fields.
        head_dim: Elements of a head.
        max_position: `max_position_embeddings` of the file.
        length: Longest sequence that this engine serves, in tokens; only rope_types "dynamic" and "longrope" depend on it.
        interleaved: See `Rope`.
        divisors: float32 [n_freqs] from a GGUF file; the frequencies are divided by them.

    Raises:
        UnsupportedError: the rope_type is unknown.
        CheckpointError: a field is missing or no number, or the sizes do not fit.
    """
    if p.kind not in _KINDS or (p.kind == "mrope" and p.fields.get("mrope_section") is None):
        raise UnsupportedError(f"rope_type {p.kind!r} is not supported; known: {', '.join(_KINDS)}")
    n_dims = int(head_dim * p.partial)
    if not 2 <= n_dims <= head_dim or n_dims % 2 or (p.kind == "dynamic" and n_dims == 2):
        raise CheckpointError(
            f"{p.file}: rope turns {n_dims} of the {head_dim} elements of a head: wanted an even number", file=p.file
        )
    with np.errstate(all="ignore"):
        try:
            inv_freq, magnitude = _KINDS[p.kind](p, n_dims, max_position, length)
        except (ArithmeticError, ValueError) as error:
            raise CheckpointError(f"{p.file}: rope fields {p.fields} give no frequencies: {error}", file=p.file) from error
    if divisors is not None:
        if divisors.shape != inv_freq.shape:
            raise CheckpointError(
                f"{p.file}: rope_freqs.weight: wanted [{inv_freq.size}], have {list(divisors.shape)}", file=p.file
            )
        with np.errstate(all="ignore"):
            inv_freq = inv_freq / divisors
    if not (np.isfinite(inv_freq).all() and math.isfinite(magnitude)):
        raise CheckpointError(f"{p.file}: rope fields {p.fields} give frequencies that are not finite", file=p.file)
    return Rope(np.ascontiguousarray(inv_freq, dtype=np.float32), magnitude, interleaved, _axes(p, n_dims // 2))


def _axes(p: Parameters, n_freqs: int) -> NDArray[np.int32] | None:
    """The axis of each pair from `mrope_section`, the numbers of pairs for time, row and column; None: there is no such field.

    Interleaved: pair 3i is turned by the time, 3i + 1 by the row and 3i + 2 by the column, as far as each has pairs; the rest
    is the time's.
    """
    sections = p.fields.get("mrope_section")
    if sections is None:
        return None
    is_list = isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n >= 0 for n in sections)
    if not isinstance(sections, list) or not is_list or sum(sections) != n_freqs:
        raise CheckpointError(f"{p.file}: mrope_section: wanted 3 numbers of {n_freqs} in all, have {sections!r}", file=p.file)
    if not p.fields.get("mrope_interleaved"):
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    axes = np.zeros(n_freqs, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def context_length(p: Parameters, max_position: int, max_model_len: int | None) -> int:
    """Longest sequence that the model supports, in tokens, rope scaling included.

    | rope_type | Length |
    |---|---|
    | linear | factor times max_position |
    | yarn | factor times the original length |
    | dynamic | the larger of max_position and max_model_len, because its frequencies follow the length |
    | others | max_position |
    """
    length = float(max_position)
    if p.kind == "linear":
        length = max_position * p.factor(max_position)
    elif p.kind == "yarn":
        length = p.original_length(max_position) * p.factor(max_position)
    elif p.kind == "dynamic":
        length = max(max_position, max_model_len or 0)
    if not 1 <= length < 2**31:
        raise CheckpointError(f"{p.file}: rope fields {p.fields} give a length of {length} tokens", file=p.file)
    return int(length)
