"""RMS norm over whole rows and over heads against float64; a row's bits depend on nothing but the row."""

from collections.abc import Callable

import numpy as np
import pytest

from llmpy import _core

Open = Callable[..., _core.Backend]


@pytest.mark.parametrize(("width", "heads"), [(1, 1), (24, 1), (40, 1), (576, 1), (1024, 8), (1030, 1), (4096, 32)])
def test_values_and_rows(width: int, heads: int, open_backend: Open) -> None:
    rng = np.random.default_rng(width)
    eps, size = 1e-5, width // heads
    x = (rng.standard_normal((70, width + 3)) * 10.0 ** rng.uniform(-3, 3, (70, 1))).astype(np.float32)
    weight = rng.standard_normal(size).astype(np.float32)
    view = x[:, :width]
    wide = view.astype(np.float64).reshape(70, heads, size)
    exact = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)).reshape(70, width)
    outs = []
    for threads in (1, 2, 5):
        backend = open_backend(threads)
        out = np.full((70, width), np.nan, np.float32)
        backend.rms_norm(view, weight, out, eps, heads)
        assert backend.allocations == 0
        outs.append(out.tobytes())
        for first, rows in ((0, 1), (69, 1), (3, 7), (20, 50)):
            part = np.empty((rows, width), np.float32)
            backend.rms_norm(view[first : first + rows], weight, part, eps, heads)
            assert part.tobytes() == out[first : first + rows].tobytes()
    assert len(set(outs)) == 1
    np.testing.assert_allclose(out, exact, rtol=4e-7, atol=1e-30)
    whole = x.copy()
    backend.rms_norm(whole[:, :width], weight, whole[:, :width], eps, heads)  # in place
    assert whole[:, :width].tobytes() == outs[0]
    assert whole[:, width:].tobytes() == x[:, width:].tobytes()
