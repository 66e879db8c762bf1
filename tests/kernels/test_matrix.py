"""Made-up weights: the same bits from every backend, against the formula of csrc/base/dummy.h in NumPy."""

import ml_dtypes
import numpy as np
import pytest

KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def made_up(key: int, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols]."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (np.arange(rows, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
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
