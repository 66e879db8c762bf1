"""Latent attention over the paged cache against float64, and equal bits of a row in every batch."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

Array = np.ndarray


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Latents:
    """One sequence's rows and a cache of random pages."""

    def __init__(self, n: int, heads: int, latent: int, rope: int, extra: int = 5) -> None:
        self.n, self.heads, self.latent, self.rope = n, heads, latent, rope
        self.scale = (latent + rope) ** -0.5
        self.q = 2 * normal(1, n, heads, latent)
        self.q_rope = 2 * normal(2, n, heads, extra + rope)  # the operation reads the end of each head
        self.c, self.k = normal(3, n, latent), normal(4, n, rope)

    def exact(self, rounded: Callable[[Array], Array]) -> Array:
        c, k = rounded(self.c).astype(np.float64), rounded(self.k).astype(np.float64)
        s = np.einsum("ihd,jd->hij", self.q.astype(np.float64), c)
        s += np.einsum("ihd,jd->hij", self.q_rope[..., -self.rope :].astype(np.float64), k)
        s = np.where(np.tri(self.n, dtype=bool), s * self.scale, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("hij,jd->ihd", p / p.sum(-1, keepdims=True), c)

    def run(self, backend: object, dtype: str, block: int, cuts: list[int], seed: int = 0) -> Array:
        """All rows, in steps that end at `cuts` and at the end."""
        pages = -(-self.n // block)
        table = np.full((1, pages + 2), 2**30, np.int32)
        table[0, :pages] = np.random.default_rng(seed).permutation(pages) + 1
        pool = backend.kv_pool(pages + 1, 0, self.latent + self.rope, dtype, block)
        out, first = np.full((self.n, self.heads * self.latent + 3), -7, np.float32), 0
        for end in [*cuts, self.n]:
            rows = slice(first, end)
            n = end - first
            batch = (np.arange(first, end, dtype=np.int32), np.zeros(n, np.int32), np.array([0, n], np.int32))
            flat = [np.ascontiguousarray(x[rows]).reshape(n, -1) for x in (self.q, self.q_rope, self.c, self.k)]
            backend.latent_attention(pool, batch, table, *flat, out[rows, :-3], self.heads, self.scale)
            assert backend.allocations == 0
            first = end
        assert (out[:, -3:] == -7).all()
        return np.ascontiguousarray(out[:, :-3]).reshape(self.n, self.heads, self.latent)


SHAPES = [(5, 16, 8, 300, "float32"), (16, 512, 64, 330, "bfloat16"), (3, 40, 6, 700, "float16"), (128, 64, 32, 20, "float32")]


@pytest.mark.parametrize(("heads", "latent", "rope", "n", "dtype"), SHAPES)
def test_values_and_rows(
    heads: int, latent: int, rope: int, n: int, dtype: str, open_backend: Callable[..., object], rounded: Callable[..., Array]
) -> None:
    x = Latents(n, heads, latent, rope)
    out = x.run(open_backend(2, max_rows=1024), dtype, 16, [])
    assert np.abs(out - x.exact(lambda a: rounded(a, dtype))).max() < 1e-5
    rng = np.random.default_rng(6)
    for threads, block in itertools.product((1, 3), (16, 64)):
        cuts = sorted({int(c) for c in rng.integers(1, n, 3)} | {1, n - 1})
        again = x.run(open_backend(threads, max_rows=1024), dtype, block, cuts, seed=threads)
        assert again.tobytes() == out.tobytes(), (threads, block, cuts)


def test_a_batch_of_sequences(open_backend: Callable[..., object]) -> None:
    """Rows of two sequences in one step have the same bits as alone; other data in the pool is NaN."""
    first, second = Latents(150, 4, 32, 8), Latents(70, 4, 32, 8)
    second.q, second.c = 3 * second.q[::-1], second.c[::-1].copy()
    backend = open_backend(2, max_rows=512)
    want = [x.run(backend, "float32", 16, []) for x in (first, second)]
    table = np.full((2, 12), 2**30, np.int32)
    table[0, :10], table[1, :5] = np.arange(15, 5, -1), np.arange(1, 6)
    pool = backend.kv_pool(16, 0, 40, "float32", 16)
    steps = [((0, 0, 100), (1, 0, 1)), ((0, 100, 101), (1, 1, 70)), ((0, 101, 150),)]
    for spans in steps:
        positions = np.concatenate([np.arange(a, b) for _, a, b in spans]).astype(np.int32)
        seqs = np.concatenate([np.full(b - a, s) for s, a, b in spans]).astype(np.int32)
        starts = np.array([sum(b - a for s, a, b in spans if s < seq) for seq in range(3)], np.int32)
        parts = [(first, second)[s] for s, _, _ in spans]
        flat = [
            np.concatenate([getattr(x, name)[a:b].reshape(b - a, -1) for x, (_, a, b) in zip(parts, spans, strict=True)])
            for name in ("q", "q_rope", "c", "k")
        ]
        out = np.empty((len(positions), 4 * 32), np.float32)
        backend.latent_attention(pool, (positions, seqs, starts), table, *flat, out, 4, first.scale)
        expected = np.concatenate([want[s][a:b].reshape(b - a, -1) for s, a, b in spans])
        assert out.tobytes() == expected.tobytes(), spans
