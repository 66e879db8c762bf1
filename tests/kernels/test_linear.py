"""Linears of every weight type and arithmetic against float64, bit for bit over row counts, threads and fused forms."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from group_blocks import IQ, scatter_scale

from binding import Backend

gguf = pytest.importorskip("gguf")

Array = np.ndarray
INT8, FLOAT = 2, 1
FLOATS = ["float32", "float16", "bfloat16"]
QUANTS = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
QUANTS += ["iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0"]
GROUPS = ["int4_g128", "int4_g32", "int8_g128", "int8_g32"]
TABLES = {  # bitsandbytes
    "nf4": [
        -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
    ],
    "fp4": [sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)],
}  # fmt: skip
CASES = [(name, FLOAT) for name in [*FLOATS, *QUANTS, "mxfp4", "fp8", *GROUPS, *TABLES, "table4"]]
CASES += [(name, INT8) for name in [*QUANTS, *GROUPS]]
# (bytes of a block, values of a block, offsets of its float16 fields)
BLOCKS = {
    "q8_0": (34, 32, [0]), "q4_0": (18, 32, [0]), "q4_1": (20, 32, [0, 2]), "q5_0": (22, 32, [0]),
    "q5_1": (24, 32, [0, 2]), "q2_k": (84, 256, [80, 82]), "q3_k": (110, 256, [108]), "q4_k": (144, 256, [0, 2]),
    "q5_k": (176, 256, [0, 2]), "q6_k": (210, 256, [208]), "mxfp4": (17, 32, []), "fp8": (132, 128, []),
    "int4_g128": (68, 128, []), "int4_g32": (20, 32, []), "int8_g128": (132, 128, []), "int8_g32": (36, 32, []),
    "nf4": (36, 64, []), "fp4": (36, 64, []), "table4": (320, 512, []), **IQ,
}  # fmt: skip
GGUF_TYPES = {"q2_k": "Q2_K", "q3_k": "Q3_K", "q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K"}


def random_weights(dtype: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Random (rows as stored in a checkpoint, their exact values as float32); every bit of a block varies."""
    if dtype in FLOATS:
        values = (0.05 * rng.standard_normal((rows, cols))).astype(np.float32)
        if dtype == "float32":
            return values, values
        if dtype == "float16":
            return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    n_bytes, n_values, scales = BLOCKS[dtype]
    raw = rng.integers(0, 256, (rows, -(-cols // n_values), n_bytes), dtype=np.uint8)
    for offset in scales:
        scale = rng.uniform(0.001, 0.01, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2])
        raw[:, :, offset : offset + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if dtype == "iq1_m":
        scatter_scale(raw, rng.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16))
    if dtype == "mxfp4":
        raw[:, :, 0] = rng.integers(115, 123, raw.shape[:2])
    if dtype == "fp8":
        return random_fp8(raw, cols, rng)
    if dtype in GROUPS:
        return random_group(raw, 4 if "int4" in dtype else 8, cols, rng)
    if dtype in TABLES:
        return random_table(raw, TABLES[dtype], rng)
    if dtype == "table4":
        return random_table4(raw, cols, rng)
    raw = raw.reshape(rows, -1)
    kind = gguf.GGMLQuantizationType[GGUF_TYPES.get(dtype, dtype.upper())]
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(rows, cols)


def random_fp8(raw: Array, cols: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Gives random blocks random scales, and no NaN, which the checkpoint's reader refuses."""
    raw[raw & 0x7F == 0x7F] = 0x81
    scales = rng.uniform(1e-4, 1e-3, raw.shape[:2]).astype(np.float32)
    raw[:, :, :4] = scales[..., None].view(np.uint8)
    values = raw[:, :, 4:].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[..., None]
    return raw.reshape(len(raw), -1), np.ascontiguousarray(values.reshape(len(raw), -1)[:, :cols])


def random_group(raw: Array, bits: int, cols: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Gives random blocks random scales of both signs, and zeros at 4 bits. A header is a scale; a zero is its last byte."""
    scales = rng.uniform(1e-3, 1e-2, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2]) * 2.0 ** (4 - bits)
    scales = scales.astype(np.float32)
    zeros = np.zeros(raw.shape[:2], np.uint32)
    numbers = raw[:, :, 4:].view(np.int8).astype(np.float32)
    if bits == 4:
        scales = (scales.view(np.uint32) & 0xFFFFFF00).view(np.float32)
        zeros = rng.integers(0, 16, raw.shape[:2], dtype=np.uint32)
        numbers = np.stack([raw[:, :, 4:] & 15, raw[:, :, 4:] >> 4], -1).reshape(*raw.shape[:2], -1).astype(np.float32)
    raw[:, :, :4] = (scales.view(np.uint32) | zeros)[..., None].view(np.uint8)
    values = (numbers - zeros.astype(np.float32)[..., None]) * scales[..., None]
    return raw.reshape(len(raw), -1), np.ascontiguousarray(values.reshape(len(raw), -1)[:, :cols])


def random_table(raw: Array, table: list[float], rng: np.random.Generator) -> tuple[Array, Array]:
    """Gives random blocks random scales."""
    scales = rng.uniform(0.01, 0.1, raw.shape[:2]).astype(np.float32)
    raw[:, :, :4] = scales[..., None].view(np.uint8)
    numbers = np.stack([raw[:, :, 4:] & 15, raw[:, :, 4:] >> 4], -1).reshape(*raw.shape[:2], -1)
    values = np.asarray(table, np.float32)[numbers] * scales[..., None]
    return raw.reshape(len(raw), -1), values.reshape(len(raw), -1)


def random_table4(raw: Array, cols: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Gives random blocks random values."""
    table = rng.normal(0, 0.1, (*raw.shape[:2], 16)).astype(np.float32)
    raw[:, :, :64] = table.view(np.uint8)
    numbers = np.stack([raw[:, :, 64:] & 15, raw[:, :, 64:] >> 4], -1).reshape(*raw.shape[:2], -1)
    values = np.take_along_axis(table, numbers, 2).reshape(len(raw), -1)
    return raw.reshape(len(raw), -1), np.ascontiguousarray(values[:, :cols])


@pytest.fixture(scope="module")
def backends(isa: str) -> list[Backend]:
    """The same instruction set on one to five threads."""
    return [Backend("cpu", isa, threads, 512, 4096) for threads in (1, 2, 7)]


def linear(backend: Backend, matrix: object, x: Array, n_out: int, **options: object) -> Array:
    y = np.full((len(x), n_out), np.nan, np.float32)
    backend.linear(matrix, x, y, **options)
    return y


def equal_bits(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("dtype", "arithmetic"), CASES)
@pytest.mark.parametrize("shape", [(40, 256), (203, 1280)])
def test_values_and_rows(dtype: str, arithmetic: int, shape: tuple[int, int], backends: list[Backend]) -> None:
    """Every row count from 1 to 512, every thread count: the same bits, and near float64."""
    rng = np.random.default_rng(1)
    n, k = shape
    raw, values = random_weights(dtype, n, k, rng)
    x = rng.standard_normal((512, k)).astype(np.float32)
    whole = None
    for backend in backends:
        matrix = backend.matrix([(dtype, n, raw)], k, 1, arithmetic)
        assert backend.matrix_info(matrix, 0)[1] == arithmetic
        counts = [*range(1, 34), 47, 64, 100, 255, 512] if backend is backends[0] else [1, 3, 29, 512]
        full = linear(backend, matrix, x, n)
        whole = full if whole is None else whole
        assert equal_bits(full, whole)
        for rows in counts:
            first = int(rng.integers(0, 513 - rows))
            assert equal_bits(linear(backend, matrix, x[first : first + rows], n), whole[first : first + rows])
        assert backend.allocations == 0
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    error = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
    # float: rounding of one chain; int8: of the activations; bfloat16 on AVX-512 may round the activations, too
    assert error < (0.012 if arithmetic == INT8 else 4e-3 if dtype == "bfloat16" else 2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(203, 576), (17, 40), (96, 1280)])
def test_float_rows(dtype: str, n: int, k: int, open_backend: Callable[..., Backend]) -> None:
    """On every device: float weights near float64, and equal bits for all row counts."""
    rng, backend = np.random.default_rng(6), open_backend(2)
    raw, values = random_weights(dtype, n, k, rng)
    x, bias = rng.standard_normal((70, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    matrix = backend.matrix([(dtype, n, raw)], k)
    whole = linear(backend, matrix, x, n, bias=bias)
    exact = x.astype(np.float64) @ values.T.astype(np.float64) + bias
    assert np.linalg.norm(whole - exact) < (4e-3 if dtype == "bfloat16" else 2e-6) * np.linalg.norm(exact)
    for rows in (*range(1, 10), 33):
        first = int(rng.integers(0, 71 - rows))
        assert equal_bits(linear(backend, matrix, x[first : first + rows], n, bias=bias), whole[first : first + rows])


@pytest.mark.parametrize(("dtype", "arithmetic"), CASES)
def test_read_back(dtype: str, arithmetic: int, isa: str) -> None:
    """matrix_read and embed give the checkpoint's exact values, written in pieces or at once."""
    rng = np.random.default_rng(2)
    backend = Backend("cpu", isa, 2)
    n, k = 77, 768
    raw, values = random_weights(dtype, n, k, rng)
    matrix = backend.matrix([(dtype, n, np.zeros_like(raw))], k, 3, arithmetic)
    for first, rows in ((0, 5), (30, 47), (5, 25)):
        backend.matrix_write(matrix, 0, first, rows, np.ascontiguousarray(raw[first : first + rows]))
    out = np.empty((n, k), np.float32)
    backend.matrix_read(matrix, 0, n, out)
    assert equal_bits(out, values)
    backend.matrix_read(matrix, 13, 20, out)
    assert equal_bits(out[:20], values[13:33])
    ids = rng.integers(0, n, 50).astype(np.int32)
    rows = np.empty((50, k), np.float32)
    backend.embed(matrix, ids, rows)
    assert equal_bits(rows, values[ids])
    backend.embed(matrix, ids, rows, 3.7)
    assert equal_bits(rows, values[ids] * np.float32(3.7))


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [*((name, FLOAT) for name in [*FLOATS, "fp8", *GROUPS]), *((name, INT8) for name in GROUPS)]
)
@pytest.mark.parametrize("k", [1, 24, 40, 95, 96, 128, 129, 300])
def test_any_columns(dtype: str, arithmetic: int, k: int, isa: str) -> None:
    """Float types, FP8 and groups take any number of columns; the rest of the last block has no effect."""
    rng = np.random.default_rng(3)
    backend = Backend("cpu", isa, 2)
    raw, values = random_weights(dtype, 19, k, rng)
    x = rng.standard_normal((9, k)).astype(np.float32)
    matrix = backend.matrix([(dtype, 19, raw)], k, 1, arithmetic)
    y = linear(backend, matrix, x, 19)
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    if arithmetic == INT8:
        assert np.linalg.norm(y - exact) < 0.012 * np.linalg.norm(exact)
    else:
        assert np.abs(y - exact).max() < (2e-2 if dtype == "bfloat16" else 1e-5)
    assert equal_bits(y[4:5], linear(backend, matrix, x[4:5], 19))


@pytest.mark.parametrize("arithmetic", [FLOAT, INT8])
def test_mixed_parts(arithmetic: int, backends: list[Backend]) -> None:
    """Parts of unlike types and ragged row counts give what each gives alone."""
    rng = np.random.default_rng(4)
    k = 512
    sizes = [("q4_k", 100), ("q4_k", 33), ("q6_k", 16), ("bfloat16", 7), ("q4_k", 1), ("q8_0", 50)]
    raws = [random_weights(dtype, rows, k, rng)[0] for dtype, rows in sizes]
    x = rng.standard_normal((37, k)).astype(np.float32)
    for backend in backends:
        parts = [(dtype, rows, raw) for (dtype, rows), raw in zip(sizes, raws, strict=True)]
        matrix = backend.matrix(parts, k, 1, arithmetic)
        for rows in (1, 4, 37):
            alone = [linear(backend, backend.matrix([part], k, 1, arithmetic), x[:rows], part[1]) for part in parts]
            assert equal_bits(linear(backend, matrix, x[:rows], 207), np.concatenate(alone, 1))


@pytest.mark.parametrize(("dtype", "arithmetic"), [("float32", FLOAT), ("bfloat16", FLOAT), ("q4_0", INT8), ("q6_k", INT8)])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_fused_equals_composed(dtype: str, arithmetic: int, rows: int, isa: str) -> None:
    """rms_norm, gated, bias and add inside the linear have the bits of the separate operations; y may be add."""
    rng = np.random.default_rng(5)
    backend = Backend("cpu", isa, 2)
    n, k = 70, 512
    raw, _ = random_weights(dtype, n, k, rng)
    matrix = backend.matrix([(dtype, n, raw)], k, 1, arithmetic)
    x = rng.standard_normal((rows, 2 * k)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((rows, n)).astype(np.float32)
    weight = rng.standard_normal(k).astype(np.float32)
    normed, gated = np.empty((rows, k), np.float32), np.empty((rows, k), np.float32)
    for act in range(5):
        backend.gated(x[:, :k], x[:, k:], gated, act)
        assert equal_bits(linear(backend, matrix, x, n, input=2, act=act), linear(backend, matrix, gated, n))
    backend.rms_norm(x[:, :k], weight, normed, 1e-5)
    plain = linear(backend, matrix, normed, n)
    fused = linear(backend, matrix, x[:, :k], n, input=1, norm_weight=weight, norm_eps=1e-5)
    assert equal_bits(fused, plain)
    options = {"input": 1, "norm_weight": weight, "norm_eps": 1e-5, "bias": bias, "add": residual}
    assert equal_bits(linear(backend, matrix, x[:, :k], n, **options), (plain + bias) + residual)
    in_place = residual.copy()
    backend.linear(matrix, normed, in_place, bias, in_place)
    assert equal_bits(in_place, (plain + bias) + residual)


@pytest.mark.parametrize(("dtype", "arithmetic"), CASES)
def test_odd_places(dtype: str, arithmetic: int, isa: str) -> None:
    """Strided rows at odd addresses: data beside x does not affect results, and data beside y is not written."""
    rng = np.random.default_rng(7)
    for n, rows, threads in ((1, 1, 1), (17, 5, 2), (31, 60, 3), (129, 2, 2)):
        backend = Backend("cpu", isa, threads, 64, 512)
        raw, _ = random_weights(dtype, n, 512, rng)
        matrix = backend.matrix([(dtype, n, raw)], 512, 1, arithmetic)
        x = np.full((rows, 519), np.nan, np.float32)
        x[:, 3:515] = rng.standard_normal((rows, 512))
        y, add = np.full((2, rows, n + 5), 7.0, np.float32)
        bias = rng.standard_normal(n).astype(np.float32)
        backend.linear(matrix, x[:, 3:515], y[:, 1 : n + 1], bias, add[:, 2 : n + 2])
        plain = linear(backend, matrix, np.ascontiguousarray(x[:, 3:515]), n)
        assert equal_bits(np.ascontiguousarray(y[:, 1 : n + 1]), (plain + bias) + np.float32(7))
        assert (y[:, 0] == 7).all() and (y[:, n + 1 :] == 7).all()


@pytest.mark.parametrize(("dtype", "arithmetic"), CASES)
def test_not_finite(dtype: str, arithmetic: int, isa: str) -> None:
    """A NaN or an infinity in one row shows in that row alone."""
    rng = np.random.default_rng(6)
    backend = Backend("cpu", isa, 1)
    raw, _ = random_weights(dtype, 32, 256, rng)
    matrix = backend.matrix([(dtype, 32, raw)], 256, 1, arithmetic)
    x = rng.standard_normal((7, 256)).astype(np.float32)
    good = linear(backend, matrix, x, 32)
    x[2, 17], x[4, 200] = np.nan, np.inf
    bad = linear(backend, matrix, x, 32)
    assert not np.isfinite(bad[[2, 4]]).any()
    assert equal_bits(bad[[0, 1, 3, 5, 6]], good[[0, 1, 3, 5, 6]])
    assert not np.isfinite(linear(backend, matrix, x[2:3], 32)).any()


@pytest.mark.parametrize("dtype", QUANTS)
def test_extreme_integers(dtype: str, isa: str) -> None:
    """The largest weights against the largest activations overflow no integer."""
    backend = Backend("cpu", isa, 1)
    n_bytes, n_values, scales = BLOCKS[dtype]
    for byte in (0, 255, 0x80, 0x7F):
        raw = np.full((16, 1024 // n_values, n_bytes), byte, np.uint8)
        for offset in scales:
            raw[:, :, offset : offset + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        if dtype == "iq1_m":
            scatter_scale(raw, np.full(raw.shape[:2], 0.5, np.float16))
        raw = raw.reshape(16, -1)
        kind = gguf.GGMLQuantizationType[GGUF_TYPES.get(dtype, dtype.upper())]
        values = gguf.quants.dequantize(raw, kind).astype(np.float64).reshape(16, 1024)
        matrix = backend.matrix([(dtype, 16, raw)], 1024, 1, INT8)
        for pattern in (np.ones(1024), -np.ones(1024), np.where(np.arange(1024) % 32 < 16, 1, -1)):
            x = np.tile(pattern.astype(np.float32), (5, 1))
            y = linear(backend, matrix, x, 16)
            exact = x.astype(np.float64) @ values.T
            scale = np.abs(values).sum(1).max()
            assert np.abs(y - exact).max() <= 1e-5 * scale + 1e-30
            assert equal_bits(linear(backend, matrix, x[:1], 16), y[:1])


@pytest.mark.parametrize(("dtype", "arithmetic"), [("float32", 0), ("float16", 0), ("bfloat16", 0), ("bfloat16", FLOAT)])
@pytest.mark.parametrize("k", [24, 95, 768])
def test_borrowed_rows(dtype: str, arithmetic: int, k: int, isa: str) -> None:
    """Parts that are read from the caller's rows, apart or adjacent, have the bits of written parts; changes are seen."""
    rng, sizes = np.random.default_rng(8), [33, 48, 7]
    backend = Backend("cpu", isa, 3)
    raws = [random_weights(dtype, rows, k + 8, rng)[0][:, :k] for rows in sizes]
    parts = [(dtype, n, np.ascontiguousarray(raw)) for n, raw in zip(sizes, raws, strict=True)]
    matrix = backend.matrix(parts, k, 3, arithmetic)
    whole, x = sum(sizes), rng.standard_normal((40, k)).astype(np.float32)
    ids, bias = rng.integers(0, whole, 20).astype(np.int32), rng.standard_normal(whole).astype(np.float32)

    def everything() -> list[bytes]:
        read, embedded = np.empty((whole, k), np.float32), np.empty((20, k), np.float32)
        backend.matrix_read(matrix, 0, whole, read)
        backend.embed(matrix, ids, embedded)
        linears = [linear(backend, matrix, x[:rows], whole, bias=bias).tobytes() for rows in (1, 2, 13, 40)]
        return [read.tobytes(), embedded.tobytes(), *linears]

    wanted, (bytes_before, _) = everything(), backend.matrix_info(matrix, 0)
    for part in (1, 0, 2):  # mixed with parts of the backend's own, then all
        backend.matrix_borrow(matrix, part, raws[part])
        assert everything() == wanted
    assert backend.matrix_info(matrix, 0)[0] == 0 < bytes_before
    raws[1][:] = raws[1][::-1].copy()
    changed = everything()
    backend.matrix_write(matrix, 1, 0, 48, np.ascontiguousarray(raws[1]))
    assert everything() == changed != wanted and 0 < backend.matrix_info(matrix, 0)[0] < bytes_before
    assert backend.allocations == 0


def test_refusals(isa: str) -> None:
    """An unsupported type or size is an error that names it."""
    backend = Backend("cpu", isa, 1, 8, 512)
    assert backend.supports("q4_k") and not backend.supports("int8")
    with pytest.raises(Exception, match="multiples of 256"):
        backend.matrix([("q4_k", 1, np.zeros(144, np.uint8))], 96)
    with pytest.raises(Exception, match="iq2_xxs wants columns in multiples of 256, have 128"):
        backend.matrix([("iq2_xxs", 1, np.zeros(66, np.uint8))], 128)
    with pytest.raises(Exception, match="int32"):
        backend.matrix([("int32", 1, np.zeros(512, np.int32))], 512)
    with pytest.raises(Exception, match="max_cols"):
        backend.matrix([("float32", 1, np.zeros(513, np.float32))], 513)
    matrix = backend.matrix([("float32", 1, np.zeros(512, np.float32))], 512)
    with pytest.raises(Exception, match="max_rows"):
        linear(backend, matrix, np.zeros((9, 512), np.float32), 1)
    with pytest.raises(Exception, match="isa"):
        Backend("cpu", "sse9")
    with pytest.raises(Exception, match="num_threads"):
        Backend("cpu", isa, 100_000)
