"""Recurrent operations on CUDA in every type, at the sizes of real models: near float64, and the same bits of rows and state
for any split of the rows: whole prompts, pieces, single rows, with other sequences."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
TYPES: dict[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LENGTHS = [1, 5, 33, 70, 2]
# operation, its sizes
CASES = [
    "ssm 32 128 1 64", "ssm 8 64 2 128", "ssm 4 24 1 8", "ssm 2 40 1 256", "ssm 3 50 1 12",
    "scan 160 16", "scan 40 8", "scan 72 32", "scan 33 60",
    "delta 8 4 128 128", "delta 4 4 64 96", "delta 2 1 16 12", "delta 2 2 256 40", "delta 2 1 20 30",
    "conv 520 4", "conv 104 4", "conv 96 3", "conv 37 2", "conv 24 7",
]  # fmt: skip


def soft(x: Array) -> Array:
    return np.logaddexp(0, x)


class Operation:
    """Inputs, weights and the exact results of one case; the rows of all sequences are concatenated."""

    def __init__(self, case: str, dtype: str) -> None:
        kind, *sizes = case.split()
        self.kind, self.sizes, self.dtype = kind, list(map(int, sizes)), TYPES[dtype]
        self.random, self.n = np.random.default_rng(len(case) + self.sizes[0]), sum(LENGTHS)
        self.starts = np.cumsum([0, *LENGTHS])
        self.rows: dict[str, Array] = {}
        self.rest: dict[str, object] = {}
        self.name = {"scan": "selective_scan"}.get(kind, kind)
        self.exact = np.concatenate([getattr(self, kind)(slice(*span)) for span in self.spans()])

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts[:-1], self.starts[1:], strict=True))

    def row(self, name: str, width: int, scale: float = 1.0) -> Array:
        """A typed input, made once; its values as float64."""
        if name not in self.rows:
            self.rows[name] = (scale * self.random.standard_normal((self.n, width))).astype(self.dtype)
        return self.rows[name].astype(np.float64)

    def weight(self, name: str, *shape: int, positive: bool = False) -> Array:
        if name not in self.rest:
            made = np.log(self.random.uniform(0.05, 8, shape)) if positive else self.random.standard_normal(shape)
            self.rest[name] = made.astype(np.float32)
        return np.asarray(self.rest[name]).astype(np.float64)

    def ssm(self, at: slice) -> Array:
        heads, size, groups, n_state = self.sizes
        self.width, self.unit = heads * size, (heads, size * n_state, max(1, heads // 3))
        x = self.row("x", self.width)[at].reshape(-1, heads, size)
        step = np.clip(soft(self.row("dt", heads, 4)[at] + self.weight("dt_bias", heads)), 0.001, 9)
        b, c = (self.row(name, groups * n_state)[at].reshape(-1, groups, n_state).repeat(heads // groups, 1) for name in "bc")
        decay, skip = np.exp(-np.exp(self.weight("a_log", heads, positive=True)) * step), self.weight("skip", heads)
        self.rest |= {"n_groups": groups, "dt_min": 0.001, "dt_max": 9.0}
        state, out = np.zeros((heads, size, n_state)), np.zeros(x.shape)
        for t in range(len(x)):
            state = decay[t][:, None, None] * state + (step[t][:, None] * x[t])[..., None] * b[t][:, None]
            out[t] = (state * c[t][:, None]).sum(-1) + skip[:, None] * x[t]
        return out.reshape(len(x), -1)

    def scan(self, at: slice) -> Array:
        self.width, n_state = self.sizes
        self.unit = (self.width, n_state, self.width // 2)
        x, b, c = self.row("x", self.width)[at], self.row("b", n_state)[at], self.row("c", n_state)[at]
        step = soft(self.row("dt", self.width, 4)[at] + self.weight("dt_bias", self.width))
        rate, skip = np.exp(self.weight("a_log", self.width, n_state, positive=True)), self.weight("skip", self.width)
        state, out = np.zeros((self.width, n_state)), np.zeros(x.shape)
        for t in range(len(x)):
            state = np.exp(-rate * step[t][:, None]) * state + (step[t] * x[t])[:, None] * b[t]
            out[t] = (state * c[t]).sum(-1) + skip * x[t]
        return out

    def delta(self, at: slice) -> Array:
        heads, keys, key_dim, value_dim = self.sizes
        self.width, self.unit = heads * value_dim, (heads, key_dim * value_dim, 2)
        q, k = (self.row(name, keys * key_dim)[at].reshape(-1, keys, key_dim).repeat(heads // keys, 1) for name in "qk")
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        v, b = self.row("v", self.width)[at].reshape(-1, heads, value_dim), self.row("b", heads)[at]
        step = soft(self.row("a", heads, 4)[at] + self.weight("dt_bias", heads))
        decay = np.exp(-np.exp(self.weight("a_log", heads, positive=True)) * step)
        self.rest["n_key_heads"] = keys
        state, out = np.zeros((heads, key_dim, value_dim)), np.zeros(v.shape)
        for t in range(len(v)):
            state = state * decay[t][:, None, None]
            error = (v[t] - np.einsum("hij,hi->hj", state, k[t])) / (1 + np.exp(-b[t]))[:, None]
            state = state + k[t][..., None] * error[:, None]
            out[t] = np.einsum("hij,hi->hj", state, q[t]) * key_dim**-0.5
        return out.reshape(len(v), -1)

    def conv(self, at: slice) -> Array:
        self.width, taps = self.sizes
        self.unit = (self.width, taps - 1, self.width // 3 // 8 * 8 if self.width > 200 else self.width // 3)
        x = self.row("x", self.width)[at]
        weight, bias = self.weight("weight", self.width, taps), self.weight("bias", self.width)
        self.rest |= {"n_taps": taps, "act": 0}
        padded = np.concatenate([np.zeros((taps - 1, self.width)), x])
        y = bias + sum(padded[k : k + len(x)] * weight[:, k] for k in range(taps))
        return y / (1 + np.exp(-y))


def code(x: Array) -> Array:
    """Items that the buffer protocol knows."""
    return x if x.dtype == np.float32 else x.view(np.uint16)


class Runs:
    """The operation on a backend with states in scattered pages, aligned as in the engine."""

    def __init__(self, backend: Backend, operation: Operation, seed: int) -> None:
        self.backend, self.o = backend, operation
        units, floats, per_page = operation.unit
        entries = -(-units // per_page)
        order = np.random.default_rng(seed).permutation(len(LENGTHS) * entries).astype(np.int32) + 1
        self.table = order.reshape(len(LENGTHS), entries)
        self.pool = np.full((order.size + 1, (per_page * floats + 3) // 4 * 4), np.nan, np.float32)
        self.out = np.zeros((operation.n, operation.width), operation.dtype)

    def call(self, spans: Sequence[tuple[int, int, int]], **more: object) -> None:
        """Rows first .. end of sequences, spans of (sequence, first, end)."""
        take = np.concatenate([np.arange(self.o.starts[s] + first, self.o.starts[s] + end) for s, first, end in spans])
        positions = np.concatenate([np.arange(first, end) for _, first, end in spans]).astype(np.int32)
        seqs = np.concatenate([np.full(end - first, s) for s, first, end in spans]).astype(np.int32)
        starts = np.cumsum([0, *(end - first for _, first, end in spans)]).astype(np.int32)
        out = np.zeros((len(take), self.o.width), self.o.dtype)
        given = {name: code(np.ascontiguousarray(x[take])) for name, x in self.o.rows.items() if name != "gate"}
        if "gate" in more:
            more = {"gate": code(np.ascontiguousarray(self.o.rows["gate"][take])), "act": more["gate"]}
        state = self.pool, self.table, 0, self.o.unit[2]
        getattr(self.backend, self.o.name)(
            state=state, batch=(positions, seqs, starts), **given, **self.o.rest, **more, out=code(out)
        )
        assert self.backend.allocations == 0
        self.out[take] = out

    def whole(self, **more: object) -> "Runs":
        self.call([(s, 0, n) for s, n in enumerate(LENGTHS)], **more)
        return self

    def in_pieces(self, most: int, **more: object) -> "Runs":
        """Runs the rows in pieces of limited size per sequence; 1: only steps."""
        random, done = np.random.default_rng(most), [0] * len(LENGTHS)
        while done != LENGTHS:
            ends = [min(n, at + int(random.integers(most == 1, most + 1))) for n, at in zip(LENGTHS, done, strict=True)]
            spans = [(s, done[s], ends[s]) for s in random.permutation(len(done)).tolist() if ends[s] > done[s]]
            if spans:
                self.call(spans, **more)
            done = ends
        return self

    def states(self) -> bytes:
        """Of all sequences in their order."""
        units, floats, per_page = self.o.unit
        pages = self.pool[self.table][:, :, : per_page * floats]
        return pages.reshape(len(LENGTHS), -1)[:, : units * floats].tobytes()


@pytest.fixture(scope="module", params=list(TYPES))
def typed(request: pytest.FixtureRequest, cuda: str) -> tuple[Backend, str]:
    return Backend(cuda, dtype=request.param, library=hardware.cuda_library()), request.param


@pytest.mark.parametrize("case", CASES)
def test_values_and_rows(case: str, typed: tuple[Backend, str]) -> None:
    backend, dtype = typed
    o = Operation(case, dtype)
    whole = Runs(backend, o, 0).whole()
    error = np.abs(whole.out.astype(np.float64) - o.exact)
    assert (error <= ROUNDING[dtype] * np.abs(o.exact) + 4e-6 * np.abs(o.exact).max()).all()
    for most in (1, 3, 40):
        pieces = Runs(backend, o, most).in_pieces(most)
        assert pieces.out.tobytes() == whole.out.tobytes(), most
        assert pieces.states() == whole.states(), most
    alone = Runs(backend, o, 7)
    for s, n in enumerate(LENGTHS):
        alone.call([(s, 0, n)])
    assert alone.out.tobytes() == whole.out.tobytes() and alone.states() == whole.states()


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("ssm", "scan"))])
def test_gate_is_the_gated_product(case: str, typed: tuple[Backend, str]) -> None:
    backend, dtype = typed
    o = Operation(case, dtype)
    plain = Runs(backend, o, 0).whole()
    o.row("gate", o.width)
    want = np.zeros_like(plain.out)
    for act in (0, 2):
        backend.gated(code(o.rows["gate"]), code(plain.out), code(want), act)
        for gated in (Runs(backend, o, 1).whole(gate=act), Runs(backend, o, 2).in_pieces(1, gate=act)):
            assert gated.out.tobytes() == want.tobytes() and gated.states() == plain.states()


@pytest.mark.parametrize(
    ("heads", "size", "n_state", "rank"), [(32, 128, 64, 128), (6, 24, 8, 64), (5, 40, 128, 256), (3, 8, 20, 24)]
)
def test_norms_of_inputs_are_the_norms(heads: int, size: int, n_state: int, rank: int, typed: tuple[Backend, str]) -> None:
    """Norms of b, c and dt inside ssm have the bits of rms_norm and linear, in steps, prompts and both."""
    backend, dtype = typed
    o = Operation(f"ssm {heads} {size} 1 {n_state}", dtype)
    weights = [o.random.standard_normal(width).astype(np.float32) for width in (n_state, n_state, rank)]
    w = (0.2 * o.random.standard_normal((heads, rank))).astype(o.dtype)
    matrix = backend.matrix([(dtype, heads, w.view(np.uint8).reshape(heads, -1))], rank, 1)
    raw = [o.row(name, width).astype(o.dtype) for name, width in (("b", n_state), ("c", n_state), ("low", rank))]
    raw = [(3 * x.astype(np.float32)).astype(o.dtype) for x in raw]
    del o.rows["low"]
    ready = [np.zeros_like(x) for x in raw]
    for x, weight, out in zip(raw, weights, ready, strict=True):
        backend.rms_norm(code(x), weight, code(out), 1e-6)
    o.rows |= {"b": ready[0], "c": ready[1], "dt": np.zeros((o.n, heads), o.dtype)}
    backend.linear(matrix, code(ready[2]), code(o.rows["dt"]))
    plain = Runs(backend, o, 0).whole()
    o.rows |= dict(zip(("b", "c", "dt"), raw, strict=True))
    width = sum((n + 15) // 16 * 16 for n in (n_state, n_state, rank, heads))

    class Normed(Runs):
        def call(self, spans: Sequence[tuple[int, int, int]], **more: object) -> None:
            scratch = np.zeros((sum(end - first for _, first, end in spans), width), o.dtype)
            super().call(spans, norms=(*weights, 1e-6, matrix, code(scratch)))

    for run in (Normed(backend, o, 1).whole(), Normed(backend, o, 2).in_pieces(1), Normed(backend, o, 3).in_pieces(20)):
        assert run.out.tobytes() == plain.out.tobytes() and run.states() == plain.states()


def test_sizes_that_no_kernel_has_are_refused(cuda: str) -> None:
    backend = Backend(cuda, dtype="float32", library=hardware.cuda_library())
    for case in ("ssm 1 4 1 260", "scan 8 68", "delta 1 1 260 4", "conv 8 9"):
        with pytest.raises(NotImplementedError, match=r"columns|keys|taps"):
            Runs(backend, Operation(case, "float32"), 0).whole()


def test_graph_pads_are_harmless(open_backend: Callable[..., Backend], recurrence: type) -> None:
    """Rows that pad a captured batch write page 0, whose content does not matter; no other page changes."""
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((3, 64)).astype(np.float32), random.standard_normal((64, 4)).astype(np.float32)
    backend, out = open_backend(1), np.zeros((3, 64), np.float32)
    pool, table = np.full((2, 64 * 3), 5, np.float32), np.array([[1], [0], [0]], np.int32)
    batch = np.array([4, 0, 0], np.int32), np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32)
    backend.conv(state=(pool, table, 0, 64), batch=batch, x=x, weight=weight, bias=None, out=out, n_taps=4)
    np.testing.assert_allclose(out[0], 5 * weight[:, :3].sum(1) + weight[:, 3] * x[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[1:], weight[:, 3] * x[1:], rtol=1e-6)
