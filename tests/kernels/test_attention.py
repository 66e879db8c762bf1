"""Attention over the paged cache against float64, and equal bits of a row in every batch."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
Open = Callable[..., Backend]


def exact(q: Array, k: Array, v: Array, first: int, scale: float, window: int, cap: float) -> Array:
    """Exact rows at positions first, first + 1, ... of one sequence, in float64."""
    n, heads, _ = q.shape
    k, v = (np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q.astype(np.float64), k[: first + n]) * scale
    s = cap * np.tanh(s / cap) if cap else s
    i, j = np.arange(first, first + n)[:, None], np.arange(first + n)[None]
    s[:, (j > i) | ((j <= i - window) if window else False)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v[: first + n])


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# heads, kv heads, head_dim, tokens, type, block, window, softcap
SHAPES = [
    (16, 8, 128, 330, "float32", 16, 0, 0.0),
    (9, 3, 64, 300, "float32", 32, 0, 0.0),
    (16, 2, 128, 200, "bfloat16", 64, 100, 20.0),
    (6, 2, 24, 700, "float32", 32, 0, 0.0),
    (3, 3, 40, 130, "float16", 64, 50, 0.0),
    (8, 1, 256, 90, "bfloat16", 16, 0, 50.0),
    (5, 1, 80, 600, "float16", 16, 300, 0.0),
    (7, 7, 96, 257, "bfloat16", 16, 1, 0.0),
    (2, 2, 20, 65, "float32", 16, 3, 0.0),
    (71, 1, 64, 70, "float32", 16, 0, 0.0),
]


@pytest.mark.parametrize(("heads", "kv", "dim", "n", "dtype", "block", "window", "cap"), SHAPES)
def test_values(
    heads: int,
    kv: int,
    dim: int,
    n: int,
    dtype: str,
    block: int,
    window: int,
    cap: float,
    open_backend: Open,
    paged: type,
    rounded: Callable[[Array, str], Array],
) -> None:
    q, k, v = 2 * normal(1, n, heads, dim), normal(2, n, kv, dim), normal(3, n, kv, dim)
    cache = paged(open_backend(2, max_rows=1024), [k], [v], dtype, block)
    out = cache.attend([(0, 0, n)], q, dim**-0.5, window, cap)
    want = exact(q, rounded(k, dtype), rounded(v, dtype), 0, dim**-0.5, window, cap)
    # Scores up to about 12 are sums of head_dim rounded products: 12 * 2^-24 * a few; they weigh values up to 4.
    assert np.abs(out - want).max() < 1e-5
    for p in sorted({0, 1, 15, 16, 63, 64, 65, n // 2, n - 2, n - 1}):
        if p < n:
            assert cache.attend([(0, p, p + 1)], q[p : p + 1], dim**-0.5, window, cap).tobytes() == out[p].tobytes()


@pytest.mark.parametrize(("dtype", "window", "cap"), [("float32", 0, 0.0), ("bfloat16", 0, 0.0), ("float16", 90, 30.0)])
def test_row_never_depends_on_its_batch(dtype: str, window: int, cap: float, open_backend: Open, paged: type) -> None:
    lengths, heads, kv, dim = [700, 1, 130, 64, 333], 8, 2, 48
    q, k, v = ([normal(10 * i + j, n, h, dim) for i, n in enumerate(lengths)] for j, h in enumerate((heads, kv, kv)))
    backend = open_backend(1, max_rows=2048)
    cache = paged(backend, k, v, dtype, 16)
    whole = [cache.attend([(s, 0, n)], q[s], 0.3, window, cap) for s, n in enumerate(lengths)]
    rng = np.random.default_rng(7)
    for block, threads in itertools.product((16, 32, 64), (1, 2, 5)):
        cache = paged(open_backend(threads, max_rows=2048), k, v, dtype, block, seed=block + threads)
        for _ in range(4):
            spans = []
            for seq, n in enumerate(lengths):
                first = int(rng.integers(n))
                end = first + 1 if rng.random() < 0.4 else int(rng.integers(first, n)) + 1
                if rng.random() < 0.85:  # a sequence may have no row in a step
                    spans.append((seq, first, end))
            if not spans:
                continue
            out = cache.attend(spans, np.concatenate([q[s][a:b] for s, a, b in spans]), 0.3, window, cap)
            want = np.concatenate([whole[s][a:b] for s, a, b in spans])
            assert out.tobytes() == want.tobytes(), (block, threads, spans)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_decode_is_cut_and_folded(
    dtype: str, open_backend: Open, paged: type, rounded: Callable[[Array, str], Array]
) -> None:
    n, dim = 3000, 64
    q, k, v = normal(1, n, 3, dim), normal(2, n, 1, dim), normal(3, n, 1, dim)
    outs = []
    for threads in (1, 2, 7):
        cache = paged(open_backend(threads), [k], [v], dtype, 32)
        rows = [cache.attend([(0, p, p + 1)], q[p : p + 1], 0.2) for p in (n - 1, 2047, 2048, 255, 256)]
        outs.append(b"".join(row.tobytes() for row in rows))
        chunk = cache.attend([(0, n - 40, n)], q[n - 40 :], 0.2)
        outs[-1] += chunk.tobytes()
    assert len(set(outs)) == 1
    want = exact(q[n - 40 :], rounded(k, dtype), rounded(v, dtype), n - 40, 0.2, 0, 0.0)
    assert np.abs(chunk - want).max() < 2e-6
    assert outs[0][: 3 * dim * 4] == chunk[-1].tobytes()


def test_cut_tasks_in_rounds(open_backend: Open, paged: type) -> None:
    """More splits than states kept at once: a task continues from round to round."""
    n, heads, dim = 11000, 96, 256
    q, k, v = normal(1, 1, heads, dim), normal(2, n, 1, dim), normal(3, n, 1, dim)
    one, many = (paged(open_backend(threads), [k], [v], "bfloat16", 64) for threads in (1, 3))
    span = [(0, n - 1, n)]
    assert one.attend(span, q, 0.06).tobytes() == many.attend(span, q, 0.06).tobytes()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_later_tokens_cannot_be_seen(poison: float, open_backend: Open, paged: type) -> None:
    n, dim = 150, 32
    q, k, v = normal(1, n, 4, dim), normal(2, n, 2, dim), normal(3, n, 2, dim)
    clean = paged(open_backend(2), [k], [v], "float32", 16).attend([(0, 0, n)], q, 0.2)
    for bad in (0, 40, 63, 64, 100, n - 1):
        k2, v2 = k.copy(), v.copy()
        k2[bad], v2[bad] = poison, poison
        cache = paged(open_backend(2), [k2], [v2], "float32", 16)
        out = cache.attend([(0, 0, n)], q, 0.2)
        assert out[:bad].tobytes() == clean[:bad].tobytes()
        assert np.isnan(out[bad]).all()
        windowed = cache.attend([(0, 0, n)], q, 0.2, window=20)
        assert np.isfinite(windowed[bad + 20 :]).all()


def test_zeros_are_positive(open_backend: Open, paged: type) -> None:
    """Products that underflow leave +0, so that the sign does not depend on the number of skipped keys."""
    n, dim = 90, 16
    q, k = normal(1, n, 2, dim), normal(2, n, 1, dim)
    v = np.where(normal(3, n, 1, dim) > 0, 1e-45, -1e-45).astype(np.float32)
    cache = paged(open_backend(1), [k], [v], "float32", 16)
    out = cache.attend([(0, 0, n)], q, 0.2)
    assert not np.signbit(out[out == 0]).any()
    for p in range(n):
        assert cache.attend([(0, p, p + 1)], q[p : p + 1], 0.2).tobytes() == out[p].tobytes()


def test_large_scores_and_one_key(open_backend: Open, paged: type) -> None:
    """Scores of thousands neither overflow nor lose the winner; with a window of one the output is the value itself."""
    n, dim = 100, 64
    q, k, v = 100 * normal(1, n, 2, dim), 100 * normal(2, n, 2, dim), normal(3, n, 2, dim)
    cache = paged(open_backend(2), [k], [v], "float32", 16)
    out = cache.attend([(0, 0, n)], q, 1.0)
    assert np.abs(out - exact(q, k, v, 0, 1.0, 0, 0.0)).max() < 0.05  # scores near 2^19 have steps of 1/16
    assert cache.attend([(0, 0, n)], q, 1.0, window=1).tobytes() == v.tobytes()


def test_many_copied_pages(open_backend: Open) -> None:
    """More pages than one launch copies, and pages longer than a block of threads copies."""
    backend = open_backend(2)
    n_pages, n, dim = 1001, 500 * 16, 256
    pool = backend.kv_pool(n_pages, 1, dim, "float32", 16)
    k, v = normal(1, n, dim), normal(2, n, dim)
    batch = (np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.array([0, n], np.int32))
    order = 1 + np.random.default_rng(3).permutation(1000).astype(np.int32)
    backend.kv_write(pool, batch, np.ascontiguousarray(order[None, :500]), k, v)
    before = np.frombuffer(backend.kv_read(pool), np.uint8).reshape(n_pages, -1).copy()
    backend.copy_pages(pool, np.ascontiguousarray(order.reshape(2, 500).T))
    after = np.frombuffer(backend.kv_read(pool), np.uint8).reshape(n_pages, -1)
    assert (after[order[500:]] == before[order[:500]]).all() and (after[order[:500]] == before[order[:500]]).all()
    assert len(np.unique(before[order[:500], :64], axis=0)) == 500 and (after[0] == before[0]).all()


def test_copied_pages_and_layers(open_backend: Open) -> None:
    backend = open_backend(2)
    n, dim = 40, 32
    q, k, v = normal(1, n, 2, dim), normal(2, n, 2, dim), normal(3, n, 2, dim)
    pool = backend.kv_pool(8, 2, dim, "bfloat16", 16, n_layers=2)
    batch = (np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.array([0, n], np.int32))
    table = np.array([[4, 2, 7]], np.int32)
    flat = [np.ascontiguousarray(x.reshape(n, -1)) for x in (q, k, v)]
    backend.kv_write(pool, batch, table, flat[1], flat[2], layer=1)
    out = np.empty_like(flat[0])
    backend.attention(pool, batch, table, flat[0], out, 0.2, layer=1)
    backend.copy_pages(pool, np.array([[4, 1], [2, 3], [7, 5]], np.int32))
    backend.kv_write(pool, batch, table, flat[2], flat[1], layer=1)
    again = np.empty_like(flat[0])
    backend.attention(pool, batch, np.array([[1, 3, 5]], np.int32), flat[0], again, 0.2, layer=1)
    assert again.tobytes() == out.tobytes()
    pages = np.frombuffer(backend.kv_read(pool), np.uint8).reshape(8, 2, -1)
    assert (pages[:, 0] == 0xFF).all() and (pages[[0, 6]] == 0xFF).all()  # nothing else is touched
    assert backend.kv_pool(1, 1, 1, "float32", 16) is not None
    for bad in ("int64", "q8_0"):
        with pytest.raises(ValueError):
            backend.kv_pool(1, 1, 16, bad, 16)
