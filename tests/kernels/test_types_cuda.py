"""Small operations on two-byte activations: the float32 result of the same operation, rounded once.

Linears, norms and attention have separate tests.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Opened = tuple[Backend, Backend, type]


@pytest.fixture(scope="module", params=list(TYPES))
def opened(request: pytest.FixtureRequest, cuda: str, core_options: Callable[[str], dict[str, str]]) -> Opened:
    """The backend with a type of activations, the backend with float32, and the type."""
    narrow, wide = (Backend(**core_options(cuda), dtype=dtype) for dtype in (request.param, "float32"))
    return narrow, wide, TYPES[request.param]


def draw(kind: type, *shape: int) -> Array:
    return np.random.default_rng(shape[-1]).standard_normal(shape).astype(kind)


def words(x: Array) -> Array:
    """Items that the buffer protocol knows."""
    return x.view(np.uint16)


@pytest.mark.parametrize("act", range(5))
@pytest.mark.parametrize("width", [1, 24, 1030, 3072])
def test_gated(act: int, width: int, opened: Opened) -> None:
    narrow, wide, kind = opened
    both = draw(kind, 17, 2 * width)
    exact = np.empty((17, width), np.float32)
    floats = both.astype(np.float32)
    wide.gated(floats[:, :width], floats[:, width:], exact, act)
    out = np.empty((17, width), kind)
    narrow.gated(words(both)[:, :width], words(both)[:, width:], words(out), act)
    assert narrow.allocations == 0
    assert out.tobytes() == exact.astype(kind).tobytes()


@pytest.mark.parametrize("width", [1, 7, 576, 2049])
def test_add_and_select(width: int, opened: Opened) -> None:
    narrow, _, kind = opened
    a, b = draw(kind, 2, 9, width)
    want = (a.astype(np.float32) + b.astype(np.float32)).astype(kind)
    out = np.empty_like(a)
    narrow.add(words(a), words(b), words(out))
    assert out.tobytes() == want.tobytes()
    rows = np.array([8, 0, 3, 3], np.int32)
    chosen = np.empty((4, width), kind)
    narrow.select(words(a), rows, words(chosen))
    assert chosen.tobytes() == a[rows].tobytes()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "n_freqs"), [(128, 64), (80, 40), (24, 12), (40, 5), (256, 100)])
def test_rope_and_cache(dim: int, n_freqs: int, interleaved: bool, opened: Opened, paged: type) -> None:
    """Rotated rows, and the stored values, read back by attention with a window of one."""
    narrow, wide, kind = opened
    n, heads, kv = 33, 4, 2
    row = draw(kind, n, (heads + 2 * kv) * dim)
    table = np.empty((n, n_freqs, 2), np.float32)
    inv_freq = (10000.0 ** (-np.arange(n_freqs) / n_freqs)).astype(np.float32)
    wide.rope_table(np.arange(n, dtype=np.int32) * 37, inv_freq, table, 1.1)
    floats, own = row.astype(np.float32), words(row)
    middle, end = heads * dim, (heads + kv) * dim
    wide.rope(table, floats[:, :middle], floats[:, middle:end], dim, interleaved)
    narrow.rope(table, own[:, :middle], own[:, middle:end], dim, interleaved)
    assert row[:, :end].tobytes() == floats[:, :end].astype(kind).tobytes()
    batch, pages = paged.batch([(0, 0, n)], 1), np.array([[2, 4, 1]], np.int32)
    for dtype, stored in ({"float32": np.float32} | TYPES).items():
        pool, out = narrow.kv_pool(5, kv, dim, dtype, 16), np.zeros((n, heads * dim), kind)
        narrow.kv_write(pool, batch, pages, own[:, middle:end], own[:, end:])
        narrow.attention(pool, batch, pages, own[:, :middle], words(out), 0.1, 1)
        values = floats[:, end:].astype(stored).astype(kind).reshape(n, kv, dim).repeat(heads // kv, 1)
        assert (out + kind(0)).tobytes() == (values.reshape(n, -1) + kind(0)).tobytes()
