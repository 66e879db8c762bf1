"""Routes to experts against float64: every score, groups, biases and ties; a row's bits depend on the row alone."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Open = Callable[..., Backend]
Array = np.ndarray
SOFTMAX, SIGMOID, CHOSEN_SOFTMAX, CHOSEN_SIGMOID = range(4)
ROUTER = 9  # enum matrix_use


def route(backend: Backend, logits: Array, k: int, **options: object) -> tuple[Array, Array]:
    """(experts, weights), each [rows, k]."""
    routes = np.full((len(logits), 2 * k), -7, np.int32)
    backend.route(logits, routes, **options)
    assert backend.allocations == 0
    return routes[:, 0::2].copy(), routes.view(np.float32)[:, 1::2].copy()


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def expected(
    logits: Array, k: int, score: int = 0, bias: Array | None = None, n_groups: int = 1, chosen_groups: int = 1,
    sums_two: bool = False, normalised: bool = False, sum_eps: float = 0.0, scale: float = 1.0,
) -> tuple[Array, Array]:  # fmt: skip
    """The same in float64."""
    x = logits.astype(np.float64)
    scores = softmax(x) if score == SOFTMAX else 1 / (1 + np.exp(-x)) if score == SIGMOID else x
    values = scores + (0 if bias is None else bias.astype(np.float64))
    groups = np.sort(values.reshape(len(x), n_groups, -1), -1)
    promise = groups[..., -2:].sum(-1) if sums_two else groups[..., -1]
    chosen = np.argsort(-promise, -1, kind="stable")[:, :chosen_groups]
    allowed = np.zeros((len(x), n_groups), bool)
    np.put_along_axis(allowed, chosen, True, 1)
    values = np.where(allowed.repeat(x.shape[1] // n_groups, 1), values, -np.inf)
    experts = np.argsort(-values, -1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, experts, 1)
    if score == CHOSEN_SOFTMAX:
        weights = softmax(weights)
    if score == CHOSEN_SIGMOID:
        weights = 1 / (1 + np.exp(-weights))
    if normalised:
        weights = weights / (weights.sum(-1, keepdims=True) + sum_eps)
    return experts, weights * scale


CASES: dict[str, tuple[int, int, dict[str, object]]] = {
    "mixtral": (8, 2, {"score": SOFTMAX, "normalised": True}),
    "qwen": (128, 8, {"score": SOFTMAX}),
    "qwen-next": (512, 10, {"score": SOFTMAX, "normalised": True}),
    "deepseek2": (160, 6, {"score": SOFTMAX, "n_groups": 8, "chosen_groups": 3, "scale": 16.0}),
    "deepseek3": (256, 8, {"score": SIGMOID, "n_groups": 8, "chosen_groups": 4, "sums_two": True, "normalised": True,
                           "sum_eps": 1e-20, "scale": 2.5, "bias": True}),
    "ernie": (64, 6, {"score": SOFTMAX, "bias": True, "normalised": True}),
    "gpt-oss": (32, 4, {"score": CHOSEN_SOFTMAX}),
    "llama4": (16, 1, {"score": CHOSEN_SIGMOID}),
    "all": (5, 5, {"score": SIGMOID}),
    "odd": (23, 7, {"score": SOFTMAX}),
}  # fmt: skip


def options_of(case: str, rng: np.random.Generator) -> tuple[int, int, dict[str, object]]:
    n, k, options = CASES[case]
    bias = {"bias": rng.uniform(0, 0.5, n).astype(np.float32)} if "bias" in options else {}
    return n, k, {**options, **bias}


@pytest.mark.parametrize("case", CASES)
def test_values_and_rows(case: str, open_backend: Open) -> None:
    rng = np.random.default_rng(len(case))
    n, k, options = options_of(case, rng)
    logits = (2 * rng.standard_normal((67, n))).astype(np.float32)
    experts, weights = expected(logits, k, **options)
    whole = None
    for threads in (1, 2, 5):
        backend = open_backend(threads)
        have = route(backend, logits, k, **options)
        assert (have[0] == experts).all()
        np.testing.assert_allclose(have[1], weights, rtol=1e-5)
        whole = whole or have
        assert all(a.tobytes() == b.tobytes() for a, b in zip(have, whole, strict=True))
        for part in (slice(0, 1), slice(66, 67), slice(3, 40)):
            alone = route(backend, logits[part], k, **options)
            assert all(a.tobytes() == b[part].tobytes() for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_ties_go_to_the_lowest_number(case: str, open_backend: Open) -> None:
    """All logits equal, all groups equal, and some equal logits: the first experts are chosen."""
    n, k, options = CASES[case]
    options = {**options, "bias": None}
    backend = open_backend(1)
    rng = np.random.default_rng(0)
    logits = np.concatenate([np.zeros((1, n)), rng.integers(-2, 3, (40, n))]).astype(np.float32)
    experts, _ = route(backend, logits, k, **options)
    assert experts[0].tolist() == list(range(k))
    assert (experts == expected(logits, k, **options)[0]).all()


@pytest.mark.parametrize("case", ["qwen", "deepseek3", "gpt-oss", "llama4"])
def test_what_is_not_finite_stays_in_its_row(case: str, open_backend: Open) -> None:
    """For any logits, a row's experts are valid and different, and no other row changes."""
    rng = np.random.default_rng(1)
    n, k, options = options_of(case, rng)
    logits = rng.standard_normal((6, n)).astype(np.float32)
    backend = open_backend(2)
    good = route(backend, logits, k, **options)
    logits[1], logits[3, 5], logits[4, 3] = np.nan, np.inf, -np.inf
    experts, weights = route(backend, logits, k, **options)
    for row in experts:
        assert len(set(row.tolist())) == k and row.min() >= 0 and row.max() < n
    for row in (0, 2, 5):
        assert (experts[row] == good[0][row]).all() and (weights[row] == good[1][row]).all()
    assert np.isfinite(weights[4]).all()


# width, experts, chosen, score, has a bias of the router and of the choice
NORMED = {"qwen": (2048, 128, 8, SOFTMAX, False, False), "gpt-oss": (2880, 32, 4, CHOSEN_SOFTMAX, True, False),
          "ernie": (2560, 64, 6, SOFTMAX, False, True), "widest": (4096, 8, 2, SIGMOID, True, True),
          "not-eights": (2048, 60, 4, SOFTMAX, False, False), "too-wide": (4160, 16, 2, SOFTMAX, False, False),
          "many-experts": (2048, 256, 8, SIGMOID, False, True), "small": (192, 40, 10, SIGMOID, True, True)}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", NORMED)
def test_norm_and_route_are_the_three_operations(case: str, dtype: str, cuda: str) -> None:
    width, n, k, score, is_biased, is_shifted = NORMED[case]
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    form = np.float32 if dtype == "float32" else np.uint16
    rng = np.random.default_rng(n)
    backend = Backend(cuda, max_rows=64, dtype=dtype, library=hardware.cuda_library())
    weight = rng.standard_normal(width).astype(np.float32)
    values = (rng.standard_normal((n, width)) / width**0.5).astype(kind).view(form)
    matrix = backend.matrix([(dtype, n, values)], width, ROUTER)
    router_bias = rng.standard_normal(n).astype(np.float32) if is_biased else None
    bias = rng.uniform(0, 0.1, n).astype(np.float32) if is_shifted else None
    a, b = rng.standard_normal((2, 40, width)).astype(kind).view(form)
    total, out = np.zeros_like(a), np.zeros_like(a)
    logits, routes = np.zeros((40, n), np.float32), np.zeros((40, 2 * k), np.int32)
    backend.add_rms_norm(a, b, total, weight, out, 1e-6)
    backend.linear(matrix, out, logits, router_bias, is_float_out=True)
    backend.route(logits, routes, score, bias, normalised=True)
    for first, rows in ((0, 1), (39, 1), (1, 2), (3, 8), (5, 9), (0, 40)):
        part = slice(first, first + rows)
        mine, normed, made = a[part].copy(), np.zeros((rows, width), form), np.zeros((rows, 2 * k), np.int32)
        scratch = np.zeros((rows, n), np.float32)
        backend.norm_route(mine, b[part], mine, weight, normed, 1e-6, matrix, router_bias, scratch, made, score, bias, True)
        assert backend.allocations == 0
        assert mine.tobytes() == total[part].tobytes() and normed.tobytes() == out[part].tobytes()
        assert made.tobytes() == routes[part].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("n", "width"), [(128, 2048), (32, 2880), (5, 64), (300, 4096), (60, 1088), (16, 4160)])
def test_logits_of_a_row_are_its_own(n: int, width: int, dtype: str, cuda: str) -> None:
    """A row's logits do not depend on the number of rows or on their addresses."""
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    rng = np.random.default_rng(n)
    backend = Backend(cuda, max_rows=2048, dtype=dtype, library=hardware.cuda_library())
    w = (rng.standard_normal((n, width)) / width**0.5).astype(kind)
    x = rng.standard_normal((1100, width)).astype(kind)
    matrix = backend.matrix([(dtype, n, w.view(np.uint16))], width, ROUTER)
    bias, whole = rng.standard_normal(n).astype(np.float32), np.zeros((1100, n), np.float32)
    backend.linear(matrix, x.view(np.uint16), whole, bias, is_float_out=True)
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w.astype(np.float64).T + bias, atol=1e-4)
    for first, rows in ((0, 1), (3, 7), (8, 8), (1, 9), (500, 70)):
        odd, y = np.zeros((rows, width + 3), kind), np.zeros((rows, n), np.float32)
        odd[:, 1:-2] = x[first : first + rows]
        for part in (x[first : first + rows], odd[:, 1:-2]):
            backend.linear(matrix, part.view(np.uint16), y, bias, is_float_out=True)
            assert y.tobytes() == whole[first : first + rows].tobytes()


def test_refusals(isa: str) -> None:
    backend = Backend("cpu", isa, 1)
    logits = np.zeros((1, 8), np.float32)
    for k, options in ((9, {}), (2, {"n_groups": 3}), (5, {"n_groups": 2}), (1, {"n_groups": 2, "chosen_groups": 3})):
        with pytest.raises(Exception, match="equal groups"):
            route(backend, logits, k, **options)
