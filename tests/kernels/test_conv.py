"""Causal depthwise convolution against float64; a sequence's bits depend on nothing but its rows."""

from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
LENGTHS = [1, 7, 2, 40, 3]


def exact(x: Array, weight: Array, bias: Array | None, n_taps: int, is_silu: bool) -> Array:
    parts, first = [], 0
    for n in LENGTHS:
        rows = x[first : first + n].astype(np.float64)
        padded = np.concatenate([np.zeros((n_taps - 1, rows.shape[1])), rows])
        out = sum(padded[k : k + n] * weight[:, k].astype(np.float64) for k in range(n_taps))
        parts.append(out + (0 if bias is None else bias))
        first += n
    y = np.concatenate(parts)
    return y / (1 + np.exp(-y)) if is_silu else y


@pytest.mark.parametrize("case", ["4 144 30 silu bias", "4 37 5 silu", "3 64 64 bias", "2 5 1", "7 33 8 silu bias"])
def test_values_and_rows(case: str, open_backend: Callable[..., Backend], recurrence: type) -> None:
    n_taps, width, per_page = map(int, case.split()[:3])
    random = np.random.default_rng(width)
    x = random.standard_normal((sum(LENGTHS), width)).astype(np.float32)
    weight = random.standard_normal((width, n_taps)).astype(np.float32)
    bias = random.standard_normal(width).astype(np.float32) if "bias" in case else None
    operation = recurrence(
        open_backend, "conv", LENGTHS, (width, n_taps - 1, per_page), {"x": x}, width, weight=weight, bias=bias,
        n_taps=n_taps, act=0 if "silu" in case else -1,
    )  # fmt: skip
    operation.check(exact(x, weight, bias, n_taps, "silu" in case), 1e-6)


def test_too_many_taps_are_refused(open_backend: Callable[..., Backend], recurrence: type) -> None:
    x, weight = np.zeros((1, 8), np.float32), np.zeros((8, 600), np.float32)
    operation = recurrence(open_backend, "conv", [1], (8, 599, 8), {"x": x}, 8, weight=weight, bias=None, n_taps=600)
    with pytest.raises(NotImplementedError, match=r"taps|this backend has no conv"):
        operation.whole()
