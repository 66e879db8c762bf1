"""Fixtures of the kernel tests: the backend of every device of this machine, and paged keys and values for attention."""

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import _core, hardware

Array = np.ndarray
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def has_engine_threads() -> bool:
    """Whether this process has a thread that may allocate in the core: any of llmpy but those of a backend's pool."""
    names = {thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.add((task / "comm").read_text().strip())
    return any(name.startswith("llmpy-") and name != "llmpy-cpu" for name in names)


@pytest.fixture(scope="module", autouse=True)
def no_other_thread_allocates() -> None:
    """Waits for the threads of other test files' engines, because a backend counts the allocations of its whole process."""
    gc.collect()
    deadline = time.monotonic() + 60
    seen, since = _core.allocation_count(), time.monotonic()
    while has_engine_threads() and time.monotonic() < min(since + 0.3, deadline):
        time.sleep(0.01)
        if _core.allocation_count() != seen:
            seen, since = _core.allocation_count(), time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test of an operation that the backend of another package does not have passes if the core refuses the operation there,
    or lets the host compute it. Tests of optional functions, for which the core uses others, are skipped."""
    try:
        return (yield)
    except NotImplementedError as error:
        found = re.fullmatch(r"this backend has no (\w+)", str(error))
        if "TEST_DEVICES" not in os.environ or found is None:
            raise
        places = [_core.backend_operations(each, hardware.library(each)) for each in os.environ["TEST_DEVICES"].split()]
        if not any(found[1] in place for place in places):
            pytest.skip(str(error))
        assert any(place.get(found[1]) in ("host", "refused") for place in places), f"{error}, but the core takes it for one"
        return None


class Paged:
    """Sequences with keys and values in randomly placed pages; all other data in the pool is NaN."""

    def __init__(
        self,
        backend: Backend,
        keys: Sequence[Array],
        values: Sequence[Array],
        dtype: str,
        block: int,
        seed: int = 0,
    ) -> None:
        self.backend, self.block = backend, block
        self.n_kv, self.head_dim = keys[0].shape[1:]
        pages = [-(-len(k) // block) for k in keys]
        self.table = np.full((len(keys), max(pages)), 2**30, np.int32)  # an entry that is looked up in vain crashes
        order = np.random.default_rng(seed).permutation(sum(pages)).astype(np.int32) + 1
        for row, n in enumerate(pages):
            self.table[row, :n], order = order[:n], order[n:]
        self.pool = backend.kv_pool(sum(pages) + 1, self.n_kv, self.head_dim, dtype, block)
        for seq, (k, v) in enumerate(zip(keys, values, strict=True)):
            for first in range(0, len(k), 512):
                part = slice(first, min(first + 512, len(k)))
                self.write([(seq, part.start, part.stop)], k[part], v[part])

    @staticmethod
    def batch(spans: Sequence[tuple[int, int, int]], n_seqs: int) -> tuple[Array, Array, Array]:
        """Rows of spans (sequence, first position, end), in the order of the sequences."""
        positions = [p for _, first, end in spans for p in range(first, end)]
        seqs = [s for s, first, end in spans for _ in range(first, end)]
        starts = [sum(end - first for s, first, end in spans if s < seq) for seq in range(n_seqs + 1)]
        return np.array(positions, np.int32), np.array(seqs, np.int32), np.array(starts, np.int32)

    def write(self, spans: Sequence[tuple[int, int, int]], k: Array, v: Array) -> None:
        """Stores the rows' keys and values."""
        n = len(k)
        self.backend.kv_write(
            self.pool,
            self.batch(spans, len(self.table)),
            self.table,
            np.ascontiguousarray(k).reshape(n, -1),
            np.ascontiguousarray(v).reshape(n, -1),
        )
        assert self.backend.allocations == 0

    def attend(
        self,
        spans: Sequence[tuple[int, int, int]],
        q: Array,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        **extras: Any,
    ) -> Array:
        """Attention [rows, heads, head_dim] for the rows of the spans; q has the same shape. extras: slopes, sinks, chunk."""
        n = len(q)
        out = np.full((n, q.shape[1] * self.head_dim + 3), -7, np.float32)
        self.backend.attention(
            self.pool,
            self.batch(spans, len(self.table)),
            self.table,
            np.ascontiguousarray(q).reshape(n, -1),
            out[:, :-3],
            scale,
            window,
            softcap,
            **extras,
        )
        assert self.backend.allocations == 0
        assert (out[:, -3:] == -7).all()
        return np.ascontiguousarray(out[:, :-3]).reshape(n, -1, self.head_dim)


class Recurrence:
    """One recurrent operation over sequences with states in randomly placed pages; all other data there is NaN.

    Args:
        open_backend: Opens a backend with a number of threads.
        name: Name of the operation.
        lengths: Rows of every sequence.
        units: Number of pieces of a state, floats per piece, and pieces per page.
        rows: The operation's inputs, [rows, width], one sequence after the other.
        width: Columns of the output.
        rest: All other arguments of the operation.
    """

    def __init__(
        self,
        open_backend: Callable[..., Backend],
        name: str,
        lengths: Sequence[int],
        units: tuple[int, int, int],
        rows: dict[str, Array],
        width: int,
        **rest: object,
    ) -> None:
        self.open_backend, self.name, self.lengths, self.units = open_backend, name, list(lengths), units
        self.rows, self.width, self.rest = rows, width, rest
        self.starts = np.cumsum([0, *lengths])

    def fresh(self, seed: int) -> tuple[Array, Array, int, int]:
        n_units, unit_floats, units_per_page = self.units
        entries, n_seqs = -(-n_units // units_per_page), len(self.lengths)
        table = np.full((n_seqs, entries + 3), 2**30, np.int32)  # an entry that is looked up in vain crashes
        order = np.random.default_rng(seed).permutation(n_seqs * entries).astype(np.int32) + 1
        table[:, 2:-1] = order.reshape(n_seqs, entries)
        pool = np.full((n_seqs * entries + 1, units_per_page * unit_floats + 5), np.nan, np.float32)
        return pool, table, 2, units_per_page

    def call(self, backend: Backend, state: tuple[Array, Array, int, int], spans: Sequence[tuple[int, int, int]]) -> Array:
        """The outputs for spans (sequence, first row, end)."""
        take = np.concatenate([np.arange(self.starts[s] + first, self.starts[s] + end) for s, first, end in spans])
        positions = np.concatenate([np.arange(first, end) for _, first, end in spans]).astype(np.int32)
        seqs = np.concatenate([np.full(end - first, s) for s, first, end in spans]).astype(np.int32)
        starts = np.cumsum([0, *(end - first for _, first, end in spans)]).astype(np.int32)
        out = np.full((len(take), self.width + 3), -7, np.float32)
        given = {name: np.pad(x[take], ((0, 0), (0, 2)))[:, :-2] for name, x in self.rows.items()}
        getattr(backend, self.name)(state=state, batch=(positions, seqs, starts), **given, **self.rest, out=out[:, :-3])
        assert backend.allocations == 0 and (out[:, -3:] == -7).all()
        return out[:, :-3]

    def whole(self, threads: int = 2) -> Array:
        """All rows in one call."""
        spans = [(s, 0, n) for s, n in enumerate(self.lengths)]
        return self.call(self.open_backend(threads), self.fresh(0), spans)

    def in_pieces(self, threads: int, seed: int) -> Array:
        """All rows in many calls, each with a few rows of some sequences, in random order."""
        random, done = np.random.default_rng(seed), [0] * len(self.lengths)
        backend, state = self.open_backend(threads), self.fresh(seed)
        out = np.full((self.starts[-1], self.width), np.nan, np.float32)
        while done != self.lengths:
            ends = [min(n, at + int(random.integers(0, 5))) for n, at in zip(self.lengths, done, strict=True)]
            spans = [(s, done[s], ends[s]) for s in random.permutation(len(done)).tolist() if ends[s] > done[s]]
            if spans:
                part = self.call(backend, state, spans)
                for (s, first, end), rows in zip(spans, np.split(part, np.cumsum([e - f for _, f, e in spans])), strict=False):
                    out[self.starts[s] + first : self.starts[s] + end] = rows
            done = ends
        n_units, unit_floats, units_per_page = self.units
        assert np.isnan(state[0][0]).all() and np.isnan(state[0][:, units_per_page * unit_floats :]).all()
        assert np.isfinite(state[0]).sum() == len(self.lengths) * n_units * unit_floats
        return out

    def check(self, exact: Array, error: float) -> None:
        """Checks outputs against exact values, relative to the largest of a column's kind, and equal bits for all splits."""
        out = self.whole()
        assert np.abs(out - exact).max() <= error * np.abs(exact).max()
        assert self.whole(1).tobytes() == self.whole(5).tobytes() == out.tobytes()
        assert self.in_pieces(1, 1).tobytes() == self.in_pieces(3, 2).tobytes() == out.tobytes()
        if self.open_backend(1).description.startswith("cpu"):
            for isa in _core.cpu_isas():
                spans = [(s, 0, n) for s, n in enumerate(self.lengths)]
                assert self.call(Backend("cpu", isa=isa), self.fresh(3), spans).tobytes() == out.tobytes()


@pytest.fixture(scope="session")
def recurrence() -> type[Recurrence]:
    """The class Recurrence."""
    return Recurrence


@pytest.fixture(scope="module")
def open_backend(each_device: str, core_options: Callable[[str], dict[str, str]]) -> Callable[..., Backend]:
    """Opens each device's backend, on CUDA with float32 activations: (num_threads, max_rows, max_cols, vocab_size)."""
    options = core_options(each_device)
    names = ("num_threads", "max_rows", "max_cols", "vocab_size")

    def open_backend(*args: int, **kwargs: object) -> Backend:
        return Backend(**options, **dict(zip(names, args, strict=False)), **kwargs)

    return open_backend


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    """The class Paged."""
    return Paged


@pytest.fixture(scope="session")
def rounded() -> Callable[[Array, str], Array]:
    """Rounds float32 values to a type and back."""
    return lambda x, dtype: x.astype(TYPES[dtype]).astype(np.float32)
