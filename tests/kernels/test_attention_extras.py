"""Attention with ALiBi slopes, sinks and chunks against float64, and equal bits of a row in every batch."""

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
Open = Callable[..., Backend]
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def exact(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    slopes: Array | None = None,
    sinks: Array | None = None,
    chunk: int = 0,
    ends: Array | None = None,
) -> Array:
    """All rows of one sequence, in float64."""
    n, heads, _ = q.shape
    k, v = (np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * scale
    s = cap * np.tanh(s / cap) if cap else s
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    if slopes is not None:
        s = s + slopes.astype(np.float64)[:, None, None] * (j - i)
    hidden = j // chunk != i // chunk if chunk else j <= i - window if window else j < 0
    s[:, (j > i if ends is None else j >= ends[:, None]) | hidden] = -np.inf
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(sinks.astype(np.float64)[:, None, None], (heads, n, 1))], 2)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", (p / p.sum(-1, keepdims=True))[:, :, :n], v)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def slopes_of(heads: int) -> Array:
    return (2.0 ** (-8 * np.arange(1, heads + 1) / heads)).astype(np.float32)


# heads, kv heads, head_dim, tokens, type, block, softcap, window, chunk, has slopes, has sinks
SHAPES = [
    (12, 12, 32, 330, "float32", 16, 0.0, 0, 0, True, False),
    (8, 2, 64, 700, "bfloat16", 32, 20.0, 0, 0, True, True),
    (8, 1, 64, 300, "float16", 16, 0.0, 100, 0, False, True),
    (6, 2, 128, 600, "bfloat16", 64, 0.0, 8, 0, False, True),
    (5, 5, 40, 270, "float32", 16, 0.0, 64, 64, False, False),
    (4, 2, 16, 530, "float32", 16, 0.0, 100, 100, True, True),
    (6, 2, 16, 70, "bfloat16", 16, 0.0, 8, 8, False, False),
]


@pytest.mark.parametrize(("heads", "kv", "dim", "n", "dtype", "block", "cap", "window", "chunk", "slopes", "sinks"), SHAPES)
def test_values_and_rows(
    heads: int,
    kv: int,
    dim: int,
    n: int,
    dtype: str,
    block: int,
    cap: float,
    window: int,
    chunk: int,
    slopes: bool,
    sinks: bool,
    open_backend: Open,
    paged: type,
    rounded: Callable[[Array, str], Array],
) -> None:
    q, k, v = 2 * normal(1, n, heads, dim), normal(2, n, kv, dim), normal(3, n, kv, dim)
    extras: dict[str, Any] = {"chunk": chunk}
    if slopes:
        extras["slopes"] = slopes_of(heads)
    if sinks:
        extras["sinks"] = 3 * normal(4, heads)
    scale = dim**-0.5
    caches = [
        paged(open_backend(threads, max_rows=1024), [k], [v], dtype, size) for threads, size in ((2, block), (1, 16), (5, 64))
    ]
    out = caches[0].attend([(0, 0, n)], q, scale, window, cap, **extras)
    want = exact(q, rounded(k, dtype), rounded(v, dtype), scale, cap, window, **extras)
    assert np.abs(out - want).max() < 1e-5
    plain = exact(q, rounded(k, dtype), rounded(v, dtype), scale, cap, window)
    assert np.abs(want - plain).max() > 1e-2  # the extras matter here
    rng = np.random.default_rng(5)
    for cache, _ in itertools.product(caches, range(3)):
        first = int(rng.integers(n))
        end = int(rng.integers(first, n)) + 1
        part = cache.attend([(0, first, end)], q[first:end], scale, window, cap, **extras)
        assert part.tobytes() == out[first:end].tobytes(), (first, end)
    for p in (0, 1, 63, 64, n // 2, n - 1):
        row = caches[0].attend([(0, p, p + 1)], q[p : p + 1], scale, window, cap, **extras)
        assert row.tobytes() == out[p].tobytes(), p


def test_extras_that_change_nothing(open_backend: Open, paged: type) -> None:
    """Slopes of zero, sinks far below and one chunk for all give the bits of attention without them."""
    n, heads, dim = 300, 4, 48
    q, k, v = normal(1, n, heads, dim), normal(2, n, 2, dim), normal(3, n, 2, dim)
    cache = paged(open_backend(2, max_rows=512), [k], [v], "float32", 16)
    plain = cache.attend([(0, 0, n)], q, 0.2)
    for extras in (
        {"slopes": np.zeros(heads, np.float32)},
        {"sinks": np.full(heads, -1e4, np.float32)},
        {"chunk": 1024},
    ):
        assert cache.attend([(0, 0, n)], q, 0.2, **extras).tobytes() == plain.tobytes(), extras


def test_a_sink_far_above_takes_everything(open_backend: Open, paged: type) -> None:
    n, heads, dim = 70, 2, 32
    q, k, v = normal(1, n, heads, dim), normal(2, n, heads, dim), normal(3, n, heads, dim)
    cache = paged(open_backend(1, max_rows=128), [k], [v], "float32", 16)
    out = cache.attend([(0, 0, n)], q, 0.2, sinks=np.array([200, 0], np.float32))
    assert (out[:, 0] == 0).all()
    assert np.abs(out[:, 1]).min(-1).max() > 0


def test_distant_keys_do_not_lose_their_place(open_backend: Open, paged: type) -> None:
    """Slopes at far positions: distances are integers, so a key's bias does not lose precision with its position."""
    n, dim = 5000, 16
    q, k, v = normal(1, n, 1, dim), normal(2, n, 1, dim), normal(3, n, 1, dim)
    cache = paged(open_backend(2, max_rows=8192), [k], [v], "float32", 64)
    slopes = np.array([0.5], np.float32)
    out = cache.attend([(0, n - 20, n)], q[n - 20 :], 0.2, slopes=slopes)
    want = exact(q[n - 300 :], k[n - 300 :], v[n - 300 :], 0.2, slopes=slopes)[-20:]
    assert np.abs(out - want).max() < 2e-6


# head_dim, heads, kv heads: what the tensor cores take, in the groups of either width of the decode kernel
TILED = [(64, 8, 8, 0.0), (64, 16, 1, 0.0), (128, 8, 1, 30.0), (128, 12, 1, 0.0), (256, 4, 2, 0.0)]


@pytest.mark.parametrize(("dim", "heads", "kv", "cap"), TILED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_tensor_cores(cuda: str, paged: type, dim: int, heads: int, kv: int, cap: float, dtype: str) -> None:
    """Decode and prefill with extras: near float64, and of equal bits."""
    backend = Backend(cuda, max_rows=4096, dtype=dtype, library=hardware.cuda_library())
    n = 700
    q, k, v = (x.astype(KINDS[dtype]) for x in (normal(1, n, heads, dim), normal(2, n, kv, dim), normal(3, n, kv, dim)))
    table = np.random.default_rng(3).permutation(np.arange(1, 1 + -(-n // 16), dtype=np.int32))[None]
    pool = backend.kv_pool(table.size + 1, kv, dim, dtype, 16)
    seqs = np.zeros(n, np.int32)

    def batch(first: int, end: int) -> tuple[Array, Array, Array]:
        return np.arange(first, end, dtype=np.int32), seqs[first:end], np.array([0, end - first], np.int32)

    backend.kv_write(pool, batch(0, n), table, *(x.view(np.uint16).reshape(n, -1) for x in (k, v)))
    every: dict[str, Any] = {"slopes": slopes_of(heads), "sinks": normal(4, heads)}
    for extras, window in (
        ({"slopes": every["slopes"]}, 0),
        ({"sinks": every["sinks"]}, 100),
        ({"chunk": 90}, 90),
        (every, 0),
        ({**every, "chunk": 300}, 300),
    ):

        def attend(first: int, end: int, window: int = window, extras: dict[str, Any] = extras) -> Array:
            out = np.empty((end - first, heads * dim), np.uint16)
            rows = np.ascontiguousarray(q[first:end]).view(np.uint16).reshape(end - first, -1)
            backend.attention(pool, batch(first, end), table, rows, out, dim**-0.5, window, cap, **extras)
            return out.view(KINDS[dtype]).reshape(end - first, heads, dim)

        out = attend(0, n)
        want = exact(q, k, v, dim**-0.5, cap, window, **extras)
        assert np.abs(out.astype(np.float64) - want).max() < (0.03 if dtype == "bfloat16" else 0.006)
        for p in (0, 1, 63, 64, 89, 90, 255, 256, 300, 511, 512, n - 1):
            assert attend(p, p + 1).tobytes() == out[p].tobytes(), (p, list(extras))
        for first, end in ((1, 66), (250, 300), (0, 513), (511, n)):
            assert attend(first, end).tobytes() == out[first:end].tobytes(), (first, end, list(extras))


SPANS = [(3, 70), (120, 121), (190, 330), (330, 333), (500, 640), (760, 1300)]
"""Rows that see each other; the third one ends in the tile of keys of the fourth, and the last one has nine tiles."""
PARTS = [(0, 1400), (3, 70), (0, 190), (121, 333), (190, 500), (330, 700), (640, 700), (70, 190), (499, 641), (730, 1400)]
"""Steps, which do not cut spans."""


def ends_of(n: int) -> Array:
    ends = np.arange(1, n + 1, dtype=np.int32)
    for first, end in SPANS:
        ends[first:end] = end
    return ends


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (50, 20.0)])
def test_rows_that_see_each_other(window: int, cap: float, open_backend: Open, paged: type) -> None:
    n, heads, dim = 1400, 4, 32
    q, k, v = normal(1, n, heads, dim), normal(2, n, 2, dim), normal(3, n, 2, dim)
    ends = ends_of(n)
    cache = paged(open_backend(2, max_rows=2048), [k], [v], "float32", 16)
    out = cache.attend([(0, 0, n)], q, 0.2, window, cap, ends=ends)
    assert np.abs(out - exact(q, k, v, 0.2, cap, window, ends=ends)).max() < 1e-5
    for first, end in PARTS:
        part = cache.attend([(0, first, end)], q[first:end], 0.2, window, cap, ends=np.ascontiguousarray(ends[first:end]))
        assert part.tobytes() == out[first:end].tobytes(), (first, end)
    plain = cache.attend([(0, 640, 760)], q[640:760], 0.2, window, cap)
    assert plain.tobytes() == out[640:760].tobytes()


@pytest.mark.parametrize(("dim", "heads", "kv", "cap"), [(64, 8, 8, 0.0), (128, 12, 1, 0.0), (256, 4, 2, 30.0)])
def test_rows_that_see_each_other_on_tensor_cores(cuda: str, dim: int, heads: int, kv: int, cap: float) -> None:
    """The bits of a row do not depend on whether other rows of the step see later ones."""
    backend, n = Backend(cuda, max_rows=4096, dtype="bfloat16", library=hardware.cuda_library()), 1400
    kind = KINDS["bfloat16"]
    q, k, v = (x.astype(kind) for x in (normal(1, n, heads, dim), normal(2, n, kv, dim), normal(3, n, kv, dim)))
    table = np.random.default_rng(3).permutation(np.arange(1, 1 + -(-n // 16), dtype=np.int32))[None]
    pool, seqs, ends = backend.kv_pool(table.size + 1, kv, dim, "bfloat16", 16), np.zeros(n, np.int32), ends_of(n)

    def batch(first: int, end: int) -> tuple[Array, Array, Array]:
        return np.arange(first, end, dtype=np.int32), seqs[first:end], np.array([0, end - first], np.int32)

    backend.kv_write(pool, batch(0, n), table, *(x.view(np.uint16).reshape(n, -1) for x in (k, v)))

    def attend(first: int, end: int, window: int, seen: Array | None) -> Array:
        out = np.empty((end - first, heads * dim), np.uint16)
        rows = np.ascontiguousarray(q[first:end]).view(np.uint16).reshape(end - first, -1)
        seen = None if seen is None else np.ascontiguousarray(seen[first:end])
        backend.attention(pool, batch(first, end), table, rows, out, dim**-0.5, window, cap, ends=seen)
        return out.view(kind).reshape(end - first, heads, dim)

    for window in (0, 50):
        out = attend(0, n, window, ends)
        want = exact(q, k, v, dim**-0.5, cap, window, ends=ends)
        assert np.abs(out.astype(np.float64) - want).max() < 0.03
        for first, end in PARTS:
            assert attend(first, end, window, ends).tobytes() == out[first:end].tobytes(), (first, end, window)
        for first, end in ((640, 700), (120, 121), (699, 700), (75, 190)):
            assert attend(first, end, window, None).tobytes() == out[first:end].tobytes(), (first, end, window)
