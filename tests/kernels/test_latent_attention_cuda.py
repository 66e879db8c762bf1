"""Latent attention on the tensor cores: two-byte pages and activations of one type, decode and prompts with equal bits."""

import itertools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
Span = tuple[int, int, int]
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LATENT, ROPE, PART, SCALE = 512, 64, 192, 0.07
EDGES = [1, 2, 17, 63, 64, 65, 129, 192, 255, 256, 257, 320, 511, 512, 513, 770]


@pytest.fixture(scope="module")
def opened(cuda: str) -> Callable[[str], Backend]:
    """The device's backend with a type of activations."""
    return lambda dtype: Backend(cuda, max_rows=4096, dtype=dtype, library=hardware.cuda_library())


class Sequences:
    """Sequences with the first tokens of one text (a number for each sequence) in random pages; the rest of the pool is NaN."""

    def __init__(
        self, backend: Backend, dtype: str, heads: int, lengths: Sequence[int], block: int = 16, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(5)
        n, kind = max(lengths), KINDS[dtype]
        self.backend, self.dtype, self.heads = backend, dtype, heads
        self.q = (0.7 * rng.standard_normal((n, heads, LATENT), np.float32)).astype(kind)
        self.q_rope = (0.7 * rng.standard_normal((n, heads, PART), np.float32)).astype(kind)
        self.c, self.k = (rng.standard_normal((n, w), np.float32).astype(kind) for w in (LATENT, ROPE))
        pages = [-(-length // block) for length in lengths]
        self.table = np.full((len(lengths), max(pages)), 2**30, np.int32)
        order = np.random.default_rng(seed).permutation(sum(pages)).astype(np.int32) + 1
        for row, count in enumerate(pages):
            self.table[row, :count], order = order[:count], order[count:]
        self.pool = backend.kv_pool(sum(pages) + 1, 0, LATENT + ROPE, dtype, block)

    def step(self, spans: Sequence[Span]) -> Array:
        """Stores the tokens of spans (sequence, first position, end); returns their [rows, heads * 512] as one batch."""
        positions = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in spans])
        seqs = np.concatenate([np.full(end - first, s, np.int32) for s, first, end in spans])
        starts = np.full(len(self.table) + 1, len(positions), np.int32)
        starts[: len(spans) + 1] = np.cumsum([0, *(end - first for _, first, end in spans)])
        views = [np.ascontiguousarray(x[positions]).reshape(len(positions), -1).view(np.uint16)
                 for x in (self.q, self.q_rope, self.c, self.k)]  # fmt: skip
        out = np.full((len(positions), self.heads * LATENT + 8), 7, self.q.dtype)
        self.backend.latent_attention(self.pool, (positions, seqs, starts), self.table, *views,
                                      out[:, :-8].view(np.uint16), self.heads, SCALE)  # fmt: skip
        assert self.backend.allocations == 0
        assert (out[:, -8:] == 7).all()
        return np.ascontiguousarray(out[:, :-8])

    def check(self, out: Array, row: int) -> None:
        """Checks that values are near float64, within the rounding of p and of the result."""
        q = np.concatenate([self.q[row], self.q_rope[row, :, -ROPE:]], -1).astype(np.float64)
        c, k = self.c[: row + 1].astype(np.float64), self.k[: row + 1].astype(np.float64)
        s = q @ np.concatenate([c, k], -1).T * SCALE
        p = np.exp(s - s.max(-1, keepdims=True))
        want = (p / p.sum(-1, keepdims=True) @ c).reshape(-1)
        error = np.abs(out.astype(np.float64) - want).max() / np.abs(want).max()
        assert error < {"float16": 1.2e-3, "bfloat16": 9e-3}[self.dtype], (row, error)


@pytest.mark.parametrize(
    ("heads", "n", "dtype", "block"), [(16, 1100, "bfloat16", 16), (128, 600, "bfloat16", 64), (20, 700, "float16", 32)]
)
def test_one_order(heads: int, n: int, dtype: str, block: int, opened: Callable[[str], Backend]) -> None:
    """Decode alone, decode in a batch, prompts and their chunks give a row the same bits, near float64."""
    backend = opened(dtype)
    prompt = Sequences(backend, dtype, heads, [n], block)
    whole = prompt.step([(0, 0, n)])
    lengths = [length for length in EDGES if length <= n] + [n]
    for length in lengths:
        prompt.check(whole[length - 1], length - 1)
    parts = Sequences(backend, dtype, heads, lengths, block, 1)
    for i, length in enumerate(lengths):
        if length > 1:
            assert parts.step([(i, 0, length - 1)]).tobytes() == whole[: length - 1].tobytes(), length
    batch = parts.step([(i, length - 1, length) for i, length in enumerate(lengths)])
    for i, length in enumerate(lengths):
        assert batch[i].tobytes() == whole[length - 1].tobytes(), length
        assert parts.step([(i, length - 1, length)]).tobytes() == whole[length - 1].tobytes(), length
    chunks = Sequences(backend, dtype, heads, [n], block, 2)
    for first, end in itertools.pairwise(sorted({0, n, 37, 101, 300, 302, 303, 520})):
        assert chunks.step([(0, first, end)]).tobytes() == whole[first:end].tobytes(), (first, end)


def test_long_sequences_are_folded(opened: Callable[[str], Backend]) -> None:
    """Splits of several blocks are combined in one order, however the blocks divide them, also beside prompts."""
    lengths = [3300, 3000, 3, 700, *range(200, 280)]
    x = Sequences(opened("bfloat16"), "bfloat16", 16, lengths)
    whole = x.step([(0, 0, 3300)])
    for i, length in enumerate(lengths[1:], 1):
        x.step([(i, 0, length)])
    last = [(i, length - 1, length) for i, length in enumerate(lengths)]
    for spans in (last, last[:1], last[1:2], last[:4], last[::-1], [(0, 3100, 3300), (2, 0, 3), *last[3:]]):
        out, at = x.step(spans), 0
        for _, first, end in spans:
            assert out[at : at + end - first].tobytes() == whole[first:end].tobytes(), (first, end, len(spans))
            at += end - first
