"""Gated activations, sums and selected rows against float64; elements never depend on their neighbours."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
Open = Callable[..., Backend]
erf = np.vectorize(math.erf, otypes=[np.float64])


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu2(x: Array) -> Array:
    return np.maximum(x, 0) ** 2


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


ACTS = [silu, gelu, gelu_tanh, relu, relu2, np.tanh, sigmoid]


def gated(backend: Backend, gate: Array, up: Array, act: int) -> Array:
    out = np.full(gate.shape, np.nan, np.float32)
    backend.gated(gate, up, out, act)
    assert backend.allocations == 0
    return out


@pytest.mark.parametrize("width", [1, 40, 1024, 2051])
def test_one_gate_for_all_columns(width: int, open_backend: Open) -> None:
    rng = np.random.default_rng(width)
    gate = np.full((9, 5), np.nan, np.float32)
    gate[:, 2] = 3 * rng.standard_normal(9)
    up, backend = rng.standard_normal((9, width)).astype(np.float32), open_backend(3)
    for act in (0, 6):
        out = np.full_like(up, np.nan)
        backend.gated(gate[:, 2:3], up, out, act)
        wide = np.ascontiguousarray(np.broadcast_to(gate[:, 2:3], up.shape))
        assert out.tobytes() == gated(backend, wide, up, act).tobytes()
        alone = np.full_like(up[4:5], np.nan)
        backend.gated(gate[4:5, 2:3], up[4:5], alone, act)
        assert alone.tobytes() == out[4:5].tobytes()


@pytest.mark.parametrize("act", range(7))
def test_gated_values(act: int, open_backend: Open) -> None:
    """Near float64 over the whole range; where 1 + erf and 1 + tanh cancel, to the last bit of 1."""
    backend = open_backend(2)
    gate = np.concatenate([np.linspace(-12, 12, 48001), [0.0, 1e-20, -1e-20, 80, -80, 300]]).astype(np.float32)[None, :]
    ones = np.ones_like(gate)
    out = gated(backend, gate, ones, act)
    with np.errstate(over="ignore"):
        exact = ACTS[act](gate.astype(np.float64))
    slack = 2e-7 * np.abs(gate) if act in (1, 2) else 0
    assert (np.abs(out - exact) <= 5e-7 * np.abs(exact) + slack + 1e-30).all()
    plain = np.full_like(gate, np.nan)
    backend.act(gate, plain, act)
    assert backend.allocations == 0 and plain.tobytes() == out.tobytes()
    assert np.isnan(gated(backend, np.full((1, 5), np.nan, np.float32), np.ones((1, 5), np.float32), act)).all()


@pytest.mark.parametrize("act", range(6))
@pytest.mark.parametrize("width", [1, 24, 1030, 3072])
def test_gated_rows(act: int, width: int, open_backend: Open) -> None:
    rng = np.random.default_rng(width)
    both = rng.standard_normal((33, 2 * width)).astype(np.float32)
    gate, up = both[:, :width], both[:, width:]
    outs = [gated(open_backend(threads), gate, up, act) for threads in (1, 2, 5)]
    assert len({out.tobytes() for out in outs}) == 1
    backend = open_backend(2)
    for first, rows in ((0, 1), (32, 1), (5, 20)):
        part = gated(backend, gate[first : first + rows], up[first : first + rows], act)
        assert part.tobytes() == outs[0][first : first + rows].tobytes()
    wanted = np.full((33, width), np.nan, np.float32)
    backend.act(gate, wanted, act)
    for first, rows in ((0, 1), (32, 1), (5, 20)):
        part = np.empty((rows, width), np.float32)
        backend.act(gate[first : first + rows], part, act)
        assert part.tobytes() == wanted[first : first + rows].tobytes()
    backend.gated(gate, up, gate, act)
    assert gate.tobytes() == outs[0].tobytes()
    backend.act(both[:, width:], both[:, width:], act)
    assert both[:, :width].tobytes() == outs[0].tobytes()


@pytest.mark.parametrize("width", [1, 7, 576, 2049])
def test_add(width: int, open_backend: Open) -> None:
    rng = np.random.default_rng(width)
    a, b = rng.standard_normal((2, 9, width)).astype(np.float32)
    backend = open_backend(2)
    expected = a + b
    out = np.empty_like(a)
    backend.add(a, b, out)
    assert out.tobytes() == expected.tobytes()
    backend.add(a, b, a)
    assert a.tobytes() == expected.tobytes()


def test_select(open_backend: Open) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 1500)).astype(np.float32)
    rows = np.array([39, 0, 7, 7, 12], np.int32)
    out = np.empty((5, 1500), np.float32)
    open_backend(2).select(x, rows, out)
    assert out.tobytes() == x[rows].tobytes()


def xielu(x: Array, weights: Array) -> Array:
    alpha_p, alpha_n, beta, eps = weights
    bent = (np.expm1(np.minimum(x, eps)) - x) * (beta + np.logaddexp(0, alpha_n))
    return np.where(x > 0, np.logaddexp(0, alpha_p) * x * x, bent) + beta * x


@pytest.mark.parametrize("weights", [(0.2, -0.9, 0.5, -1e-6), (25.0, 3.0, 1.5, -0.25)])
def test_xielu(weights: tuple[float, ...], open_backend: Open) -> None:
    w = np.array(weights, np.float32)
    x = np.concatenate([np.linspace(-9, 9, 4001), [0.0, 1e-20, -1e-20, 1e-5, -1e-5, -120]]).astype(np.float32)[None, :]
    out = np.full_like(x, np.nan)
    open_backend(2).act(x, out, 8, weights=w)
    exact = xielu(x.astype(np.float64), w.astype(np.float64))
    # The difference of two small numbers has the absolute error of its terms.
    assert (np.abs(out - exact) <= 6e-7 * np.abs(exact) + 1e-6 * (1 + np.abs(x)) * np.logaddexp(0, w[1])).all()
    for column in (0, 17, x.shape[1] - 1):
        alone = np.empty((1, 1), np.float32)
        open_backend(1).act(x[:, column : column + 1].copy(), alone, 8, weights=w)
        assert alone[0, 0] == out[0, column]
    assert np.isnan(out).sum() == 0
    open_backend(1).act(np.full((1, 3), np.nan, np.float32), alone := np.zeros((1, 3), np.float32), 8, weights=w)
    assert np.isnan(alone).all()


def test_clip(open_backend: Open) -> None:
    x = np.array([[-9.0, -0.5, -0.25, 0.0, 0.3, 0.5, 0.6, np.inf, -np.inf, np.nan]], np.float32)
    out = np.empty_like(x)
    open_backend(2).act(x, out, 7, 0.5)
    np.testing.assert_array_equal(out, np.clip(x, -0.5, 0.5))


@pytest.mark.parametrize("width", [1, 8, 99, 4099])
@pytest.mark.parametrize(("scale", "cap"), [(0.0625, 0.0), (1.0, 30.0), (0.5, 3.0)])
def test_logits(width: int, scale: float, cap: float, open_backend: Open) -> None:
    """Whole rows and parts of rows have the same bits; data between rows is not changed."""
    x = (np.random.default_rng(width).standard_normal((19, width + 3)) * 20).astype(np.float32)
    wide = x[:, :width].astype(np.float64) * scale
    exact = cap * np.tanh(wide / cap) if cap else wide
    outs = []
    for threads in (1, 2, 5):
        out = x.copy()
        backend = open_backend(threads)
        backend.scale_logits(out[:, :width], scale, cap)
        assert backend.allocations == 0
        assert out[:, width:].tobytes() == x[:, width:].tobytes()
        outs.append(out[:, :width].tobytes())
    assert len(set(outs)) == 1
    np.testing.assert_allclose(out[:, :width], exact, rtol=5e-7)
    for first, rows in ((0, 1), (18, 1), (3, 7)):
        part = x[first : first + rows].copy()
        backend.scale_logits(part[:, :width], scale, cap)
        assert part.tobytes() == out[first : first + rows].tobytes()


@pytest.mark.parametrize(("width", "few"), [(1, 1), (131, 25), (3000, 7), (3000, 2999)])
def test_logits_of_some_ids(width: int, few: int, open_backend: Open) -> None:
    backend, random = open_backend(2), np.random.default_rng(width)
    x = random.standard_normal((9, few + 3)).astype(np.float32)
    ids, sources = random.permutation(width)[:few], np.full(width, -1, np.float32)
    sources[ids] = np.arange(few)
    out, alone = np.full((9, width + 3), -7, np.float32), np.full((1, width), np.nan, np.float32)
    backend.spread_logits(x[:, :few], sources, out[:, :width])
    wanted = np.full((9, width), -1e30, np.float32)
    wanted[:, ids] = x[:, :few]
    assert backend.allocations == 0 and (out[:, width:] == -7).all()
    assert out[:, :width].tobytes() == wanted.tobytes()
    backend.spread_logits(x[4:5, :few], sources, alone)
    assert alone.tobytes() == wanted[4:5].tobytes()


def test_products_and_factors(open_backend: Open) -> None:
    """`gated` with identity is a product, and a row of factors scales columns, each with one rounding."""
    backend, random = open_backend(2), np.random.default_rng(0)
    for width in (1, 40, 1030, 3000):
        a, b = random.standard_normal((2, 7, width)).astype(np.float32)
        assert gated(backend, a, b, 9).tobytes() == (a * b).tobytes()
        factors = random.standard_normal(width).astype(np.float32)
        out = np.full_like(a, np.nan)
        backend.act(a, out, 10, weights=factors)
        assert backend.allocations == 0 and out.tobytes() == (a * factors).tobytes()


@pytest.mark.parametrize(("width", "taken"), [(1, 1), (40, 40), (1030, 1030), (3000, 7), (7, 3000)])
def test_columns_by_number(width: int, taken: int, open_backend: Open) -> None:
    backend, random = open_backend(2), np.random.default_rng(width)
    x = random.standard_normal((9, width + 3)).astype(np.float32)
    columns = random.integers(0, width, taken).astype(np.float32)
    out, alone = np.full((9, taken + 3), -7, np.float32), np.full((1, taken), np.nan, np.float32)
    backend.take(x[:, :width], columns, out[:, :taken])
    assert backend.allocations == 0 and (out[:, taken:] == -7).all()
    assert out[:, :taken].tobytes() == x[:, columns.astype(int)].tobytes()
    backend.take(x[4:5, :width], columns, alone)
    assert alone.tobytes() == out[4:5, :taken].tobytes()


@pytest.mark.parametrize("width", [1, 40, 1030, 3000])
def test_rows_scaled_by_their_positions(width: int, open_backend: Open) -> None:
    """The factor steps where the quotient does; a row has the same bits in any batch, and in place."""
    backend, random = open_backend(2), np.random.default_rng(width)
    x = random.standard_normal((9, width + 3)).astype(np.float32)
    for every, slope, first, positions in (
        (4, 0.5, 1, [0, 2, 3, 6, 7, 11, 12, 40, 1000]),
        (8192, 0.1, 1, [0, 8190, 8191, 8192, 16382, 16383, 65535, 1 << 20, (1 << 31) - 1]),
        (16, 0.3, 0, [0, 15, 16, 31, 32, 33, 47, 48, 10**6]),
    ):
        at = np.array(positions, np.int32)
        steps = (at.astype(np.int64) + first) // every
        out = np.full_like(x, -7)
        backend.position_scale(x[:, :width], at, out[:, :width], every, slope, first)
        assert backend.allocations == 0 and (out[:, width:] == -7).all()
        want = x[:, :width].astype(np.float64) * (1 + slope * np.log1p(steps))[:, None]
        assert (np.abs(out[:, :width] - want) <= 3e-7 * np.abs(want)).all()
        assert out[steps == 0, :width].tobytes() == x[steps == 0, :width].tobytes()
        again = x.copy()
        for row in range(9):
            part = again[row : row + 1]
            backend.position_scale(part[:, :width], at[row : row + 1], part[:, :width], every, slope, first)
        assert again[:, :width].tobytes() == out[:, :width].tobytes()
