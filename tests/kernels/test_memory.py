"""Memory of weights and pages is freed and allocated again at the same addresses, with or without its content."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import DeviceMemoryError, _core

ROWS, COLS = 512, 256
WEIGHTS, PAGES = 0, 1


@pytest.fixture
def backend(device: str, core_options: Callable[[str], dict[str, str]]) -> Backend:
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return Backend(**core_options(device), max_rows=64, max_cols=COLS, vocab_size=64, dtype=dtype)


def matrices(backend: Backend, count: int) -> list[tuple[_core.Matrix, np.ndarray]]:
    """Matrices of different sizes, and their values."""
    rng, made = np.random.default_rng(3), []
    for i in range(count):
        data = rng.standard_normal((ROWS * (i + 1), COLS)).astype(ml_dtypes.bfloat16)
        made.append((backend.matrix([("bfloat16", len(data), data.view(np.uint16))], COLS), data.astype(np.float32)))
    return made


def holds(backend: Backend, matrix: _core.Matrix, wanted: np.ndarray) -> bool:
    have = np.empty_like(wanted)
    backend.matrix_read(matrix, 0, len(wanted), have)
    return have.tobytes() == wanted.tobytes()


def test_what_was_saved_comes_back(backend: Backend) -> None:
    made = matrices(backend, 4)
    for _ in range(3):
        backend.pool_save(WEIGHTS)
        backend.pool_release(WEIGHTS)
        backend.pool_release(WEIGHTS)
        backend.pool_restore(WEIGHTS)
        backend.pool_restore(WEIGHTS)
        assert all(holds(backend, matrix, wanted) for matrix, wanted in made)


def test_what_was_not_saved_is_zero(backend: Backend) -> None:
    made = matrices(backend, 2)
    for _ in range(2):
        backend.pool_release(WEIGHTS)
        backend.pool_restore(WEIGHTS)
        assert all(holds(backend, matrix, np.zeros_like(wanted)) for matrix, wanted in made)
        for matrix, wanted in made:
            backend.matrix_write(matrix, 0, 0, len(wanted), wanted.astype(ml_dtypes.bfloat16).view(np.uint16))
        assert all(holds(backend, matrix, wanted) for matrix, wanted in made)


def test_uses_sleep_apart(backend: Backend) -> None:
    [(matrix, wanted)] = matrices(backend, 1)
    pool = backend.kv_pool(8, 2, 64, "bfloat16" if backend.description.startswith("cuda") else "float32", 16, fill=7)
    backend.pool_save(WEIGHTS)
    backend.pool_release(WEIGHTS)
    assert set(backend.kv_read(pool)) == {7}
    backend.pool_restore(WEIGHTS)
    backend.pool_release(PAGES)
    assert holds(backend, matrix, wanted)
    backend.pool_restore(PAGES)
    table, k = np.array([[1]], np.int32), ones(backend)
    batch = np.array([0], np.int32), np.array([0], np.int32), np.array([0, 1], np.int32)
    out = np.zeros_like(k)
    backend.kv_write(pool, batch, table, k, k)
    backend.attention(pool, batch, table, k, out, 1.0)
    assert (out == k).all()


def ones(backend: Backend) -> np.ndarray:
    """A row of ones, as the bits of the activations' type."""
    row = np.ones((1, 128), np.float32)
    return row.astype(ml_dtypes.bfloat16).view(np.uint16) if backend.description.startswith("cuda") else row


def test_all_come_back_or_none(core_options: Callable[[str], dict[str, str]]) -> None:
    """On the processor, where allocations can be made to fail."""
    backend = Backend(**core_options("cpu"), max_rows=64, max_cols=COLS, vocab_size=64)
    made = matrices(backend, 2)
    pools = [backend.kv_pool(8, 2, 64, "float32", 16, fill=7) for _ in range(3)]
    for use, count in ((WEIGHTS, 1), (PAGES, len(pools))):
        backend.pool_save(use)
        backend.pool_release(use)
        for n in range(count):
            _core.fail_allocation_after(n)
            try:
                with pytest.raises(DeviceMemoryError, match="the system has no memory for the"):
                    backend.pool_restore(use)
            finally:
                _core.fail_allocation_after(-1)
        backend.pool_restore(use)
    assert all(holds(backend, matrix, wanted) for matrix, wanted in made)
    assert all(set(backend.kv_read(pool)) == {7} for pool in pools)
