"""Adapters of a linear against float64; a row's bits depend on its adapter and its input alone."""

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
SLOTS, MAX_RANK = 3, 8
RANKS = [[8, 3], [1, 0], [5, 8]]  # of each slot's parts


def make(columns: int, widths: list[int], max_rank: int = MAX_RANK) -> tuple[Array, list[tuple[int, int, int, int, int]]]:
    """Slots with random adapters, and the places of their parts."""
    rng, at, parts, first = np.random.default_rng(columns), 0, [], 0
    for rows in widths:
        head, a, b = at, at + 16, at + 16 + max_rank * columns
        parts.append((first, rows, 4 * head, 4 * a, 4 * b))
        first, at = first + rows, b + max_rank * rows
    slots = rng.standard_normal((SLOTS, at)).astype(np.float32)
    for slot, ranks in enumerate(RANKS):
        for (_, _, head, *_), rank in zip(parts, ranks, strict=False):
            slots.view(np.uint32)[slot, head // 4] = rank
            slots[slot, head // 4 + 1] = 0.5 + slot
    for _, _, head, *_ in parts:
        slots.view(np.uint32)[:, head // 4 + 2 : head // 4 + 6] = 0  # no bias, no matrix
    return slots, parts


def wanted(x: Array, y: Array, slots: Array, parts: list[tuple[int, int, int, int, int]], chosen: Array) -> Array:
    found = y.astype(np.float64)
    for row, slot in enumerate(chosen):
        for first, rows, head, a, b in parts if slot >= 0 else []:
            rank = slots.view(np.uint32)[slot, head // 4]
            down = slots[slot, a // 4 :][: rank * x.shape[1]].reshape(rank, x.shape[1]).astype(np.float64)
            up = slots[slot, b // 4 :][: rank * rows].reshape(rank, rows).astype(np.float64)
            found[row, first : first + rows] += slots[slot, head // 4 + 1] * ((down @ x[row]) @ up)
    return found


@pytest.mark.parametrize(("columns", "widths"), [(1, [1]), (40, [16, 7]), (515, [33, 64]), (64, [300])])
@pytest.mark.parametrize("threads", [1, 3])
def test_values_and_bits(columns: int, widths: list[int], threads: int, isa: str) -> None:
    backend, rng = Backend("cpu", isa, num_threads=threads), np.random.default_rng(1)
    slots, parts = make(columns, widths)
    x = rng.standard_normal((9, columns)).astype(np.float32)
    y = rng.standard_normal((9, sum(widths))).astype(np.float32)
    chosen = np.array([0, -1, 2, 1, 1, 0, -1, 2, 0], np.int32)
    out = y.copy()
    backend.lora(x, out, slots, parts, chosen, MAX_RANK)
    want = wanted(x, y, slots, parts, chosen)
    assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()
    assert out[chosen < 0].tobytes() == y[chosen < 0].tobytes()
    for row in range(9):
        alone = y[row : row + 1].copy()
        backend.lora(x[row : row + 1], alone, slots, parts, chosen[row : row + 1], MAX_RANK)
        assert alone.tobytes() == out[row : row + 1].tobytes()
    picked = np.array([7, 1, 4], np.int32)
    some = y[picked].copy()
    backend.lora(x[picked], some, slots, parts, chosen, MAX_RANK, picked)
    assert some.tobytes() == out[picked].tobytes()


def test_threads_change_no_bit(isa: str) -> None:
    slots, parts = make(515, [33, 64])
    x = np.random.default_rng(2).standard_normal((5, 515)).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        y = np.zeros((5, 97), np.float32)
        Backend("cpu", isa, num_threads=threads).lora(x, y, slots, parts, np.array([0, 1, 2, 0, -1], np.int32), MAX_RANK)
        found.append(y.tobytes())
    assert found[0] == found[1] == found[2]


def make_biased(columns: int, widths: tuple[int, int]) -> tuple[Array, list[tuple[int, int, int, int, int]]]:
    """Slots with adapters of a matrix of two parts, and with biases of every kind."""
    rng, b = np.random.default_rng(columns), 16 + MAX_RANK * columns
    second = b + (MAX_RANK + 1) * widths[0]
    parts = [(0, widths[0], 0, 4 * 16, 4 * b), (widths[0], widths[1], 4 * second, 4 * (second + 16), 4 * (second + b))]
    slots = rng.standard_normal((SLOTS, second + b + (MAX_RANK + 1) * widths[1])).astype(np.float32)
    for slot, (ranks, kinds) in enumerate([([8, 0], [1, 2]), ([0, 5], [2, 0]), ([3, 3], [0, 1])]):
        for i, at in enumerate((0, second)):
            slots.view(np.uint32)[slot, at : at + 6] = ranks[i], slots.view(np.uint32)[slot, at + 1], kinds[i], 0, 0, 0
    return slots, parts


def wanted_with_biases(
    x: Array, y: Array, slots: Array, parts: list[tuple[int, int, int, int, int]], chosen: Array, base: Array | None
) -> Array:
    found = wanted(x, y, slots, parts, chosen)
    for row, slot in enumerate(chosen):
        for first, rows, head, _, b in parts if slot >= 0 else []:
            kind = slots.view(np.uint32)[slot, head // 4 + 2]
            bias = slots[slot, b // 4 + MAX_RANK * rows :][:rows].astype(np.float64)
            if kind == 2 and base is not None:
                bias = bias - base[first : first + rows]
            found[row, first : first + rows] += bias * (kind > 0)
    return found


def test_biases_and_embeddings(isa: str) -> None:
    """A bias is added, or replaces the linear's; an embedding reads a column of A."""
    backend, rng, columns = Backend("cpu", isa, num_threads=2), np.random.default_rng(3), 21
    slots, parts = make_biased(columns, (16, 7))
    ids, base = rng.integers(0, columns, 8).astype(np.int32), rng.standard_normal(23).astype(np.float32)
    chosen = np.array([0, 1, -1, 2, 0, 2, 1, -1], np.int32)
    x, y = rng.standard_normal((8, columns)).astype(np.float32), rng.standard_normal((8, 23)).astype(np.float32)
    for token_ids, factor in ((None, 1.0), (ids, 2.5)):
        given = x if token_ids is None else np.eye(columns, dtype=np.float32)[ids] * np.float32(factor)
        if token_ids is not None:
            slots.view(np.uint32)[:, [parts[0][2] // 4 + 2, parts[1][2] // 4 + 2]] = 0
        want = wanted_with_biases(given, y, slots, parts, chosen, base)
        out = y.copy()
        backend.lora(given, out, slots, parts, chosen, MAX_RANK, base_bias=base, token_ids=token_ids, factor=factor)
        assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()
        assert out[chosen < 0].tobytes() == y[chosen < 0].tobytes()
        for row in range(8):
            alone, own = y[row : row + 1].copy(), None if token_ids is None else token_ids[row : row + 1]
            backend.lora(given[row : row + 1], alone, slots, parts, chosen[row : row + 1], MAX_RANK, base_bias=base,
                         token_ids=own, factor=factor)  # fmt: skip
            assert alone.tobytes() == out[row : row + 1].tobytes()
    shared = y.copy()  # the rows of an embedding that two ranks share
    for own_ids in ((0, 11), (11, columns)):
        backend.lora(given, shared, slots, parts, chosen, MAX_RANK, token_ids=ids, factor=factor, ids=own_ids)
        others = ids >= own_ids[1]
        assert shared[others].tobytes() == y[others].tobytes()
    assert shared.tobytes() == out.tobytes() and {*(ids[chosen >= 0] < 11)} == {False, True}


def test_whole_matrices(isa: str) -> None:
    """A matrix of the adapter takes the place of the linear's, or of the embedding's."""
    backend, rng = Backend("cpu", isa, num_threads=2), np.random.default_rng(4)
    slots, parts = make(24, [16, 8])
    own, table = rng.standard_normal((8, 24)).astype(np.float32), rng.standard_normal((24, 8)).astype(np.float32)
    x, y = rng.standard_normal((5, 24)).astype(np.float32), rng.standard_normal((5, 24)).astype(np.float32)
    base, ids = rng.standard_normal(24).astype(np.float32), np.array([3, 0, 23, 9, 3], np.int32)
    chosen = np.array([0, 1, -1, 1, 2], np.int32)
    for token_ids, matrix in ((None, own), (ids, table)):
        slots.view(np.uint64)[1, parts[1][2] // 8 + 2] = matrix.ctypes.data
        given = x if token_ids is None else np.eye(24, dtype=np.float32)[ids]
        before = y.copy()
        before[[1, 3], 16:] = x[[1, 3]] @ own.T + base[16:] if token_ids is None else 1.0 * table[ids[[1, 3]]]
        out = y.copy()
        backend.lora(given, out, slots, parts, chosen, MAX_RANK, base_bias=base, token_ids=token_ids)
        want = wanted(given, before, slots, parts, chosen)
        assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()
        assert out[2].tobytes() == y[2].tobytes()
