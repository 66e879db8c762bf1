"""Dummy weights: the same bits from every backend, equal to the formula of csrc/base/dummy.h in NumPy."""

import ml_dtypes
import numpy as np
import pytest

KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def made_up(key: int, rows: int, cols: int, first: int = 0, step: int = 1) -> np.ndarray:
    """float32 [rows, cols], of rows first, first + step, ..."""
    with np.errstate(over="ignore"):
        numbers = np.uint64(first) + np.arange(rows, dtype=np.uint64) * np.uint64(step)
        z = np.uint64(key) + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        z = (z ^ z >> np.uint64(31))[:, None]
        h = z.astype(np.uint32) + np.arange(cols, dtype=np.uint32) * np.uint32(0x9E3779B9)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x21F0AAAD) ^ (z >> np.uint64(32)).astype(np.uint32)
        h = (h ^ h >> np.uint32(15)) * np.uint32(0x735A2D97)
        h ^= h >> np.uint32(15)
    values = (h >> np.uint32(8) | np.uint32(1)).astype(np.int32) - (1 << 23)
    return values.astype(np.float32) * np.float32(np.float32(0.0692) * 2.0**-24)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (75, 96), (130, 4128)])
def test_made_up_values_are_the_formulas(open_backend, dtype, rows, cols):
    backend = open_backend(1, 8, cols)
    kind, key = KINDS[dtype], 0xFEDCBA9876543210
    parts = [(dtype, 3, np.zeros((3, cols), kind).view(np.uint8)), (dtype, rows, np.zeros((rows, cols), kind).view(np.uint8))]
    matrix = backend.matrix(parts, cols)
    backend.matrix_fill(matrix, 1, key, dtype, rows, cols)
    got = np.empty((3 + rows, cols), np.float32)
    backend.matrix_read(matrix, 0, 3 + rows, got)
    wanted = made_up(key, rows, cols)
    assert (got[:3] == 0).all(), "another part was written"
    assert got[3:].tobytes() == wanted.astype(kind).astype(np.float32).tobytes()
    assert (wanted != 0).all() and abs(wanted).max() <= 0.0346
    if wanted.size > 1000:
        assert abs(wanted.std() - 0.02) < 0.001 and abs(wanted.mean()) < 0.002


@pytest.mark.parametrize("dtype", KINDS)
def test_made_up_rows_of_a_part(open_backend, dtype):
    """A row's dummy values depend only on its number in the checkpoint's tensor."""
    backend, key, cols, kind = open_backend(1, 8, 96), 77, 96, KINDS[dtype]
    matrix = backend.matrix([(dtype, 200, np.zeros((200, cols), kind).view(np.uint8))], cols)
    backend.matrix_fill(matrix, 0, key, dtype, 70, cols, 100, 1000, 1)
    backend.matrix_fill(matrix, 0, key, dtype, 30, cols, 5, 3, 7)
    got = np.empty((200, cols), np.float32)
    backend.matrix_read(matrix, 0, 200, got)
    wanted = np.zeros((200, cols), kind)
    wanted[100:170], wanted[5:35] = made_up(key, 70, cols, 1000), made_up(key, 30, cols, 3, 7)
    assert got.tobytes() == wanted.astype(np.float32).tobytes()
