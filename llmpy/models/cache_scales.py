"""Scales of an FP8 cache of keys and values that a checkpoint brings (docs/use/quantization.md)."""

import re
from collections.abc import Mapping

import numpy as np

from ..errors import UnsupportedError
from .packed import FLOATS, Options, fail
from .program import Reader, Tensors

_ENDINGS = {
    ".k_scale": "k", ".k_proj.k_scale": "k", ".k_proj.output_scale": "k",
    ".v_scale": "v", ".v_proj.v_scale": "v", ".v_proj.output_scale": "v",
    ".kv_scale": "kv",
}  # fmt: skip
PATTERNS = (*(f"*{ending}" for ending in _ENDINGS), "*.q_scale", "*.prob_scale")
"""Names of scales, which are no weights of the model. Queries and probabilities stay in floats."""
LEAST = 2.0**-100
"""The smallest scale; the largest is its inverse."""
_LAYER = re.compile(r"(.*?\.\d+\.)")
_STORED = {"num_bits": 8, "type": "float", "strategy": "tensor"}


class CacheScales:
    """Two factors of each layer: the cache stores keys / k and values / v.

    Args:
        layers: k and v by the prefix of the layer's names ("model.layers.3."); empty: all factors are 1.
        file: The checkpoint, for messages.
    """

    def __init__(self, layers: Mapping[str, tuple[float, float]] | None = None, file: str = "") -> None:
        self._layers, self._file = dict(layers or {}), file
        self._unread = set(self._layers)

    def of(self, prefix: str) -> tuple[float, float]:
        """k and v of a layer of the cache.

        Args:
            prefix: Of the names of the layer's tensors.

        Raises:
            CheckpointError: other layers have scales, and this one has none.
        """
        layer = next((layer for layer in self._layers if prefix.startswith(layer)), None)
        if layer is None and self._layers:
            fail(f"{prefix}self_attn.k_scale", self._file, "wanted cache scales for each layer with attention, have none")
        self._unread.discard(layer or "")
        return (1.0, 1.0) if layer is None else self._layers[layer]

    def finish(self) -> None:
        """Raises CheckpointError for a layer that has scales and no cache."""
        for layer in self._unread:
            fail(f"{layer}self_attn.k_scale", self._file, "wanted a layer with attention, have none")


def read(scheme: object, reader: Reader, where: str) -> CacheScales:
    """The scales of a checkpoint.

    Args:
        scheme: `quantization_config`.
        reader: The checkpoint.
        where: The configuration's file, for messages.

    Raises:
        UnsupportedError: the configuration names another type of cache than FP8 with one scale a layer.
        CheckpointError: a scale is missing, or it is no positive number.
    """
    stated = scheme.get("kv_cache_scheme") if isinstance(scheme, Mapping) else None
    if isinstance(stated, Mapping):
        _check(stated, where)
    tensors, found = reader.tensors(), dict[str, dict[str, str]]()
    for name in tensors:
        role = next((role for ending, role in _ENDINGS.items() if name.endswith(ending)), None)
        inside = _LAYER.match(name)
        if role and inside:
            found.setdefault(inside[1], {}).update(dict.fromkeys(role, name))
    layers, file = dict[str, tuple[float, float]](), ""
    for layer, names in found.items():
        name, lacks = next(iter(names.values())), {"k", "v"} - set(names)
        file = tensors[name][2]
        if lacks:
            fail(name, file, f"wanted the scale of {', '.join(lacks)} beside it, have none")
        layers[layer] = read_scale(names["k"], tensors, reader), read_scale(names["v"], tensors, reader)
    return CacheScales(layers, file)


def _check(stated: Options, where: str) -> None:
    for option, wanted in _STORED.items():
        if stated.get(option, wanted) != wanted or stated.get("dynamic"):
            raise UnsupportedError(
                f"{where}: kv_cache_scheme {dict(stated)!r} is not supported with kv_cache_dtype='fp8'; wanted {_STORED} and "
                "dynamic false, or kv_cache_dtype='auto'"
            )


def read_scale(name: str, tensors: Tensors, reader: Reader) -> float:
    """A tensor that holds one scale; CheckpointError if it does not."""
    dtype, shape, file = tensors[name]
    if dtype not in FLOATS or np.prod(shape) != 1:
        fail(name, file, f"wanted one number of type {' or '.join(FLOATS)}, have {dtype} {list(shape)}")
    value = float(np.frombuffer(reader.read_float32(name), np.float32)[0])
    if not LEAST <= value <= 1 / LEAST:
        fail(name, file, f"wanted a scale from 2^-100 to 2^100, have {value}")
    return value
