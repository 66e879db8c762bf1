"""Mixtures of experts on a CUDA device in two-byte types: the bits of their separate linears in any batch.

test_experts.py compares with float64. Here every kernel (few rows, many, plain) must give the bits of one chain.
"""

from collections.abc import Callable
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from cuda_ways import is_portable
from group_blocks import GROUPS, headers

from binding import Backend, Matrix
from llmpy import hardware

Array = np.ndarray
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
GATED, CLAMPED, PLAIN = range(3)
SILU, GELU_TANH, RELU2 = 0, 2, 4
LINEAR, EXPERTS = 1, 4
FLOAT, ROUNDED = 1, {"fp8": 4, "int8_g128": 2}  # enum arithmetic
# bytes of a block, values of a block, offsets of its float16 fields
BLOCKS = {
    "q8_0": (34, 32, [0]), "q4_0": (18, 32, [0]), "q4_k": (144, 256, [0, 2]), "q6_k": (210, 256, [208]), "mxfp4": (17, 32, []),
    "fp8": (132, 128, []), **GROUPS,
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(cuda: str) -> Callable[[str], Backend]:
    """The device's backend with a type of activations."""
    return lambda dtype: Backend(cuda, max_rows=4096, dtype=dtype, library=hardware.cuda_library())


def stored(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Weights as a file has them."""
    if dtype in KINDS:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(KINDS[dtype]).view(np.uint16)
    n_bytes, n_values, scales = BLOCKS[dtype]
    blocks = rng.integers(0, 256, (*shape[:-1], -(-shape[-1] // n_values), n_bytes), dtype=np.uint8)
    for offset in scales:
        scale = rng.uniform(0.001, 0.004, blocks.shape[:-1]).astype(np.float16)
        blocks[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    if dtype == "mxfp4":
        blocks[..., 0] = 119
    if dtype == "fp8":
        blocks[blocks & 0x7F == 0x7F] = 0x81  # no NaN
        blocks[..., :4] = rng.uniform(1e-4, 4e-4, blocks.shape[:-1]).astype(np.float32)[..., None].view(np.uint8)
    if dtype in GROUPS:
        blocks[..., :4] = headers(dtype, blocks.shape[:-1], rng)
    return blocks.reshape(*shape[:-1], -1)


class Mixture:
    """Random experts, and the results of their separate linears."""

    def __init__(
        self, backend: Backend, activations: str, n: int, cols: int, inner: int, form: int = GATED, act: int = SILU,
        dtype: str = "", has_bias: bool = False, limit: float = 0.7, scaled: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.backend, self.kind, self.n, self.cols, self.inner = backend, KINDS[activations], n, cols, inner
        self.form, self.act, self.dtype, self.limit, self.scaled = form, act, dtype or activations, limit, scaled
        self.rows = inner if form == PLAIN else 2 * inner
        self.up, self.down = (stored(self.dtype, shape, rng) for shape in ((n, self.rows, cols), (n, cols, inner)))
        self.up_bias = rng.standard_normal((n, self.rows)).astype(np.float32) if has_bias else None
        self.down_bias = rng.standard_normal((n, cols)).astype(np.float32) if has_bias else None
        parts = [(self.dtype, self.rows, np.ascontiguousarray(e)) for e in self.up]
        self.all_up = backend.matrix(parts, cols, LINEAR | EXPERTS, n_experts=n)
        parts = [(self.dtype, cols, np.ascontiguousarray(e)) for e in self.down]
        self.all_down = backend.matrix(parts, inner, LINEAR | EXPERTS, n_experts=n)

    def run(self, x: Array, routes: Array) -> Array:
        y = np.full((len(x), self.cols + 8), 3, self.kind)
        self.backend.experts(
            self.all_up, self.all_down, np.ascontiguousarray(routes), x.view(np.uint16), y.view(np.uint16)[:, : self.cols],
            self.n, self.inner, self.form, self.act, self.limit, self.up_bias, self.down_bias, self.scaled,
        )  # fmt: skip
        assert self.backend.allocations == 0
        assert (y[:, self.cols :] == 3).all()
        return np.ascontiguousarray(y[:, : self.cols])

    def linear(self, of: Matrix, raw: Array, x: Array, bias: Array | None) -> Array:
        """A linear of one expert, with the arithmetic of the experts' matrix."""
        rows = raw.shape[0]
        y = np.empty((len(x), rows), self.kind)
        arithmetic = self.backend.matrix_info(of, 0)[1]
        matrix = self.backend.matrix([(self.dtype, rows, np.ascontiguousarray(raw))], x.shape[1], LINEAR, arithmetic)
        self.backend.linear(matrix, np.ascontiguousarray(x).view(np.uint16), y.view(np.uint16), bias)
        return y

    def product(self, h: Array) -> Array:
        out = np.empty((len(h), self.inner), self.kind)
        words = h.view(np.uint16)
        if self.form == PLAIN:
            self.backend.act(words, out.view(np.uint16), self.act)
        else:
            self.backend.gated(words[:, : self.inner], words[:, self.inner :], out.view(np.uint16), self.act)
        return out

    def expected(self, x: Array, routes: Array) -> Array:
        """Expected results from separate linears; weights have few bits, so float64 holds each step of the chain exactly."""
        weights = routes.view(np.float32)[:, 1::2]
        results = np.zeros((len(x), weights.shape[1], self.cols), np.float64)
        for e in range(self.n):
            rows, places = np.nonzero(routes[:, 0::2] == e)
            if not len(rows):
                continue
            mine = x[rows]
            if self.scaled:
                mine = (mine.astype(np.float32) * weights[rows, places][:, None]).astype(self.kind)
            biases = [None if all_of is None else all_of[e].copy() for all_of in (self.up_bias, self.down_bias)]
            h = self.linear(self.all_up, self.up[e], mine, biases[0])
            y = self.linear(self.all_down, self.down[e], self.product(h), biases[1])
            results[rows, places] = y.astype(np.float64)
        total = np.zeros((len(x), self.cols), np.float32)
        for j in range(weights.shape[1]):
            weight = np.ones(len(x)) if self.scaled else weights[:, j].astype(np.float64)
            total = (weight[:, None] * results[:, j] + total).astype(np.float32)
        return total.astype(self.kind)


def draw_routes(n_rows: int, n: int, k: int, rng: np.random.Generator, skew: float = 1.0) -> Array:
    """Random pairs of expert and weight with few bits; some experts are chosen often, some rarely."""
    liking = rng.exponential(1, n) ** skew
    routes = np.zeros((n_rows, 2 * k), np.int32)
    routes[:, 0::2] = np.stack([rng.choice(n, k, False, liking / liking.sum()) for _ in range(n_rows)])
    routes.view(np.float32)[:, 1::2] = rng.integers(1, 256, (n_rows, k)) / 256
    return routes


# experts, chosen, columns, inner, options
CASES: dict[str, tuple[int, int, int, int, dict[str, object]]] = {
    "gated": (6, 2, 256, 192, {}),
    "wide": (8, 2, 576, 832, {"act": GELU_TANH}),  # columns that end in the middle of a stage
    "many": (128, 8, 128, 64, {"skew": 2.0}),
    "bias": (16, 4, 192, 128, {"has_bias": True}),
    "plain": (20, 6, 320, 448, {"form": PLAIN, "act": RELU2}),
    "plain-bias": (5, 3, 128, 64, {"form": PLAIN, "act": SILU, "has_bias": True}),
    "input": (4, 1, 192, 320, {"scaled": True}),
    "alone": (1, 1, 512, 256, {}),
    "all": (7, 7, 64, 64, {}),
    "odd": (6, 2, 72, 40, {"has_bias": True}),  # what the copy engine cannot read
    "odder": (5, 3, 33, 19, {}),
    "odd-plain": (4, 2, 64, 24, {"form": PLAIN, "act": RELU2}),
    "big": (12, 4, 1024, 768, {}),
}
ROWS = (1, 2, 3, 5, 8, 9, 12, 16, 20, 25, 33, 47, 64, 65, 90, 128, 150, 200, 257, 400, 700)


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("weights", ["", *ROUNDED])
@pytest.mark.parametrize("case", CASES)
def test_bits(case: str, weights: str, dtype: str, opened: Callable[[str], Backend]) -> None:
    """The bits of the experts' linears for any number of rows; a row with NaN affects only itself."""
    n, k, cols, inner, made = CASES[case]
    options = dict(made)
    skew = float(str(options.pop("skew", 1.0)))
    rng = np.random.default_rng(len(case) + n)
    mixture = Mixture(opened(dtype), dtype, n, cols, inner, dtype=weights, **options)  # type: ignore[arg-type]
    found = [mixture.backend.matrix_info(matrix, 0)[1] for matrix in (mixture.all_up, mixture.all_down)]
    wanted = [ROUNDED.get(weights, FLOAT) if width % 64 == 0 else FLOAT for width in (cols, inner)]
    assert found == wanted or case.startswith("odd")
    wide = np.full((ROWS[-1], cols + 16), np.nan, mixture.kind)  # rows lie apart
    wide[:, 8 : cols + 8] = rng.standard_normal((ROWS[-1], cols))
    x, routes = wide[:, 8 : cols + 8], draw_routes(ROWS[-1], n, k, rng, skew)
    expected = mixture.expected(x, routes)
    assert np.abs(expected.astype(np.float32)).max() > 0.01
    for rows in ROWS:
        first = int(rng.integers(0, ROWS[-1] + 1 - rows))
        part = slice(first, first + rows)
        assert mixture.run(x[part], routes[part]).tobytes() == expected[part].tobytes(), rows
    x[3] = np.nan
    for rows in (5, 20, 100, 600):
        y = mixture.run(x[:rows], routes[:rows])
        assert np.isnan(y[3].astype(np.float32)).all()
        y[3] = expected[3]
        assert y.tobytes() == expected[:rows].tobytes(), rows


@pytest.mark.parametrize("weights", ["bfloat16", *ROUNDED])
def test_all_rows_to_the_same(weights: str, opened: Callable[[str], Backend]) -> None:
    """Some experts have all rows, more than a unit holds, while others have none."""
    rng = np.random.default_rng(2)
    mixture = Mixture(opened("bfloat16"), "bfloat16", 64, 192, 128, dtype=weights)
    x, routes = rng.standard_normal((400, 192)).astype(mixture.kind), draw_routes(400, 64, 4, rng)
    whole = mixture.run(x, routes)
    for rows in (2, 8, 9, 40, 64, 100, 300, 2000):
        lone = rng.integers(0, 2, rows) * 7
        assert mixture.run(x[lone], routes[lone]).tobytes() == whole[lone].tobytes(), rows


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize(
    ("k", "cols", "inner", "form"),
    [
        (1, 192, 128, GATED),
        (2, 6144, 64, CLAMPED),
        (2, 6208, 64, GATED),
        (3, 64, 3136, GATED),
        (4, 2944, 192, CLAMPED),
        (5, 2944, 64, GATED),
        (6, 576, 832, CLAMPED),
        (7, 320, 320, GATED),
        (8, 2048, 768, CLAMPED),
        (9, 128, 128, GATED),
    ],
)
def test_one_row(k: int, cols: int, inner: int, form: int, dtype: str, opened: Callable[[str], Backend]) -> None:
    """A row alone, with any number of experts, has the same bits as in a batch, in consecutive launches."""
    rng = np.random.default_rng(k)
    mixture = Mixture(opened(dtype), dtype, 12, cols, inner, form, has_bias=form == CLAMPED)
    x, routes = rng.standard_normal((20, cols)).astype(mixture.kind), draw_routes(20, 12, k, rng)
    whole = mixture.run(x, routes)
    assert np.isfinite(whole.astype(np.float32)).all()
    for row in range(20):
        assert mixture.run(x[row : row + 1], routes[row : row + 1]).tobytes() == whole[row].tobytes(), row


@pytest.mark.parametrize("dtype", list(KINDS))
def test_clamped(dtype: str, opened: Callable[[str], Backend]) -> None:
    """The clamped product against float64, and its bits over the rows."""
    rng = np.random.default_rng(3)
    for cols, inner in ((128, 192), (40, 24)):
        mixture = Mixture(opened(dtype), dtype, 6, cols, inner, CLAMPED, has_bias=True)
        x, routes = rng.standard_normal((300, cols)).astype(mixture.kind), draw_routes(300, 6, 2, rng)
        up, down = (w.view(mixture.kind).astype(np.float64) for w in (mixture.up, mixture.down))
        exact = np.zeros((300, cols))
        assert mixture.up_bias is not None and mixture.down_bias is not None
        for r, row in enumerate(x.astype(np.float64)):
            for e, weight in zip(routes[r, 0::2], routes.view(np.float32)[r, 1::2], strict=True):
                h = up[e] @ row + mixture.up_bias[e]
                gate = np.minimum(h[:inner], 0.7)
                h = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(h[inner:], -0.7, 0.7) + 1)
                exact[r] += float(weight) * (down[e] @ h + mixture.down_bias[e])
        whole = mixture.run(x, routes)
        error = np.linalg.norm(whole.astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error < {"float16": 1e-3, "bfloat16": 8e-3}[dtype]
        for rows in (1, 8, 30, 64, 100):
            assert mixture.run(x[:rows], routes[:rows]).tobytes() == whole[:rows].tobytes()


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize(("cols", "inner"), [(128, 192), (1024, 768), (320, 64)])
def test_fp8_values(cols: int, inner: int, dtype: str, opened: Callable[[str], Backend]) -> None:
    """Near float64: of activations that are rounded as the definition says, and of exact ones. The tensor cores' sums, off by
    2e-4, round some inner values to the next bfloat16, and some of those to the next e4m3."""
    rng = np.random.default_rng(cols)
    mixture = Mixture(opened(dtype), dtype, 6, cols, inner, dtype="fp8")
    x, routes = rng.standard_normal((50, cols)).astype(mixture.kind), draw_routes(50, 6, 2, rng)

    def values(raw: Array, width: int) -> Array:
        blocks = raw.reshape(*raw.shape[:2], -1, 132)
        scales = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
        numbers = np.ascontiguousarray(blocks[..., 4:]).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return (numbers * scales).reshape(*raw.shape[:2], -1)[..., :width]

    def rounded(row: Array) -> Array:
        slabs = np.zeros(-(-len(row) // 128) * 128)
        slabs[: len(row)] = row
        slabs = slabs.reshape(-1, 128)
        scales = np.abs(slabs).max(1, keepdims=True) / 448
        return ((slabs / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales).ravel()[: len(row)]

    up, down = values(mixture.up, cols), values(mixture.down, inner)
    got = mixture.run(x, routes).astype(np.float64)
    for rule, limit in ((rounded, {"float16": 1e-2, "bfloat16": 2e-2}[dtype]), (lambda row: row, 0.08)):
        wanted = np.zeros((50, cols))
        for r, row in enumerate(x.astype(np.float64)):
            for e, weight in zip(routes[r, 0::2], routes.view(np.float32)[r, 1::2], strict=True):
                gate, other = np.split((up[e] @ rule(row)).astype(mixture.kind).astype(np.float64), 2)
                h = (gate / (1 + np.exp(-gate)) * other).astype(mixture.kind).astype(np.float64)
                wanted[r] += float(weight) * (down[e] @ rule(h))
        assert np.linalg.norm(got - wanted) < limit * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", list(BLOCKS))
def test_quantised(dtype: str, opened: Callable[[str], Backend]) -> None:
    """Types of GGUF files, FP8 and groups: the bits of the linears."""
    rng = np.random.default_rng(4)
    activations = "float16" if dtype == "mxfp4" else "bfloat16"
    mixture = Mixture(opened(activations), activations, 5, 256, 512, dtype=dtype)
    x, routes = rng.standard_normal((40, 256)).astype(mixture.kind), draw_routes(40, 5, 2, rng)
    expected = mixture.expected(x, routes)
    for rows in (1, 8, 13, 40):
        assert mixture.run(x[:rows], routes[:rows]).tobytes() == expected[:rows].tobytes()


def packed_blocks(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, Array]:
    """Rows of MXFP4 blocks as in a file, and their values."""
    nibbles = rng.integers(0, 16, (*shape[:-1], shape[-1] // 32, 32), dtype=np.uint8)
    exponents = rng.integers(118, 123, (*nibbles.shape[:-1], 1), dtype=np.uint8)
    exponents[..., 0, 0, :] = rng.integers(0, 129, exponents[..., 0, 0, :].shape)  # far ones, too
    values = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[nibbles] * np.exp2(exponents - 128.0)
    blocks = np.concatenate([exponents, nibbles[..., :16] | nibbles[..., 16:] << 4], -1)
    return blocks.reshape(*shape[:-1], -1), values.reshape(shape).astype(np.float32)


RANK_ROWS = (1, 3, 9, 40, 200, 700)


def rank_matrices(mixture: Mixture, experts: slice, inner: slice, outputs: slice) -> tuple[Matrix, Matrix, list[Array | None]]:
    """Some experts' inner columns and outputs, as a rank holds them: up, down and their biases."""
    n_halves = 1 if mixture.form == PLAIN else 2

    def of_halves(rows: Array) -> Array:
        halves = rows.reshape(len(rows), n_halves, mixture.inner, -1)[:, :, inner]
        return np.ascontiguousarray(halves.reshape(len(rows), -1, *rows.shape[2:]))

    up, down = of_halves(mixture.up[experts]), np.ascontiguousarray(mixture.down[experts, outputs])
    biases = (mixture.up_bias, of_halves), (mixture.down_bias, lambda rows: rows[:, outputs].copy())
    make = mixture.backend.matrix
    return (
        make([(mixture.dtype, e.shape[0], e.copy()) for e in up], mixture.cols, LINEAR | EXPERTS),
        make([(mixture.dtype, e.shape[0], e.copy()) for e in down], mixture.inner, LINEAR | EXPERTS),
        [None if bias is None else cut(bias[experts]) for bias, cut in biases],
    )


def same_words(array: Array) -> Array:
    return array.view(np.uint16)


@pytest.mark.parametrize("dtype", [*KINDS, "fp8"])
@pytest.mark.parametrize("case", ["gated", "bias", "plain-bias", "input", "odd", "big"])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_ranks_with_some_of_the_experts(case: str, dtype: str, n_ranks: int, opened: Callable[[str], Backend]) -> None:
    """Each writes the results of its own routes and nothing else; combined they have the bits of all experts on one rank."""
    n, k, cols, inner, options = CASES[case]
    rng = np.random.default_rng(n_ranks + n)
    activations = dtype if dtype in KINDS else "bfloat16"
    mixture = Mixture(opened(activations), activations, n, cols, inner, dtype=dtype, **options)  # type: ignore[arg-type]
    x, routes = rng.standard_normal((RANK_ROWS[-1], cols)).astype(mixture.kind), draw_routes(RANK_ROWS[-1], n, k, rng)
    shares = list(pairwise(n * rank // n_ranks for rank in range(n_ranks + 1)))
    made = [rank_matrices(mixture, slice(*share), slice(None), slice(None)) for share in shares]
    for rows in RANK_ROWS:
        results = np.full((rows, k * cols + 8), 3, mixture.kind)
        for (first, end), (up, down, (up_bias, down_bias)) in zip(shares, made, strict=True):
            before = results.copy()
            mixture.backend.experts(
                up, down, routes[:rows].copy(), same_words(x[:rows]), same_words(results)[:, :-8], n, inner, mixture.form,
                mixture.act, mixture.limit, up_bias, down_bias, mixture.scaled, held=(first, end - first),
            )  # fmt: skip
            is_own = (routes[:rows, 0::2] >= first) & (routes[:rows, 0::2] < end)
            changed = (same_words(results) != same_words(before))[:, :-8].reshape(-1, k, cols).any(-1)
            assert (changed == is_own).all()
        assert (results[:, -8:] == 3).all()
        y = np.full((rows, cols + 8), 3, mixture.kind)
        mixture.backend.combine(same_words(results)[:, :-8], routes[:rows].copy(), same_words(y)[:, :-8], mixture.scaled)
        assert y[:, :-8].tobytes() == mixture.run(x[:rows], routes[:rows]).tobytes() and (y[:, -8:] == 3).all(), rows


@pytest.mark.parametrize("dtype", [*KINDS, "fp8"])
@pytest.mark.parametrize("case", ["gated", "bias", "plain-bias", "input", "big"])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_ranks_with_columns_of_all_experts(case: str, dtype: str, n_ranks: int, opened: Callable[[str], Backend]) -> None:
    """The ways up and down apart, with a rank's columns of each, have the bits of both on one rank."""
    n, k, cols, inner, options = CASES[case]
    rng = np.random.default_rng(n_ranks + n)
    activations = dtype if dtype in KINDS else "bfloat16"
    mixture = Mixture(opened(activations), activations, n, cols, inner, dtype=dtype, **options)  # type: ignore[arg-type]
    x, routes = rng.standard_normal((RANK_ROWS[-1], cols)).astype(mixture.kind), draw_routes(RANK_ROWS[-1], n, k, rng)
    inners, outputs = (
        list(pairwise(size // 16 * rank // n_ranks * 16 for rank in range(n_ranks + 1))) for size in (inner, cols)
    )
    made = [rank_matrices(mixture, slice(None), slice(*i), slice(*o)) for i, o in zip(inners, outputs, strict=True)]
    call = (n, inner, mixture.form, mixture.act, mixture.limit)
    for rows in RANK_ROWS:
        products, y = np.full((rows, k * inner + 8), 3, mixture.kind), np.full((rows, cols + 8), 3, mixture.kind)
        some = routes[:rows].copy()
        for (first, end), (up, _, (bias, _)) in zip(inners, made, strict=True):
            before = products.copy()
            mixture.backend.experts(
                up, None, some, same_words(x[:rows]), same_words(products)[:, :-8], *call, bias, None, mixture.scaled,
                first_column=first,
            )  # fmt: skip
            changed = (same_words(products) != same_words(before))[:, :-8].reshape(-1, k, inner)
            assert not changed[..., :first].any() and not changed[..., end:].any() and changed[..., first:end].any()
        for (first, end), (_, down, (_, bias)) in zip(outputs, made, strict=True):
            mixture.backend.experts(
                None, down, some, same_words(products)[:, :-8], same_words(y)[:, first:end], *call, None, bias, mixture.scaled
            )
        assert y[:, :-8].tobytes() == mixture.run(x[:rows], routes[:rows]).tobytes() and (y[:, -8:] == 3).all(), rows
        assert (products[:, -8:] == 3).all()


def test_wrong_widths_by_route(opened: Callable[[str], Backend]) -> None:
    backend = opened("bfloat16")
    mixture, x, y = Mixture(backend, "bfloat16", 4, 64, 32), np.zeros((3, 64), np.uint16), np.zeros((3, 64), np.uint16)
    routes = draw_routes(3, 4, 2, np.random.default_rng(9))
    with pytest.raises(RuntimeError, match=r"experts: wanted down \[128\]\[32\], have \[256\]\[32\]"):
        backend.experts(mixture.all_up, mixture.all_down, routes, x, y, 4, 32, held=(0, 4))
    with pytest.raises(RuntimeError, match="experts: wanted 40 columns of each part of y, have 32"):
        backend.experts(mixture.all_up, None, routes, x, y, 4, 32, first_column=8)
    with pytest.raises(RuntimeError, match="combine: wanted 2 results of 64 columns, have 64 columns"):
        backend.combine(x, routes, y)


def twins(backend: Backend, activations: str, n: int, cols: int, inner: int, form: int) -> tuple[Mixture, Mixture]:
    """A mixture in MXFP4, and one in bfloat16 with the same values."""
    rng = np.random.default_rng(cols)
    act = RELU2 if form == PLAIN else SILU
    packed, plain = (
        Mixture(backend, activations, n, cols, inner, form, act, dtype="bfloat16", has_bias=True, limit=0.7) for _ in range(2)
    )
    for name, shape in (("up", (n, packed.rows, cols)), ("down", (n, cols, inner))):
        blocks, values = packed_blocks(shape, rng)
        wide = values.astype(ml_dtypes.bfloat16)
        assert (wide.astype(np.float32) == values).all()
        for mixture, dtype, stored_rows in ((packed, "mxfp4", blocks), (plain, "bfloat16", wide.view(np.uint16))):
            parts = [(dtype, shape[1], np.ascontiguousarray(e)) for e in stored_rows]
            matrix = backend.matrix(parts, shape[2], LINEAR | EXPERTS)
            setattr(mixture, f"all_{name}", matrix)
            read = np.empty((2 * shape[1], shape[2]), np.float32)
            backend.matrix_read(matrix, shape[1], len(read), read)
            assert read.tobytes() == values[1:3].tobytes()
    return packed, plain


@pytest.mark.parametrize(
    ("n", "k", "cols", "inner", "form"),
    [
        (6, 2, 256, 192, CLAMPED),
        (32, 4, 2880, 64, GATED),
        (40, 8, 64, 320, GATED),
        (20, 6, 192, 448, PLAIN),
        (3, 3, 128, 1088, CLAMPED),
    ],
)
def test_mxfp4(n: int, k: int, cols: int, inner: int, form: int, opened: Callable[[str], Backend]) -> None:
    """The bits of the same values in bfloat16, for any number of rows; the portable kernels have another chain."""
    packed, plain = twins(opened("bfloat16"), "bfloat16", n, cols, inner, form)
    rng = np.random.default_rng(n)
    x, routes = rng.standard_normal((700, cols)).astype(ml_dtypes.bfloat16), draw_routes(700, n, k, rng)
    expected = plain.run(x, routes)
    assert np.isfinite(expected.astype(np.float32)).any()
    if is_portable(opened("bfloat16")):
        wanted, expected = expected.astype(np.float64), packed.run(x, routes)
        assert np.linalg.norm(expected.astype(np.float64) - wanted) < 1e-2 * np.linalg.norm(wanted)
    for rows in ROWS:
        first = int(rng.integers(0, 701 - rows))
        part = slice(first, first + rows)
        assert packed.run(x[part], routes[part]).tobytes() == expected[part].tobytes(), rows


@pytest.mark.parametrize(
    ("k", "cols", "inner", "form"),
    [
        (1, 320, 640, GATED),
        (2, 6144, 192, CLAMPED),
        (3, 64, 6144, GATED),
        (4, 2944, 704, CLAMPED),
        (4, 64, 6208, GATED),
        (5, 448, 320, CLAMPED),
    ],
)
def test_one_row_of_mxfp4(k: int, cols: int, inner: int, form: int, opened: Callable[[str], Backend]) -> None:
    """A row alone has the same bits as in a batch, in consecutive launches."""
    rng = np.random.default_rng(k)
    mixture, _ = twins(opened("bfloat16"), "bfloat16", 6, cols, inner, form)
    x, routes = rng.standard_normal((20, cols)).astype(ml_dtypes.bfloat16), draw_routes(20, 6, k, rng)
    whole = mixture.run(x, routes)
    for row in range(20):
        assert mixture.run(x[row : row + 1], routes[row : row + 1]).tobytes() == whole[row].tobytes(), row


@pytest.mark.parametrize(("cols", "inner"), [(96, 64), (64, 160), (32, 96)])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_mxfp4_that_is_not_packed(dtype: str, cols: int, inner: int, opened: Callable[[str], Backend]) -> None:
    """Columns that are not a multiple of 64, or other activations: near the same values, equal bits for any number of rows."""
    packed, plain = twins(opened("bfloat16"), "bfloat16", 5, cols, inner, GATED)
    if dtype == "float16":
        packed = Mixture(opened(dtype), dtype, 5, cols, inner, dtype="mxfp4")
    rng = np.random.default_rng(inner)
    x, routes = rng.standard_normal((60, cols)).astype(packed.kind), draw_routes(60, 5, 2, rng)
    whole = packed.run(x, routes)
    if dtype == "bfloat16":
        wanted = plain.run(x, routes).astype(np.float64)
        assert np.linalg.norm(whole.astype(np.float64) - wanted) < 1e-2 * np.linalg.norm(wanted)
    for rows in (1, 7, 20, 60):
        assert packed.run(x[:rows], routes[:rows]).tobytes() == whole[:rows].tobytes()


def test_large_exponents_of_mxfp4(opened: Callable[[str], Backend]) -> None:
    if is_portable(opened("bfloat16")):
        pytest.skip("weights are not packed")
    blocks = np.full((8, 34), 129, np.uint8)
    with pytest.raises(Exception, match="at most 12"):
        opened("bfloat16").matrix([("mxfp4", 8, blocks)], 64, LINEAR | EXPERTS)


def test_refusals(opened: Callable[[str], Backend]) -> None:
    backend = opened("bfloat16")
    y, routes = np.zeros((1, 64), np.uint16), np.zeros((1, 2), np.int32)
    down = backend.matrix([("bfloat16", 128, np.zeros((128, 64), np.uint16))], 64)
    mixed = backend.matrix(
        [("bfloat16", 128, np.zeros((128, 64), np.uint16)), ("float32", 128, np.zeros((128, 64), np.float32))], 64
    )
    with pytest.raises(Exception, match="one type"):
        backend.experts(mixed, down, routes, y, y, 2, 64)
    with pytest.raises(Exception, match="at most 512 experts"):
        backend.experts(down, down, np.zeros((1, 34), np.int32), y, y, 2, 64)


@pytest.mark.parametrize(("n", "k"), [(128, 8), (512, 10), (8, 2), (60, 4)])
def test_routes_do_not_depend_on_other_rows(n: int, k: int, opened: Callable[[str], Backend]) -> None:
    backend, rng = opened("bfloat16"), np.random.default_rng(n)
    logits = rng.standard_normal((300, n)).astype(np.float32)
    whole = np.zeros((300, 2 * k), np.int32)
    backend.route(logits, whole, normalised=True)
    for rows in (1, 3, 4, 5, 128):
        routes = np.zeros((rows, 2 * k), np.int32)
        backend.route(logits[100 : 100 + rows].copy(), routes, normalised=True)
        assert routes.tobytes() == whole[100 : 100 + rows].tobytes()
