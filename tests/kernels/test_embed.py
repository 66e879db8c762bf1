"""Embedding rows: exact values of every part of a matrix (more types in test_linear.py), refused ids, no allocation."""

from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Open = Callable[..., Backend]


@pytest.mark.parametrize("threads", [1, 3])
def test_embed(open_backend: Open, threads: int) -> None:
    rng = np.random.default_rng(0)
    backend = open_backend(threads)
    first = rng.standard_normal((37, 72)).astype(np.float32)
    second = rng.standard_normal((50, 72)).astype(np.float16)
    matrix = backend.matrix([("float32", 37, first), ("float16", 50, second)], 72, 2)
    table = np.concatenate([first, second.astype(np.float32)])
    ids = np.array([0, 36, 37, 86, 86, 15, 52], np.int32)
    out = np.empty((7, 72), np.float32)
    backend.embed(matrix, ids, out)
    assert backend.allocations == 0
    assert out.tobytes() == table[ids].tobytes()
    backend.embed(matrix, ids, out, 8.5)
    assert out.tobytes() == (table[ids] * np.float32(8.5)).tobytes()
    backend.embed(matrix, ids, out, 0.125)
    assert out.tobytes() == (table[ids] * np.float32(0.125)).tobytes()
    backend.embed(matrix, ids[:3], out[:3], first_row=49)
    assert out[:3].tobytes() == table[ids[:3] + 49].tobytes()
    backend.embed(matrix, None, out, first_row=40)
    assert out.tobytes() == np.repeat(table[40:41], 7, 0).tobytes()
    if not backend.has_host_memory:  # nothing comes back from there but a NaN
        backend.embed(matrix, np.array([0, 87, -1], np.int32), out[:3])
        assert np.isnan(out[1:3]).all() and np.isfinite(out[0]).all()
        return
    for bad in (-1, 87):
        with pytest.raises(Exception, match="token id"):
            backend.embed(matrix, np.array([0, bad], np.int32), out[:2])
