"""Gathers of CPU ranks: every kind leaves the same bits on all ranks and touches nothing else. One thread runs each rank."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from rank_threads import run_all

from binding import Backend
from llmpy import _core, errors
from ranks import ARENA, COLUMNS, LOGITS, ROUTES, ROWS, TO_FIRST, TO_OWNERS, Ranks, view
from staging import address, header, struct

Array = np.ndarray
GUARD = 37  # floats around a value


def random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Bit patterns of float32: any, with many zeros below 0 and NaNs with payloads."""
    bits = rng.integers(0, 2**32, shape, np.uint64).astype(np.uint32)
    bits[rng.random(shape) < 0.1] = 0x80000000
    is_nan = rng.random(shape) < 0.1
    bits[is_nan] = rng.integers(0x7F800001, 0x80000000, int(is_nan.sum()), np.uint64).astype(np.uint32)
    return bits


def cuts(rng: np.random.Generator, n: int, n_ranks: int) -> list[tuple[int, int]]:
    """Unequal shares of n items; some may be empty."""
    inner = np.sort(rng.integers(0, n + 1, n_ranks - 1)).tolist()
    return list(pairwise([0, *inner, n]))


class Place:
    """One value at the same place of every rank's shared memory; all other words there differ and must stay.

    Args:
        n_ranks: The number of ranks.
        n_rows: Rows.
        width: Columns.
    """

    def __init__(self, n_ranks: int, n_rows: int, width: int) -> None:
        self.n_rows, self.width, self.stride = n_rows, width, width + 5
        n_words = 2 * GUARD + n_rows * self.stride
        self.memory = [np.arange(n_words, dtype=np.uint32) * 2654435761 + rank for rank in range(n_ranks)]
        self.before: list[Array] = []

    def rows(self, words: Array) -> Array:
        """The value in one rank's memory, as bits."""
        return words[GUARD : len(words) - GUARD].reshape(self.n_rows, self.stride)[:, : self.width]

    def view(self, rank: int) -> object:
        return view(address(self.memory[rank]) + GUARD * 4, self.width, self.stride)

    def keep(self) -> None:
        """Remembers the memory before a gather."""
        self.before = [words.copy() for words in self.memory]

    def check(self, rank: int, wanted: Array) -> None:
        """The value is as wanted; all else is as before."""
        expected = self.before[rank].copy()
        self.rows(expected)[:] = wanted
        assert self.memory[rank].tobytes() == expected.tobytes(), f"rank {rank}"


Connect = Callable[..., Ranks]


@pytest.fixture
def connect(isa: str) -> Iterator[Connect]:
    """Connects backends of one instruction set: (place, purpose, threads of each, seconds)."""
    made: list[Ranks] = []

    def connect(place: Place, purpose: int = ARENA, num_threads: int = 1, timeout_s: float = 30.0) -> Ranks:
        ranks = Ranks([Backend("cpu", isa=isa, num_threads=num_threads) for _ in place.memory], timeout_s)
        made.append(ranks)
        ranks.share(purpose, [address(words) for words in place.memory], place.memory[0].nbytes)
        return ranks

    yield connect
    for ranks in made:
        ranks.close()


SHAPES = [(1, 1), (1, 4096), (3, 70), (64, 333), (2048, 40)]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", ["whole", "a", "a in whole", "is stored"])
def test_columns(connect: Connect, n_ranks: int, shape: tuple[int, int], source: str) -> None:
    rng = np.random.default_rng(n_ranks)
    place, wanted, shares = Place(n_ranks, *shape), random_bits(rng, shape), cuts(rng, shape[1], n_ranks)
    terms = [np.ascontiguousarray(wanted[:, first:end]) for first, end in shares]
    for rank, (first, end) in enumerate(shares):
        if source == "is stored":
            place.rows(place.memory[rank])[:] = wanted
        elif source != "a":
            place.rows(place.memory[rank])[:, first:end] = wanted[:, first:end]
    place.keep()
    ranks = connect(place)
    allocations = _core.allocation_count()

    def work(rank: int) -> None:
        first, end = shares[rank]
        fields = {"first": first, "n_columns": end - first, "is_stored": source == "is stored"}
        if source == "a":
            fields["a"] = view(address(terms[rank]), end - first, end - first)
        elif source == "a in whole":
            fields["a"] = view(address(place.memory[rank]) + (GUARD + first) * 4, end - first, place.stride)
        ranks.gather(rank, COLUMNS, shape[0], place.view(rank), **fields)
        assert (place.rows(place.memory[rank]) == wanted).all()

    run_all(n_ranks, work)
    assert _core.allocation_count() == allocations
    for rank in range(n_ranks):
        place.check(rank, wanted)
        ranks.check(rank)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_sum_and_norm(connect: Connect, n_ranks: int, shape: tuple[int, int], num_threads: int) -> None:
    """a + b with the bits of `add`; the norm with the bits of `rms_norm` of the whole value."""
    rng = np.random.default_rng(n_ranks)
    a, b = rng.standard_normal((2, *shape)).astype(np.float32)
    a[rng.random(shape) < 0.2] = b[rng.random(shape) < 0.2] = -0.0
    weight = rng.standard_normal(shape[1]).astype(np.float32)
    place, shares = Place(n_ranks, *shape), cuts(rng, shape[1], n_ranks)
    outs = [np.full(shape, np.nan, np.float32) for _ in shares]
    total, normed = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for rank, (first, end) in enumerate(shares):  # a lies in whole already on odd ranks
        if rank % 2:
            place.rows(place.memory[rank])[:, first:end] = a[:, first:end].view(np.uint32)
    place.keep()
    ranks = connect(place, num_threads=num_threads)
    ranks.backends[0].add(a, b, total)
    ranks.backends[0].rms_norm(total, weight, normed, 1e-5)

    def work(rank: int) -> None:
        first, end = shares[rank]
        ranks.meet(rank)
        own = view(address(place.memory[rank]) + (GUARD + first) * 4, end - first, place.stride)
        norm = struct("rms_norm_args", n_rows=shape[0], n_heads=1, x=place.view(rank), weight=address(weight), eps=1e-5,
                      out=view(address(outs[rank]), shape[1], shape[1]))  # fmt: skip
        terms = {
            "a": own if rank % 2 else view(address(a) + first * 4, end - first, shape[1]),
            "b": view(address(b) + first * 4, end - first, shape[1]),
        }
        ranks.gather(rank, COLUMNS, shape[0], place.view(rank), first=first, n_columns=end - first, norm=norm, **terms)

    run_all(n_ranks, work)
    for rank in range(n_ranks):
        place.check(rank, total.view(np.uint32))
        assert outs[rank].tobytes() == normed.tobytes()


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(connect: Connect, n_ranks: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(n_ranks)
    place, wanted, shares = Place(n_ranks, *shape), random_bits(rng, shape), cuts(rng, 1000, n_ranks)
    ids = rng.integers(0, 1000, shape[0]).astype(np.int32)
    for rank, (first, end) in enumerate(shares):
        own = (ids >= first) & (ids < end)
        place.rows(place.memory[rank])[own] = wanted[own]
    place.keep()
    ranks = connect(place)

    def work(rank: int) -> None:
        fields = {"first_id": shares[rank][0], "end_id": shares[rank][1], "token_ids": address(ids)}
        ranks.gather(rank, ROWS, shape[0], place.view(rank), **fields)

    run_all(n_ranks, work)
    for rank in range(n_ranks):
        place.check(rank, wanted)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("n_rows", "part", "n_chosen"), [(1, 16, 2), (5, 24, 4), (300, 9, 3)])
def test_routes(connect: Connect, n_ranks: int, n_rows: int, part: int, n_chosen: int) -> None:
    rng = np.random.default_rng(n_ranks)
    shape = n_rows, part * n_chosen
    place, wanted, shares = Place(n_ranks, *shape), random_bits(rng, shape), cuts(rng, 20, n_ranks)
    routes = np.zeros((n_rows, n_chosen + 2, 2), np.int32)  # an expert and its weight
    routes[:, :n_chosen, 0] = rng.integers(0, 20, (n_rows, n_chosen))
    for rank, (first, end) in enumerate(shares):
        experts = np.repeat(routes[:, :n_chosen, 0], part, 1)
        own = (experts >= first) & (experts < end)
        place.rows(place.memory[rank])[own] = wanted[own]
    place.keep()
    ranks = connect(place)

    def work(rank: int) -> None:
        fields = {"routes": address(routes), "route_stride": n_chosen + 2, "n_chosen": n_chosen}
        ids = {"first_id": shares[rank][0], "end_id": shares[rank][1]}
        ranks.gather(rank, ROUTES, n_rows, place.view(rank), **fields, **ids)

    run_all(n_ranks, work)
    for rank in range(n_ranks):
        place.check(rank, wanted)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("n_rows", "part", "n_chosen"), [(1, 16, 2), (5, 24, 4), (300, 9, 3)])
def test_columns_of_parts(connect: Connect, n_ranks: int, n_rows: int, part: int, n_chosen: int) -> None:
    rng = np.random.default_rng(n_ranks)
    shape = n_rows, part * n_chosen
    place, wanted, shares = Place(n_ranks, *shape), random_bits(rng, shape), cuts(rng, part, n_ranks)
    for rank, (first, end) in enumerate(shares):
        own = np.tile((np.arange(part) >= first) & (np.arange(part) < end), n_chosen)
        place.rows(place.memory[rank])[:, own] = wanted[:, own]
    place.keep()
    ranks = connect(place)

    def work(rank: int) -> None:
        first, end = shares[rank]
        fields = {"first": first, "n_columns": end - first, "n_chosen": n_chosen}
        ranks.gather(rank, COLUMNS, n_rows, place.view(rank), **fields)

    run_all(n_ranks, work)
    for rank in range(n_ranks):
        place.check(rank, wanted)


def gather_logits(connect: Connect, n_ranks: int, shape: tuple[int, int], kind: int) -> tuple[Place, np.ndarray]:
    """Each rank gives its columns of logits to a gather of a kind; the place, and the whole logits."""
    rng = np.random.default_rng(n_ranks)
    place, wanted, shares = Place(n_ranks, *shape), random_bits(rng, shape), cuts(rng, shape[1], n_ranks)
    for rank, (first, end) in enumerate(shares):
        place.rows(place.memory[rank])[:, first:end] = wanted[:, first:end]
    place.keep()
    ranks = connect(place, LOGITS)

    def work(rank: int) -> None:
        first, end = shares[rank]
        ranks.gather(rank, kind, shape[0], place.view(rank), first=first, n_columns=end - first)

    run_all(n_ranks, work)
    return place, wanted


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_to_the_first_rank(connect: Connect, n_ranks: int, shape: tuple[int, int]) -> None:
    place, wanted = gather_logits(connect, n_ranks, shape, TO_FIRST)
    place.check(0, wanted)
    for rank in range(1, n_ranks):
        place.check(rank, place.rows(place.before[rank]))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_to_the_owners_of_rows(connect: Connect, n_ranks: int, shape: tuple[int, int]) -> None:
    place, wanted = gather_logits(connect, n_ranks, shape, TO_OWNERS)
    for rank in range(n_ranks):
        mine = slice(shape[0] * rank // n_ranks, shape[0] * (rank + 1) // n_ranks)
        rows = place.rows(place.before[rank]).copy()
        rows[mine] = wanted[mine]
        place.check(rank, rows)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_embeddings_of_ranks(connect: Connect, n_ranks: int) -> None:
    rng = np.random.default_rng(n_ranks)
    table, shares = rng.standard_normal((300, 72)).astype(np.float16), cuts(rng, 300, n_ranks)
    ids = rng.integers(0, 300, 90).astype(np.int32)
    place, wanted = Place(n_ranks, 90, 72), np.zeros((90, 72), np.float32)
    ranks = connect(place)
    ranks.backends[0].embed(ranks.backends[0].matrix([("float16", 300, table)], 72, 2), ids, wanted, 8.5)
    for rank, (first, end) in enumerate(shares):
        place.keep()
        if end > first:
            matrix = ranks.backends[rank].matrix([("float16", end - first, table[first:end])], 72, 2)
            out = place.rows(place.memory[rank]).view(np.float32)
            ranks.backends[rank].embed(matrix, ids, out, 8.5, first_id=first, end_id=end)
        left = (ids < first) | (ids >= end)
        mine = np.where(left[:, None], place.rows(place.before[rank]), wanted.view(np.uint32))
        place.check(rank, mine)

    def work(rank: int) -> None:
        first, end = shares[rank]
        ranks.gather(rank, ROWS, 90, place.view(rank), token_ids=address(ids), first_id=first, end_id=end)

    run_all(n_ranks, work)
    for rank in range(n_ranks):
        place.check(rank, wanted.view(np.uint32))


def test_an_own_id_without_a_row(isa: str) -> None:
    backend = Backend("cpu", isa=isa, num_threads=1)
    matrix = backend.matrix([("float32", 5, np.ones((5, 8), np.float32))], 8, 2)
    out = np.zeros((3, 8), np.float32)
    backend.embed(matrix, np.array([9, 15, -3], np.int32), out, first_id=10, end_id=15)
    assert not out.any()
    backend.embed(matrix, np.array([10, 14, 99], np.int32), out, first_id=10, end_id=15)
    assert out[:2].all() and not out[2].any()
    with pytest.raises(RuntimeError, match="token id 15, from row 0 on, is outside of the matrix's 5 rows"):
        backend.embed(matrix, np.array([14, 15], np.int32), out[:2], first_id=10, end_id=16)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_many_gathers(connect: Connect, n_ranks: int) -> None:
    """Each rank computes from what it has just gathered; two places take turns."""
    n_steps, n_gathers, width = 20, 20, 61
    rng = np.random.default_rng(n_ranks)
    shares, place = cuts(rng, width, n_ranks), Place(n_ranks, 2, width)
    start = rng.integers(0, 2**32, width, np.uint64).astype(np.uint32)
    wanted = start.copy()
    for _ in range(n_steps * n_gathers):
        wanted = np.roll(wanted, 1) * np.uint32(2654435761)
    ranks = connect(place)
    results: dict[int, Array] = {}

    def work(rank: int) -> None:
        first, end = shares[rank]
        rows, whole, value = place.rows(place.memory[rank]), place.view(rank), start
        for step in range(n_steps * n_gathers):
            if step % n_gathers == 0:
                ranks.meet(rank)
            row = rows[step % 2]
            row[first:end] = (np.roll(value, 1) * np.uint32(2654435761))[first:end]
            at = view(whole.data + step % 2 * place.stride * 4, width, width)  # type: ignore[attr-defined]
            ranks.gather(rank, COLUMNS, 1, at, first=first, n_columns=end - first)
            value = row.copy()
        results[rank] = value

    run_all(n_ranks, work)
    for rank in range(n_ranks):
        assert (results[rank] == wanted).all()


def test_ranks_wait_for_the_last(connect: Connect) -> None:
    place, left = Place(3, 1, 30), [0.0] * 3
    ranks = connect(place)

    def work(rank: int) -> None:
        for number in range(3):
            if rank == number:
                time.sleep(0.05)
                place.rows(place.memory[rank])[0, 10 * rank : 10 * rank + 10] = 7
                left[rank] = time.monotonic()
            ranks.gather(rank, COLUMNS, 1, place.view(rank), first=10 * rank, n_columns=10)
            assert time.monotonic() >= left[number] > 0
            assert (place.rows(place.memory[rank])[0, 10 * number : 10 * number + 10] == 7).all()

    run_all(3, work)


def test_memory_is_shared_again(connect: Connect) -> None:
    place, moved = Place(2, 3, 20), Place(2, 3, 20)
    ranks = connect(place)
    for rank in range(2):
        moved.rows(moved.memory[rank])[:, 10 * rank : 10 * rank + 10] = 5
    place.keep()
    moved.keep()
    ranks.share(ARENA, [address(words) for words in moved.memory], moved.memory[0].nbytes)
    run_all(2, lambda rank: ranks.gather(rank, COLUMNS, 3, moved.view(rank), first=10 * rank, n_columns=10))
    for rank in range(2):
        moved.check(rank, np.full((3, 20), 5, np.uint32))
        place.check(rank, place.rows(place.before[rank]))


def test_the_fused_norm_needs_several_ranks(isa: str) -> None:
    backends = [Backend("cpu", isa=isa, num_threads=1) for _ in range(2)]
    fused = header().enums["FUSION_GATHER_NORM"]
    assert not backends[0].fusions & fused
    for n_ranks in (1, 2):
        ranks = Ranks(backends[:n_ranks])
        assert bool(backends[0].fusions & fused) == (n_ranks > 1)
        ranks.close()
    assert not backends[0].fusions & fused


def test_wrong_calls(connect: Connect, isa: str) -> None:
    place = Place(1, 4, 20)
    ranks = connect(place, timeout_s=0.1)
    place.keep()
    whole, floats = place.view(0), len(place.memory[0])
    base = address(place.memory[0])
    wrong = [
        (COLUMNS, 4, whole, {"first": 11, "n_columns": 10}, "columns 11 to 21 do not lie in 20 columns"),
        (COLUMNS, 4, view(base - 4, 20, 25), {}, "4 rows of 20 columns do not lie in the rank's shared arena"),
        (COLUMNS, 1, view(base + 4 * (floats - 19), 20, 20), {}, "do not lie in the rank's shared arena"),
        (COLUMNS, 2, view(base, 20, floats - 19), {}, "do not lie in the rank's shared arena"),
        (COLUMNS, 2**32 - 1, view(base, 20, 2**32 - 1), {}, "do not lie in the rank's shared arena"),
        (TO_FIRST, 4, whole, {}, "do not lie in the rank's shared logits of 0 bytes"),
        (COLUMNS, 4, whole, {"n_columns": 5, "a": view(base, 4, 20)}, "terms of 4 and 0 columns do not fit 5 columns"),
        (COLUMNS, 4, whole, {"n_columns": 5, "b": view(base, 5, 20)}, "terms of 0 and 5 columns do not fit 5 columns"),
        (ROWS, 4, whole, {}, "rows have no token ids"),
        (ROUTES, 4, whole, {"routes": base, "n_chosen": 3}, "20 columns are not 3 equal parts with routes"),
        (ROUTES, 4, whole, {"routes": base}, "20 columns are not 0 equal parts with routes"),
        (5, 4, whole, {}, "there is no kind 5"),
    ]  # fmt: skip
    for kind, n_rows, at, fields, text in wrong:
        with pytest.raises(RuntimeError, match=text):
            ranks.gather(0, kind, n_rows, at, **fields)
    place.check(0, place.rows(place.before[0]))
    ranks.gather(0, COLUMNS, 0, view(0, 0, 0))  # a step without rows
    ranks.gather(0, COLUMNS, 1, view(base + 4 * (floats - 20), 20, 20), n_columns=20)
    with pytest.raises(RuntimeError, match="context 0 is connected to other ranks already"):
        Ranks(ranks.backends)
    ranks.close()
    with pytest.raises(RuntimeError, match="not connected"):
        ranks.gather(0, COLUMNS, 4, whole)
    with pytest.raises(RuntimeError, match="not connected"):
        ranks.meet(0)
    with pytest.raises(errors.ConfigError, match="step_timeout_s: wanted more than 0 seconds, have 0"):
        Ranks(ranks.backends, 0.0)


def test_a_rank_that_does_not_come(connect: Connect) -> None:
    place = Place(2, 1, 20)
    ranks = connect(place, timeout_s=0.1)

    def come(rank: int) -> None:
        ranks.meet(rank)
        for _ in range(2 if rank else 3):
            ranks.gather(rank, COLUMNS, 1, place.view(rank), first=10 * rank, n_columns=10)

    with pytest.raises(errors.DeviceError, match=r"^rank 1 \(cpu\) did not reach gather 3 within 0.1 s \(step_timeout_s\)$"):
        run_all(2, come)
    with pytest.raises(errors.DeviceError, match=r"^rank 1 \(cpu\) did not reach gather 3"):
        ranks.check(0)
    ranks.check(1)
    with pytest.raises(errors.DeviceError, match=r"^rank 1 \(cpu\) did not reach gather 3"):
        ranks.meet(1)
