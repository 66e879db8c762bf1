"""Rotary positions, cache writes and their fused form."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware
from staging import Batch, Pool

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Array = np.ndarray
Open = Callable[..., Backend]


def table_of(backend: Backend, positions: Array, n_freqs: int, magnitude: float = 1.0) -> Array:
    inv_freq = (10000.0 ** (-np.arange(n_freqs) / n_freqs)).astype(np.float32)
    table = np.empty((len(positions), n_freqs, 2), np.float32)
    backend.rope_table(positions.astype(np.int32), inv_freq, table, magnitude)
    assert backend.allocations == 0
    return table


def test_table(open_backend: Open) -> None:
    backend = open_backend(2)
    positions = np.array([0, 1, 2, 100, 4095, 131071], np.int32)
    inv_freq = (500000.0 ** (-np.arange(37) / 37)).astype(np.float32)
    table = np.empty((6, 37, 2), np.float32)
    backend.rope_table(positions, inv_freq, table, 1.25)
    angle = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)  # the product is rounded to float32
    want = 1.25 * np.stack([np.cos(angle), np.sin(angle)], -1)
    assert np.abs(table - want).max() < 2e-7
    alone = np.empty((1, 37, 2), np.float32)
    backend.rope_table(positions[4:5], inv_freq, alone, 1.25)
    assert alone.tobytes() == table[4].tobytes()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "n_freqs"), [(128, 64), (64, 32), (80, 40), (24, 12), (40, 5), (96, 16), (10, 1), (256, 100)])
def test_rotation(dim: int, n_freqs: int, interleaved: bool, open_backend: Open) -> None:
    rng = np.random.default_rng(dim)
    n, heads, kv = 33, 3, 2
    qkv = rng.standard_normal((n, (heads + 2 * kv) * dim + 5)).astype(np.float32)  # as one linear leaves it
    backend = open_backend(2)
    table = table_of(backend, np.arange(n) * 37, n_freqs, 1.1)
    before = qkv.copy()
    q, k = qkv[:, : heads * dim], qkv[:, heads * dim : (heads + kv) * dim]
    backend.rope(table, q, k, dim, interleaved)
    assert backend.allocations == 0
    x = before[:, : (heads + kv) * dim].reshape(n, heads + kv, dim).astype(np.float64)
    cosine, sine = (table[:, None, :, i].astype(np.float64) for i in (0, 1))
    end = 2 * n_freqs
    pairs = (slice(0, end, 2), slice(1, end, 2)) if interleaved else (slice(n_freqs), slice(n_freqs, end))
    want = x.copy()
    want[:, :, pairs[0]] = x[:, :, pairs[0]] * cosine - x[:, :, pairs[1]] * sine
    want[:, :, pairs[1]] = x[:, :, pairs[1]] * cosine + x[:, :, pairs[0]] * sine
    got = qkv[:, : (heads + kv) * dim].reshape(n, heads + kv, dim)
    assert np.abs(got - want).max() < 1e-6  # two rounded products of numbers up to 5
    assert got[:, :, end:].tobytes() == before[:, : (heads + kv) * dim].reshape(got.shape)[:, :, end:].tobytes()
    assert qkv[:, (heads + kv) * dim :].tobytes() == before[:, (heads + kv) * dim :].tobytes()
    for threads, rows in ((1, slice(4, 5)), (5, slice(7, 30))):
        part = before[rows].copy()
        alone = open_backend(threads)
        alone.rope(
            np.ascontiguousarray(table[rows]),
            part[:, : heads * dim],
            part[:, heads * dim : (heads + kv) * dim],
            dim,
            interleaved,
        )
        assert part.tobytes() == qkv[rows].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [128, 24, 10])
def test_cache_rounds_to_nearest_even(dtype: str, dim: int, open_backend: Open, paged: type, rounded) -> None:
    """With a window of one the output is the stored value; the softmax of two positions shows a key's rounding."""
    rng = np.random.default_rng(5)
    n = 37
    v = (rng.standard_normal((n, 2, dim)) * 10.0 ** rng.uniform(-7, 3, (n, 2, dim))).astype(np.float32)
    v[0, 0, :4] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, -(1 + 3 * 2.0**-11)]  # ties of bfloat16 and float16
    cache = paged(open_backend(2), [np.abs(v)], [v], dtype, 16)
    out = cache.attend([(0, 0, n)], np.ones((n, 2, dim), np.float32), 1e-3, window=1)
    want = rounded(v, dtype)
    assert (out + 0.0).tobytes() == (want + 0.0).tobytes()


def store_heads(
    is_fused: bool, pool: Pool, batch: Batch, table: Array, heads: tuple[Array, Array, Array], norms: list[Array] | None,
    rope: Array | None, interleaved: bool,
) -> None:  # fmt: skip
    """Norms and rope of q and k, then keys and values into the pool: in one operation, or in one for each of them.

    A norm's weight is [size of a head], or [heads, size of a head].
    """
    backend, dim, (q, k, v) = pool.backend, pool.view.head_dim, heads
    if is_fused:
        backend.qkv(pool, batch, table, q, k, v, *(norms or (None, None)), 1e-6, rope, interleaved)
        assert backend.allocations == 0
        return
    for x, weight in zip((q, k), norms or (), strict=False):
        backend.rms_norm(x, weight, x, 1e-6, x.shape[1] // dim, dim if weight.ndim == 2 else 0)
    if rope is not None:
        backend.rope(rope, q, k, dim, interleaved)
    backend.kv_write(pool, batch, table, k, v)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("parts", ["norm rope", "norms rope", "rope", "norm", ""])
@pytest.mark.parametrize(("dim", "dtype", "block"), [(128, "bfloat16", 16), (40, "float32", 32), (24, "float16", 64)])
def test_fused_equals_composed(
    parts: str, interleaved: bool, dim: int, dtype: str, block: int, open_backend: Open, paged: type
) -> None:
    rng = np.random.default_rng(dim)
    heads, kv, lengths = 6, 2, (50, 1, 23)
    n = sum(lengths)
    spans = [(s, 3, 3 + m) for s, m in enumerate(lengths)]
    data = rng.standard_normal((n, (heads + 2 * kv) * dim)).astype(np.float32)
    shapes = [(heads, dim), (kv, dim)] if "norms" in parts else [(dim,), (dim,)]
    norms = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    backend = open_backend(3)
    batch = paged.batch(spans, 3)
    rope = table_of(backend, batch[0], dim // 4) if "rope" in parts else None
    table = rng.permutation(20)[: 3 * 5].reshape(3, 5).astype(np.int32)
    pools = []
    rows = []
    for is_fused in (False, True):
        row = data.copy()
        q, k, v = row[:, : heads * dim], row[:, heads * dim : (heads + kv) * dim], row[:, (heads + kv) * dim :]
        pool = backend.kv_pool(20, kv, dim, dtype, block)
        store_heads(is_fused, pool, batch, table, (q, k, v), norms if "norm" in parts else None, rope, interleaved)
        pools.append(backend.kv_read(pool))
        rows.append(row.tobytes())
    assert rows[0] == rows[1]
    assert pools[0] == pools[1]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("parts", ["norm rope", "norms rope", "rope", "norm", ""])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "n_freqs", "dtype", "block"),
    [
        (32, 8, 128, 64, "bfloat16", 16),
        (14, 2, 64, 32, "float16", 32),
        (5, 1, 256, 64, "bfloat16", 64),
        (6, 2, 80, 16, "float16", 16),
        (3, 3, 96, 48, "bfloat16", 32),
        (6, 2, 64, 10, "bfloat16", 16),
        (2, 1, 20, 10, "float16", 16),
    ],
)
def test_fused_equals_composed_in_two_bytes(
    heads: int, kv: int, dim: int, n_freqs: int, dtype: str, block: int, parts: str, interleaved: bool, cuda: str, paged: type
) -> None:
    """q in place and the pages are equal by memcmp; a backend may write k in place or not."""
    rng = np.random.default_rng(dim)
    backend = Backend(cuda, dtype=dtype, library=hardware.cuda_library())
    lengths = (300, 1, 23)
    n = sum(lengths)
    batch = paged.batch([(s, 3, 3 + m) for s, m in enumerate(lengths)], 3)
    stride = (heads + 2 * kv) * dim + 8
    data = rng.standard_normal((n, stride), np.float32).astype(TYPES[dtype]).view(np.uint16)
    shapes = [(heads, dim), (kv, dim)] if "norms" in parts else [(dim,), (dim,)]
    norms = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    rope = table_of(backend, batch[0], n_freqs) if "rope" in parts else None
    n_pages = -(-303 // block)
    table = rng.permutation(4 * n_pages)[: 3 * n_pages].reshape(3, -1).astype(np.int32)
    pools, rows = [], []
    for is_fused in (False, True):
        row = data.copy()
        q, k, v = row[:, : heads * dim], row[:, heads * dim : (heads + kv) * dim], row[:, (heads + kv) * dim : -8]
        pool = backend.kv_pool(4 * n_pages, kv, dim, dtype, block)
        store_heads(is_fused, pool, batch, table, (q, k, v), norms if "norm" in parts else None, rope, interleaved)
        pools.append(backend.kv_read(pool))
        rows.append((q.tobytes(), v.tobytes(), row[:, -8:].tobytes()))
    assert rows[0] == rows[1]
    assert pools[0] == pools[1]
