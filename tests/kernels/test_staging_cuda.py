"""Staging of a batch on a CUDA device: arrays, padding, changes of page tables, ids known only on the device."""

import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray


@pytest.fixture(scope="module")
def backend(cuda: str) -> Backend:
    return Backend(cuda, max_rows=3000, vocab_size=50, library=hardware.cuda_library())


def ints(*values: object) -> Array:
    return np.array(*values, np.int32) if len(values) == 1 else np.array(values, np.int32)


@pytest.mark.parametrize(
    ("n_rows", "n_seqs", "n_wanted"), [(1, 1, 1), (1, 1, 0), (255, 3, 3), (257, 257, 257), (3000, 40, 2999)]
)
@pytest.mark.parametrize("slot", [0, 1])
def test_a_batch_arrives(backend: Backend, slot: int, n_rows: int, n_seqs: int, n_wanted: int) -> None:
    rng = np.random.default_rng(n_rows)
    rows = [rng.integers(0, 2**31 - 1, n, dtype=np.int32) for n in (n_rows, n_rows, n_rows, n_seqs + 1, n_wanted)]
    to = [np.full(n_rows + 4, -5, np.int32) for _ in rows]
    tables, to_tables = rng.integers(0, 99, 500, dtype=np.int32), np.full(500, -5, np.int32)
    runs = ints([[0, 1], [7, 90], [100, 0], [499, 1]])
    backend.begin(slot, tuple(rows), tables, runs.reshape(-1), tuple(to), to_tables)
    for wanted, got in zip(rows, to, strict=True):
        assert (got[: len(wanted)] == wanted).all() and (got[len(wanted) :] == -5).all()
    changed = np.zeros(500, bool)
    for first, count in runs:
        changed[first : first + count] = True
    assert (to_tables == np.where(changed, tables, -5)).all()


@pytest.mark.parametrize(("n_rows", "n_pad"), [(0, 1), (0, 300), (5, 3), (200, 56), (255, 2)])
def test_padding(backend: Backend, n_rows: int, n_pad: int) -> None:
    rows = (
        ints(range(n_rows)) + 9,
        ints(range(n_rows)) + 70,
        ints(range(n_rows))[::-1].copy(),
        ints(range(n_rows + 1)),
        ints(range(n_rows)),
    )
    n = n_rows + n_pad
    to = tuple(np.full(n + 2, -5, np.int32) for _ in rows)
    backend.begin(1, rows, ints([3]), ints([]), to, ints([4]), n_pad_rows=n_pad, pad_row_seq=256)
    token_ids, positions, row_seq, seq_first_row, logits_rows = to
    assert (token_ids[:n] == [*rows[0], *[0] * n_pad]).all() and (token_ids[n:] == -5).all()
    assert (positions[:n] == [*rows[1], *[0] * n_pad]).all() and (positions[n:] == -5).all()
    assert (row_seq[:n] == [*rows[2], *[256] * n_pad]).all() and (row_seq[n:] == -5).all()
    assert (seq_first_row[: n + 1] == range(n + 1)).all() and seq_first_row[n + 1] == -5
    assert (logits_rows[:n] == range(n)).all() and (logits_rows[n:] == -5).all()


def test_more_changes_than_one_kernel_brings(backend: Backend) -> None:
    tables = np.random.default_rng(0).integers(0, 9999, 100_000, dtype=np.int32)
    to, to_tables = tuple(np.zeros(3, np.int32) for _ in range(5)), np.full(100_000, -5, np.int32)
    rows = (ints(1, 2), ints(3, 4), ints(5, 6), ints(0, 2), ints([1]))
    backend.begin(0, rows, tables, ints(10, 80_000, 90_000, 10_000), to, to_tables)
    assert (to_tables[10:80_010] == tables[10:80_010]).all() and (to_tables[90_000:] == tables[90_000:]).all()
    assert (to_tables[:10] == -5).all() and (to_tables[80_010:90_000] == -5).all()
    assert to[0][:2].tolist() == [1, 2] and to[3][:2].tolist() == [0, 2] and to[4][0] == 1


def test_ids_of_the_step_before(backend: Backend) -> None:
    logits = np.random.default_rng(1).standard_normal((20, 50)).astype(np.float32)
    tasks = [{"logits_row": i, "is_greedy": True} for i in range(20)]
    backend.sample(logits, tasks)  # of slot 0
    rows = (ints(-1, 7, -20, -3), ints(0, 0, 0, 0), ints(0, 1, 2, 3), ints(range(5)), ints(range(4)))
    to = tuple(np.zeros(5, np.int32) for _ in range(5))
    backend.begin(1, rows, ints([1]), ints([]), to, ints([1]))
    drawn = logits.argmax(1)
    assert to[0][:4].tolist() == [drawn[0], 7, drawn[19], drawn[2]]
