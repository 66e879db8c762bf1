"""RMS norm over whole rows and over heads against float64; a row's bits depend on nothing but the row."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
Open = Callable[..., Backend]


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


TYPES: dict[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def normed(backend: Backend, x: Array, weight: Array, heads: int = 1) -> Array:
    out = np.zeros_like(x)
    backend.rms_norm(x.view(code(x)), weight, out.view(code(x)), 1e-6, heads)
    assert backend.allocations == 0
    return out


def code(x: Array) -> str:
    """A format that the buffer protocol knows."""
    return "f4" if x.itemsize == 4 else "i2"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width_heads", ["64", "320", "576", "777", "4096", "5120", "14336", "20480", "1024/8", "1600/20"])
def test_device_types(width_heads: str, dtype: str, cuda: str) -> None:
    """Every path through the kernels: near float64 for each type, equal bits for a row alone and for unaligned rows."""
    width, heads = (*map(int, width_heads.split("/")), 1)[:2]
    rng = np.random.default_rng(width)
    backend = Backend(cuda, dtype=dtype, library=hardware.cuda_library())
    x = rng.standard_normal((37, width + 8)).astype(TYPES[dtype])
    weight = rng.standard_normal(width // heads).astype(np.float32)
    whole = normed(backend, x[:, :width], weight, heads)
    wide = x[:, :width].astype(np.float64).reshape(37, heads, -1)
    exact = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)).reshape(37, width)
    tolerance = {"float32": 4e-7, "float16": 6e-4, "bfloat16": 4.1e-3}[dtype]
    np.testing.assert_allclose(whole.astype(np.float64), exact, rtol=tolerance, atol=1e-7)
    for part in (slice(0, 1), slice(36, 37), slice(5, 25)):
        assert normed(backend, x[part, :width], weight, heads).tobytes() == whole[part].tobytes()
    moved = np.zeros((37, width + 11), TYPES[dtype])
    moved[:, 3 : 3 + width] = x[:, :width]
    assert normed(backend, moved[:, 3 : 3 + width], weight, heads).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [40, 256, 576, 1001, 4096, 8192, 12288])
def test_add_norm_is_add_and_norm(width: int, dtype: str, cuda: str) -> None:
    rng = np.random.default_rng(width)
    backend = Backend(cuda, dtype=dtype, library=hardware.cuda_library())
    a, b = rng.standard_normal((2, 23, width)).astype(TYPES[dtype])
    weight = rng.standard_normal(width).astype(np.float32)
    form = code(a)
    total = np.zeros_like(a)
    backend.add(a.view(form), b.view(form), total.view(form))
    want = normed(backend, total, weight)
    for rows in (1, 23):
        own, out = np.zeros((2, rows, width), TYPES[dtype])
        backend.add_rms_norm(a[:rows].view(form), b[:rows].view(form), own.view(form), weight, out.view(form), 1e-6)
        assert backend.allocations == 0
        assert own.tobytes() == total[:rows].tobytes() and out.tobytes() == want[:rows].tobytes()
    inner = rng.standard_normal(width).astype(np.float32)
    middle = normed(backend, b, inner)
    backend.add(a.view(form), middle.view(form), total.view(form))
    want = normed(backend, total, weight)
    for rows in (1, 23):
        own, out = np.zeros((2, rows, width), TYPES[dtype])
        terms = a[:rows].view(form), b[:rows].view(form)
        backend.add_rms_norm(*terms, own.view(form), weight, out.view(form), 1e-6, inner, 1e-6)
        assert own.tobytes() == total[:rows].tobytes() and out.tobytes() == want[:rows].tobytes()
    own, out = a.copy(), np.zeros_like(a)
    backend.add_rms_norm(own.view(form), b.view(form), own.view(form), weight, out.view(form), 1e-6, inner, 1e-6)
    assert own.tobytes() == total.tobytes() and out.tobytes() == want.tobytes()
    backend.add(a.view(form), b.view(form), total.view(form))
    want = normed(backend, total, weight)
    for term in (a.copy(), b.copy()):
        mine, other = (term, b) if term.tobytes() == a.tobytes() else (term, a)
        out = np.zeros_like(a)
        backend.add_rms_norm(mine.view(form), other.view(form), mine.view(form), weight, out.view(form), 1e-6)
        assert mine.tobytes() == total.tobytes() and out.tobytes() == want.tobytes()


@pytest.mark.parametrize(("size", "heads"), [(1, 3), (24, 4), (64, 5), (128, 16), (256, 2), (300, 3), (1030, 1)])
def test_weights_of_each_head(size: int, heads: int, open_backend: Open) -> None:
    """Weights per head equal the norm of each head alone; no weights equal ones."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((23, heads * size)).astype(np.float32)
    weight = rng.standard_normal((heads, size)).astype(np.float32)
    backend = open_backend(2)
    out, plain, ones = (np.full_like(x, np.nan) for _ in range(3))
    backend.rms_norm(x, weight, out, 1e-6, heads, size)
    backend.rms_norm(x, None, plain, 1e-6, heads)
    backend.rms_norm(x, np.ones(size, np.float32), ones, 1e-6, heads)
    assert plain.tobytes() == ones.tobytes()
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        alone = np.full((23, size), np.nan, np.float32)
        backend.rms_norm(np.ascontiguousarray(x[:, columns]), weight[head], alone, 1e-6)
        assert alone.tobytes() == np.ascontiguousarray(out[:, columns]).tobytes()
