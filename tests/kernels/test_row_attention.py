"""Attention of rows over their whole sequence against float64; a row's bits depend on nothing but its sequence."""

import itertools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
Open = Callable[..., Backend]
TYPES: dict[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LENGTHS = [1, 7, 64, 130, 16]


def starts(lengths: Sequence[int]) -> Array:
    return np.cumsum([0, *lengths]).astype(np.int32)


def exact(q: Array, k: Array, v: Array, lengths: Sequence[int], heads: tuple[int, int], scale: float) -> Array:
    n_heads, n_kv = heads
    parts, at = [], starts(lengths)
    for first, end in itertools.pairwise(at):
        rows = slice(first, end)
        a = q[rows].astype(np.float64).reshape(end - first, n_heads, -1).transpose(1, 0, 2)
        b, c = (
            x[rows].astype(np.float64).reshape(end - first, n_kv, -1).transpose(1, 0, 2).repeat(n_heads // n_kv, 0)
            for x in (k, v)
        )
        scores = a @ b.transpose(0, 2, 1) * scale
        p = np.exp(scores - scores.max(-1, keepdims=True))
        parts.append((p / p.sum(-1, keepdims=True) @ c).transpose(1, 0, 2).reshape(end - first, -1))
    return np.concatenate(parts)


@pytest.mark.parametrize(("heads", "head_dim"), [((12, 12), 32), ((4, 2), 24), ((2, 1), 100), ((3, 3), 5), ((2, 1), 300)])
def test_values_and_rows(heads: tuple[int, int], head_dim: int, open_backend: Open) -> None:
    rng, n = np.random.default_rng(head_dim), sum(LENGTHS)
    width, kv_width, scale = heads[0] * head_dim, heads[1] * head_dim, head_dim**-0.5
    rows = (3 * rng.standard_normal((n, width + 2 * kv_width))).astype(np.float32)
    q, k, v = rows[:, :width], rows[:, width : width + kv_width], rows[:, width + kv_width :]
    outs = []
    for threads in (1, 2, 5):
        backend = open_backend(threads)
        padded = np.full((n, width + 3), -7, np.float32)
        backend.row_attention(starts(LENGTHS), q, k, v, padded[:, :width], *heads, scale)
        assert backend.allocations == 0 and (padded[:, width:] == -7).all()
        outs.append(padded[:, :width].tobytes())
    assert len(set(outs)) == 1
    out = padded[:, :width]
    assert np.abs(out - exact(q, k, v, LENGTHS, heads, scale)).max() <= 1e-5 * np.abs(v).max()  # scores up to 90
    at = starts(LENGTHS)
    for first, end in [*itertools.pairwise(at), (at[1], at[3])]:
        own = at[(at >= first) & (at <= end)] - first
        alone = np.empty((end - first, width), np.float32)
        part = slice(first, end)
        backend.row_attention(own.astype(np.int32), q[part], k[part], v[part], alone, *heads, scale)
        assert alone.tobytes() == out[part].tobytes()


def test_long_and_peaked(open_backend: Open) -> None:
    """The longest allowed sequence, and scores far apart."""
    rng = np.random.default_rng(0)
    q, k, v = (20 * rng.standard_normal((3, 512, 16))).astype(np.float32)
    out = np.empty_like(q)
    backend = open_backend(2)
    backend.row_attention(starts([512]), q, k, v, out, 1, 1, 0.25)
    assert np.abs(out - exact(q, k, v, [512], (1, 1), 0.25)).max() <= 1e-2  # scores of thousands err by some 1e-4
    q[5, 3] = np.nan
    backend.row_attention(starts([512]), q, k, v, out, 1, 1, 0.25)
    assert np.isnan(out[5]).all() and np.isfinite(np.delete(out, 5, 0)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_device_types(dtype: str, cuda: str) -> None:
    rng, heads, n = np.random.default_rng(3), (4, 2), sum(LENGTHS)
    backend = Backend(cuda, dtype=dtype, library=hardware.cuda_library())
    q, k, v = (rng.standard_normal((n, width)).astype(TYPES[dtype]) for width in (128, 64, 64))
    out = np.zeros((n, 128), TYPES[dtype])
    form = "f4" if dtype == "float32" else "i2"
    backend.row_attention(starts(LENGTHS), q.view(form), k.view(form), v.view(form), out.view(form), *heads, 0.18)
    tolerance = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert np.abs(out.astype(np.float64) - exact(q, k, v, LENGTHS, heads, 0.18)).max() <= tolerance * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((3, 3), 64), ((4, 2), 72), ((2, 2), 80), ((2, 1), 128), ((3, 3), 88), ((5, 5), 40)]
)
def test_on_tensor_cores(dtype: str, heads: tuple[int, int], head_dim: int, cuda: str) -> None:
    """Segments of one row to many tiles; equal bits of each alone, and of columns of one wide value."""
    lengths = [1, 63, 64, 65, 17, 700, 128, *[3] * 300, 129]
    rng, n, kind = np.random.default_rng(head_dim), sum(lengths), TYPES[dtype]
    backend = Backend(cuda, dtype=dtype, library=hardware.cuda_library())
    widths = [heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim]
    every = rng.standard_normal((n, sum(widths))).astype(kind)
    q, k, v = (np.ascontiguousarray(part) for part in np.split(every, np.cumsum(widths)[:-1], 1))
    scale, out = 2 * head_dim**-0.5, np.zeros((n, widths[0]), kind)
    backend.row_attention(starts(lengths), q.view("i2"), k.view("i2"), v.view("i2"), out.view("i2"), *heads, scale)
    tolerance = {"float16": 3e-3, "bfloat16": 2.5e-2}[dtype]
    assert np.abs(out.astype(np.float64) - exact(q, k, v, lengths, heads, scale)).max() <= tolerance
    at = starts(lengths)
    for s in (0, 1, 3, 4, 5, 8, len(lengths) - 1):
        part, alone = slice(at[s], at[s + 1]), np.zeros((lengths[s], widths[0]), kind)
        own = [x[part].view("i2") for x in (q, k, v)]
        backend.row_attention(starts(lengths[s : s + 1]), *own, alone.view("i2"), *heads, scale)
        assert alone.tobytes() == out[part].tobytes(), lengths[s]


def test_squares_and_distances(open_backend: Open) -> None:
    """Scores with two tables of distances, whose rows are shared out; and rows that do not depend on other squares."""
    rng, side, heads, head_dim, n = np.random.default_rng(8), 5, 3, 20, 4
    rows, width = n * side**2, heads * head_dim
    q, k, v = (rng.standard_normal((rows, width)).astype(np.float32) for _ in range(3))
    lines, columns = (rng.standard_normal((7, head_dim)).astype(np.float32) for _ in range(2))
    chosen = rng.integers(0, 7, (2 * side - 1, 2)).astype(np.int32)
    shares = rng.random((2 * side - 1, 2)).astype(np.float32)
    y, x = np.indices((side, side)).reshape(2, -1)
    by_line, by_column = ((shares[..., None] * table[chosen]).sum(1).astype(np.float64) for table in (lines, columns))
    bias = by_line[y[:, None] - y + side - 1] + by_column[x[:, None] - x + side - 1]  # [query, key, head_dim]
    a, b, c = (part.astype(np.float64).reshape(n, side**2, heads, head_dim).transpose(0, 2, 1, 3) for part in (q, k, v))
    scores = 0.3 * a @ b.transpose(0, 1, 3, 2) + np.einsum("nhic,ijc->nhij", a, bias)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True) @ c).transpose(0, 2, 1, 3).reshape(rows, width)
    tables = [lines.reshape(-1), columns.reshape(-1), chosen, shares]
    outs = []
    for threads in (1, 3):
        out = np.full((rows, width + 3), -7, np.float32)
        open_backend(threads).grid_attention(starts([side**2] * n), tables, q, k, v, out[:, :width], heads, 0.3)
        assert np.abs(out[:, :width] - want).max() <= 2e-5 * np.abs(v).max() and (out[:, width:] == -7).all()
        outs.append(out.tobytes())
    assert len(set(outs)) == 1
    alone, part = np.empty((side**2, width), np.float32), slice(side**2, 2 * side**2)
    open_backend(2).grid_attention(starts([side**2]), tables, q[part], k[part], v[part], alone, heads, 0.3)
    assert alone.tobytes() == out[part, :width].tobytes()
