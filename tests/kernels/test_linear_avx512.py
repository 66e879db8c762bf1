"""Only on AVX-512: BF16 weights times activations rounded to bfloat16 (arithmetic AUTO)."""

import numpy as np
import pytest

from binding import Backend
from llmpy import _core

BF16 = 3
pytestmark = pytest.mark.skipif("avx512" not in _core.cpu_isas(), reason="this processor has no AVX-512")


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of x rounded to bfloat16, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def linear(backend: Backend, matrix: object, x: np.ndarray, n: int) -> np.ndarray:
    y = np.full((len(x), n), np.nan, np.float32)
    backend.linear(matrix, x, y)
    return y


@pytest.mark.parametrize(("n", "k"), [(200, 1280), (33, 72), (16, 1)])
def test_bf16_activations(n: int, k: int) -> None:
    """Near float64 on the rounded activations; the same bits for every row count and thread count; ties go to even."""
    rng = np.random.default_rng(1)
    weights = to_bf16(0.05 * rng.standard_normal((n, k)).astype(np.float32))
    x = rng.standard_normal((512, k)).astype(np.float32)
    x[:, ::3] = to_float(to_bf16(x[:, ::3])) * np.float32(1 + 2**-8)  # ties
    rounded = to_float(to_bf16(x)).astype(np.float64)
    exact, size = rounded @ to_float(weights).T.astype(np.float64), np.abs(rounded) @ np.abs(to_float(weights)).T
    whole = None
    for threads in (1, 2, 5):
        backend = Backend("cpu", "avx512", threads, 512, 2048)
        matrix = backend.matrix([("bfloat16", n, weights)], k)
        assert backend.matrix_info(matrix, 0)[1] == BF16
        full = linear(backend, matrix, x, n)
        whole = full if whole is None else whole
        assert np.array_equal(full, whole)
        for rows in (1, 2, 3, 7, 11, 12, 13, 24, 31, 32, 100, 511):
            first = int(rng.integers(0, 513 - rows))
            assert np.array_equal(linear(backend, matrix, x[first : first + rows], n), whole[first : first + rows])
    assert (np.abs(whole - exact) <= 2e-6 * size).all()


def test_bf16_not_finite() -> None:
    """A NaN or an infinity in one row shows in that row alone."""
    rng = np.random.default_rng(2)
    backend = Backend("cpu", "avx512", 2)
    matrix = backend.matrix([("bfloat16", 32, to_bf16(rng.standard_normal((32, 64)).astype(np.float32)))], 64)
    x = rng.standard_normal((14, 64)).astype(np.float32)
    good = linear(backend, matrix, x, 32)
    x[2, 17], x[9, 60] = np.nan, np.inf
    bad = linear(backend, matrix, x, 32)
    assert not np.isfinite(bad[[2, 9]]).any()
    rest = [i for i in range(14) if i not in (2, 9)]
    assert np.array_equal(bad[rest], good[rest])
