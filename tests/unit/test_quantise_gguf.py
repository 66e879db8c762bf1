"""The rounding to GGUF's blocks of 32 values at load has the bits of gguf-py."""

import ctypes

import numpy as np
import pytest
from host_library import build

gguf = pytest.importorskip("gguf")
TYPES = ("Q8_0", "Q5_0", "Q4_1", "Q4_0")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("gguf"), None, "dtype", "quantise", "quantise_gguf", "quantise_k")


def rounded(library: ctypes.CDLL, name: str, rows: np.ndarray) -> np.ndarray | None:
    """The blocks; None: the type cannot hold the values."""
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    to = np.full((len(rows), rows.shape[1] // values * size), 255, np.uint8)
    library.quantise_row.restype = ctypes.c_bool
    fits = [
        library.quantise_row(
            int(kind), row.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(len(row)), made.ctypes.data_as(ctypes.c_void_p)
        )
        for row, made in zip(rows, to, strict=True)
    ]
    return to if all(fits) else None


@pytest.mark.parametrize("name", TYPES)
def test_bits(library: ctypes.CDLL, name: str) -> None:
    """Rows of many sizes, of zeros, of one value, of values halfway between numbers, and with two peaks."""
    rng = np.random.default_rng(21)
    rows = (rng.standard_normal((20000, 64)) * 10.0 ** rng.integers(-6, 5, (20000, 1))).astype(np.float32)
    rows[0], rows[1], rows[2, ::2] = 0, 0.3, 0
    rows[3:1000] = rng.integers(-32, 33, (997, 64)) / 4
    rows[1000:1500, 1] = -rows[1000:1500, 0] * 2
    rows[1000:1500, 2] = rows[1000:1500, 0] * 2
    have = rounded(library, name, rows)
    assert have is not None and np.array_equal(have, gguf.quantize(rows, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", TYPES)
def test_range(library: ctypes.CDLL, name: str) -> None:
    """A scale beyond float16 and values that are not finite are errors; scales below it make zeros."""
    largest = {"Q8_0": 127 * 65504, "Q5_0": 16 * 65504, "Q4_1": -65504, "Q4_0": 8 * 65504}[name]
    row = np.zeros((1, 32), np.float32)
    for value, fits in ((largest, True), (1.01 * largest, False), (np.nan, False), (np.inf, False), (1e-42, True)):
        row[0, 5] = value
        assert (rounded(library, name, row) is not None) == fits, value
    row[0, 5] = 1e-42
    assert not gguf.dequantize(rounded(library, name, row), gguf.GGMLQuantizationType[name]).any()


@pytest.mark.parametrize("name", ["Q6_K", "Q5_K", "Q4_K", "Q2_K"])
def test_range_of_k_types(library: ctypes.CDLL, name: str) -> None:
    row = np.zeros((1, 512), np.float32)
    for value in (1e12, 1e30, np.nan, -np.inf):
        row[0, 300] = value
        assert rounded(library, name, row) is None, value
    for value in (1e6, -1e-9, 1e-42):
        row[0, 300] = value
        assert rounded(library, name, row) is not None, value
    assert not gguf.dequantize(rounded(library, name, row), gguf.GGMLQuantizationType[name]).any()
