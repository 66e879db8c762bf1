"""The kernel that rounds a trainer's tensors on the device, run thread by thread on the host, against quantise.c."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from host_library import build

ROOT = Path(__file__).parents[2]
TYPES = {"FP8": (128, 132), "INT8_G128": (128, 132), "INT8_G32": (32, 36), "INT4_G128": (128, 68), "INT4_G32": (32, 20)}
"""Values and bytes of a block."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("quantise"), "cuda_quantise.cc", "dtype", "quantise", "quantise_gguf", "quantise_k")


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def rounded(library: ctypes.CDLL, number: int, rows: np.ndarray, n_bytes: int) -> np.ndarray:
    """Blocks by quantise.c."""
    floats, to = np.zeros_like(rows), np.zeros((len(rows), n_bytes), np.uint8)
    sizes = (ctypes.c_size_t(len(rows)), ctypes.c_size_t(rows.shape[1]))
    library.quantise_rows.restype = ctypes.c_bool
    assert library.quantise_rows(number, 0, pointer(rows), *sizes, pointer(floats), pointer(to))
    return to


def split(rows: np.ndarray) -> np.ndarray:
    """Blocks of 132 bytes as fp8_rows.cuh has them: scales, the last first, in whole 128 bytes; then numbers."""
    blocks = rows.reshape(len(rows), -1, 132)
    lead = -(-4 * blocks.shape[1] // 128) * 128
    scales = np.zeros((len(rows), lead), np.uint8)
    scales[:, lead - 4 * blocks.shape[1] :] = blocks[:, ::-1, :4].reshape(len(rows), -1)
    return np.concatenate([scales, blocks[:, :, 4:].reshape(len(rows), -1)], 1)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n_cols", [32, 130, 321, 1344])
def test_bits(library: ctypes.CDLL, name: str, n_cols: int) -> None:
    """Rows of many sizes, of zeros, of one value, from dense and from transposed tensors."""
    number = int(re.findall(rf"DTYPE_{name} = (\d+),", (ROOT / "csrc/base/dtype.h").read_text())[0])
    rng = np.random.default_rng(n_cols)
    rows = (rng.standard_normal((6, n_cols)) * 10.0 ** rng.integers(-9, 9, (6, 1))).astype(np.float32)
    rows[1], rows[2], rows[3, ::2] = 0, 0.3, np.abs(rows[3, ::2]) * 1e-4
    n_values, n_bytes = TYPES[name]
    want = rounded(library, number, rows, -(-n_cols // n_values) * n_bytes)
    for is_split in (False, True) if n_bytes == 132 else (False,):
        lead = -(-4 * -(-n_cols // 128) // 128) * 128 if is_split else 0
        laid = split(want) if is_split else want
        for stored in (rows, np.asfortranarray(rows)):
            have = np.zeros_like(laid)
            strides = [ctypes.c_int64(stride // 4) for stride in stored.strides]
            library.quantise_by_kernel.restype = ctypes.c_bool
            is_dense = library.quantise_by_kernel(
                number, pointer(stored), *strides, len(rows), n_cols, ctypes.c_void_p(have.ctypes.data + lead),
                ctypes.c_uint64(laid.shape[1]), is_split,
            )  # fmt: skip
            assert is_dense == (stored is rows and (n_values == 32 or n_cols % 4 == 0))
            assert have.tobytes() == laid.tobytes()


@pytest.mark.parametrize(("n_rows", "n_cols", "stride", "n_blocks"), [
    (1, 8, 8, 3), (3, 8200, 8208, 2), (1, 40000, 40000, 4), (5, 64, 72, 1), (4, 12, 12, 1), (4, 16, 18, 1)
])  # fmt: skip
def test_counts(library: ctypes.CDLL, n_rows: int, n_cols: int, stride: int, n_blocks: int) -> None:
    """Values beyond 2^100 and NaNs of dense rows; what lies between the rows is not counted."""
    rows = np.full((n_rows, stride), np.nan, np.float32)
    rows[:, :n_cols] = np.random.default_rng(n_cols).standard_normal((n_rows, n_cols))
    rows[0, 0] = -(2.0**100)
    library.count_by_kernel.restype = ctypes.c_uint64
    call = (pointer(rows), ctypes.c_int64(stride), n_rows, n_cols, n_blocks)
    if n_cols % 8 or stride % 4:
        assert library.count_by_kernel(*call) == 2**64 - 1
        return
    assert library.count_by_kernel(*call) == 0
    bad = [(0, 1, np.inf), (n_rows - 1, n_cols - 1, np.nan), (n_rows // 2, n_cols // 2, 1.0000001 * 2.0**100)]
    for row, column, value in bad:
        rows[row, column] = value
    assert library.count_by_kernel(*call) == len(bad)
