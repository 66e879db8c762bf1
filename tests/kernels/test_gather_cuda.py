"""Gathers of CUDA ranks: every kind leaves the same bits on all ranks and touches nothing else. Ranks share one device here;
where there are two, the cases run on two as well."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest
from cuda_ways import Ways
from rank_threads import run_all

from binding import Backend
from llmpy import devices, errors, hardware
from ranks import ARENA, COLUMNS, LOGITS, ROUTES, ROWS, TO_FIRST, TO_OWNERS, Ranks, view
from staging import address, header, struct

Array = np.ndarray
GUARD = 96  # items around a value; a value begins at a multiple of 64 bytes
WORDS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
DEVICES = [device["device"] for device in devices() if device["available"] and device["device"].startswith("cuda")]


class Team:
    """Ranks with one shared buffer each.

    Args:
        names: Device of each rank.
        dtype: Type of activations.
        size_bytes: Bytes of a rank's buffer.
        options: Options of the ranks.
    """

    def __init__(self, names: Sequence[str], dtype: str, size_bytes: int, purpose: int = ARENA, **options: float) -> None:
        self.dtype, self.words, self.n, self.has_devices = dtype, WORDS[dtype], len(names), len({*names}) == len(names)
        library = hardware.cuda_library()
        self.backends = [Backend(name, max_rows=4096, vocab_size=64, dtype=dtype, library=library) for name in names]
        self.buffers: list[tuple[Backend, int, int]] = []
        self.memory = [self.buffer(rank, size_bytes) for rank in range(self.n)]
        self.ranks = Ranks(self.backends, **options)
        self.ranks.share(purpose, self.memory, size_bytes)
        self.size_bytes = size_bytes
        self.ways = [Ways(backend, "gather") for backend in self.backends]

    @property
    def most_sent(self) -> int:
        """Values of one `ll`: 512 KB, or 128 KB where ranks share a device, because their grids have 8 blocks."""
        item = np.dtype(self.words).itemsize
        return (1 << 19 if self.has_devices else 1 << 17) // item

    def put_first(self, way: str | None = None) -> list[str]:
        """Puts a way first on all ranks, or none. Returns the ways that ran since the last call."""
        found = [ways.put_first(ways.names.index(way) + 1 if way else 0) for ways in self.ways]
        assert all(each == found[0] for each in found)
        return found[0]

    def close(self) -> None:
        self.ranks.close()
        for backend, buffer, size in self.buffers:
            backend.table.function("buffer_destroy")(backend.ctx, buffer, size)

    def buffer(self, rank: int, size_bytes: int) -> int:
        made = self.backends[rank].new_buffer(size_bytes)
        self.buffers.append((self.backends[rank], made, size_bytes))
        return made

    def put(self, rank: int, to: int, array: Array) -> None:
        array = np.ascontiguousarray(array)
        self.backends[rank].table.call("upload", self.backends[rank].ctx, to, address(array), array.nbytes)

    def new(self, rank: int, array: Array) -> int:
        """A new buffer with an array's bytes."""
        made = self.buffer(rank, max(array.nbytes, 1))
        self.put(rank, made, array)
        return made

    def get(self, rank: int, at: int, shape: tuple[int, ...], kind: type) -> Array:
        array = np.empty(shape, kind)
        self.backends[rank].table.call("download", self.backends[rank].ctx, address(array), at, array.nbytes)
        return array

    def wait(self) -> None:
        """Waits for all ranks' streams, and raises the first failure of a wait."""
        for backend in self.backends:
            backend.table.call("synchronize", backend.ctx)
        for rank in range(self.n):
            self.ranks.check(rank)

    def call(self, rank: int, name: str, args: object) -> None:
        backend = self.backends[rank]
        backend.table.call(name, backend.ctx, ctypes.addressof(args))  # type: ignore[arg-type]


class Place:
    """One value at the same place of every rank's memory; all other words there differ and must stay."""

    def __init__(self, team: Team, n_rows: int, width: int, words: type, gap: int = 8) -> None:
        self.team, self.n_rows, self.width, self.stride, self.words = team, n_rows, width, width + gap, words
        self.item = np.dtype(words).itemsize
        n = 2 * GUARD + n_rows * self.stride
        assert n * self.item <= team.size_bytes
        self.before = [(np.arange(n, dtype=np.uint32) * 2654435761 + 7 * rank).astype(words) for rank in range(team.n)]

    def rows(self, memory: Array) -> Array:
        return memory[GUARD : len(memory) - GUARD].reshape(self.n_rows, self.stride)[:, : self.width]

    def view(self, rank: int, first: int = 0, width: int | None = None) -> object:
        at = self.team.memory[rank] + (GUARD + first) * self.item
        return view(at, self.width if width is None else width, self.stride)

    def upload(self) -> None:
        """Ends before any rank gathers, which stores into the memory of the others. In an engine `meet` sees to this order."""
        for rank, memory in enumerate(self.before):
            self.team.put(rank, self.team.memory[rank], memory)
        for backend in self.team.backends:
            backend.table.call("synchronize", backend.ctx)

    def check(self, rank: int, wanted: Array) -> None:
        """The value is as wanted; all else is as it was uploaded."""
        expected = self.before[rank].copy()
        self.rows(expected)[:] = wanted
        found = self.team.get(rank, self.team.memory[rank], expected.shape, self.words)
        assert found.tobytes() == expected.tobytes(), (rank, np.flatnonzero(found != expected)[:8])


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], words: type) -> Array:
    """Any bit patterns: zeros below 0 and NaNs with payloads among them."""
    bits = rng.integers(0, np.iinfo(words).max, shape, words, endpoint=True)
    bits[rng.random(shape) < 0.1] = 1 << (8 * np.dtype(words).itemsize - 1)
    return bits


def cuts(rng: np.random.Generator, n: int, n_ranks: int, step: int = 1) -> list[tuple[int, int]]:
    """Unequal shares of n items in whole steps; some may be empty."""
    inner = (np.sort(rng.integers(0, n // step + 1, n_ranks - 1)) * step).tolist()
    return list(pairwise([0, *inner, n]))


@pytest.fixture(params=["one", "several"])
def make_team(cuda: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Team]]:
    """Opens a team: (number of ranks, dtype, bytes), on one device or on one device a rank."""
    made: list[Team] = []

    def make_team(n_ranks: int, dtype: str = "bfloat16", size_bytes: int = 1 << 20, **options: float) -> Team:
        if request.param == "several" and len(DEVICES) < n_ranks:
            pytest.skip(f"{len(DEVICES)} CUDA devices")
        names = DEVICES[:n_ranks] if request.param == "several" else [cuda] * n_ranks
        made.append(Team(names, dtype, size_bytes, **options))
        return made[-1]

    yield make_team
    for team in made:
        team.close()


MakeTeam = Callable[..., Team]
# rows, columns, step of the cuts, columns between rows
SHAPES = [(1, 8, 1, 8), (1, 4096, 64, 0), (7, 333, 1, 4), (64, 1000, 8, 8), (513, 96, 16, 0), (2048, 520, 8, 8),
          (2048, 65, 1, 3)]  # fmt: skip
N_RANKS = pytest.mark.parametrize("n_ranks", [2, 3, 4])


@N_RANKS
@pytest.mark.parametrize("dtype", WORDS)
def test_columns(make_team: MakeTeam, n_ranks: int, dtype: str) -> None:
    team, rng = make_team(n_ranks, dtype, 8 << 20), np.random.default_rng(n_ranks)
    for n_rows, width, step, gap in SHAPES:
        for source, way in product(("whole", "a", "a in whole", "is stored"), ("ll", "push")):
            team.put_first(way)
            place, wanted = Place(team, n_rows, width, team.words, gap), random_bits(rng, (n_rows, width), team.words)
            shares = cuts(rng, width, n_ranks, step)
            for rank, (first, end) in enumerate(shares):
                if source == "is stored":
                    place.rows(place.before[rank])[:] = wanted
                elif source != "a":
                    place.rows(place.before[rank])[:, first:end] = wanted[:, first:end]
            place.upload()
            for rank, (first, end) in enumerate(shares):
                fields = {"first": first, "n_columns": end - first, "is_stored": source == "is stored", "unit": step}
                if source == "a" and end > first:
                    terms = team.new(rank, wanted[:, first:end])
                    fields["a"] = view(terms, end - first, end - first)
                elif source == "a in whole":
                    fields["a"] = place.view(rank, first, end - first)
                team.ranks.gather(rank, COLUMNS, n_rows, place.view(rank), **fields)
            team.wait()
            for rank in range(n_ranks):
                place.check(rank, wanted)
            has_eights = step % 8 == 0 and source != "is stored"
            is_sent = way == "ll" and has_eights and n_rows * width <= team.most_sent
            assert team.put_first() == ["ll" if is_sent else "push"], (n_rows, width, source)


@N_RANKS
@pytest.mark.parametrize("dtype", WORDS)
def test_sum_and_norm(make_team: MakeTeam, n_ranks: int, dtype: str) -> None:
    """a + b with the bits of `add`; the norm with the bits of `rms_norm`, in one launch or in two."""
    team, rng, kind = make_team(n_ranks, dtype, 4 << 20), np.random.default_rng(n_ranks), KINDS[dtype]
    words = np.float32 if dtype == "float32" else np.uint16  # as binding takes activations
    shapes = [(1, 64, 8), (5, 256, 8), (3, 264, 8), (200, 1000, 8), (1, 4096, 64), (2, 8192, 8), (33, 5120, 64),
              (9, 16384, 64), (2, 16392, 8), (7, 333, 1), (3, 4096, 1)]  # fmt: skip
    for (n_rows, width, step), way in product(shapes, ("ll_norm", "push_norm", "ll", "push")):
        team.put_first(way)
        shape = n_rows, width
        a, b = rng.standard_normal((2, *shape)).astype(kind)
        a[rng.random(shape) < 0.2] = b[rng.random(shape) < 0.2] = -0.0
        weight = rng.standard_normal(width).astype(np.float32)
        total, normed = np.zeros(shape, kind), np.zeros(shape, kind)
        team.backends[0].add(a.view(words), b.view(words), total.view(words))
        team.backends[0].rms_norm(total.view(words), weight, normed.view(words), 1e-5)
        place, shares = Place(team, n_rows, width, team.words), cuts(rng, width, n_ranks, step)
        for rank, (first, end) in enumerate(shares):  # a lies in whole already on odd ranks
            if rank % 2:
                place.rows(place.before[rank])[:, first:end] = a[:, first:end].view(team.words)
        place.upload()
        outs = []
        for rank, (first, end) in enumerate(shares):
            memory = [team.new(rank, array) for array in (a, b, np.zeros(shape, team.words), weight)]
            outs.append(memory[2])
            at = first * place.item
            own = place.view(rank, first, end - first) if rank % 2 else view(memory[0] + at, end - first, width)
            norm = struct("rms_norm_args", n_rows=n_rows, n_heads=1, x=place.view(rank), weight=memory[3], eps=1e-5,
                          out=view(outs[rank], width, width))  # fmt: skip
            terms = {"a": own, "b": view(memory[1] + at, end - first, width)} if end > first else {}
            terms |= {"first": first, "n_columns": end - first, "norm": norm, "unit": step}
            team.ranks.gather(rank, COLUMNS, n_rows, place.view(rank), **terms)
        team.wait()
        for rank in range(n_ranks):
            place.check(rank, total.view(team.words))
            assert team.get(rank, outs[rank], shape, team.words).tobytes() == normed.tobytes(), (shape, rank)
        is_normed = width % 8 == 0 and width <= 16384
        is_sent = step % 8 == 0 and n_rows * width <= team.most_sent
        sends_rows = step % 8 == 0 and width * place.item <= 16384 and n_rows <= (128 if team.has_devices else 8)
        takers = [("push_norm", is_normed), ("ll", is_sent), ("push", True)]
        takers = [("ll_norm", is_normed and sends_rows and n_rows * width * place.item <= 1 << 20), *takers]
        assert team.put_first() == [way if dict(takers)[way] else next(name for name, takes in takers if takes)], (shape, way)


@N_RANKS
def test_embeddings_are_joined_by_rows(make_team: MakeTeam, n_ranks: int) -> None:
    rng = np.random.default_rng(n_ranks)
    team, kind = make_team(n_ranks), ml_dtypes.bfloat16
    for n_rows, width in ((1, 72), (90, 72), (300, 99)):
        table, ids = rng.standard_normal((300, width)).astype(kind), rng.integers(0, 300, n_rows).astype(np.int32)
        wanted, shares = np.zeros((n_rows, width), np.uint16), cuts(rng, 300, n_ranks)
        whole = team.backends[0].matrix([("bfloat16", 300, table.view(np.uint16))], width, 2)
        team.backends[0].embed(whole, ids, wanted, 8.5)
        place, on_device = Place(team, n_rows, width, np.uint16), []
        place.upload()
        for rank, (first, end) in enumerate(shares):
            on_device.append(team.new(rank, ids))
            if end == first:
                continue
            own = team.backends[rank].matrix([("bfloat16", end - first, table[first:end].view(np.uint16))], width, 2)
            args = struct("embed_args", matrix=own.address, token_ids=on_device[rank], n_rows=n_rows, scale=8.5,
                          out=place.view(rank), first_id=first, end_id=end)  # fmt: skip
            team.call(rank, "embed", args)
            left = (ids < first) | (ids >= end)
            before = place.rows(place.before[rank])
            place.check(rank, np.where(left[:, None], before, wanted))
        for rank, (first, end) in enumerate(shares):
            fields = {"first_id": first, "end_id": end, "token_ids": on_device[rank]}
            team.ranks.gather(rank, ROWS, n_rows, place.view(rank), **fields)
        team.wait()
        for rank in range(n_ranks):
            place.check(rank, wanted)


# (n_rows, columns of a part, parts)
PARTS = [(1, 16, 2), (5, 24, 4), (300, 9, 3), (33, 2048, 8)]


@N_RANKS
@pytest.mark.parametrize("dtype", WORDS)
def test_results_of_routes(make_team: MakeTeam, n_ranks: int, dtype: str) -> None:
    """Each rank has the parts of its experts' routes."""
    team, rng = make_team(n_ranks, dtype, 8 << 20), np.random.default_rng(n_ranks)
    for (n_rows, part, n_chosen), way in product(PARTS, ("ll_routes", "push_parts")):
        team.put_first(way)
        shape = n_rows, part * n_chosen
        place, wanted, shares = Place(team, *shape, team.words), random_bits(rng, shape, team.words), cuts(rng, 20, n_ranks)
        routes = np.zeros((n_rows, n_chosen + 2, 2), np.int32)  # an expert and its weight
        routes[:, :n_chosen, 0] = rng.integers(0, 20, (n_rows, n_chosen))
        experts = np.repeat(routes[:, :n_chosen, 0], part, 1)
        for rank, (first, end) in enumerate(shares):
            own = (experts >= first) & (experts < end)
            place.rows(place.before[rank])[own] = wanted[own]
        place.upload()
        on_device = [team.new(rank, routes) for rank in range(n_ranks)]
        for rank, (first, end) in enumerate(shares):
            fields = {"routes": on_device[rank], "route_stride": n_chosen + 2, "n_chosen": n_chosen}
            team.ranks.gather(rank, ROUTES, n_rows, place.view(rank), **fields, first_id=first, end_id=end)
        team.wait()
        for rank in range(n_ranks):
            place.check(rank, wanted)
        is_sent = part % 8 == 0 and n_rows * part * n_chosen <= team.most_sent
        assert team.put_first() == [way if is_sent else "push_parts"], (shape, way)


@N_RANKS
@pytest.mark.parametrize("dtype", WORDS)
def test_sums_over_routes(make_team: MakeTeam, n_ranks: int, dtype: str) -> None:
    """Packets and sums in one launch have the bits of the gather and `combine`."""
    team, rng = make_team(n_ranks, dtype, 8 << 20), np.random.default_rng(n_ranks)
    for n_rows, part, n_chosen in [(1, 2048, 8), (3, 520, 5), (2, 96, 32), (4, 24, 4), (300, 8, 3)]:
        shape, sums = (n_rows, part * n_chosen), {}
        values, shares = rng.standard_normal(shape).astype(KINDS[dtype]).view(team.words), cuts(rng, 20, n_ranks)
        routes = np.zeros((n_rows, n_chosen + 2, 2), np.int32)
        routes[:, :n_chosen, 0] = rng.integers(0, 20, (n_rows, n_chosen))
        routes[..., 1] = rng.random((n_rows, n_chosen + 2)).astype(np.float32).view(np.int32)
        experts = np.repeat(routes[:, :n_chosen, 0], part, 1)
        for way in ("ll_combine", "push_parts"):
            team.put_first(way)
            place = Place(team, *shape, team.words)
            for rank, (first, end) in enumerate(shares):
                own = (experts >= first) & (experts < end)
                place.rows(place.before[rank])[own] = values[own]
            place.upload()
            on_device = [team.new(rank, routes) for rank in range(n_ranks)]
            y = [team.new(rank, np.full((n_rows, part + 8), 3, team.words)) for rank in range(n_ranks)]
            for rank, (first, end) in enumerate(shares):
                fields = {"routes": on_device[rank], "route_stride": n_chosen + 2, "n_chosen": n_chosen}
                views = {"results": place.view(rank), "y": view(y[rank], part, part + 8)}
                combine, ids = struct("combine_args", n_rows=n_rows, **fields, **views), {"first_id": first, "end_id": end}
                team.ranks.gather(rank, ROUTES, n_rows, place.view(rank), **fields, **ids, combine=combine)
            team.wait()
            sums[way] = {team.get(rank, y[rank], (n_rows, part + 8), team.words).tobytes() for rank in range(n_ranks)}
            assert len(sums[way]) == 1, (shape, way)
            threads = min(128, 16384 // (8 * np.dtype(team.words).itemsize * n_chosen) // 32 * 32)
            fits = threads and n_rows * -(-part // (8 * threads)) <= (128 if team.has_devices else 8)
            assert team.put_first() == [way if fits or way != "ll_combine" else "ll_routes"], (shape, way)
        assert sums["ll_combine"] == sums["push_parts"], shape


@N_RANKS
@pytest.mark.parametrize("dtype", WORDS)
def test_columns_of_parts(make_team: MakeTeam, n_ranks: int, dtype: str) -> None:
    """Each rank has columns of all parts."""
    team, rng = make_team(n_ranks, dtype, 8 << 20), np.random.default_rng(n_ranks)
    for n_rows, part, n_chosen in PARTS:
        shape = n_rows, part * n_chosen
        place, wanted, shares = Place(team, *shape, team.words), random_bits(rng, shape, team.words), cuts(rng, part, n_ranks)
        for rank, (first, end) in enumerate(shares):
            own = np.tile((np.arange(part) >= first) & (np.arange(part) < end), n_chosen)
            place.rows(place.before[rank])[:, own] = wanted[:, own]
        place.upload()
        for rank, (first, end) in enumerate(shares):
            fields = {"first": first, "n_columns": end - first, "n_chosen": n_chosen}
            team.ranks.gather(rank, COLUMNS, n_rows, place.view(rank), **fields)
        team.wait()
        for rank in range(n_ranks):
            place.check(rank, wanted)


def gather_logits(
    team: Team, rng: np.random.Generator, shape: tuple[int, int], step: int, kind: int
) -> tuple[Place, np.ndarray]:
    """Each rank gives its columns of logits to a gather of a kind; the place, and the whole logits."""
    place, wanted = Place(team, *shape, np.uint32), random_bits(rng, shape, np.uint32)
    shares = cuts(rng, shape[1], team.n, step)
    for rank, (first, end) in enumerate(shares):
        place.rows(place.before[rank])[:, first:end] = wanted[:, first:end]
    place.upload()
    for rank, (first, end) in enumerate(shares):
        team.ranks.gather(rank, kind, shape[0], place.view(rank), first=first, n_columns=end - first)
    team.wait()
    return place, wanted


@N_RANKS
def test_logits_go_to_the_first_rank(make_team: MakeTeam, n_ranks: int) -> None:
    team, rng = make_team(n_ranks, size_bytes=8 << 20, purpose=LOGITS), np.random.default_rng(n_ranks)
    for n_rows, width, step in ((1, 32000, 64), (7, 333, 1), (64, 5000, 8)):
        place, wanted = gather_logits(team, rng, (n_rows, width), step, TO_FIRST)
        place.check(0, wanted)
        for rank in range(1, n_ranks):
            place.check(rank, place.rows(place.before[rank]))


@N_RANKS
def test_logits_go_to_the_owners_of_rows(make_team: MakeTeam, n_ranks: int) -> None:
    team, rng = make_team(n_ranks, size_bytes=8 << 20, purpose=LOGITS), np.random.default_rng(n_ranks)
    for n_rows, width, step in ((33, 32000, 64), (7, 333, 1), (64, 5000, 8)):
        place, wanted = gather_logits(team, rng, (n_rows, width), step, TO_OWNERS)
        for rank in range(n_ranks):
            mine = slice(n_rows * rank // n_ranks, n_rows * (rank + 1) // n_ranks)
            rows = place.rows(place.before[rank]).copy()
            rows[mine] = wanted[mine]
            place.check(rank, rows)


@N_RANKS
@pytest.mark.parametrize("slot", [0, 1])
def test_a_step_begins_with_the_drawn_ids_of_all_ranks(make_team: MakeTeam, n_ranks: int, slot: int) -> None:
    team = make_team(n_ranks)
    logits = np.random.default_rng(slot).standard_normal((20, 50)).astype(np.float32)
    tasks = [{"logits_row": i, "is_greedy": True} for i in range(20)]
    drawn = logits.argmax(1)
    first = 10 * slot
    for rank, backend in enumerate(team.backends):  # two slots: the first half goes to slot 0
        backend.sample(logits if rank == 0 else logits[:, ::-1].copy(), tasks, slots=slot + 1)
    for rank in range(n_ranks):  # not before all have drawn: an allocation waits for a kernel that waits for other ranks
        team.ranks.meet(rank, slot, 18 if rank == 0 else 2 if rank == n_ranks - 1 else 0, 0 if rank == 0 else 18)
    team.wait()
    rows = tuple(np.array(one, np.int32) for one in ([-1 - first, 7, -20], [0] * 3, range(3), range(4), range(3)))
    for rank in range(n_ranks):
        to = tuple(np.zeros(4, np.int32) for _ in range(5))
        tables, runs = np.array([1], np.int32), np.array([], np.int32)
        team.backends[rank].begin(slot ^ 1, rows, tables, runs, to, np.array([1], np.int32))
        assert to[0][:3].tolist() == [drawn[first], 7, 49 - drawn[19]], rank


WIDTH = 256


def add_neighbours(team: Team, rank: int, step: int) -> None:
    """Gathers a row of place step % 2, then own columns of the other place = the gathered ones + the next rank's."""
    share = WIDTH // team.n
    at, other = (team.memory[rank] + 4 * WIDTH * (place % 2) for place in (step, step + 1))
    whole = view(at, WIDTH, WIDTH)
    unit = share if step % 3 else 0  # packets, and stores that meet
    team.ranks.gather(rank, COLUMNS, 1, whole, first=rank * share, n_columns=share, unit=unit)
    a, b = (view(at + 4 * share * (one % team.n), share, share) for one in (rank, rank + 1))
    team.call(rank, "add", struct("add_args", n_rows=1, a=a, b=b, out=view(other + 4 * share * rank, share, share)))


def neighbours_added(start: Array, n_ranks: int, n_steps: int) -> Array:
    """The place that `n_steps` of add_neighbours gathered last."""
    value = start
    for _ in range(n_steps - 1):
        value = value + np.roll(value, -WIDTH // n_ranks)
    return value


def start_row(team: Team) -> Array:
    start = np.random.default_rng(team.n).standard_normal(WIDTH).astype(np.float32)
    for rank in range(team.n):
        own = np.zeros((2, WIDTH), np.float32)
        share = slice(WIDTH // team.n * rank, WIDTH // team.n * (rank + 1))
        own[0, share] = start[share]
        team.put(rank, team.memory[rank], own)
    return start


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("first", [0, 2**30 - 20, 2**31 - 20, 2**32 - 20])
def test_many_gathers_from_threads(make_team: MakeTeam, n_ranks: int, first: int) -> None:
    """Every gather needs the one before on all ranks. Meetings are counted across 2^31 and 2^32, and slots are cleared."""
    team = make_team(n_ranks, "float32", first_meeting=first)
    start, n_steps = start_row(team), 60

    def work(rank: int) -> None:
        for step in range(n_steps):
            if step % 10 == 0:
                team.ranks.meet(rank)
            add_neighbours(team, rank, step)

    run_all(n_ranks, work)
    team.wait()
    wanted = neighbours_added(start, n_ranks, n_steps)
    for rank in range(n_ranks):
        found = team.get(rank, team.memory[rank] + 4 * WIDTH * ((n_steps - 1) % 2), (WIDTH,), np.float32)
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_graphs_are_replayed_among_other_gathers(make_team: MakeTeam, n_ranks: int) -> None:
    team = make_team(n_ranks, "float32", first_meeting=2**32 - 30)
    start, graphs, n_steps = start_row(team), [ctypes.c_void_p() for _ in range(n_ranks)], 0
    for rank, backend in enumerate(team.backends):
        backend.table.call("graph_begin", backend.ctx)
        for step in range(4):
            add_neighbours(team, rank, step)
        backend.table.call("graph_end", backend.ctx, ctypes.addressof(graphs[rank]))
    for n_eager in (0, 2, 0, 6, 0, 0, 2, 0):
        for rank, backend in enumerate(team.backends):
            team.ranks.meet(rank)
            for step in range(n_eager):
                add_neighbours(team, rank, step)
            backend.table.call("graph_launch", backend.ctx, graphs[rank])
        n_steps += 4 + n_eager
    team.wait()
    wanted = neighbours_added(start, n_ranks, n_steps)
    for rank, backend in enumerate(team.backends):
        found = team.get(rank, team.memory[rank] + 4 * WIDTH, (WIDTH,), np.float32)
        assert found.tobytes() == wanted.tobytes()
        backend.table.function("graph_destroy")(backend.ctx, graphs[rank])


def test_grids_of_all_sizes_in_turn(make_team: MakeTeam) -> None:
    """Blocks that only some gathers have count by themselves."""
    team, rng = make_team(2, first_meeting=2**31 - 9), np.random.default_rng(0)
    for number, n_rows in enumerate((1, 128, 3, 300, 2, 64, 1, 1, 128, 5, 40, 2, 128)):
        place, wanted = Place(team, n_rows, 256, np.uint16), random_bits(rng, (n_rows, 256), np.uint16)
        place.rows(place.before[0])[:, :128], place.rows(place.before[1])[:, 128:] = wanted[:, :128], wanted[:, 128:]
        place.upload()
        for rank in range(2):
            unit = 128 * (number % 4 != 3)
            team.ranks.gather(rank, COLUMNS, n_rows, place.view(rank), first=128 * rank, n_columns=128, unit=unit)
        team.wait()
        for rank in range(2):
            place.check(rank, wanted)


def gather_row(team: Team, rank: int, unit: int = 0) -> None:
    whole = view(team.memory[rank], 64, 64)
    team.ranks.gather(rank, COLUMNS, 1, whole, first=32 * rank, n_columns=32, unit=unit)


UNITS = pytest.mark.parametrize("unit", [0, 32], ids=["push", "ll"])


@UNITS
def test_a_rank_that_does_not_come(make_team: MakeTeam, unit: int) -> None:
    team = make_team(2, timeout_s=0.5)
    for rank in range(2):
        team.ranks.meet(rank)
        for _ in range(3 - rank):
            gather_row(team, rank, unit)
    begun = time.monotonic()
    backend = team.backends[0]
    backend.table.call("synchronize", backend.ctx)
    assert 0.3 < time.monotonic() - begun < 5
    name = "cuda:1" if team.backends[1].description.startswith("cuda:1") else "cuda:0"
    text = rf"^rank 1 \({name}\) did not reach gather 3 within 0.5 s \(step_timeout_s\)$"
    with pytest.raises(errors.DeviceError, match=text):
        team.ranks.check(0)
    begun = time.monotonic()
    for _ in range(20):
        gather_row(team, 0, unit)
    backend.table.call("synchronize", backend.ctx)
    assert time.monotonic() - begun < 0.4  # later waits end soon
    with pytest.raises(errors.DeviceError, match="did not reach gather 3"):
        team.ranks.check(0)
    team.ranks.check(1)


def test_columns_that_no_rank_sends(make_team: MakeTeam) -> None:
    team = make_team(2, timeout_s=0.3)
    for rank in range(2):
        team.ranks.gather(rank, COLUMNS, 1, view(team.memory[rank], 64, 64), first=32 * rank, n_columns=8, unit=8)
    with pytest.raises(errors.DeviceError, match=r"^rank 0 \(cuda:0\) did not get all values of gather 1 within 0.3 s"):
        team.wait()


def test_a_rank_that_does_not_begin_the_step(make_team: MakeTeam) -> None:
    team = make_team(3, timeout_s=0.2)
    for rank in (0, 2):
        team.ranks.meet(rank)
        team.backends[rank].table.call("synchronize", team.backends[rank].ctx)
        with pytest.raises(errors.DeviceError, match=r"^rank 1 \(cuda:\d\) did not reach the start of the step within 0.2 s"):
            team.ranks.check(rank)


@UNITS
def test_abort_ends_waits(make_team: MakeTeam, unit: int) -> None:
    team = make_team(2, timeout_s=30.0)
    team.ranks.meet(0)
    team.ranks.meet(1)
    gather_row(team, 0, unit)
    time.sleep(0.1)
    begun = time.monotonic()
    team.ranks.abort()
    team.backends[0].table.call("synchronize", team.backends[0].ctx)
    assert time.monotonic() - begun < 1
    with pytest.raises(errors.DeviceError, match=r"^rank 0 \(cuda:0\) stopped at gather 1: the step was aborted$"):
        team.ranks.check(0)
    team.ranks.check(1)


def test_wrong_calls(cuda: str) -> None:
    library = hardware.cuda_library()
    backends = [Backend(cuda, max_rows=64, vocab_size=8, dtype="bfloat16", library=library) for _ in range(3)]
    fused = header().enums["FUSION_GATHER_NORM"]
    assert not backends[0].fusions & fused
    with pytest.raises(errors.ConfigError, match="step_timeout_s: wanted more than 0 seconds, have 0"):
        Ranks(backends, 0.0)
    with pytest.raises(errors.ConfigError, match="tensor_parallel_size: wanted at most 8 ranks"):
        Ranks(backends * 3)
    other = Backend(cuda, max_rows=64, vocab_size=8, dtype="float32", library=library)
    with pytest.raises(RuntimeError, match="wanted contexts with the same options"):
        Ranks([backends[0], other])
    ranks = Ranks(backends[:2])
    assert backends[0].fusions & backends[1].fusions & fused and not backends[2].fusions & fused
    with pytest.raises(RuntimeError, match="context 1 is connected to other ranks already"):
        Ranks([backends[2], backends[1]])
    memory = [backend.new_buffer(4096) for backend in backends[:2]]
    ranks.share(ARENA, memory, 4096)
    whole = view(memory[0], 20, 20)
    wrong = [
        (COLUMNS, 4, whole, {"first": 11, "n_columns": 10}, RuntimeError, "columns 11 to 21 do not lie in 20 columns"),
        (COLUMNS, 4, view(memory[0] - 2, 20, 25), {}, RuntimeError, "4 rows of 20 columns do not lie in the rank's shared"),
        (COLUMNS, 2, view(memory[0], 20, 2029), {}, RuntimeError, "do not lie in the rank's shared arena"),
        (TO_FIRST, 4, whole, {}, RuntimeError, "do not lie in the rank's shared logits of 0 bytes"),
        (COLUMNS, 4, whole, {"n_columns": 5, "a": view(memory[0], 4, 20)}, RuntimeError, "terms of 4 and 0 columns"),
        (ROWS, 4, whole, {}, RuntimeError, "rows have no token ids"),
        (5, 4, whole, {}, RuntimeError, "there is no kind 5"),
        (ROUTES, 4, whole, {"routes": memory[0], "n_chosen": 3}, RuntimeError, "20 columns are not 3 equal parts with routes"),
        (COLUMNS, 4, whole, {"first": 3, "n_columns": 3, "n_chosen": 4}, RuntimeError, "columns 3 to 6 do not lie in 5"),
    ]  # fmt: skip
    for kind, n_rows, at, fields, error, text in wrong:
        with pytest.raises(error, match=text):
            ranks.gather(0, kind, n_rows, at, **fields)
    ranks.gather(0, COLUMNS, 0, view(0, 0, 0))  # a step without rows
    ranks.close()
    assert not backends[0].fusions & fused
    with pytest.raises(RuntimeError, match="not connected"):
        ranks.gather(0, COLUMNS, 4, whole)
    with pytest.raises(RuntimeError, match="not connected"):
        ranks.meet(0)
    for backend, buffer in zip(backends, memory, strict=False):
        backend.table.function("buffer_destroy")(backend.ctx, buffer, 4096)
