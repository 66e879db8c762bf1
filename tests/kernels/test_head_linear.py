"""A product per head with some rows of one matrix, plain and transposed, against float64; equal bits alone and in a batch."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


# heads, key rows, value rows, columns
SHAPES = [(4, 16, 12, 24, "float32"), (3, 128, 128, 512, "bfloat16"), (16, 24, 8, 64, "float16"), (5, 7, 9, 30, "float32")]


@pytest.mark.parametrize(("heads", "keys", "values", "cols", "dtype"), SHAPES)
def test_both_products(heads: int, keys: int, values: int, cols: int, dtype: str, open_backend: Callable[..., object]) -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((heads, keys + values, cols), np.float32).astype(TYPES[dtype])
    n, extra = 37, 3
    x = rng.standard_normal((n, heads, keys + extra), np.float32)  # the operation reads the head of each part
    y = rng.standard_normal((n, heads, cols), np.float32)
    outs = []
    for threads in (1, 3):
        backend = open_backend(threads, max_rows=64, max_cols=512)
        matrix = backend.matrix([(dtype, heads * (keys + values), w.reshape(-1, cols))], cols)

        def product(a: Array, width: int, first: int, used: int, is_transposed: bool, b=backend, m=matrix) -> Array:
            flat = np.ascontiguousarray(a).reshape(len(a), -1)
            out = np.full((len(a), heads * width + 2), -7, np.float32)
            b.head_linear(m, flat, out[:, :-2], heads, keys + values, first, used, is_transposed)
            assert (out[:, -2:] == -7).all() and b.allocations == 0
            return np.ascontiguousarray(out[:, :-2]).reshape(len(a), heads, width)

        absorbed, back = product(x, cols, 0, keys, True), product(y, values, keys, values, False)
        outs.append(absorbed.tobytes() + back.tobytes())
        exact = w.astype(np.float64)
        want = np.einsum("rhk,hkc->rhc", x[..., :keys].astype(np.float64), exact[:, :keys])
        assert np.abs(absorbed - want).max() < 2e-6 * keys
        want = np.einsum("rhc,hvc->rhv", y.astype(np.float64), exact[:, keys:])
        assert np.abs(back - want).max() < 1e-6 * cols
        for r in (0, 17, n - 1):
            assert product(x[r : r + 1], cols, 0, keys, True).tobytes() == absorbed[r].tobytes()
            assert product(y[r : r + 1], values, keys, values, False).tobytes() == back[r].tobytes()
    assert outs[0] == outs[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores(dtype: str, cuda: str) -> None:
    """Activations of the weights' 16-bit type: right, and a row's bits are those that it has alone, in any number of rows."""
    heads, keys, values, cols, n = 3, 128, 128, 512, 150
    rng, kind = np.random.default_rng(2), TYPES[dtype]
    w = (rng.standard_normal((heads, keys + values, cols), np.float32) / 16).astype(kind)
    x, y = (rng.standard_normal((n, heads, width), np.float32).astype(kind) for width in (keys + 64, cols))
    backend = Backend(cuda, max_rows=256, max_cols=512, dtype=dtype, library=hardware.cuda_library())
    matrix = backend.matrix([(dtype, heads * (keys + values), w.reshape(-1, cols))], cols)
    exact = w.astype(np.float64)
    for a, width, first, used, is_transposed, want in (
        (x, cols, 0, keys, True, np.einsum("rhk,hkc->rhc", x[..., :keys].astype(np.float64), exact[:, :keys])),
        (y, values, keys, values, False, np.einsum("rhc,hvc->rhv", y.astype(np.float64), exact[:, keys:])),
    ):

        def product(rows: Array, w=width, f=first, u=used, t=is_transposed) -> Array:
            out = np.full((len(rows), heads * w + 8), 7, kind)
            flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
            backend.head_linear(matrix, flat.view(np.uint16), out[:, :-8].view(np.uint16), heads, keys + values, f, u, t)
            assert (out[:, -8:] == 7).all()
            return np.ascontiguousarray(out[:, :-8])

        whole = product(a)
        error = np.abs(whole.astype(np.float64).reshape(want.shape) - want).max() / np.abs(want).max()
        assert error < {"float16": 1e-3, "bfloat16": 5e-3}[dtype]
        for begin, end in ((0, 1), (149, 150), (3, 19), (20, 37), (60, 125)):
            assert product(a[begin:end]).tobytes() == whole[begin:end].tobytes(), (begin, end)
