"""Fixtures of the kernel tests: the backend of every device of this machine, and a paged history to attend to."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from llmpy import _core

Array = np.ndarray
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Paged:
    """Sequences whose keys and values lie in randomly placed pages; everything else in the pool is NaN."""

    def __init__(
        self,
        backend: "_core.Backend",
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
        self, spans: Sequence[tuple[int, int, int]], q: Array, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Array:
        """[rows, heads, head_dim] for the rows of the spans; q alike."""
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
        )
        assert self.backend.allocations == 0
        assert (out[:, -3:] == -7).all()
        return np.ascontiguousarray(out[:, :-3]).reshape(n, -1, self.head_dim)


@pytest.fixture(scope="module")
def open_backend(each_device: str, core_options: Callable[[str], dict[str, str]]) -> Callable[..., _core.Backend]:
    """Opens each device's backend, on CUDA with float32 activations: (num_threads, max_rows, max_cols, vocab_size)."""
    options = core_options(each_device)
    names = ("num_threads", "max_rows", "max_cols", "vocab_size")

    def open_backend(*args: int, **kwargs: object) -> _core.Backend:
        return _core.Backend(**options, **dict(zip(names, args, strict=False)), **kwargs)

    return open_backend


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    """The class Paged."""
    return Paged


@pytest.fixture(scope="session")
def rounded() -> Callable[[Array, str], Array]:
    """Rounds float32 values to a type and back."""
    return lambda x, dtype: x.astype(TYPES[dtype]).astype(np.float32)
