"""Mixtures of experts against float64, and bit for bit against their separate linears, for all rows and threads."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from binding import Backend

gguf = pytest.importorskip("gguf")

Open = Callable[..., Backend]
Array = np.ndarray
GATED, CLAMPED, PLAIN = range(3)
SILU, GELU_TANH, RELU2 = 0, 2, 4


def random_routes(n_rows: int, n_experts: int, k: int, rng: np.random.Generator) -> Array:
    """Random pairs of expert and weight around 1/k; some experts are chosen often and some never."""
    liking = rng.exponential(1, n_experts)
    experts = np.stack([rng.choice(n_experts, k, False, liking / liking.sum()) for _ in range(n_rows)])
    routes = np.zeros((n_rows, 2 * k), np.int32)
    routes[:, 0::2] = experts
    routes.view(np.float32)[:, 1::2] = rng.uniform(0.2, 1.5, (n_rows, k)) / k
    return routes


class Experts:
    """Random experts with matrices of one or two parts per expert, and their exact values."""

    def __init__(
        self, n_experts: int, cols: int, inner: int, form: int = GATED, dtype: str = "float32", n_parts: int = 0,
        has_bias: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.n_experts, self.cols, self.inner, self.form, self.dtype = n_experts, cols, inner, form, dtype
        self.n_parts = n_parts or (1 if form == PLAIN else 2)
        rows = inner * (1 if form == PLAIN else 2)
        self.up = self._rounded(rng.standard_normal((n_experts, rows, cols)) / cols**0.5)
        self.down = self._rounded(rng.standard_normal((n_experts, cols, inner)) / inner**0.5)
        self.up_bias = rng.standard_normal((n_experts, rows)).astype(np.float32) if has_bias else None
        self.down_bias = rng.standard_normal((n_experts, cols)).astype(np.float32) if has_bias else None

    def _rounded(self, values: Array) -> Array:
        if self.dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        return values.astype(np.float16 if self.dtype == "float16" else np.float32).astype(np.float32)

    def _stored(self, values: Array) -> Array:
        values = np.ascontiguousarray(values)
        if self.dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16) if self.dtype == "float16" else values

    def matrices(self, backend: Backend, arithmetic: int = 1) -> tuple[object, object]:
        parts = self.up.reshape(self.n_experts * self.n_parts, -1, self.cols)
        up = [(self.dtype, part.shape[0], self._stored(part)) for part in parts]
        down = [(self.dtype, self.cols, self._stored(part)) for part in self.down]
        return backend.matrix(up, self.cols, 1, arithmetic), backend.matrix(down, self.inner, 1, arithmetic)

    def exact(self, x: Array, routes: Array, act: int = SILU, limit: float = 7.0, input_scaled: bool = False) -> Array:
        weights = routes.view(np.float32)[:, 1::2].astype(np.float64)
        out = np.zeros((len(x), self.cols))
        for r, row in enumerate(x.astype(np.float64)):
            for expert, weight in zip(routes[r, 0::2], weights[r], strict=True):
                h = self.up[expert].astype(np.float64) @ (row * (weight if input_scaled else 1))
                h = h + (0 if self.up_bias is None else self.up_bias[expert])
                y = self.down[expert] @ self._inner(h, act, limit)
                y = y + (0 if self.down_bias is None else self.down_bias[expert])
                out[r] += y * (1 if input_scaled else weight)
        return out

    def _inner(self, h: Array, act: int, limit: float) -> Array:
        gate, up = (h, h) if self.form == PLAIN else (h[: self.inner], h[self.inner :])
        if self.form == CLAMPED:
            gate = np.minimum(gate, limit)
            return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -limit, limit) + 1)
        acted = {
            SILU: lambda g: g / (1 + np.exp(-g)),
            RELU2: lambda g: np.maximum(g, 0) ** 2,
            GELU_TANH: lambda g: 0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))),
        }[act](gate)
        return acted if self.form == PLAIN else acted * up

    def run(self, backend: Backend, matrices: tuple[object, object], x: Array, routes: Array, **options: object) -> Array:
        y = np.full((len(x), self.cols + 3), -7, np.float32)
        backend.experts(
            *matrices, np.ascontiguousarray(routes), x, y[:, :-3], self.n_experts, self.inner, self.form,
            up_bias=self.up_bias, down_bias=self.down_bias, **options,
        )  # fmt: skip
        assert backend.allocations == 0
        assert (y[:, -3:] == -7).all()
        return np.ascontiguousarray(y[:, :-3])


def near(have: Array, exact: Array, bound: float) -> bool:
    return float(np.abs(have - exact).max()) <= bound * float(np.abs(exact).max())


def slices(n: int, rng: np.random.Generator) -> Sequence[slice]:
    """Ranges of rows of many lengths."""
    lengths = [1, 1, 2, 3, 7, 13, 29, n // 2, n]
    firsts = [int(rng.integers(0, n - length + 1)) for length in lengths]
    return [slice(first, first + length) for first, length in zip(firsts, lengths, strict=True)]


# name: (experts, chosen, columns, inner, form, options of the class, options of the call)
CASES: dict[str, tuple[int, int, int, int, int, dict[str, object], dict[str, object]]] = {
    "gated": (6, 2, 64, 48, GATED, {}, {}),
    "one-part": (6, 2, 64, 48, GATED, {"n_parts": 1}, {}),
    "gelu": (4, 3, 40, 24, GATED, {}, {"act": GELU_TANH}),
    "clamped": (5, 4, 72, 40, CLAMPED, {"has_bias": True, "n_parts": 1}, {"limit": 0.9}),
    "plain": (8, 3, 56, 88, PLAIN, {}, {"act": RELU2}),
    "input": (3, 1, 64, 80, GATED, {}, {"input_scaled": True}),
    "bias": (4, 2, 33, 19, GATED, {"has_bias": True}, {}),
    "many": (40, 8, 64, 32, GATED, {}, {}),
    "one": (1, 1, 48, 64, GATED, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_rows(case: str, open_backend: Open) -> None:
    """Near float64; a row has the same bits alone, among any others, and on any number of threads."""
    n, k, cols, inner, form, made, options = CASES[case]
    rng = np.random.default_rng(len(case))
    experts = Experts(n, cols, inner, form, **made)
    x = np.full((150, cols + 5), np.nan, np.float32)  # rows lie apart
    x[:, 2 : cols + 2] = rng.standard_normal((150, cols))
    x = x[:, 2 : cols + 2]
    routes = random_routes(150, n, k, rng)
    whole = None
    for threads in (1, 2, 5):
        backend = open_backend(threads, 160, 128)
        matrices = experts.matrices(backend)
        have = experts.run(backend, matrices, x, routes, **options)
        whole = have if whole is None else whole
        assert have.tobytes() == whole.tobytes()
        for part in slices(150, rng):
            assert experts.run(backend, matrices, x[part], routes[part], **options).tobytes() == whole[part].tobytes()
    assert near(whole, experts.exact(x, routes, **options), 4e-6)


def test_rows_among_other_rows(open_backend: Open) -> None:
    """Rows shuffled and repeated: a row's bits do not depend on other rows of its experts."""
    rng = np.random.default_rng(3)
    experts = Experts(12, 96, 64)
    x, routes = rng.standard_normal((64, 96)).astype(np.float32), random_routes(64, 12, 3, rng)
    backend = open_backend(2, 512, 128)
    matrices = experts.matrices(backend)
    whole = experts.run(backend, matrices, x, routes)
    order = rng.integers(0, 64, 300)
    assert experts.run(backend, matrices, x[order], routes[order]).tobytes() == whole[order].tobytes()
    lone = np.zeros(300, np.int64)  # all rows to the same experts
    assert experts.run(backend, matrices, x[lone], routes[lone]).tobytes() == whole[lone].tobytes()


def test_the_order_of_routes_is_the_order_of_the_sum(open_backend: Open) -> None:
    """The sum is one chain of fused multiply-adds in the order of the routes; the order matters only in the last bits."""
    rng = np.random.default_rng(4)
    experts = Experts(6, 64, 48)
    x, routes = rng.standard_normal((40, 64)).astype(np.float32), random_routes(40, 6, 4, rng)
    backend = open_backend(2, 64, 64)
    matrices = experts.matrices(backend)
    whole = experts.run(backend, matrices, x, routes)
    turned = np.ascontiguousarray(routes.reshape(40, 4, 2)[:, ::-1].reshape(40, 8))
    assert near(experts.run(backend, matrices, x, turned), whole, 1e-6)
    weights = routes.view(np.float32)[:, 1::2]
    one = np.zeros((40, 2), np.int32)
    total = np.zeros((40, 64), np.float32)
    for j in range(4):
        one[:, 0] = routes[:, 2 * j]
        one.view(np.float32)[:, 1] = 1
        y = experts.run(backend, matrices, x, one).astype(np.float64)
        total = (weights[:, j : j + 1].astype(np.float64) * y + total).astype(np.float32)  # float64 holds the product
    assert np.abs(total - whole).max() <= 1.2e-7 * np.abs(whole).max()


def test_equals_the_linears(isa: str) -> None:
    """One expert with weight 1 has the bits of up, the product and down as separate operations."""
    rng = np.random.default_rng(5)
    experts = Experts(3, 64, 48, has_bias=True)
    x = rng.standard_normal((21, 64)).astype(np.float32)
    backend = Backend("cpu", isa, 2, 64, 64)
    matrices = experts.matrices(backend)
    for expert in range(3):
        routes = np.zeros((21, 2), np.int32)
        routes[:, 0] = expert
        routes.view(np.float32)[:, 1] = 1
        have = experts.run(backend, matrices, x, routes)
        up = backend.matrix([("float32", 96, experts.up[expert].copy())], 64, 1, 1)
        down = backend.matrix([("float32", 64, experts.down[expert].copy())], 48, 1, 1)
        h, y = np.empty((21, 96), np.float32), np.empty((21, 64), np.float32)
        backend.linear(up, x, h, experts.up_bias[expert].copy())
        backend.linear(down, h, y, experts.down_bias[expert].copy(), input=2)
        assert have.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arithmetic", [0, 1])
def test_types_of_weights(dtype: str, arithmetic: int, isa: str) -> None:
    rng = np.random.default_rng(6)
    experts = Experts(6, 96, 64, dtype=dtype)
    x, routes = rng.standard_normal((70, 96)).astype(np.float32), random_routes(70, 6, 2, rng)
    whole = None
    for threads in (1, 3):
        backend = Backend("cpu", isa, threads, 128, 128)
        matrices = experts.matrices(backend, arithmetic)
        have = experts.run(backend, matrices, x, routes)
        whole = have if whole is None else whole
        assert have.tobytes() == whole.tobytes()
        for part in slices(70, rng):
            assert experts.run(backend, matrices, x[part], routes[part]).tobytes() == whole[part].tobytes()
    assert near(whole, experts.exact(x, routes), 6e-3 if dtype == "bfloat16" else 4e-6)


QUANTISED = [("q4_k", "q6_k"), ("q8_0", "q8_0"), ("q4_0", "q4_k"), ("iq2_xxs", "iq4_xs")]
SCALES = {"q4_k": (0, 4), "q6_k": (208, 210), "q8_0": (0, 2), "q4_0": (0, 2)}  # float16 fields of a block
SCALES |= {"iq2_xxs": (0, 2), "iq4_xs": (0, 2)}


def random_blocks(dtype: str, rows: int, cols: int, rng: np.random.Generator) -> Array:
    """Rows of random blocks, scales of both signs."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]]
    raw = rng.integers(0, 256, (rows, cols // n_values, n_bytes), dtype=np.uint8)
    first, last = SCALES[dtype]
    scale = rng.uniform(0.001, 0.01, (*raw.shape[:2], (last - first) // 2)) * rng.choice([-1, 1])
    raw[:, :, first:last] = scale.astype("<f2").view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("arithmetic", [1, 2])
@pytest.mark.parametrize(("up_type", "down_type"), QUANTISED)
def test_quantised_weights(up_type: str, down_type: str, arithmetic: int, isa: str) -> None:
    """Types of GGUF files, also with different types of gate and up: the bits of the linears in any batch."""
    rng = np.random.default_rng(7)
    n, k, cols, inner = 4, 2, 512, 256
    gates, ups, downs = (
        [random_blocks(kind, rows, width, rng) for _ in range(n)]
        for kind, rows, width in ((up_type, inner, cols), (down_type, inner, cols), (down_type, cols, inner))
    )
    x, routes = rng.standard_normal((37, cols)).astype(np.float32), random_routes(37, n, k, rng)
    whole = None
    for threads in (1, 2):
        backend = Backend("cpu", isa, threads, 64, 512)
        parts = [part for g, u in zip(gates, ups, strict=True) for part in ((up_type, inner, g), (down_type, inner, u))]
        up = backend.matrix(parts, cols, 1, arithmetic)
        down = backend.matrix([(down_type, cols, d) for d in downs], inner, 1, arithmetic)
        y = np.empty((37, cols), np.float32)
        backend.experts(up, down, routes, x, y, n, inner)
        whole = y if whole is None else whole
        assert y.tobytes() == whole.tobytes()
        for part in slices(37, rng):
            alone = np.empty_like(y[part])
            backend.experts(up, down, np.ascontiguousarray(routes[part]), x[part], alone, n, inner)
            assert alone.tobytes() == whole[part].tobytes()
        sums = np.zeros((37, cols), np.float64)
        for j in range(k):
            for r in range(37):
                e = int(routes[r, 2 * j])
                h, z = np.empty((1, 2 * inner), np.float32), np.empty((1, cols), np.float32)
                backend.linear(backend.matrix(parts[2 * e : 2 * e + 2], cols, 1, arithmetic), x[r : r + 1], h)
                backend.linear(backend.matrix([(down_type, cols, downs[e])], inner, 1, arithmetic), h, z, input=2)
                sums[r] += routes.view(np.float32)[r, 2 * j + 1] * z[0].astype(np.float64)
            if threads == 2:
                break
        if threads == 1:
            assert np.abs(sums - whole).max() <= 1e-6 * np.abs(whole).max()


def test_not_finite(isa: str) -> None:
    """A NaN in a row appears only in that row, and a NaN in an expert only in the rows of the expert."""
    rng = np.random.default_rng(8)
    experts = Experts(4, 64, 32)
    backend = Backend("cpu", isa, 2, 64, 64)
    matrices = experts.matrices(backend)
    x, routes = rng.standard_normal((9, 64)).astype(np.float32), random_routes(9, 4, 2, rng)
    good = experts.run(backend, matrices, x, routes)
    x[4, 7] = np.nan
    bad = experts.run(backend, matrices, x, routes)
    assert np.isnan(bad[4]).all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert bad[others].tobytes() == good[others].tobytes()
    x[4, 7] = 0
    experts.down[1, 3, 5] = np.nan
    bad = experts.run(backend, experts.matrices(backend), x, routes)
    served = (routes[:, 0::2] == 1).any(1)
    assert (np.isnan(bad).any(1) == served).all()
    assert not np.isnan(np.delete(bad, 3, 1)).any()


def cut(experts: Experts, first: int, end: int) -> Experts:
    """Some of the experts, as a rank holds them."""
    some = copy.copy(experts)
    some.n_experts = end - first
    for name in ("up", "down", "up_bias", "down_bias"):
        whole = getattr(experts, name)
        setattr(some, name, None if whole is None else whole[first:end].copy())
    return some


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_ranks_with_some_of_the_experts(case: str, n_ranks: int, isa: str) -> None:
    """Each writes the results of its own routes and nothing else; combined they have the bits of all experts on one rank."""
    n, k, cols, inner, form, made, options = CASES[case]
    rng = np.random.default_rng(len(case))
    experts, x, routes = Experts(n, cols, inner, form, **made), rng.standard_normal((41, cols)), random_routes(41, n, k, rng)
    x = x.astype(np.float32)
    bounds = [n * rank // n_ranks for rank in range(n_ranks + 1)]
    input_scaled = bool(options.get("input_scaled"))
    for threads in (1, 3):
        backend = Backend("cpu", isa, threads, 64, 128)
        wanted = experts.run(backend, experts.matrices(backend), x, routes, **options)
        for rows in (slice(0, 41), slice(7, 8)):
            results = np.full((len(x[rows]), k * cols + 5), -7, np.float32)
            for first, end in pairwise(bounds):
                if first == end:
                    continue
                some, before = cut(experts, first, end), results.copy()
                backend.experts(
                    *some.matrices(backend), np.ascontiguousarray(routes[rows]), x[rows], results[:, :-5], n, inner, form,
                    up_bias=some.up_bias, down_bias=some.down_bias, held=(first, end - first), **options,
                )  # fmt: skip
                is_own = (routes[rows, 0::2] >= first) & (routes[rows, 0::2] < end)
                changed = (results != before)[:, :-5].reshape(-1, k, cols)
                assert not changed[~is_own].any() and changed[is_own].any(-1).all()
            assert (results[:, -5:] == -7).all()
            y = np.full((len(results), cols + 3), -7, np.float32)
            backend.combine(results[:, :-5], np.ascontiguousarray(routes[rows]), y[:, :-3], input_scaled)
            assert y[:, :-3].tobytes() == wanted[rows].tobytes() and (y[:, -3:] == -7).all()


def columns_of(experts: Experts, first: int, end: int, outputs: tuple[int, int]) -> Experts:
    """Inner columns and outputs of all experts, as a rank holds them."""
    some, n_halves = copy.copy(experts), experts.up.shape[1] // experts.inner

    def halves(rows: Array | None) -> Array | None:
        if rows is None:
            return None
        apart = rows.reshape(experts.n_experts, n_halves, experts.inner, -1)[:, :, first:end]
        return np.ascontiguousarray(apart.reshape(experts.n_experts, -1, *rows.shape[2:]))

    some.up, some.up_bias = halves(experts.up), halves(experts.up_bias)
    some.down = experts.down[:, slice(*outputs)]
    some.down_bias = None if experts.down_bias is None else experts.down_bias[:, slice(*outputs)].copy()
    return some


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_ranks_with_columns_of_all_experts(case: str, n_ranks: int, isa: str) -> None:
    """The ways up and down apart, with a rank's columns of each, have the bits of both on one rank."""
    n, k, cols, inner, form, made, options = CASES[case]
    rng = np.random.default_rng(len(case))
    experts, routes = Experts(n, cols, inner, form, **made), random_routes(41, n, k, rng)
    x = rng.standard_normal((41, cols)).astype(np.float32)
    for threads in (1, 3):
        backend = Backend("cpu", isa, threads, 64, 128)
        wanted = experts.run(backend, experts.matrices(backend), x, routes, **options)
        products = np.full((41, k * inner + 5), -7, np.float32)
        y = np.full((41, cols), -7, np.float32)
        inners, outputs = ([size * rank // n_ranks for rank in range(n_ranks + 1)] for size in (inner, cols))
        ranks = [columns_of(experts, *own, out) for own, out in zip(pairwise(inners), pairwise(outputs), strict=True)]
        for some, (first, end) in zip(ranks, pairwise(inners), strict=True):
            before = products.copy()
            parts = some.up.reshape(n * some.n_parts, -1, cols)
            up = backend.matrix([("float32", len(part), part.copy()) for part in parts], cols, 1, 1)
            scaled = {"up_bias": some.up_bias, "first_column": first, **options}
            backend.experts(up, None, routes, x, products[:, :-5], n, inner, form, **scaled)
            changed = (products != before)[:, :-5].reshape(-1, k, inner)
            assert not changed[..., :first].any() and not changed[..., end:].any() and changed[..., first:end].any()
        assert (products[:, -5:] == -7).all()
        for some, (first, end) in zip(ranks, pairwise(outputs), strict=True):
            down = backend.matrix([("float32", end - first, part.copy()) for part in some.down], inner, 1, 1)
            scaled = {"down_bias": some.down_bias, **options}
            backend.experts(None, down, routes, products[:, :-5], y[:, first:end], n, inner, form, **scaled)
        assert y.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 300), (70, 5, 33), (9, 8, 1024)], ids=str)
def test_combine(shape: tuple[int, int, int], isa: str) -> None:
    """One chain from 0 in the order of the routes, each product and sum rounded once together."""
    n_rows, k, width = shape
    rng = np.random.default_rng(width)
    results, routes = rng.standard_normal((n_rows, k * width)).astype(np.float32), random_routes(n_rows, k + 3, k, rng)
    weights, total = routes.view(np.float32)[:, 1::2].astype(np.longdouble), np.zeros((n_rows, width), np.float32)
    for j in range(k):  # a long double holds the product, and the sum but for its last bits
        part = results[:, j * width : (j + 1) * width].astype(np.longdouble)
        total = (weights[:, j : j + 1] * part + total).astype(np.float32)
    for threads in (1, 3):
        y = np.empty((n_rows, width), np.float32)
        Backend("cpu", isa, threads, 128, 64).combine(results, routes, y)
        assert y.tobytes() == total.tobytes()


def test_wrong_widths_by_route(isa: str) -> None:
    rng = np.random.default_rng(9)
    experts, backend = Experts(4, 64, 32), Backend("cpu", isa, 1, 64, 64)
    x, routes, y = rng.standard_normal((3, 64)).astype(np.float32), random_routes(3, 4, 2, rng), np.empty((3, 64), np.float32)
    with pytest.raises(RuntimeError, match="experts: wanted 128 columns of y, have 64"):
        backend.experts(*experts.matrices(backend), routes, x, y, 4, 32, held=(0, 4))
    with pytest.raises(RuntimeError, match="experts: wanted 40 columns of each part of y, have 32"):
        backend.experts(experts.matrices(backend)[0], None, routes, x, y, 4, 32, first_column=8)
    with pytest.raises(RuntimeError, match="combine: wanted 2 results of 64 columns, have 64 columns"):
        backend.combine(x, routes, y)
