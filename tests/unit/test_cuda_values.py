"""The values of the CUDA backend's weight formats, compiled for the host, against dtype.c; needs no device and no nvcc."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from host_library import build

ROOT = Path(__file__).parents[2]
LAID_OUT_ANEW = {"DTYPE_FP8", "DTYPE_INT8_G128"}  # their scales precede a row (fp8_rows.cuh)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("values")
    (folder / "cuda_fp8.h").touch()  # cuda_values.cc has what the formats use of it
    return build(folder, "cuda_values.cc", "dtype")


def types() -> dict[str, tuple[int, int, int]]:
    """Number, values and bytes of a block of every type of the CUDA backend whose rows lie as in the file."""
    numbers = dict(re.findall(r"(DTYPE_\w+) = (\d+),", (ROOT / "csrc/base/dtype.h").read_text()))
    blocks = re.findall(r'\[(DTYPE_\w+)\] = \{\{"\w+", (\d+), (\d+)\}', (ROOT / "csrc/base/dtype.c").read_text())
    table = re.findall(r"^    \{(DTYPE_\w+),", (ROOT / "kernels/cuda/core/types.cuh").read_text(), re.M)
    sizes = {name: (int(numbers[name]), int(values), int(n_bytes)) for name, values, n_bytes in blocks}
    return {name: sizes[name] for name in table if name not in LAID_OUT_ANEW}


@pytest.mark.parametrize("name", types())
def test_values_have_the_bits_of_the_definition(library: ctypes.CDLL, name: str) -> None:
    """Of 3000 random blocks, whose scales may be any float16: equal where finite, and finite in the same places."""
    number, n_values, n_bytes = types()[name]
    n = 3000 * n_values
    row = np.random.default_rng(number).integers(0, 256, 3000 * n_bytes, dtype=np.uint8)
    have, want = np.zeros(n, np.float32), np.zeros(n, np.float32)
    address = row.ctypes.data_as(ctypes.c_void_p)
    library.values_of_row(number, address, n, have.ctypes.data_as(ctypes.c_void_p))
    library.dtype_to_float(number, address, want.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(n))
    finite = np.isfinite(want)
    assert finite.mean() > 0.5 and np.array_equal(finite, np.isfinite(have))
    assert have[finite].tobytes() == want[finite].tobytes()
    assert len(np.unique(want[finite])) > 2
