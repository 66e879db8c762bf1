"""Adapters on a CUDA device: sums against float64, rows alone and in any batch, and linears that add them before they round."""

from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from group_blocks import int4_rows
from modules import load

from binding import Backend
from llmpy import hardware

plain = load(Path(__file__).with_name("test_lora.py"))
SLOTS, make, wanted = plain.SLOTS, plain.make, plain.wanted

Array = np.ndarray
KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MAX_RANK, MAX_ROWS = 8, 2100


@pytest.fixture(scope="module", params=list(KINDS))
def backend(request: pytest.FixtureRequest, cuda: str) -> Backend:
    made = Backend(cuda, max_rows=MAX_ROWS, dtype=request.param, library=hardware.cuda_library(), max_loras=SLOTS)
    made.kind = KINDS[request.param]  # type: ignore[attr-defined]
    return made


def begin(backend: Backend, chosen: Array | None, rows: Array | None = None, n_pad: int = 0, n_rows: int | None = None) -> None:
    """Starts a step with rows of these slots."""
    n = len(chosen) if chosen is not None else n_rows or 0
    each = np.arange(n, dtype=np.int32)
    given = (each, each, each, np.array([0, n] if n else [0], np.int32), each if rows is None else rows)
    to = tuple(np.zeros(n + n_pad + 4, np.int32) for _ in given)
    empty, one = np.zeros(0, np.int32), np.zeros(1, np.int32)
    backend.begin(0, given, one, empty, to, one.copy(), n_pad_rows=n_pad, row_adapters=chosen, has_adapters=True)


def stored(backend: Backend, values: Array) -> Array:
    """Values as rows of activations."""
    rounded = values.astype(backend.kind)  # type: ignore[attr-defined]
    return rounded if rounded.dtype == np.float32 else rounded.view(np.uint16)


def read(backend: Backend, rows: Array) -> Array:
    return rows.view(backend.kind).astype(np.float64)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("columns", "widths"), [(1, [1]), (40, [16, 7]), (515, [33, 64]), (1024, [1000, 4, 8, 520]), (4096, [64])]
)
@pytest.mark.parametrize("n_rows", [1, 3, 40, 2050])
def test_values_and_bits(columns: int, widths: list[int], n_rows: int, backend: Backend) -> None:
    rng = np.random.default_rng(n_rows)
    slots, parts = make(columns, widths)
    for slot, ranks in enumerate([[8, 3, 1, 5], [1, 0, 2, 8], [5, 8, 8, 0]]):
        for (_, _, head, *_), rank in zip(parts, ranks, strict=False):
            slots.view(np.uint32)[slot, head // 4] = rank
            slots[slot, head // 4 + 1] = 0.5 + slot
    x = stored(backend, rng.standard_normal((n_rows, columns)))
    chosen = rng.integers(-1, SLOTS, n_rows, dtype=np.int32)
    begin(backend, chosen)
    delta = np.full((n_rows, sum(widths)), np.nan, np.float32)
    for first in range(0, n_rows, 1024):
        backend.lora(x[first : first + 1024], delta[first : first + 1024], slots, parts, None, MAX_RANK, None, True, first)
    want = wanted(read(backend, x), np.zeros(delta.shape), slots, parts, chosen)
    assert np.abs(delta - want).max() <= 1e-5 * max(np.abs(want).max(), 1)
    zeros = delta[chosen < 0]
    assert zeros.tobytes() == np.full_like(zeros, -0.0).tobytes()
    for row in rng.integers(0, n_rows, 4):
        n_pad = int(row) % 3
        begin(backend, chosen[row : row + 1], n_pad=n_pad)
        alone = np.full((1 + n_pad, sum(widths)), np.nan, np.float32)
        backend.lora(np.repeat(x[row : row + 1], 1 + n_pad, 0), alone, slots, parts, None, MAX_RANK, None, True)
        assert alone[:1].tobytes() == delta[row : row + 1].tobytes()
        assert alone[1:].tobytes() == np.full_like(alone[1:], -0.0).tobytes()
    picked = np.sort(rng.choice(n_rows, (n_rows + 1) // 2, replace=False)).astype(np.int32)[:1024]
    begin(backend, chosen, picked)
    some = np.full((len(picked), sum(widths)), np.nan, np.float32)
    backend.lora(x[picked], some, slots, parts, None, MAX_RANK, picked, True)
    assert some.tobytes() == delta[picked].tobytes()


@pytest.mark.parametrize("columns", [2056, 5001, 14336])
def test_chunks_and_ranks(columns: int, backend: Backend) -> None:
    """Inputs of several chunks of columns, ranks of several runs, tiles of 1 to 16 rows."""
    max_rank, rng = 40, np.random.default_rng(columns)
    slots, parts = make(columns, [64, 24], max_rank)
    for slot, ranks in enumerate([[40, 16], [17, 1], [32, 33]]):
        for (_, _, head, *_), rank in zip(parts, ranks, strict=True):
            slots.view(np.uint32)[slot, head // 4] = rank
    x, chosen = (
        stored(backend, rng.standard_normal((36, columns))),
        np.repeat(np.array([0, 1, 2, -1, 1], np.int32), [17, 9, 1, 1, 8]),
    )
    begin(backend, chosen)
    delta = np.full((len(x), 88), np.nan, np.float32)
    backend.lora(x, delta, slots, parts, None, max_rank, None, True)
    want = wanted(read(backend, x), np.zeros(delta.shape), slots, parts, chosen)
    assert np.abs(delta - want).max() <= 1e-5 * np.abs(want).max()
    for n in (1, 8, 9):
        for first in range(0, len(x) - n, 5):
            begin(backend, chosen[first : first + n])
            some = np.full((n, 88), np.nan, np.float32)
            backend.lora(x[first : first + n], some, slots, parts, None, max_rank, None, True)
            assert some.tobytes() == delta[first : first + n].tobytes()


def test_padding_alone(backend: Backend) -> None:
    slots, parts = make(40, [16, 7])
    begin(backend, None, n_pad=5)
    delta = np.full((5, 23), np.nan, np.float32)
    backend.lora(stored(backend, np.ones((5, 40))), delta, slots, parts, None, MAX_RANK, None, True)
    assert delta.tobytes() == np.full_like(delta, -0.0).tobytes()


def small(backend: Backend, n_rows: int, columns: int, width: int) -> tuple[Array, Array, Array, Array]:
    """Rows of x, their slots, ids below `columns`, and biases of a matrix."""
    rng = np.random.default_rng(n_rows)
    x, chosen = stored(backend, rng.standard_normal((n_rows, columns))), rng.integers(-1, SLOTS, n_rows, dtype=np.int32)
    return x, chosen, rng.integers(0, columns, n_rows, dtype=np.int32), rng.standard_normal(width).astype(np.float32)


@pytest.mark.parametrize(("columns", "widths"), [(21, (16, 7)), (1100, (520, 64))])
@pytest.mark.parametrize("n_rows", [1, 19])
def test_biases(columns: int, widths: tuple[int, int], n_rows: int, backend: Backend) -> None:
    """A bias is part of delta; a row with a bias and no factors has it, too."""
    slots, parts = plain.make_biased(columns, widths)
    x, chosen, _, base = small(backend, n_rows, columns, sum(widths))
    chosen[0] = 1  # no factors of the first part
    for base_bias in (None, base):
        begin(backend, chosen)
        delta = np.full((n_rows, sum(widths)), np.nan, np.float32)
        backend.lora(x, delta, slots, parts, None, MAX_RANK, None, True, base_bias=base_bias)
        want = plain.wanted_with_biases(read(backend, x), np.zeros(delta.shape), slots, parts, chosen, base_bias)
        assert np.abs(delta - want).max() <= 1e-5 * np.abs(want).max()
        zeros = delta[chosen < 0]
        assert zeros.tobytes() == np.full_like(zeros, -0.0).tobytes()
        for row in range(n_rows):
            begin(backend, chosen[row : row + 1])
            alone = np.full((1, sum(widths)), np.nan, np.float32)
            backend.lora(x[row : row + 1], alone, slots, parts, None, MAX_RANK, None, True, base_bias=base_bias)
            assert alone.tobytes() == delta[row : row + 1].tobytes()


def in_bfloat16(slots: Array, parts: list[tuple[int, int, int, int, int]], columns: int) -> tuple[Array, Array]:
    """Slots whose A and B have values of bfloat16, stored as float32 and as bfloat16."""
    wide = slots.copy()
    narrow = slots.copy()
    for _, rows, _, a, b in parts:
        for at, n in ((a, columns * MAX_RANK), (b, rows * MAX_RANK)):
            values = slots[:, at // 4 :][:, :n].astype(ml_dtypes.bfloat16)
            wide[:, at // 4 :][:, :n] = values.astype(np.float32)
            narrow.view(np.uint16)[:, at // 2 :][:, :n] = values.view(np.uint16)
        bias = slots[:, b // 4 + MAX_RANK * rows :][:, :rows]
        narrow[:, (b + 2 * MAX_RANK * rows) // 4 :][:, :rows] = bias
    return wide, narrow


@pytest.mark.parametrize(
    ("columns", "widths"), [(21, (16, 7)), (515, (33, 64)), (1100, (520, 64)), (4096, (64, 8)), (5000, (24, 40))]
)
@pytest.mark.parametrize("n_rows", [1, 19])
def test_factors_of_bfloat16(columns: int, widths: tuple[int, int], n_rows: int, backend: Backend) -> None:
    """They have the bits of the same values in float32."""
    slots, parts = plain.make_biased(columns, widths)
    wide, narrow = in_bfloat16(slots, parts, columns)
    x, chosen, _, base = small(backend, n_rows, columns, sum(widths))
    found = []
    for given, is_bfloat16 in ((wide, False), (narrow, True)):
        begin(backend, chosen)
        found.append(np.full((n_rows, sum(widths)), np.nan, np.float32))
        backend.lora(
            x, found[-1], given, parts, None, MAX_RANK, None, True, base_bias=base, is_bfloat16=is_bfloat16
        )  # fmt: skip
    assert found[0].tobytes() == found[1].tobytes()
    want = plain.wanted_with_biases(read(backend, x), np.zeros(found[0].shape), wide, parts, chosen, base)
    assert np.abs(found[0] - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("columns", "widths"), [(21, (16, 7)), (1100, (520, 64))])
def test_heads(columns: int, widths: tuple[int, int], backend: Backend) -> None:
    """Logits are float32 for every type of activations, and changed where they lie; the rows are a step's wanted ones."""
    slots, parts = plain.make_biased(columns, widths)
    x, chosen, _, base = small(backend, 19, columns, sum(widths))
    logits = np.random.default_rng(1).standard_normal((19, sum(widths))).astype(np.float32)
    begin(backend, chosen)
    out = logits.copy()
    backend.lora(x, out, slots, parts, None, MAX_RANK, base_bias=base)
    want = plain.wanted_with_biases(read(backend, x), logits, slots, parts, chosen, base)
    assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()
    assert out[chosen < 0].tobytes() == logits[chosen < 0].tobytes()
    picked = np.array([1, 4, 5, 11, 18], np.int32)
    begin(backend, chosen, picked)
    for first in (0, 2):  # the logits of a step come in slices
        some = logits[picked[first:]]
        backend.lora(x[picked[first:]], some, slots, parts, None, MAX_RANK, picked[first:], first_row=first, base_bias=base)
        assert some.tobytes() == out[picked[first:]].tobytes()


@pytest.mark.parametrize(("columns", "widths"), [(21, (16, 7)), (1100, (520, 64))])
def test_embeddings(columns: int, widths: tuple[int, int], backend: Backend) -> None:
    """A x is a column of A; the sum with the base row is rounded once."""
    slots, parts = plain.make_biased(columns, widths)
    slots.view(np.uint32)[:, [part[2] // 4 + 2 for part in parts]] = 0
    x, chosen, ids, _ = small(backend, 19, columns, sum(widths))
    before = stored(backend, np.random.default_rng(1).standard_normal((19, sum(widths))))
    begin(backend, chosen)
    out = before.copy()
    backend.lora(x, out, slots, parts, None, MAX_RANK, token_ids=ids, factor=2.5)
    want = wanted(np.eye(columns)[ids] * 2.5, read(backend, before), slots, parts, chosen)
    epsilon = float(ml_dtypes.finfo(backend.kind).eps)  # type: ignore[attr-defined]
    assert (np.abs(read(backend, out) - want) <= epsilon / 2 * np.abs(want) + 1e-5 * np.abs(want).max()).all()
    assert out[chosen < 0].tobytes() == before[chosen < 0].tobytes() and out.tobytes() != before.tobytes()
    for row in range(19):
        begin(backend, chosen[row : row + 1])
        alone = before[row : row + 1].copy()
        backend.lora(x[:1], alone, slots, parts, None, MAX_RANK, token_ids=ids[row : row + 1], factor=2.5)
        assert alone.tobytes() == out[row : row + 1].tobytes()
    begin(backend, chosen)
    shared, middle = before.copy(), columns // 2
    for own in ((0, middle), (middle, columns)):  # of two ranks
        backend.lora(x, shared, slots, parts, None, MAX_RANK, token_ids=ids, factor=2.5, ids=own)
        others = ids >= own[1]
        assert shared[others].tobytes() == before[others].tobytes()
    assert shared.tobytes() == out.tobytes()


def matrices(backend: Backend, rng: np.random.Generator, n: int, k: int) -> list[object]:
    """A matrix of each kind of weights."""
    name = {value: key for key, value in KINDS.items()}[backend.kind]  # type: ignore[attr-defined]
    made = [backend.matrix([(name, n, stored(backend, rng.standard_normal((n, k))))], k)]
    made.append(backend.matrix([("float32", n, rng.standard_normal((n, k)).astype(np.float32))], k))
    if name == "float32":
        return made
    fp8 = np.zeros((n, -(-k // 128), 132), np.uint8)
    fp8[:, :, :4] = np.full((n, 1, 1), 1e-3, np.float32).view(np.uint8)
    fp8[:, :, 4:] = rng.integers(0, 0x60, (n, fp8.shape[1], 128), dtype=np.uint8)
    made.append(backend.matrix([("fp8", n, fp8.reshape(n, -1))], k))
    if name == "bfloat16":
        numbers, scales = rng.integers(0, 16, (n, k)), rng.uniform(1e-3, 1e-2, (n, -(-k // 128)))
        made.append(backend.matrix([("int4_g128", n, int4_rows(numbers, scales, np.full(scales.shape, 8), 128)[0])], k))
    return made


@pytest.mark.parametrize("rows", [1, 2, 17, 40, 64, 65, 300])
def test_linears_add_before_they_round(rows: int, backend: Backend) -> None:
    """The bits of the float32 sums plus delta, rounded once; and of the product of gate and up, each rounded so."""
    rng, n, k = np.random.default_rng(rows), 1536, 1088
    x = stored(backend, rng.standard_normal((rows, k)))
    delta = rng.standard_normal((rows, n)).astype(np.float32)
    bias, kind = rng.standard_normal(n).astype(np.float32), x.dtype
    delta[::3] = -0.0
    for matrix in matrices(backend, rng, n, k):
        run = partial(backend.linear, matrix, x)
        for given in (None, bias):
            sums, plain, got = np.zeros((rows, n), np.float32), np.zeros((rows, n), kind), np.zeros((rows, n), kind)
            run(sums, given, is_float_out=True)
            run(plain, given)
            assert stored(backend, sums).tobytes() == plain.tobytes()  # what is rounded is the float32 sum
            run(got, given, delta=delta)
            assert got.tobytes() == stored(backend, sums + delta).tobytes()
            assert got[::3].tobytes() == plain[::3].tobytes()
        halves = stored(backend, sums + delta)
        product, expected, mid = np.zeros((rows, n // 2), kind), np.zeros((rows, n // 2), kind), np.zeros((rows, n), kind)
        run(product, bias, mid=mid, delta=delta)
        backend.gated(np.ascontiguousarray(halves[:, : n // 2]), np.ascontiguousarray(halves[:, n // 2 :]), expected, 0)
        assert product.tobytes() == expected.tobytes()
