"""Layer norm over whole rows against float64; a row's bits depend on nothing but the row."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Open = Callable[..., Backend]
TYPES: dict[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [1, 24, 40, 384, 1030, 4096])
def test_values_and_rows(width: int, has_bias: bool, open_backend: Open) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((70, width + 3)) * 10.0 ** rng.uniform(-3, 3, (70, 1)) + 5).astype(np.float32)
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    view, wide = x[:, :width], x[:, :width].astype(np.float64)
    shifted = wide - wide.mean(-1, keepdims=True)
    unit = shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + 1e-5)
    exact = unit * weight.astype(np.float64) + (bias if has_bias else 0)
    outs = []
    for threads in (1, 2, 5):
        backend = open_backend(threads)
        out = np.full((70, width), np.nan, np.float32)
        backend.layer_norm(view, weight, bias if has_bias else None, out, 1e-5)
        assert backend.allocations == 0
        outs.append(out.tobytes())
        for first, rows in ((0, 1), (69, 1), (3, 7), (20, 50)):
            part = np.empty((rows, width), np.float32)
            backend.layer_norm(view[first : first + rows], weight, bias if has_bias else None, part, 1e-5)
            assert part.tobytes() == out[first : first + rows].tobytes()
    assert len(set(outs)) == 1
    # The mean's error counts against the spread of the row: values around 5 with a spread of 0.001 lose some digits.
    slack = 1e-6 + 3e-7 * np.abs(wide).max(-1, keepdims=True) / (np.sqrt((shifted**2).mean(-1, keepdims=True) + 1e-5))
    assert (np.abs(out - exact) <= slack * (1 + np.abs(exact) + np.abs(weight))).all()
    whole = x.copy()
    backend.layer_norm(whole[:, :width], weight, bias if has_bias else None, whole[:, :width], 1e-5)  # in place
    assert whole[:, :width].tobytes() == outs[0]
    assert whole[:, width:].tobytes() == x[:, width:].tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [40, 384, 1001, 4096])
def test_device_types(width: int, dtype: str, cuda: str) -> None:
    rng = np.random.default_rng(width)
    backend = Backend(cuda, dtype=dtype, library=hardware.cuda_library())
    x, out = rng.standard_normal((37, width)).astype(TYPES[dtype]), np.zeros((37, width), TYPES[dtype])
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    form = "f4" if dtype == "float32" else "i2"
    backend.layer_norm(x.view(form), weight, bias, out.view(form), 1e-6)
    wide = x.astype(np.float64)
    shifted = wide - wide.mean(-1, keepdims=True)
    exact = shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + 1e-6) * weight + bias
    tolerance = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4.1e-3}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=tolerance, atol=tolerance)
    for part in (slice(0, 1), slice(36, 37), slice(5, 25)):
        alone = np.zeros_like(out[part])
        backend.layer_norm(x[part].view(form), weight, bias, alone.view(form), 1e-6)
        assert alone.tobytes() == out[part].tobytes()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size", "heads"), [(1, 3), (24, 4), (128, 16), (300, 3)])
def test_weights_of_each_head(size: int, heads: int, has_bias: bool, open_backend: Open) -> None:
    """Weights per head or for all heads equal the norm of each head alone; no weights equal ones."""
    rng = np.random.default_rng(size)
    x = (rng.standard_normal((23, heads * size)) + 2).astype(np.float32)
    weight, bias = rng.standard_normal((2, heads, size)).astype(np.float32)
    backend = open_backend(2)
    out, shared, plain, ones = (np.full_like(x, np.nan) for _ in range(4))
    backend.layer_norm(x, weight, bias if has_bias else None, out, 1e-6, heads, size)
    backend.layer_norm(x, weight[0], bias[0] if has_bias else None, shared, 1e-6, heads)
    backend.layer_norm(x, None, None, plain, 1e-6, heads)
    backend.layer_norm(x, np.ones(size, np.float32), None, ones, 1e-6, heads)
    assert plain.tobytes() == ones.tobytes()
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        part = np.ascontiguousarray(x[:, columns])
        for each, whole in ((head, out), (0, shared)):
            alone = np.full((23, size), np.nan, np.float32)
            backend.layer_norm(part, weight[each], bias[each] if has_bias else None, alone, 1e-6)
            assert alone.tobytes() == np.ascontiguousarray(whole[:, columns]).tobytes()
