"""Linears on a CUDA device against float64: all its weight types, float32 and two-byte activations, tensor cores."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from group_blocks import GROUPS, IQ, headers, scatter_scale

from binding import Backend
from llmpy import hardware

Array = np.ndarray
KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LINEAR, LOGITS = 1, 16  # enum matrix_use
FLOAT = 1  # enum arithmetic
# bytes of a block, values of a block, offsets of its float16 fields
BLOCKS = {
    "q8_0": (34, 32, [0]), "q4_0": (18, 32, [0]), "q4_1": (20, 32, [0, 2]), "q4_k": (144, 256, [0, 2]),
    "q6_k": (210, 256, [208]),
    "q5_0": (22, 32, [0]), "q5_1": (24, 32, [0, 2]), "q2_k": (84, 256, [80, 82]), "q3_k": (110, 256, [108]),
    "q5_k": (176, 256, [0, 2]), **IQ,
    "fp8": (132, 128, []), "nf4": (36, 64, []), "fp4": (36, 64, []), "table4": (320, 512, []), **GROUPS,
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(cuda: str) -> Callable[[str], Backend]:
    """The device's backend with a type of activations."""
    return lambda dtype: Backend(cuda, max_rows=512, dtype=dtype, library=hardware.cuda_library())


def raw_rows(dtype: str, rows: int, cols: int, rng: np.random.Generator) -> Array:
    """Random rows in the file's format."""
    if dtype in KINDS:
        raw = (0.05 * rng.standard_normal((rows, cols))).astype(KINDS[dtype]).view(np.uint8).reshape(rows, -1)
    else:
        n_bytes, n_values, scales = BLOCKS[dtype]
        blocks = rng.integers(0, 256, (rows, -(-cols // n_values), n_bytes), dtype=np.uint8)
        for offset in scales:
            scale = rng.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16)
            blocks[:, :, offset : offset + 2] = scale[..., None].view(np.uint8)
        if dtype == "fp8":
            blocks[blocks & 0x7F == 0x7F] = 0x81  # no NaN
            blocks[:, :, :4] = rng.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float32)[..., None].view(np.uint8)
        if dtype in (*GROUPS, "nf4", "fp4"):
            blocks[:, :, :4] = headers(dtype, blocks.shape[:2], rng)
        if dtype == "iq1_m":
            scatter_scale(blocks, rng.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16))
        if dtype == "table4":
            blocks[:, :, :64] = rng.normal(0, 0.1, (*blocks.shape[:2], 16)).astype(np.float32).view(np.uint8)
        raw = blocks.reshape(rows, -1)
    return np.ascontiguousarray(raw)


def weights(backend: Backend, dtype: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[object, Array]:
    """(a matrix, its exact values as the CPU reads them)."""
    raw, values = raw_rows(dtype, rows, cols, rng), np.empty((rows, cols), np.float32)
    cpu = Backend("cpu")
    cpu.matrix_read(cpu.matrix([(dtype, rows, raw)], cols), 0, rows, values)
    return backend.matrix([(dtype, rows, raw)], cols, 3, FLOAT), values


def linear(backend: Backend, matrix: object, x: Array, n: int, **options: object) -> Array:
    y = np.zeros((len(x), n), x.dtype)
    words = np.float32 if x.dtype == np.float32 else np.uint16
    backend.linear(matrix, x.view(words), y.view(words), **options)
    return y


@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize("dtype", [*KINDS, *BLOCKS])
def test_values_and_rows(dtype: str, activations: str, opened: Callable[[str], Backend]) -> None:
    """Near float64 (one rounding of the result, and of float32 sums), and the same bits for every number of rows."""
    rng = np.random.default_rng(1)
    backend = opened(activations)
    for n, k in ((40, 256), (203, 1280)):
        matrix, values = weights(backend, dtype, n, k, rng)
        read, ids = np.empty((n, k), np.float32), rng.integers(0, n, 9).astype(np.int32)
        backend.matrix_read(matrix, 0, n, read)
        assert read.tobytes() == values.tobytes()
        x = rng.standard_normal((300, k)).astype(KINDS[activations])
        embedded = np.empty((9, k), x.dtype)
        backend.embed(matrix, ids, embedded.view(np.float32 if activations == "float32" else np.uint16))
        assert embedded.tobytes() == values[ids].astype(x.dtype).tobytes()
        y = linear(backend, matrix, x, n)
        assert backend.allocations == 0
        exact = x.astype(np.float64) @ values.T.astype(np.float64)
        error = np.linalg.norm(y.astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error < {"float32": 2e-6, "float16": 4e-4, "bfloat16": 3e-3}[activations]
        for rows in (1, 2, 7, 8, 9, 16, 63, 64, 65, 128, 299):
            first = int(rng.integers(0, 301 - rows))
            assert linear(backend, matrix, x[first : first + rows], n).tobytes() == y[first : first + rows].tobytes()


@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize("k", [1, 7, 24, 40, 95, 96])
def test_any_columns_and_places(k: int, activations: str, opened: Callable[[str], Backend]) -> None:
    """Tails of k, strided rows at odd addresses between NaN, bias and sum; a row of NaN affects only itself."""
    rng = np.random.default_rng(k)
    backend, kind = opened(activations), KINDS[activations]
    matrix, values = weights(backend, activations, 19, k, rng)
    wide = np.full((21, k + 6), np.nan, kind)
    wide[:, 3 : k + 3] = rng.standard_normal((21, k)).astype(kind)
    words = np.float32 if activations == "float32" else np.uint16
    plain = linear(backend, matrix, np.ascontiguousarray(wide[:, 3 : k + 3]), 19)
    exact = wide[:, 3 : k + 3].astype(np.float64) @ values.T.astype(np.float64)
    assert np.abs(plain.astype(np.float64) - exact).max() < (1e-5 if activations == "float32" else 2e-2)
    y, add = np.full((21, 24), 7, kind), np.full((21, 19), 3, kind)
    bias = rng.standard_normal(19).astype(np.float32)
    backend.linear(matrix, wide.view(words)[:, 3 : k + 3], y.view(words)[:, 2:21], bias, add.view(words))
    alone = linear(backend, matrix, np.ascontiguousarray(wide[:, 3 : k + 3]), 19, bias=bias)
    assert np.ascontiguousarray(y[:, 2:21]).tobytes() == (alone + add).astype(kind).tobytes()
    assert (y[:, :2] == 7).all() and (y[:, 21:] == 7).all()
    wide[4, 3], wide[9, 3] = np.nan, np.inf
    bad = linear(backend, matrix, np.ascontiguousarray(wide[:, 3 : k + 3]), 19).astype(np.float32)
    assert not np.isfinite(bad[[4, 9]]).any()
    rest = [row for row in range(21) if row not in (4, 9)]
    assert bad[rest].tobytes() == plain.astype(np.float32)[rest].tobytes()


@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize("k", [1, 40, 127, 129, 300])
@pytest.mark.parametrize("dtype", ["fp8", *GROUPS])
def test_cut_blocks(dtype: str, k: int, activations: str, opened: Callable[[str], Backend]) -> None:
    """The rest of the last block has no effect; the bits are those of the values in float32 where x is float32."""
    rng = np.random.default_rng(k)
    backend, kind = opened(activations), KINDS[activations]
    matrix, values = weights(backend, dtype, 19, k, rng)
    x = rng.standard_normal((70, k)).astype(kind)
    y, exact = linear(backend, matrix, x, 19), x.astype(np.float64) @ values.T.astype(np.float64)
    assert np.abs(y.astype(np.float64) - exact).max() <= np.abs(exact).max() * (1e-6 if activations == "float32" else 8e-3)
    if activations == "float32":
        plain = backend.matrix([("float32", 19, values)], k)
        assert linear(backend, plain, x, 19).tobytes() == y.tobytes()
    for rows in (1, 9, 65):
        assert linear(backend, matrix, x[:rows], 19).tobytes() == y[:rows].tobytes()


def spoiled(x: Array, rng: np.random.Generator) -> Array:
    """The rows with magnitudes over six decades."""
    return (x.astype(np.float32) * 10.0 ** rng.integers(-3, 4, x.shape)).astype(x.dtype)


def chain(backend: Backend, matrix: object, x: Array, n: int, **options: object) -> Array:
    """The linear by the plain kernel, the only one that reads rows at odd addresses."""
    odd = np.zeros((len(x), x.shape[1] + 1), x.dtype)
    odd[:, 1:] = x
    y = np.zeros((len(x), n), np.float32 if options.get("is_float_out") else x.dtype)
    backend.linear(matrix, odd.view(np.uint16)[:, 1:], y if options.get("is_float_out") else y.view(np.uint16), **options)
    return y


# columns that are whole stages of the rings, that end in the middle of one, and rows of a few tiles or of a part of one
@pytest.mark.parametrize(("n", "k"), [(40, 64), (203, 576), (576, 1536), (1000, 1024), (3072, 1088), (4096, 14336)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_chain(dtype: str, n: int, k: int, opened: Callable[[str], Backend]) -> None:
    """Every kernel gives the bits of the plain chain for every number of rows; a row of NaN affects only itself."""
    rng = np.random.default_rng(n + k)
    backend, kind = opened(dtype), KINDS[dtype]
    parts = [n // 3, 0, n - n // 3]  # of one type, so that they are one matrix
    raw = (0.05 * rng.standard_normal((n, k))).astype(kind).view(np.uint16)
    cut = [(dtype, rows, raw[at : at + rows].copy()) for rows, at in zip(parts, (0, n // 3, n // 3), strict=True)]
    matrix = backend.matrix(cut, k)
    x = spoiled(rng.standard_normal((300, k)).astype(kind), rng)
    expected = chain(backend, matrix, x, n)
    counts = range(1, 301) if n * k < 1 << 20 else (1, 2, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 96, 128, 129, 192, 256, 300)
    for rows in counts:
        first = int(rng.integers(0, 301 - rows))
        y = linear(backend, matrix, x[first : first + rows], n)
        assert y.tobytes() == expected[first : first + rows].tobytes(), rows
    x[5], x[70] = np.nan, np.inf
    for rows in (6, 16, 64, 100):
        y = linear(backend, matrix, x[:rows], n).astype(np.float32)
        assert not np.isfinite(y[5::65]).any()
        y[5::65] = expected[:rows][5::65]
        assert y.astype(kind).tobytes() == expected[:rows].tobytes(), rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_that_shared_memory_does_not_hold(dtype: str, cuda: str) -> None:
    n, k, kind = 40, 98304, KINDS[dtype]
    rng = np.random.default_rng(9)
    backend = Backend(cuda, max_rows=16, max_cols=k, dtype=dtype, library=hardware.cuda_library())
    raw = (0.05 * rng.standard_normal((n, k), np.float32)).astype(kind).view(np.uint16)
    matrix = backend.matrix([(dtype, n, raw)], k)
    x = rng.standard_normal((9, k), np.float32).astype(kind)
    expected = chain(backend, matrix, x, n)
    for rows in (1, 2, 9):
        assert linear(backend, matrix, x[:rows], n).tobytes() == expected[:rows].tobytes(), rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_epilogues(dtype: str, opened: Callable[[str], Backend]) -> None:
    """Bias, a sum in place, float32 logits; strided rows between guards."""
    rng = np.random.default_rng(7)
    backend, kind, n, k = opened(dtype), KINDS[dtype], 392, 640
    matrix, _ = weights(backend, dtype, n, k, rng)
    x = np.full((150, k + 24), np.nan, kind)
    x[:, 8 : k + 8] = rng.standard_normal((150, k)).astype(kind)
    bias = rng.standard_normal(n).astype(np.float32)
    for rows in (1, 7, 12, 30, 50, 64, 65, 150):
        own, words = np.ascontiguousarray(x[:rows, 8 : k + 8]), x.view(np.uint16)[:rows, 8 : k + 8]
        for options in ({}, {"bias": bias}, {"is_float_out": True}, {"bias": bias, "is_float_out": True}):
            expected = chain(backend, matrix, own, n, **options)
            y = np.full((rows, n + 9), 3, expected.dtype)
            target = y if options.get("is_float_out") else y.view(np.uint16)
            backend.linear(matrix, words, target[:, 2 : n + 2], **options)
            assert np.ascontiguousarray(y[:, 2 : n + 2]).tobytes() == expected.tobytes(), (rows, options)
            assert (y[:, :2] == 3).all() and (y[:, n + 2 :] == 3).all()
        y = rng.standard_normal((rows, n)).astype(kind)
        expected = (chain(backend, matrix, own, n, bias=bias).astype(np.float32) + y.astype(np.float32)).astype(kind)
        backend.linear(matrix, words, y.view(np.uint16), bias, y.view(np.uint16))
        assert y.tobytes() == expected.tobytes(), rows


# halves that are whole eights, that are not, and columns that the streaming kernels do not read
@pytest.mark.parametrize(("n", "k"), [(24, 64), (200, 1088), (1536, 576), (4096, 1024), (203, 128), (40, 72)])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_products(dtype: str, n: int, k: int, opened: Callable[[str], Backend]) -> None:
    """act(gate) * up inside the linear has the bits of the linear and a separate product, for every number of rows."""
    rng = np.random.default_rng(n + k)
    backend, kind = opened(dtype), KINDS[dtype]
    words = np.float32 if dtype == "float32" else np.uint16
    parts = [np.ascontiguousarray((0.2 * rng.standard_normal((n, k))).astype(kind).view(words)) for _ in range(2)]
    matrix = backend.matrix([(dtype, n, part) for part in parts], k)
    bias = rng.standard_normal(2 * n).astype(np.float32)
    x = rng.standard_normal((450, k)).astype(kind)
    x[11] = np.nan
    for rows in (1, 3, 8, 9, 16, 17, 32, 40, 64, 65, 100, 128, 150, 257, 450):
        for act, given in ((0, None), (0, bias), *(((act, None) for act in (1, 2, 3, 4)) if rows in (17, 150) else ())):
            both = linear(backend, matrix, x[:rows], 2 * n, bias=given).view(words)
            y, expected = np.full((rows, n + 3), 5, kind), np.empty((rows, n), kind)
            backend.gated(both[:, :n], both[:, n:], expected.view(words), act)
            mid = np.empty((rows, 2 * n), words)
            backend.linear(matrix, x[:rows].view(words), y.view(words)[:, 1 : n + 1], bias=given, act=act, mid=mid)
            assert np.ascontiguousarray(y[:, 1 : n + 1]).tobytes() == expected.tobytes(), (rows, act)
            assert (y[:, :1] == 5).all() and (y[:, n + 1 :] == 5).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_one_after_another(dtype: str, cuda: str) -> None:
    """A block that has several large tiles stores each while it multiplies the next: the bits of few rows."""
    rng, kind, n, k, rows = np.random.default_rng(8), KINDS[dtype], 7264, 640, 2177
    backend = Backend(cuda, max_rows=rows, dtype=dtype, library=hardware.cuda_library())
    matrix = backend.matrix([(dtype, n, np.zeros((n, k), np.uint16))], k)
    backend.matrix_fill(matrix, 0, n + k, dtype, n, k)
    x = rng.standard_normal((rows, k), np.float32).astype(kind).view(np.uint16)
    bias = rng.standard_normal(n).astype(np.float32)
    for width, given, adds in ((n, None, False), (n, bias, True), (n // 2, None, False), (n // 2, bias, False)):
        before = rng.standard_normal((rows, width + 8), np.float32).astype(kind).view(np.uint16)
        results = {}
        for part in ((0, rows), (0, 60), (1000, 1300), (rows - 50, rows)):
            y, own = before[slice(*part)].copy(), x[slice(*part)]
            mid = np.empty((len(own), n), np.uint16) if width < n else None
            target = y[:, :width]
            backend.linear(matrix, own, target, given, target if adds else None, mid=mid)
            assert (y[:, width:] == before[slice(*part), width:]).all()
            results[part] = y
            assert y.tobytes() == results[0, rows][slice(*part)].tobytes(), (width, adds, part)


LARGE = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]


@pytest.mark.parametrize(("n", "k"), [*LARGE, (32000, 1024), (1536, 576), (1000, 64)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_library(dtype: str, n: int, k: int, cuda: str) -> None:
    """After prepare(), many rows may use cuBLASLt; every row has the same bits as among few rows."""
    library, kind = hardware.cublaslt_library(), KINDS[dtype]
    if not library:
        pytest.skip("no cuBLASLt")
    is_head = n == 32000
    backend = Backend(
        cuda, max_rows=4200, max_cols=k, vocab_size=n if is_head else 0, dtype=dtype, library=hardware.cuda_library(),
        cublaslt=library,
    )  # fmt: skip
    use = LINEAR | (LOGITS if is_head else 0)
    matrix = backend.matrix([(dtype, n, np.zeros((n, k), np.uint16))], k, use)
    backend.matrix_fill(matrix, 0, n + k, dtype, n, k)
    backend.prepare()
    assert "cuBLASLt" in backend.description
    rng = np.random.default_rng(n + k)
    x = spoiled(rng.standard_normal((4200, k), np.float32).astype(kind), rng)
    x[3] = np.nan
    out = np.float32 if is_head else kind
    few = {first: np.empty((64, n), out) for first in (0, 37, 1000, 2011)}
    words = {2: np.uint16, 4: np.float32}[np.dtype(out).itemsize]
    for first, y in few.items():
        backend.linear(matrix, x[first : first + 64].view(np.uint16), y.view(words), is_float_out=is_head)
    counts = (65, 100, 101, 128, 150, 192, 200, 256, 300, 384, 500, 768, 1000, 1536, 1999, 2048)
    for rows in (*counts, 3000, 4096, 4200) if n * k < 1 << 23 else counts:
        y = np.full((rows, n + 8), 9, out)
        backend.linear(matrix, x[:rows].view(np.uint16), y.view(words)[:, :n], is_float_out=is_head)
        assert (y[:, n:] == 9).all() and not np.isfinite(y[3, :n].astype(np.float32)).any()
        y[3, :n] = few[0][3]  # a NaN has many patterns
        for first, expected in few.items():
            there = max(0, min(64, rows - first))
            assert y[first : first + there, :n].tobytes() == expected[:there].tobytes(), (rows, first)


@pytest.mark.parametrize("activations", list(KINDS))
@pytest.mark.parametrize("dtype", [*KINDS, *BLOCKS])
def test_a_share_of_the_rows_has_the_bits_of_the_whole(dtype: str, activations: str, opened: Callable[[str], Backend]) -> None:
    """Ranks have some rows of a matrix each, of the head too."""
    rng, n, k = np.random.default_rng(2), 1032, 512
    backend, words = opened(activations), np.float32 if activations == "float32" else np.uint16
    raw = raw_rows(dtype, n, k, rng)
    x = spoiled(rng.standard_normal((300, k), np.float32).astype(KINDS[activations]), rng)
    for use, kind in ((LINEAR, words), (LINEAR | LOGITS, np.float32)):
        whole, is_float_out = backend.matrix([(dtype, n, raw)], k, use, FLOAT), use != LINEAR
        for first, end in ((0, 512), (512, 1032), (64, 65), (8, 1000), (333, 700)):
            own = backend.matrix([(dtype, end - first, raw[first:end])], k, use, FLOAT)
            for rows in (1, 5, 64, 65, 300):
                y, mine = np.zeros((rows, n), kind), np.zeros((rows, end - first), kind)
                backend.linear(whole, x[:rows].view(words), y, is_float_out=is_float_out)
                backend.linear(own, x[:rows].view(words), mine, is_float_out=is_float_out)
                assert mine.tobytes() == np.ascontiguousarray(y[:, first:end]).tobytes(), (first, rows, use)


def test_refusals(opened: Callable[[str], Backend]) -> None:
    backend = opened("bfloat16")
    assert not any(backend.supports(dtype) for dtype in ("int8", "int32", "float64"))
    with pytest.raises(Exception, match="int32"):
        backend.matrix([("int32", 1, np.zeros(256, np.int32))], 256)
    matrix = backend.matrix([("bfloat16", 1, np.zeros(16, np.uint16))], 16)
    with pytest.raises(Exception, match="max_rows"):
        backend.linear(matrix, np.zeros((513, 16), np.uint16), np.zeros((513, 1), np.uint16))


# rows of W, columns, has a bias, is gate | up; the last ones need two launches
NORMED = {"qwen": (5120, 2048, False, False), "gpt-oss": (5120, 2880, True, False), "llama": (6144, 4096, False, False),
          "product": (10752, 1088, False, True), "product-bias": (11008, 1024, True, True), "small": (2048, 2048, False, False),
          "too-wide": (2560, 4160, False, False)}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", NORMED)
def test_norm_and_linear_are_both_operations(case: str, dtype: str, opened: Callable[[str], Backend]) -> None:
    n, k, is_biased, is_product = NORMED[case]
    rng = np.random.default_rng(n)
    backend = opened(dtype)
    matrix, _ = weights(backend, dtype, n, k, rng)
    weight = rng.standard_normal(k).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if is_biased else None
    a, b = rng.standard_normal((2, 9, k)).astype(KINDS[dtype]).view(np.uint16)
    total, out, mid = np.zeros_like(a), np.zeros_like(a), np.zeros((9, n), np.uint16) if is_product else None
    y = np.zeros((9, n // 2 if is_product else n), np.uint16)
    backend.add_rms_norm(a, b, total, weight, out, 1e-6)
    backend.linear(matrix, out, y, bias, mid=mid)
    for first, rows in ((0, 1), (8, 1), (1, 2), (0, 9)):
        part = slice(first, first + rows)
        mine, normed, made = np.zeros((rows, k), np.uint16), np.zeros((rows, k), np.uint16), np.zeros_like(y[part])
        middle = np.zeros((rows, n), np.uint16) if is_product else None
        backend.norm_linear(a[part], b[part], mine, weight, normed, 1e-6, matrix, made, bias, middle)
        assert backend.allocations == 0
        assert mine.tobytes() == total[part].tobytes() and made.tobytes() == y[part].tobytes()
