"""Linears of FP8 or INT8 weights with activations rounded to their type, on a CUDA device: one order of sums for every
kernel and row count.

The tensor cores keep 13 bits below the largest product of e4m3 of a step. Where values have few bits, their sums are exact, so
NumPy gives the bits; otherwise float64 gives the values. Sums of INT8 are always exact.
"""

import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from cuda_ways import is_portable

from binding import Backend
from llmpy import hardware

Array = np.ndarray
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
E4M3 = ml_dtypes.float8_e4m3fn
LINEAR, EMBED, EXPERTS = 1, 2, 4  # enum matrix_use
AUTO, FLOAT, INT8, FP8 = 0, 1, 2, 4  # enum arithmetic


@dataclass(frozen=True)
class Numbers:
    """A type of weights and rounded activations."""

    dtype: str  # of a matrix
    arithmetic: int
    largest: int
    error: float  # of the sums, relative to their norm
    loss: float  # of rounding the activations; by NumPy at most 0.0132 and 0.0206 for these matrices

    def of(self, values: Array) -> Array:
        """Rounds to nearest even."""
        if self.arithmetic == FP8:
            return values.clip(-448, 448).astype(E4M3)
        return np.rint(values).clip(-127, 127).astype(np.int8)


TYPES = {"fp8": Numbers("fp8", FP8, 448, 5e-4, 0.05), "int8": Numbers("int8_g128", INT8, 127, 1e-6, 0.025)}
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 191, 300)
# Rows of W that end tiles and slices anywhere; columns of whole slabs, of odd numbers of them, of stages, and with rests.
SHAPES = [(8, 128), (72, 256), (203, 300), (40, 129), (16, 1), (576, 1152), (1000, 640), (392, 2000), (4096, 1024), (6144, 520),
          (9000, 384)]  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(TYPES))
def numbers(request: pytest.FixtureRequest) -> Numbers:
    return TYPES[str(request.param)]


@pytest.fixture(scope="module")
def backend(dtype: str, cuda: str) -> Backend:
    return Backend(cuda, max_rows=512, dtype=dtype, library=hardware.cuda_library())


def blocks(stored: Array, scales: Array) -> Array:
    """Rows as the checkpoint's reader gives them: [rows, slabs] float32 scales before 128 numbers each."""
    rows, slabs = scales.shape
    raw = np.zeros((rows, slabs, 132), np.uint8)
    padded = np.zeros((rows, slabs * 128), np.uint8)
    padded[:, : stored.shape[1]] = stored.view(np.uint8)
    raw[:, :, :4], raw[:, :, 4:] = scales[..., None].view(np.uint8), padded.reshape(rows, slabs, 128)
    return raw.reshape(rows, -1)


def spread(scales: Array, k: int) -> Array:
    return scales.repeat(128, 1)[:, :k]


def random_weights(numbers: Numbers, n: int, k: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """(rows of the file, values)."""
    stored = numbers.of(60 * rng.standard_normal((n, k), np.float32))
    scales = rng.uniform(1e-4, 1e-3, (n, -(-k // 128))).astype(np.float32)
    return blocks(stored, scales), stored.astype(np.float32) * spread(scales, k)


def rounded(numbers: Numbers, x: Array) -> tuple[Array, Array]:
    """(numbers, scales [rows, slabs]) of activations."""
    slabs = -(-x.shape[1] // 128)
    padded = np.zeros((len(x), slabs * 128), np.float32)
    padded[:, : x.shape[1]] = x
    most = np.abs(padded.reshape(len(x), slabs, 128)).max(2)
    scales = np.maximum(most / np.float32(numbers.largest), np.float32(2.0**-126))
    return numbers.of(x.astype(np.float32) * spread(np.float32(1) / scales, x.shape[1])).astype(np.float32), scales


def linear(backend: Backend, matrix: object, x: Array, n: int, **options: object) -> Array:
    y = np.zeros((len(x), n), np.float32 if options.get("is_float_out") else x.dtype)
    backend.linear(matrix, x.view(np.uint16), y if options.get("is_float_out") else y.view(np.uint16), **options)
    assert backend.allocations == 0
    return y


def draw(kind: type, rng: np.random.Generator, *shape: int) -> Array:
    """Normal values; some columns are 20 times larger, some rows vary over many orders."""
    x = rng.standard_normal(shape, np.float32) * np.where(rng.random(shape[1]) < 0.02, 20, 1)
    x[::5] *= 10.0 ** rng.integers(-3, 2, x[::5].shape)
    return x.astype(kind)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_and_rows(n: int, k: int, dtype: str, numbers: Numbers, backend: Backend) -> None:
    """Equal bits for every number of rows, near float64 of the rounded activations, and how far rounding is from exact ones."""
    rng = np.random.default_rng(n + k)
    raw, values = random_weights(numbers, n, k, rng)
    matrix = backend.matrix([(numbers.dtype, n, raw)], k, LINEAR, AUTO)
    assert backend.matrix_info(matrix, 0)[1] == numbers.arithmetic
    x = draw(KINDS[dtype], rng, 300, k)
    y, floats = linear(backend, matrix, x, n), linear(backend, matrix, x, n, is_float_out=True)
    assert floats.astype(x.dtype).tobytes() == y.tobytes()
    x8, scales = rounded(numbers, x)
    wanted = (x8.astype(np.float64) * spread(scales, k)) @ values.T.astype(np.float64)
    assert np.linalg.norm(floats - wanted) < numbers.error * np.linalg.norm(wanted)
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    assert np.linalg.norm(floats - exact) < numbers.loss * np.linalg.norm(exact)
    for rows in ROWS:
        first = int(rng.integers(0, 301 - rows))
        part = slice(first, first + rows)
        assert linear(backend, matrix, x[part], n).tobytes() == y[part].tobytes(), rows
        assert linear(backend, matrix, x[part], n, is_float_out=True).tobytes() == floats[part].tobytes(), rows


def fold(x8: Array, x_scales: Array, w: Array, w_scales: Array) -> Array:
    """The order of linear_fp8.cuh in NumPy; the sums of slabs are exact."""
    total = np.zeros((len(x8), len(w)), np.float32)
    for s in range(x_scales.shape[1]):
        slab = slice(128 * s, 128 * (s + 1))
        p = x8[:, slab].astype(np.float64) @ w[:, slab].T.astype(np.float64)
        factor = x_scales[:, s : s + 1] * w_scales[None, :, s]
        total = (p.astype(np.longdouble) * factor + total).astype(np.float32)
    return total


# Scales of activations whose products with the largest number, and with small ones, bfloat16 has.
SCALES = {FP8: [0.75, 1.25, 3, 0.0625, 20], INT8: [0.5, 2, 4, 0.0625, 16]}


@pytest.mark.parametrize(("n", "k"), [(72, 128), (200, 640), (1000, 1300), (136, 4224)])
def test_order(n: int, k: int, dtype: str, numbers: Numbers, backend: Backend) -> None:
    """The bits of the definition: slabs in order, the product of the scales rounded, one rounding an addition."""
    rng = np.random.default_rng(k)
    w = rng.integers(-4, 5, (n, k)).astype(np.float32)
    w[:, ::128] = 0  # under it x has its largest value, 448 or 127 times its scale
    w_scales = rng.uniform(1e-4, 1e-3, (n, -(-k // 128))).astype(np.float32)
    x8 = rng.integers(-4, 5, (150, k)).astype(np.float32)
    x8[:, ::128] = numbers.largest
    x_scales = rng.choice(np.array(SCALES[numbers.arithmetic], np.float32), (150, -(-k // 128)))
    x = (x8 * spread(x_scales, k)).astype(KINDS[dtype])
    assert (x.astype(np.float32) == x8 * spread(x_scales, k)).all()
    matrix = backend.matrix([(numbers.dtype, n, blocks(numbers.of(w), w_scales))], k)
    wanted = fold(x8, x_scales, w, w_scales)
    for rows in (1, 8, 16, 30, 64, 65, 150):
        assert linear(backend, matrix, x[:rows], n, is_float_out=True).tobytes() == wanted[:rows].tobytes(), rows


@pytest.mark.parametrize(("n", "k"), [(72, 256), (208, 1300), (4096, 1024)])
def test_all_ways_give_equal_bits(n: int, k: int, dtype: str, numbers: Numbers, backend: Backend) -> None:
    """Few and many rows' kernels, as sums and as gate | up, with a bias and rows to add."""
    rng = np.random.default_rng(n)
    library = ctypes.CDLL(hardware.cuda_library())
    library.llmpy_cuda_way.restype = ctypes.c_char_p
    library.llmpy_cuda_put_first.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32]
    names = [(library.llmpy_cuda_way(0, row) or b"").decode() for row in range(32)]
    matrix = backend.matrix([(numbers.dtype, n, random_weights(numbers, n, k, rng)[0])], k)
    x, bias = draw(KINDS[dtype], rng, 300, k), rng.standard_normal(n).astype(np.float32)
    add = draw(KINDS[dtype], rng, 300, n)
    for rows in (1, 9, 17, 40, 64, 65, 200, 300):
        found = []
        for name in (["fp8_plain"] if is_portable(backend) else ["fp8_row", "fp8_few", "fp8_many"]):
            library.llmpy_cuda_put_first(backend.ctx, 0, names.index(name) + 1)
            plain = linear(backend, matrix, x[:rows], n, bias=bias, add=add.view(np.uint16)[:rows])
            product, mid = np.zeros((rows, n // 2), np.uint16), np.zeros((rows, n), np.uint16)
            backend.linear(matrix, x[:rows].view(np.uint16), product, bias, mid=mid)
            ran = library.llmpy_cuda_put_first(backend.ctx, 0, 0)
            if rows > {"fp8_row": 1, "fp8_few": 64}.get(name, rows):
                assert not ran >> names.index(name) & 1
                continue
            assert ran >> names.index(name) & 1
            both = linear(backend, matrix, x[:rows], n, bias=bias)
            total = (both.astype(np.float32) + add[:rows].astype(np.float32)).astype(x.dtype)
            assert total.tobytes() == plain.tobytes()
            if n // 2 % 8 == 0:
                gated = np.zeros((rows, n // 2), np.uint16)
                backend.gated(both.view(np.uint16)[:, : n // 2], both.view(np.uint16)[:, n // 2 :], gated, 0)
                assert gated.tobytes() == product.tobytes()
            found.append((plain.tobytes(), product.tobytes()))
        assert len({*found}) == 1, rows


@pytest.mark.parametrize("scales", ["rows", "blocks"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 512), (4096, 14336), (1000, 1024)])
def test_large_tiles(n: int, k: int, scales: str, numbers: Numbers, cuda: str) -> None:
    """Hundreds and thousands of rows, whose blocks have several tiles and clusters, have the bits of few rows."""
    rng, kind = np.random.default_rng(n + k), KINDS["bfloat16"]
    backend = Backend(cuda, max_rows=2100, dtype="bfloat16", library=hardware.cuda_library())
    stored = rng.integers(0, 0x70, (n, k), np.uint8) | rng.integers(0, 2, (n, k), np.uint8) << 7
    step = 128 if scales == "blocks" else 1
    values = rng.uniform(1e-4, 1e-3, (-(-n // step), -(-k // 128))).astype(np.float32).repeat(step, 0)[:n]
    matrix = backend.matrix([(numbers.dtype, n, blocks(stored, values))], k)
    backend.prepare()
    x = draw(kind, rng, 2100, k)
    few = {first: linear(backend, matrix, x[first : first + 64], n) for first in (0, 100, 600, 1990)}
    gated = {}
    for first, y in few.items():
        gated[first] = np.zeros((64, n // 2), np.uint16)
        backend.gated(y.view(np.uint16)[:, : n // 2], y.view(np.uint16)[:, n // 2 :], gated[first], 0)
    for rows in (65, 128, 200, 256, 300, 512, 700, 1024, 1500, 2048, 2100):
        y, mid = linear(backend, matrix, x[:rows], n), np.zeros((rows, n), np.uint16)
        product = np.zeros((rows, n // 2), np.uint16)
        backend.linear(matrix, x[:rows].view(np.uint16), product, mid=mid)
        for first, wanted in few.items():
            there = max(0, min(64, rows - first))
            assert y[first : first + there].tobytes() == wanted[:there].tobytes(), (rows, first)
            assert product[first : first + there].tobytes() == gated[first][:there].tobytes(), (rows, first)


@pytest.mark.parametrize("of", ["blocks", "rows"])
@pytest.mark.parametrize(("n", "k"), [(128, 384), (1000, 1300), (1152, 640), (4096, 1024)])
def test_shared_scales(of: str, n: int, k: int, dtype: str, numbers: Numbers, backend: Backend) -> None:
    """After prepare, scales of blocks are read once for 64 rows, and those of rows once for all slabs: equal bits, as sums and
    as gate | up."""
    rng = np.random.default_rng(k)
    stored = numbers.of(60 * rng.standard_normal((n, k), np.float32))
    scales = rng.uniform(1e-4, 1e-3, (-(-n // 128), -(-k // 128))).astype(np.float32).repeat(128, 0)[:n]
    if of == "rows":
        scales = rng.uniform(1e-4, 1e-3, (n, 1)).astype(np.float32).repeat(-(-k // 128), 1)
    matrix = backend.matrix([(numbers.dtype, n, blocks(stored, scales))], k)
    x, found = draw(KINDS[dtype], rng, 300, k), []
    for _ in range(2):
        y = {rows: linear(backend, matrix, x[:rows], n, is_float_out=True) for rows in (64, 65, 129, 300)}
        product, mid = np.zeros((300, n // 2), np.uint16), np.zeros((300, n), np.uint16)
        backend.linear(matrix, x.view(np.uint16), product, mid=mid)
        found.append((*(one.tobytes() for one in y.values()), product.tobytes()))
        assert y[64].tobytes() == y[300][:64].tobytes()
        backend.prepare()
    assert found[0] == found[1]


# Rows of W, columns, is gate | up. The row's kernel norms those of 10M weights and more itself; 8320 columns want two launches.
NORMED = [(6144, 2048, False), (10240, 1024, True), (2048, 2176, True), (520, 4096, False), (392, 6152, False),
          (64, 8320, False)]  # fmt: skip


@pytest.mark.parametrize(("n", "k", "is_product"), NORMED)
def test_norm_and_linear_are_both_operations(n: int, k: int, is_product: bool, dtype: str, numbers: Numbers,
                                             backend: Backend) -> None:  # fmt: skip
    """A norm that rounds its rows for the linear behind it gives the bits of the sum, its norm and the linear."""
    rng = np.random.default_rng(n)
    matrix = backend.matrix([(numbers.dtype, n, random_weights(numbers, n, k, rng)[0])], k)
    weight = rng.standard_normal(k).astype(np.float32)
    a, b = rng.standard_normal((2, 200, k)).astype(KINDS[dtype]).view(np.uint16)
    total, out, mid = np.zeros_like(a), np.zeros_like(a), np.zeros((200, n), np.uint16) if is_product else None
    y = np.zeros((200, n // 2 if is_product else n), np.uint16)
    backend.add_rms_norm(a, b, total, weight, out, 1e-6)
    backend.linear(matrix, out, y, mid=mid)
    for first, rows in ((0, 1), (7, 1), (3, 2), (1, 33), (90, 64), (0, 65), (0, 200)):
        part = slice(first, first + rows)
        mine, normed, made = np.zeros((rows, k), np.uint16), np.zeros((rows, k), np.uint16), np.zeros_like(y[part])
        middle = np.zeros((rows, n), np.uint16) if is_product else None
        backend.norm_linear(a[part], b[part], mine, weight, normed, 1e-6, matrix, made, mid=middle)
        assert backend.allocations == 0
        assert mine.tobytes() == total[part].tobytes() and made.tobytes() == y[part].tobytes(), rows


def test_places_and_other_rows(dtype: str, numbers: Numbers, backend: Backend) -> None:
    """Strided rows at odd addresses between NaN; y between guards; a row that is not finite affects only itself."""
    rng, kind, n, k = np.random.default_rng(3), KINDS[dtype], 203, 300
    matrix = backend.matrix([(numbers.dtype, n, random_weights(numbers, n, k, rng)[0])], k)
    wide = np.full((130, k + 7), np.nan, kind)
    wide[:, 3 : k + 3] = draw(kind, rng, 130, k)
    plain = linear(backend, matrix, np.ascontiguousarray(wide[:, 3 : k + 3]), n)
    for rows in (1, 20, 64, 130):
        y = np.full((rows, n + 6), 7, kind)
        backend.linear(matrix, wide.view(np.uint16)[:rows, 3 : k + 3], y.view(np.uint16)[:, 2 : n + 2])
        assert np.ascontiguousarray(y[:, 2 : n + 2]).tobytes() == plain[:rows].tobytes()
        assert (y[:, :2] == 7).all() and (y[:, n + 2 :] == 7).all()
    wide[4, 3], wide[9, 200] = np.nan, np.inf
    for rows in (10, 64, 130):
        bad = linear(backend, matrix, np.ascontiguousarray(wide[:rows, 3 : k + 3]), n).astype(np.float32)
        assert not np.isfinite(bad[[4, 9]]).any()
        rest = [row for row in range(rows) if row not in (4, 9)]
        assert bad[rest].tobytes() == plain.astype(np.float32)[rest].tobytes()
    zeros = np.zeros((3, k), kind)
    assert not linear(backend, matrix, zeros, n).astype(np.float32).any()


def test_shares_of_rows_and_parts(dtype: str, numbers: Numbers, backend: Backend) -> None:
    """Ranks have some rows of a matrix; q, k and v are parts of one."""
    rng, n, k = np.random.default_rng(4), 1032, 520
    raw, values = random_weights(numbers, n, k, rng)
    whole = backend.matrix([(numbers.dtype, n, raw)], k, LINEAR | EMBED)
    cut = backend.matrix(
        [(numbers.dtype, 600, raw[:600]), (numbers.dtype, 0, raw[:0]), (numbers.dtype, 432, raw[600:])], k, LINEAR | EMBED
    )
    x = draw(KINDS[dtype], rng, 200, k)
    for rows in (1, 40, 200):
        y = linear(backend, whole, x[:rows], n)
        assert linear(backend, cut, x[:rows], n).tobytes() == y.tobytes()
        for first, end in ((0, 512), (64, 65), (333, 700)):
            own = backend.matrix([(numbers.dtype, end - first, raw[first:end].copy())], k)
            assert linear(backend, own, x[:rows], end - first).tobytes() == np.ascontiguousarray(y[:, first:end]).tobytes()
    read, ids = np.empty((n, k), np.float32), rng.integers(0, n, 9).astype(np.int32)
    backend.matrix_read(cut, 0, n, read)
    assert read.tobytes() == values.tobytes()
    embedded = np.empty((9, k), KINDS[dtype])
    backend.embed(cut, ids, embedded.view(np.uint16))
    assert embedded.tobytes() == values[ids].astype(embedded.dtype).tobytes()


def test_a_large_upload(dtype: str, numbers: Numbers, backend: Backend) -> None:
    """Several threads split the rows of a large tensor; its memory is that of the numbers and, in whole lines, the scales."""
    n, k = 9000, 2048
    raw, values = random_weights(numbers, n, k, np.random.default_rng(5))
    matrix = backend.matrix([(numbers.dtype, n, raw)], k)
    read = np.empty((n, k), np.float32)
    backend.matrix_read(matrix, 0, n, read)
    assert read.tobytes() == values.tobytes()
    assert backend.matrix_info(matrix, 0)[0] == n * (k + 128)


def test_where_activations_are_not_rounded(dtype: str, numbers: Numbers, backend: Backend, cuda: str) -> None:
    """Experts whose rows are no whole eights, and where it is asked for; refusals."""
    rng, k = np.random.default_rng(6), 256
    raw, values = random_weights(numbers, 24, k, rng)
    plain = "float32", 24, values
    x = draw(KINDS[dtype], rng, 20, k)
    wanted = linear(backend, backend.matrix([plain], k), x, 24)
    for parts, use, arithmetic in (
        ([(numbers.dtype, 24, raw)], LINEAR, FLOAT),
        ([(numbers.dtype, 20, raw[:20].copy()), (numbers.dtype, 4, raw[20:].copy())], LINEAR | EXPERTS, AUTO),
    ):
        matrix = backend.matrix(parts, k, use, arithmetic)
        assert backend.matrix_info(matrix, 0)[1] == FLOAT
        if not use & EXPERTS:
            assert linear(backend, matrix, x, 24).tobytes() == wanted.tobytes()
    name = next(name for name, one in TYPES.items() if one == numbers)
    with pytest.raises(Exception, match=f"q4_0 weights have no products with {name} activations"):
        backend.matrix([("q4_0", 1, np.zeros(18, np.uint8))], 32, LINEAR, numbers.arithmetic)
    wide = Backend(cuda, dtype="float32", library=hardware.cuda_library())
    with pytest.raises(Exception, match="dtype bfloat16 or float16"):
        wide.matrix([(numbers.dtype, 24, raw)], k, LINEAR, numbers.arithmetic)
    assert wide.matrix_info(wide.matrix([(numbers.dtype, 24, raw)], k), 0)[1] == FLOAT
