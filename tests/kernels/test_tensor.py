"""Weights written from tensors of any type and strides, and their checksums, against NumPy; the same bits on every device."""

import ml_dtypes
import numpy as np
import pytest

KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(1, 32), (19, 96), (75, 4128), (130, 40)]


def words(array):
    """The array's bytes as int32, padded."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.concatenate([flat, np.zeros(-flat.size % 4, np.uint8)]).view(np.int32)


def lay(values, layout):
    """Returns (memory, shape argument): the values in a larger array with these strides, surrounded by NaN."""
    rows, cols = values.shape
    if layout == "rows":
        memory, first, strides = np.full(rows * cols + 8, np.nan, values.dtype), 8, (cols, 1)
    elif layout == "padded":  # rows apart, at an odd place
        memory, first, strides = np.full(rows * (cols + 3) + 8, np.nan, values.dtype), 5, (cols + 3, 1)
    elif layout == "transposed":
        memory, first, strides = np.full(rows * cols + 8, np.nan, values.dtype), 2, (1, rows)
    elif layout == "reversed":
        memory, first, strides = np.full(rows * cols + 8, np.nan, values.dtype), rows * cols - 1, (-cols, -1)
    else:  # "spread"
        memory, first, strides = np.full(rows * cols * 6 + 8, np.nan, values.dtype), 3, (2, 2 * rows + 1)
    at = first + np.arange(rows)[:, None] * strides[0] + np.arange(cols) * strides[1]
    memory[at] = values
    return words(memory), (first, rows, cols, *strides)


def place_of(matrix, part, rows, cols):
    """The place of a whole part, with its elements numbered in memory order."""
    return matrix, part, 0, rows, 0, cols, 1


def checksum(stored, numbers=None):
    """The checksum formula of csrc/base/mix.h; numbers: element numbers if they do not start from 0."""
    bits = stored.reshape(-1).view(np.uint32 if stored.dtype.itemsize == 4 else np.uint16).astype(np.uint64)
    with np.errstate(over="ignore"):
        numbers = np.arange(bits.size) if numbers is None else numbers.reshape(-1)
        z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z += bits * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return int((z ^ z >> np.uint64(31)).sum(dtype=np.uint64))


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("layout", ["rows", "padded", "transposed", "reversed", "spread"])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_matrix(open_backend, rows, cols, layout, on_device):
    backend, rng = open_backend(1, 8, cols), np.random.default_rng(rows + cols)
    for stored, kind in KINDS.items():
        empty = (stored, 5, np.zeros((5, cols), kind).view(np.uint8))
        part = (stored, rows, np.zeros((rows, cols), kind).view(np.uint8))
        matrix = backend.matrix([empty, part, empty], cols)
        for dtype, own in KINDS.items():
            values = rng.standard_normal((rows, cols)).astype(own)
            values[0, :4] = [0.0, -0.0, 6e-8, 1.0009765625]  # halves of the last place are among them
            wanted = values.astype(np.float32).astype(kind)
            memory, shape = lay(values, layout)
            assert backend.tensor_sum(place_of(matrix, 1, rows, cols), memory, shape, dtype, on_device) == (checksum(wanted), 0)
            backend.tensor_write(place_of(matrix, 1, rows, cols), memory, shape, dtype, on_device)
            got = np.empty((rows + 10, cols), np.float32)
            backend.matrix_read(matrix, 0, rows + 10, got)
            assert got[5:-5].tobytes() == wanted.astype(np.float32).tobytes(), (stored, dtype)
            assert (got[:5] == 0).all(), "another part was written"
            assert (got[-5:] == 0).all(), "another part was written"
            assert backend.tensor_sum(place_of(matrix, 1, rows, cols)) == (checksum(wanted), 0)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize(("first_row", "rows"), [(0, 40), (37, 5), (60, 90), (64, 128), (199, 1)])
def test_rows_of_a_part(open_backend, first_row, rows, layout, on_device):
    """Only these rows are written and counted; each element has its number in the checkpoint's tensor."""
    cols, total = 96, 200
    backend, rng = open_backend(2, 8, cols), np.random.default_rng(rows)
    numbers = 1000 + np.arange(rows)[:, None] * 3 + np.arange(cols) * 700
    for stored, kind in KINDS.items():
        old = rng.standard_normal((total, cols)).astype(kind)
        matrix = backend.matrix([(stored, total, old.view(np.uint8))], cols)
        place = matrix, 0, first_row, rows, 1000, 3, 700
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        memory, shape = lay(values, layout)
        assert backend.tensor_sum(place, memory, shape, "float32", on_device)[0] == checksum(values.astype(kind), numbers)
        backend.tensor_write(place, memory, shape, "float32", on_device)
        wanted, got = old.astype(np.float32), np.empty((total, cols), np.float32)
        wanted[first_row : first_row + rows] = values.astype(kind)
        backend.matrix_read(matrix, 0, total, got)
        assert got.tobytes() == wanted.tobytes()
        assert backend.tensor_sum(place)[0] == checksum(values.astype(kind), numbers)


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_many_pieces(open_backend, layout):
    """A tensor larger than one transfer from the host."""
    rows, cols = 2600, 4128
    backend = open_backend(2, 8, cols)
    values = np.random.default_rng(1).standard_normal((rows, cols)).astype(np.float32)
    for dtype in ("float32", "bfloat16"):
        wanted = values.astype(ml_dtypes.bfloat16)
        memory, shape = lay(values.astype(KINDS[dtype]), layout)
        matrix = backend.matrix([("bfloat16", rows, np.zeros((rows, cols), np.uint16).view(np.uint8))], cols)
        for on_device in (True, False):
            backend.tensor_write(place_of(matrix, 0, rows, cols), memory, shape, dtype, on_device)
            assert backend.tensor_sum(place_of(matrix, 0, rows, cols)) == (checksum(wanted), 0)
            backend.tensor_write(place_of(matrix, 0, rows, cols), *lay(np.zeros((rows, cols), np.float32), "rows"), "float32")


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("size", [1, 64, 4097])
def test_vector(open_backend, size, on_device):
    backend, rng = open_backend(1, 8, 64), np.random.default_rng(size)
    for dtype, own in KINDS.items():
        for layout in ("rows", "reversed", "spread"):
            values = rng.standard_normal((1, size)).astype(own)
            wanted = values[0].astype(np.float32) + np.float32(1)
            memory, shape = lay(values, layout)
            place = np.full(size + 2, 7, np.float32)
            assert backend.tensor_sum(place[1:-1], memory, shape, dtype, on_device, 1.0) == (checksum(wanted), 0)
            backend.tensor_write(place[1:-1], memory, shape, dtype, on_device, 1.0)
            assert place[1:-1].tobytes() == wanted.tobytes()
            assert place[0] == place[-1] == 7, "memory beside the vector was written"
            assert backend.tensor_sum(place[1:-1]) == (checksum(wanted), 0)


def test_what_is_not_finite_is_counted(open_backend):
    backend = open_backend(1, 8, 64)
    values = np.ones((33, 64), np.float32)
    values[[1, 7, 32], [0, 63, 5]] = [np.nan, -np.inf, 3.4e38]
    memory, shape = lay(values, "rows")
    for stored, kind in KINDS.items():
        matrix = backend.matrix([(stored, 33, np.zeros((33, 64), kind).view(np.uint8))], 64)
        wanted = 2 if stored == "float32" else 3  # the largest float rounds to infinity
        assert backend.tensor_sum(place_of(matrix, 0, 33, 64), memory, shape, "float32")[1] == wanted
        backend.tensor_write(place_of(matrix, 0, 33, 64), memory, shape, "float32")
        assert backend.tensor_sum(place_of(matrix, 0, 33, 64))[1] == wanted


def test_quantised_weights_are_refused(open_backend):
    backend = open_backend(1, 8, 64)
    matrix = backend.matrix([("q8_0", 16, np.zeros(16 * 2 * 34, np.uint8))], 64)
    memory, shape = lay(np.zeros((16, 64), np.float32), "rows")
    with pytest.raises(NotImplementedError, match="wanted a weight of floats"):
        backend.tensor_write(place_of(matrix, 0, 16, 64), memory, shape, "float32")
    assert backend.tensor_sum(place_of(matrix, 0, 16, 64)) == (checksum(np.zeros((16, 64), np.float32)), 0)
