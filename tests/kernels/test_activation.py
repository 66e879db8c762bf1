"""Gated activations, sums and selected rows against float64; elements never depend on their neighbours."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmpy import _core

Array = np.ndarray
Open = Callable[..., _core.Backend]
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


ACTS = [silu, gelu, gelu_tanh, relu, relu2, np.tanh]


def gated(backend: _core.Backend, gate: Array, up: Array, act: int) -> Array:
    out = np.full(gate.shape, np.nan, np.float32)
    backend.gated(gate, up, out, act)
    assert backend.allocations == 0
    return out


@pytest.mark.parametrize("act", range(6))
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
