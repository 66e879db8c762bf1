"""Attention over pages of e4m3 and int8, against float64 over the rounded keys and values, and equal bits in every batch."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
Open = Callable[..., Backend]

# heads, kv heads, head_dim, tokens, block, window, softcap
SHAPES = [
    (16, 8, 128, 330, 16, 0, 0.0),
    (16, 2, 64, 600, 64, 100, 20.0),
    (6, 2, 24, 700, 32, 0, 0.0),
    (8, 1, 256, 90, 16, 0, 50.0),
    (2, 2, 20, 65, 16, 3, 0.0),
    (71, 1, 64, 70, 16, 0, 0.0),
]


def stored(x: Array, dtype: str) -> Array:
    """What a page holds of [tokens, heads, head_dim], as float64."""
    if dtype == "fp8":
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x / scale).astype(np.float64) * scale


def exact(q: Array, k: Array, v: Array, scale: float, window: int, cap: float) -> Array:
    n, heads, _ = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * scale
    s = cap * np.tanh(s / cap) if cap else s
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    s[:, (j > i) | ((j <= i - window) if window else False)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)


def normal(seed: int, *shape: int) -> Array:
    """Normal numbers; tokens differ in size by factors up to 100."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * rng.uniform(0.02, 2, (shape[0], shape[1], 1))).astype(np.float32)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize(("heads", "kv", "dim", "n", "block", "window", "cap"), SHAPES)
def test_values_and_bits(
    heads: int, kv: int, dim: int, n: int, block: int, window: int, cap: float, dtype: str, open_backend: Open, paged: type
) -> None:
    q, k, v = normal(1, n, heads, dim), normal(2, n, kv, dim), normal(3, n, kv, dim)
    cache = paged(open_backend(2, max_rows=1024), [k], [v], dtype, block)
    out = cache.attend([(0, 0, n)], q, dim**-0.5, window, cap)
    want = exact(q, stored(k, dtype), stored(v, dtype), dim**-0.5, window, cap)
    assert np.abs(out - want).max() < 1e-5
    assert np.abs(want - exact(q, k.astype(float), v.astype(float), dim**-0.5, window, cap)).max() > 1e-3  # rounding shows
    for p in sorted({0, 15, 16, 63, 64, n // 2, n - 1}):
        assert cache.attend([(0, p, p + 1)], q[p : p + 1], dim**-0.5, window, cap).tobytes() == out[p].tobytes()
    for block_tokens, threads, first in ((16, 1, 7), (32, 3, n // 3), (64, 2, n - 3)):
        cache = paged(open_backend(threads, max_rows=1024), [k], [v], dtype, block_tokens, seed=first)
        part = cache.attend([(0, first, n)], q[first:], dim**-0.5, window, cap)
        assert part.tobytes() == out[first:].tobytes()


def test_every_e4m3_is_rounded_and_read_back(open_backend: Open, paged: type) -> None:
    """With a window of one the output is the stored value itself."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    between = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, between, np.nextafter(between, -500), np.nextafter(between, 500), [460, 1e9, -np.inf, 1e-30]])
    v = np.resize(x.astype(np.float32), (40, 1, 32))
    cache = paged(open_backend(1), [np.zeros_like(v)], [v], "fp8", 16)
    out = cache.attend([(0, 0, 40)], np.zeros_like(v), 1.0, window=1)
    assert (out == stored(v, "fp8")).all()


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_what_is_not_finite_is_not_hidden(dtype: str, open_backend: Open, paged: type) -> None:
    k, v = normal(2, 70, 1, 32), normal(3, 70, 1, 32)
    v[40, 0, 3], k[50, 0, 9] = np.nan, np.nan
    cache = paged(open_backend(1), [k], [v], dtype, 16)
    out = cache.attend([(0, 0, 70)], normal(1, 70, 1, 32), 0.2)
    assert np.isfinite(out[:40]).all() and np.isnan(out[40:, 0, 3]).all() and np.isnan(out[50:]).any(-1).all()


def test_int8_of_tiny_and_zero_rows(open_backend: Open, paged: type) -> None:
    v = normal(3, 4, 1, 32) * np.array([0, 1e-38, 1e-43, 1e30], np.float32)[:, None, None]
    cache = paged(open_backend(1), [np.zeros_like(v)], [v], "int8", 16)
    out = cache.attend([(0, 0, 4)], np.zeros_like(v), 1.0, window=1)
    assert (out[0] == 0).all()
    assert (np.abs(out - v) <= np.abs(v).max(-1, keepdims=True) / 200 + 1e-43).all()


@pytest.mark.parametrize(("dtype", "a_head"), [("fp8", 2 * 16 * 64), ("int8", 2 * 16 * 64 + 2 * 16 * 4)])
def test_bytes_of_a_page(dtype: str, a_head: int, open_backend: Open) -> None:
    assert open_backend(1).kv_pool(1, 3, 64, dtype, 16).view.page_bytes == 3 * a_head
    with pytest.raises(ValueError, match="no pages"):
        open_backend(1).kv_pool(1, 0, 576, dtype, 16)
