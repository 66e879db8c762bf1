"""Rounds floats to GGUF's types Q2_K, Q4_K, Q5_K and Q6_K, which gguf-py can only read.

A block has 256 values. csrc/base/dtype.c has the exact values of its bytes.

| type | sub-blocks | a value | scales of the sub-blocks |
|---|---|---|---|
| Q4_K, Q5_K | 8 of 32 | d * scale * q - dmin * min, q from 0 to 15 or 31 | 6 bits; d and dmin are float16 |
| Q2_K | 16 of 16 | d * scale * q - dmin * min, q from 0 to 3 | 4 bits; d and dmin are float16 |
| Q6_K | 16 of 16 | d * scale * q, q from -32 to 31 | 8 bits with a sign; d is float16 |

Each sub-block tries several steps between neighbouring values. For each it solves the least squares for the scale (and the
minimum) of the numbers q that this step gives, and keeps the one with the least squared error.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

BLOCK = 256
_STEPS = np.arange(-10, 11, dtype=np.float32) / 10
"""What the steps add to the largest q when they divide a sub-block's range by it."""
_AT_A_TIME = 1 << 12
"""Blocks that a thread rounds at a time, so that its temporaries stay below 100 MB."""


_RANGES = {15: (0, 15), 63: (0, 63), -128: (-128, 127)}
"""The whole numbers that can be stored, by the one of the largest magnitude."""


def _divide(a: Floats, b: Floats) -> Floats:
    """a / b, and 0 where b is 0; b has a's shape, or 1 instead of a's last size."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _fit_with_minimum(x: Floats, largest: int) -> tuple[Floats, Floats]:
    """The best scale and minimum of sub-blocks.

    Args:
        x: [blocks, sub-blocks, values].
        largest: Of the numbers q.

    Returns:
        Scales and minima m, both at least 0, each [blocks, sub-blocks]: x is about scale * q - m.
    """
    low = np.minimum(x.min(-1, keepdims=True), 0)
    span, n = x.max(-1, keepdims=True) - low, np.float32(x.shape[-1])
    sum_x = x.sum(-1)
    best = np.full(x.shape[:-1], np.inf, np.float32), np.zeros(x.shape[:-1], np.float32), np.zeros(x.shape[:-1], np.float32)
    for step in _STEPS:
        q = np.clip(np.rint((x - low) * _divide(np.full_like(span, largest + step), span)), 0, largest)
        sum_q, sum_qq, sum_qx = q.sum(-1), (q * q).sum(-1), (q * x).sum(-1)
        scale = _divide(n * sum_qx - sum_q * sum_x, n * sum_qq - sum_q * sum_q)
        least = (scale * sum_q - sum_x) / n
        without = least < 0
        scale = np.maximum(np.where(without, _divide(sum_qx, sum_qq), scale), 0)
        least = np.where(without, 0, least)
        error = np.square(scale[..., None] * q - least[..., None] - x).sum(-1)
        for kept, new in zip(best[1:], (scale, least), strict=True):
            np.copyto(kept, new, where=error < best[0])
        np.minimum(best[0], error, out=best[0])
    return best[1], best[2]


def _fit(x: Floats) -> Floats:
    """The best scales of sub-blocks, [blocks, sub-blocks], for numbers from -32 to 31; x: [blocks, sub-blocks, values]."""
    at = np.abs(x).argmax(-1)[..., None]
    peak = np.take_along_axis(x, at, -1)
    best = np.full(x.shape[:-1], np.inf, np.float32), np.zeros(x.shape[:-1], np.float32)
    for step in _STEPS:
        q = np.clip(np.rint(x * _divide(np.full_like(peak, -32 - step), peak)), -32, 31)
        scale = _divide((q * x).sum(-1), (q * q).sum(-1))
        error = np.square(scale[..., None] * q - x).sum(-1)
        np.copyto(best[1], scale, where=error < best[0])
        np.minimum(best[0], error, out=best[0])
    return best[1]


def _shared(values: Floats, largest: int) -> tuple[Floats, Floats]:
    """A block's float16 factor, as float32 [blocks, 1], and whole numbers: their products are about the values.

    The value with the largest magnitude becomes `largest`, 15, 63 or -128.
    """
    peak = np.take_along_axis(values, np.abs(values).argmax(-1)[:, None], -1)
    factor = (peak / np.float32(largest)).astype(np.float16).astype(np.float32)
    return factor, np.clip(np.rint(_divide(values, factor)), *_RANGES[largest])


def _halves(factor: Floats) -> Bytes:
    """The two bytes of each float16."""
    return factor.astype(np.float16).view(np.uint8)


def _pack_six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """12 bytes with 8 scales and 8 minima of 6 bits."""
    low = np.concatenate([scales[:, :4] | scales[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6], 1)
    return np.concatenate([low, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], 1)


class _Fitted(NamedTuple):
    """Blocks before they are packed: d and dmin, the whole scales and minima, and the numbers q."""

    d: Floats
    dmin: Floats
    scales: Bytes
    minima: Bytes
    q: Bytes


def _fitted(x: Floats, largest: int, largest_scale: int) -> _Fitted:
    """x: [blocks, sub-blocks, values]; largest: of the numbers q; largest_scale: of the whole scales and minima."""
    scales, minima = _fit_with_minimum(x, largest)
    (d, scales), (dmin, minima) = _shared(scales, largest_scale), _shared(minima, largest_scale)
    step, least = (d * scales)[..., None], (dmin * minima)[..., None]
    q = np.clip(np.rint(_divide(x + least, step)), 0, largest).astype(np.uint8)
    return _Fitted(d, dmin, scales.astype(np.uint8), minima.astype(np.uint8), q)


def _two_bits(x: Floats) -> Bytes:
    """Blocks of Q2_K; x: [blocks, 256]."""
    d, dmin, scales, minima, q = _fitted(x.reshape(-1, 16, 16), 3, 15)
    pairs = q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = np.bitwise_or.reduce(pairs, 2).reshape(-1, 64)
    return np.concatenate([scales | minima << 4, packed, _halves(d), _halves(dmin)], 1)


def _with_minima(x: Floats, bits: int) -> Bytes:
    """Blocks of Q4_K or Q5_K; x: [blocks, 256]."""
    d, dmin, scales, minima, q = _fitted(x.reshape(-1, 8, 32), (1 << bits) - 1, 63)
    parts = [_halves(d), _halves(dmin), _pack_six_bits(scales, minima)]
    if bits == 5:
        parts.append(np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], 1))
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    return np.concatenate([*parts, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], 1)


def _symmetric(x: Floats) -> Bytes:
    """Blocks of Q6_K; x: [blocks, 256]."""
    x = x.reshape(-1, 16, 16)
    d, scales = _shared(_fit(x), -128)
    q = (np.clip(np.rint(_divide(x, (d * scales)[..., None])), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce(q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], 2).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), _halves(d)], 1)


TYPES: dict[str, Callable[[Floats], Bytes]] = {
    "q2_k": _two_bits, "q4_k": lambda x: _with_minima(x, 4), "q5_k": lambda x: _with_minima(x, 5), "q6_k": _symmetric,
}  # fmt: skip
"""What rounds blocks to a type: float32 [blocks, 256] to bytes [blocks, bytes of a block]."""
NARROW = {"q2_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""The type of a matrix with columns that are no multiple of 256, as in llama.cpp (but for Q2_K, which has IQ4_NL there)."""


def quantise(values: Floats, kind: str) -> Bytes:
    """The bytes of a matrix.

    Args:
        values: Finite, float32 [..., columns], columns in multiples of 256.
        kind: One of TYPES.

    Returns:
        Bytes, [..., bytes of a row].
    """
    blocks = values.reshape(-1, BLOCK)
    parts = (blocks[at : at + _AT_A_TIME] for at in range(0, len(blocks), _AT_A_TIME))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(TYPES[kind], parts))).reshape(*values.shape[:-1], -1)
