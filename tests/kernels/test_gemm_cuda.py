"""Linears of many rows on a CUDA device: every tile gives the bits of the plain chain, and writes its own rows alone."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROWS = (65, 100, 128, 129, 191, 200, 256, 300, 448, 512, 700, 1000, 1100)


@pytest.fixture(scope="module")
def opened(cuda: str) -> Callable[[str], Backend]:
    """The device's backend with a type of activations."""
    return lambda dtype: Backend(cuda, max_rows=1100, dtype=dtype, library=hardware.cuda_library())


def wide(rng: np.random.Generator, rows: int, cols: int, kind: type) -> Array:
    """Values with magnitudes over four decades."""
    return (rng.standard_normal((rows, cols)) * 10.0 ** rng.uniform(-3, 1, (rows, cols))).astype(kind)


def plain(backend: Backend, matrix: object, x: Array, n: int, is_float: bool, bias: Array | None = None) -> Array:
    """The linear of rows at odd addresses, which the copy engine cannot read."""
    shifted = np.zeros((len(x), x.shape[1] + 1), np.uint16)
    shifted[:, 1:] = x.view(np.uint16)
    y = np.zeros((len(x), n), np.float32 if is_float else np.uint16)
    backend.linear(matrix, shifted[:, 1:], y, bias, is_float_out=is_float)
    return y


@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize(("n", "k"), [(1032, 1024), (4096, 192), (6144, 576), (8200, 128), (19, 64), (1001, 320)])
def test_bits_of_the_plain_chain(n: int, k: int, activations: str, is_float: bool, opened: Callable[[str], Backend]) -> None:
    """Any number of rows and of columns of y; a row of NaN affects only itself."""
    rng = np.random.default_rng(n)
    backend, kind = opened(activations), KINDS[activations]
    weights = wide(rng, n, k, kind)
    matrix = backend.matrix([(activations, n, weights.view(np.uint8).reshape(n, -1))], k)
    x, bias = wide(rng, max(ROWS), k, kind), rng.standard_normal(n).astype(np.float32)
    x[37, ::2], x[37, 1::2] = np.nan, np.inf
    good = [row for row in range(max(ROWS)) if row != 37]
    expected = plain(backend, matrix, x, n, is_float, bias)
    for rows in ROWS:
        y = np.full((rows + 130, n), 7, expected.dtype)
        backend.linear(matrix, x[:rows].view(np.uint16), y[:rows], bias, is_float_out=is_float)
        assert backend.allocations == 0
        here = [row for row in good if row < rows]
        assert y[here].tobytes() == expected[here].tobytes()
        assert (y[rows:] == 7).all()
        bad = y[37] if is_float else y[37].view(kind).astype(np.float32)
        assert np.isnan(bad).all()


@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize("pad", [8, 3])
def test_strides_and_sums(pad: int, activations: str, opened: Callable[[str], Backend]) -> None:
    """Strided rows of x and y, a sum in place, and parts of one type."""
    rng = np.random.default_rng(pad)
    backend, kind, n, k = opened(activations), KINDS[activations], 1000, 256
    parts = [wide(rng, rows, k, kind) for rows in (600, 200, 200)]
    matrix = backend.matrix([(activations, len(w), w.view(np.uint8).reshape(len(w), -1)) for w in parts], k)
    for rows in (65, 130, 520):
        x = wide(rng, rows, k + 64, kind)
        y = wide(rng, rows, n + 2 * pad, kind)
        before, other = y.copy(), np.ascontiguousarray(y[:, pad : pad + n])
        product = plain(backend, matrix, np.ascontiguousarray(x[:, :k]), n, False).view(kind)
        inside = y.view(np.uint16)[:, pad : pad + n]
        backend.linear(matrix, x.view(np.uint16)[:, :k], inside, None, inside)
        expected = (product.astype(np.float32) + other.astype(np.float32)).astype(kind)
        assert np.ascontiguousarray(y[:, pad : pad + n]).tobytes() == expected.tobytes()
        assert y[:, :pad].tobytes() == before[:, :pad].tobytes()
        assert y[:, pad + n :].tobytes() == before[:, pad + n :].tobytes()


@pytest.mark.parametrize("act", range(5))
@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize(("n", "k"), [(4104, 256), (200, 576)])
def test_products_equal_two_steps(n: int, k: int, activations: str, act: int, opened: Callable[[str], Backend]) -> None:
    """act(gate) * up of one launch has the bits of the plain chain, rounded, and the separate product; with bias, too."""
    rng = np.random.default_rng(n)
    backend, kind = opened(activations), KINDS[activations]
    parts = [wide(rng, n, k, kind) for _ in range(2)]
    matrix = backend.matrix([(activations, n, w.view(np.uint8).reshape(n, -1)) for w in parts], k)
    x = wide(rng, 700, k, kind)
    for bias in (None, rng.standard_normal(2 * n).astype(np.float32)):
        both = plain(backend, matrix, x, 2 * n, False, bias)
        expected = np.zeros((len(x), n), np.uint16)
        backend.gated(both[:, :n], both[:, n:], expected, act)
        for rows in (65, 129, 256, 700):
            y, mid = np.full((rows + 64, n + 8), 7, np.uint16), np.zeros((rows, 2 * n), np.uint16)
            backend.linear(matrix, x[:rows].view(np.uint16), y[:rows, :n], bias, act=act, mid=mid)
            assert y[:rows, :n].tobytes() == expected[:rows].tobytes()
            assert (y[rows:] == 7).all() and (y[:, n:] == 7).all()
