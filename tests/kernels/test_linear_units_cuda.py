"""Linears of weights in units with bfloat16 activations, on a CUDA device: one order of sums for all kernels and rows.

Where values have few bits, the tensor cores' sums are exact, so NumPy gives the bits; otherwise float64 gives the values.
"""

import ctypes
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from cuda_ways import is_portable
from group_blocks import int4_rows, q4_0_rows, q4_k_rows, q6_k_rows, q8_0_rows

from binding import Backend
from llmpy import hardware

Array = np.ndarray
BF16 = ml_dtypes.bfloat16
# values of a group; values of a block; bytes of 16 rows by 128 columns
TYPES = {
    "int4_g128": (128, 1, 1088), "int4_g32": (32, 1, 1280), "q4_0": (32, 32, 1280), "q8_0": (32, 32, 2176),
    "q4_k": (32, 256, 1216), "q6_k": (16, 256, 1696),
}  # fmt: skip
LINEAR, EMBED, EXPERTS, LOGITS, READ_ROWS = 1, 2, 4, 16, 32  # enum matrix_use
AUTO, FLOAT = 0, 1  # enum arithmetic
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 191, 300)
# Rows of W that end tiles and panels anywhere; columns of whole slabs, of odd numbers of halves, of stages and turns.
SHAPES = [
    (8, 128),
    (72, 256),
    (203, 320),
    (40, 192),
    (16, 64),
    (576, 1152),
    (1000, 640),
    (392, 2048),
    (4096, 1024),
    (6144, 2240),
]


@pytest.fixture(scope="module", params=list(TYPES))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backend(cuda: str) -> Backend:
    return Backend(cuda, max_rows=512, dtype="bfloat16", library=hardware.cuda_library())


class Ways:
    """Puts a way of LINEAR_WAYS first."""

    def __init__(self, backend: Backend) -> None:
        self.library, self.ctx = ctypes.CDLL(hardware.cuda_library()), backend.ctx
        self.library.llmpy_cuda_way.restype = ctypes.c_char_p
        self.library.llmpy_cuda_put_first.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32]
        self.names = [(self.library.llmpy_cuda_way(0, row) or b"").decode() for row in range(32)]

        self.sm_90a_alone = {"units_few", "units_many"} if is_portable(backend) else set()

    def here(self, *names: str) -> list[str]:
        """Those that the device has."""
        return [name for name in names if name not in self.sm_90a_alone]

    def first(self, name: str) -> None:
        self.library.llmpy_cuda_put_first(self.ctx, 0, self.names.index(name) + 1 if name else 0)

    def ran(self) -> set[str]:
        """The ways that ran since the last call; the table's order holds again."""
        found = self.library.llmpy_cuda_put_first(self.ctx, 0, 0)
        return {name for i, name in enumerate(self.names) if found >> i & 1}


@dataclass
class Weights:
    """A weight is numbers * scales - minima."""

    raw: Array  # rows of the file
    values: Array  # as they are defined, in float32
    numbers: Array  # [n, k], whole
    scales: Array  # [n, groups] float32
    minima: Array


def columns(dtype: str, k: int) -> int:
    """Whole blocks."""
    block = TYPES[dtype][1]
    return -(-k // block) * block


def halves(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.uniform(1e-3, 1e-2, shape) * rng.choice([-1, 1], shape)).astype(np.float16)


def random_weights(dtype: str, n: int, k: int, rng: np.random.Generator) -> Weights:
    """Scales of both signs, zeros from 0 to 16."""
    group, groups = TYPES[dtype][0], -(-k // TYPES[dtype][0])
    none = np.zeros((n, groups), np.float32)

    def wide(each: Array) -> Array:
        return each.repeat(group, 1)[:, :k]

    if dtype == "q8_0":
        q, d = rng.integers(-128, 128, (n, k)), halves(rng, n, groups)
        scales = d.astype(np.float32)
        return Weights(q8_0_rows(q, d), wide(scales) * q.astype(np.float32), q, scales, none)
    if dtype == "q4_k":
        q, s, m = rng.integers(0, 16, (n, k)), rng.integers(0, 64, (n, groups)), rng.integers(0, 64, (n, groups))
        d = halves(rng, n, k // 256, 2)
        scales, minima = (d[..., i].astype(np.float32).repeat(8, 1) * (s, m)[i].astype(np.float32) for i in range(2))
        values = wide(scales) * q.astype(np.float32) - wide(minima)
        return Weights(q4_k_rows(q, s, m, d), values, q, scales, minima)
    if dtype == "q6_k":
        q, s, d = rng.integers(0, 64, (n, k)), rng.integers(-128, 128, (n, groups)), halves(rng, n, k // 256)
        scales = d.astype(np.float32).repeat(16, 1) * s.astype(np.float32)
        return Weights(q6_k_rows(q, s, d), wide(scales) * (q - 32).astype(np.float32), q - 32, scales, none)
    q, d = rng.integers(0, 16, (n, k)), halves(rng, n, groups).astype(np.float32)
    if dtype == "q4_0":
        raw, values = q4_0_rows(q, d)
        return Weights(raw, values, q - 8, d, none)
    scales = ((d * np.float32(1.0007)).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    zeros = rng.integers(0, 17, (n, groups))
    raw, values = int4_rows(q, scales, zeros, group)
    return Weights(raw, values, q - wide(zeros), scales, none)


def linear(backend: Backend, matrix: object, x: Array, n: int, **options: object) -> Array:
    y = np.zeros((len(x), n), np.float32 if options.get("is_float_out") else x.dtype)
    backend.linear(matrix, x.view(np.uint16), y if options.get("is_float_out") else y.view(np.uint16), **options)
    assert backend.allocations == 0
    return y


def draw(rng: np.random.Generator, *shape: int) -> Array:
    """Normal values; some columns are 20 times larger, some rows vary over many orders."""
    x = rng.standard_normal(shape, np.float32) * np.where(rng.random(shape[1]) < 0.02, 20, 1)
    x[::5] *= 10.0 ** rng.integers(-3, 2, x[::5].shape)
    return x.astype(BF16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_and_rows(n: int, k: int, dtype: str, backend: Backend) -> None:
    """Equal bits for every number of rows, near float64; the stored values are exact."""
    rng, k = np.random.default_rng(n + k), columns(dtype, k)
    weights = random_weights(dtype, n, k, rng)
    matrix, values = backend.matrix([(dtype, n, weights.raw)], k, LINEAR, AUTO), weights.values
    assert backend.matrix_info(matrix, 0)[1] == AUTO
    read = np.empty((n, k), np.float32)
    backend.matrix_read(matrix, 0, n, read)
    assert read.tobytes() == values.tobytes()
    x = draw(rng, 300, k)
    y, floats = linear(backend, matrix, x, n), linear(backend, matrix, x, n, is_float_out=True)
    assert floats.astype(x.dtype).tobytes() == y.tobytes()
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    assert np.linalg.norm(floats - exact) < 1e-6 * np.linalg.norm(exact)
    for rows in ROWS:
        first = int(rng.integers(0, 301 - rows))
        part = slice(first, first + rows)
        assert linear(backend, matrix, x[part], n).tobytes() == y[part].tobytes(), rows
        assert linear(backend, matrix, x[part], n, is_float_out=True).tobytes() == floats[part].tobytes(), rows


def fused(p: Array, scale: Array, total: Array) -> Array:
    """fmaf of exact sums: the product and the sum of float32 numbers of few bits are exact in 64 bits."""
    return (p.astype(np.longdouble) * scale + total).astype(np.float32)


def fold(x: Array, w: Weights, group: int) -> Array:
    """The order of linear_units.cuh in NumPy. x: whole numbers."""
    total = np.zeros((len(x), len(w.numbers)), np.float32)
    for slab in range(0, x.shape[1], 128):
        v = np.zeros_like(total)
        for k in range(slab, min(slab + 128, x.shape[1]), group):
            part = x[:, k : k + group].astype(np.float64)
            p = part @ w.numbers[:, k : k + group].T.astype(np.float64)
            scale = w.scales[None, :, k // group]
            if group == 128:
                total = fused(p, scale, total)
            else:
                v = fused(p, scale, v)
                v = fused(part.sum(1, keepdims=True), -w.minima[None, :, k // group], v) if w.minima.any() else v
        if group < 128:
            total = total + v
    return total


@pytest.mark.parametrize(("n", "k"), [(72, 128), (200, 640), (1000, 1344), (136, 4224)])
def test_order(n: int, k: int, dtype: str, backend: Backend) -> None:
    """The bits of the definition: groups and slabs in order, one rounding an addition."""
    rng, k = np.random.default_rng(k), columns(dtype, k)
    weights, x = random_weights(dtype, n, k, rng), rng.integers(-128, 129, (150, k)).astype(np.float32)
    matrix = backend.matrix([(dtype, n, weights.raw)], k)
    wanted = fold(x, weights, TYPES[dtype][0])
    for rows in (1, 8, 16, 30, 64, 65, 150):
        got = linear(backend, matrix, x[:rows].astype(BF16), n, is_float_out=True)
        assert got.tobytes() == wanted[:rows].tobytes(), rows


@pytest.mark.parametrize(("n", "k"), [(72, 256), (208, 1344), (4096, 1024)])
def test_all_ways_give_equal_bits(n: int, k: int, dtype: str, backend: Backend) -> None:
    """Few and many rows' kernels and the plain one, as sums and as gate | up, with a bias and rows to add."""
    rng, ways, k = np.random.default_rng(n), Ways(backend), columns(dtype, k)
    matrix = backend.matrix([(dtype, n, random_weights(dtype, n, k, rng).raw)], k)
    x, bias = draw(rng, 300, k), rng.standard_normal(n).astype(np.float32)
    add = draw(rng, 300, n)
    for rows in (1, 9, 16, 17, 40, 64, 65, 200, 300):
        plain = partial(linear, backend, matrix, x[:rows], n, bias=bias)
        found = []
        for name in ways.here("units_few", "units_many", "units_plain"):
            if name == "units_few" and rows > 16:
                continue
            ways.first(name)
            both, total = plain(), plain(add=add.view(np.uint16)[:rows])
            assert ways.ran() == {name}
            assert (both.astype(np.float32) + add[:rows].astype(np.float32)).astype(BF16).tobytes() == total.tobytes()
            found.append(total.tobytes())
        assert len({*found}) == 1, rows
        gated = np.zeros((rows, n // 2), np.uint16)
        words = plain().view(np.uint16)
        for act in (0, 2):
            gated_by = gated.copy()
            if n // 2 % 8:
                continue
            backend.gated(words[:, : n // 2], words[:, n // 2 :], gated_by, act)
            for name in ways.here("units_few", "units_many", "twice"):
                if name == "units_few" and rows > 16:
                    continue
                ways.first(name)
                product, mid = np.zeros((rows, n // 2), np.uint16), np.zeros((rows, n), np.uint16)
                backend.linear(matrix, x[:rows].view(np.uint16), product, bias, mid=mid, act=act)
                assert name in ways.ran()
                assert product.tobytes() == gated_by.tobytes(), (rows, name)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 512), (4096, 14336), (1000, 1024)])
def test_large_tiles(n: int, k: int, dtype: str, cuda: str) -> None:
    """Hundreds and thousands of rows, whose blocks have several tiles, have the bits of few rows."""
    rng = np.random.default_rng(n + k)
    backend = Backend(cuda, max_rows=2100, dtype="bfloat16", library=hardware.cuda_library())
    weights = random_weights(dtype, n, k, rng)
    matrix, values = backend.matrix([(dtype, n, weights.raw)], k), weights.values
    read = np.empty((64, k), np.float32)
    backend.matrix_read(matrix, n - 64, 64, read)
    assert read.tobytes() == values[-64:].tobytes()
    x = draw(rng, 2100, k)
    few = {first: linear(backend, matrix, x[first : first + 16], n) for first in (0, 100, 600, 2050)}
    gated = {}
    for first, y in few.items():
        gated[first] = np.zeros((16, n // 2), np.uint16)
        backend.gated(y.view(np.uint16)[:, : n // 2], y.view(np.uint16)[:, n // 2 :], gated[first], 0)
    for rows in (17, 32, 64, 65, 128, 200, 256, 512, 1024, 2100):
        y, mid = linear(backend, matrix, x[:rows], n), np.zeros((rows, n), np.uint16)
        product = np.zeros((rows, n // 2), np.uint16)
        backend.linear(matrix, x[:rows].view(np.uint16), product, mid=mid)
        for first, wanted in few.items():
            there = max(0, min(16, rows - first))
            assert y[first : first + there].tobytes() == wanted[:there].tobytes(), (rows, first)
            assert product[first : first + there].tobytes() == gated[first][:there].tobytes(), (rows, first)


def test_places_and_other_rows(dtype: str, backend: Backend) -> None:
    """Strided rows at odd addresses between NaN; y between guards; a row that is not finite affects only itself."""
    rng, n, k = np.random.default_rng(3), 203, columns(dtype, 320)
    matrix = backend.matrix([(dtype, n, random_weights(dtype, n, k, rng).raw)], k)
    wide = np.full((130, k + 7), np.nan, BF16)
    wide[:, 3 : k + 3] = draw(rng, 130, k)
    plain = linear(backend, matrix, np.ascontiguousarray(wide[:, 3 : k + 3]), n)
    for rows in (1, 20, 64, 130):
        y = np.full((rows, n + 6), 7, BF16)
        backend.linear(matrix, wide.view(np.uint16)[:rows, 3 : k + 3], y.view(np.uint16)[:, 2 : n + 2])
        assert np.ascontiguousarray(y[:, 2 : n + 2]).tobytes() == plain[:rows].tobytes()
        assert (y[:, :2] == 7).all() and (y[:, n + 2 :] == 7).all()
    wide[4, 3], wide[9, 200] = np.nan, np.inf
    for rows in (10, 64, 130):
        bad = linear(backend, matrix, np.ascontiguousarray(wide[:rows, 3 : k + 3]), n).astype(np.float32)
        assert not np.isfinite(bad[[4, 9]]).any()
        rest = [row for row in range(rows) if row not in (4, 9)]
        assert bad[rest].tobytes() == plain.astype(np.float32)[rest].tobytes()


@pytest.mark.parametrize("n", [1032, 1040])
def test_shares_of_rows_and_parts(n: int, dtype: str, backend: Backend) -> None:
    """Ranks have some rows of a matrix; q, k and v are parts of one; rows are written again."""
    rng, k = np.random.default_rng(4), columns(dtype, 576)
    weights = random_weights(dtype, n, k, rng)
    raw, values = weights.raw, weights.values
    whole = backend.matrix([(dtype, n, raw)], k)
    cut = backend.matrix([(dtype, 600, raw[:600]), (dtype, 0, raw[:0]), (dtype, n - 600, raw[600:])], k)
    x = draw(rng, 200, k)
    for rows in (1, 40, 200):
        y = linear(backend, whole, x[:rows], n)
        assert linear(backend, cut, x[:rows], n).tobytes() == y.tobytes()
        for first, end in ((0, 512), (64, 65), (333, 700)):
            own = backend.matrix([(dtype, end - first, raw[first:end].copy())], k)
            assert linear(backend, own, x[:rows], end - first).tobytes() == np.ascontiguousarray(y[:, first:end]).tobytes()
    read = np.empty((n, k), np.float32)
    backend.matrix_read(cut, 0, n, read)
    assert read.tobytes() == values.tobytes()
    backend.matrix_write(whole, 0, 5, 700, np.ascontiguousarray(raw[300:1000]))
    backend.matrix_read(whole, 0, n, read)
    values[5:705] = values[300:1000].copy()
    assert read.tobytes() == values.tobytes()
    assert np.isfinite(values).all()
    assert backend.matrix_info(whole, 0)[0] == -(-n // 16) * -(-k // 128) * TYPES[dtype][2]


MIXED = [("q4_k", 256), ("q4_k", 72), ("q6_k", 200), ("q5_k", 40), ("bfloat16", 64), ("fp8", 48), ("q8_0", 1000)]


def mixed_rows(dtype: str, n: int, k: int, rng: np.random.Generator) -> Array:
    """Rows of a type as a file has them."""
    if dtype == "bfloat16":
        return draw(rng, n, k).view(np.uint8)
    if dtype not in ("q5_k", "fp8"):
        return random_weights(dtype, n, k, rng).raw
    n_bytes, n_values = {"q5_k": (176, 256), "fp8": (132, 128)}[dtype]
    raw = rng.integers(0, 120, (n, k // n_values, n_bytes), dtype=np.uint8)
    scale = np.full((n, k // n_values, 1), 1e-3, np.float32) if dtype == "fp8" else halves(rng, n, k // n_values, 2)
    raw[:, :, :4] = scale.view(np.uint8)
    return raw.reshape(n, -1)


@pytest.mark.parametrize("first", range(3))
def test_parts_of_several_types(first: int, backend: Backend) -> None:
    """Each part has the bits of its own linear, for every number of rows, with a bias and rows to add; reads, writes."""
    rng, k, parts = np.random.default_rng(first), 512, MIXED[first : first + 5]
    raws = [mixed_rows(kind, n, k, rng) for kind, n in parts]
    rows_of = [(kind, n, raw) for (kind, n), raw in zip(parts, raws, strict=True)]
    matrix, own = backend.matrix(rows_of, k), [backend.matrix([one], k) for one in rows_of]
    ends = np.cumsum([n for _, n in parts])
    total = int(ends[-1])
    x, bias, add = draw(rng, 300, k), rng.standard_normal(total).astype(np.float32), draw(rng, 300, total)
    for rows in (1, 9, 16, 17, 65, 300):
        y = linear(backend, matrix, x[:rows], total, bias=bias, add=add[:rows].view(np.uint16))
        floats = linear(backend, matrix, x[:rows], total, is_float_out=True)
        for part, end, (_, n) in zip(own, ends, parts, strict=True):
            of = slice(int(end) - n, int(end))
            beside = np.ascontiguousarray(add[:rows, of]).view(np.uint16)
            alone = linear(backend, part, x[:rows], n, bias=bias[of].copy(), add=beside)
            assert np.ascontiguousarray(y[:, of]).tobytes() == alone.tobytes(), (rows, n)
            alone = linear(backend, part, x[:rows], n, is_float_out=True)
            assert np.ascontiguousarray(floats[:, of]).tobytes() == alone.tobytes(), (rows, n)
    read, one = np.empty((total, k), np.float32), np.empty((8, k), np.float32)
    backend.matrix_read(matrix, 0, total, read)
    for number, (part, end, (_, n)) in enumerate(zip(own, ends, parts, strict=True)):
        backend.matrix_read(part, 0, 8, one)
        assert one.tobytes() == read[int(end) - n : int(end) - n + 8].tobytes()
        assert backend.matrix_info(matrix, number)[1] == backend.matrix_info(part, 0)[1]
        backend.matrix_write(matrix, number, 1, 7, np.ascontiguousarray(raws[number][:7]))
        backend.matrix_read(matrix, int(end) - n + 1, 7, one[:7])
        assert one[:7].tobytes() == read[int(end) - n : int(end) - n + 7].tobytes()


def test_gate_and_up_of_several_types(backend: Backend) -> None:
    """Their product has the bits of both sums and the product of their own."""
    rng, k, n = np.random.default_rng(1), 512, 320
    gate, up = (random_weights(kind, n, k, rng).raw for kind in ("q4_k", "q6_k"))
    both = backend.matrix([("q4_k", n, gate), ("q6_k", n, up)], k)
    x = draw(rng, 70, k)
    sums = linear(backend, both, x, 2 * n)
    for rows in (1, 16, 70):
        y, mid = np.zeros((rows, n), np.uint16), np.zeros((rows, 2 * n), np.uint16)
        backend.linear(both, x[:rows].view(np.uint16), y, mid=mid)
        assert mid.tobytes() == sums[:rows].tobytes()
        wanted = np.zeros((rows, n), np.uint16)
        backend.gated(mid[:, :n].copy(), mid[:, n:].copy(), wanted)
        assert y.tobytes() == wanted.tobytes()


def test_where_the_plain_chain_serves(dtype: str, backend: Backend, cuda: str) -> None:
    """Other uses, columns and activations, and where it is asked for: exact weights in one chain."""
    rng = np.random.default_rng(6)
    half = Backend(cuda, dtype="float16", library=hardware.cuda_library())
    for of, k, use, arithmetic in (
        (backend, 256, LINEAR, FLOAT), (backend, 256, LINEAR | EMBED, AUTO), (backend, 256, LINEAR | READ_ROWS, AUTO),
        (backend, 256, LINEAR | EXPERTS, AUTO), (backend, 224, LINEAR, AUTO), (half, 256, LINEAR, AUTO),
    ):  # fmt: skip
        if columns(dtype, k) != k:
            continue
        weights = random_weights(dtype, 24, k, rng)
        matrix = of.matrix([(dtype, 24, weights.raw)], k, use, arithmetic)
        assert of.matrix_info(matrix, 0)[1] == FLOAT
        if not use & EXPERTS:
            x = rng.standard_normal((20, k)).astype(np.float16 if of is half else BF16)
            wanted = linear(of, of.matrix([("float32", 24, weights.values)], k), x, 24)
            assert linear(of, matrix, x, 24).tobytes() == wanted.tobytes()
    logits = backend.matrix([(dtype, 24, random_weights(dtype, 24, 256, rng).raw)], 256, LINEAR | LOGITS)
    assert backend.matrix_info(logits, 0)[1] == AUTO
