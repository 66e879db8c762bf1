"""The tables of ways.cuh on a device: every row takes some problem, and all rows that take a problem give equal bits.

The library exports two functions for this: the name of a row, and a switch that puts one row of a table first.
"""

import itertools
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from cuda_ways import Ways
from group_blocks import int4_rows

from binding import Backend
from llmpy import hardware

Array = np.ndarray
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LINEAR, EXPERTS, ROUTER = 1, 4, 8
GATED, CLAMPED, UNGATED = range(3)


@pytest.fixture(scope="module")
def opened(cuda: str) -> Callable[[str], Backend]:
    """The device's backend with a type of activations."""
    return lambda dtype: Backend(cuda, max_rows=4096, dtype=dtype, library=hardware.cuda_library())


def draw(rng: np.random.Generator, kind: type, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(kind).view(np.uint16)


@pytest.mark.parametrize("dtype", list(KINDS))
def test_linear(dtype: str, opened: Callable[[str], Backend]) -> None:
    """By rows of x: sums, gate | up, router logits, weights of another type, and a norm before."""
    backend, kind, rng = opened(dtype), KINDS[dtype], np.random.default_rng(0)
    ways = Ways(backend, "linear")
    weights = draw(rng, kind, 1536, 1088)
    matrix = backend.matrix([(dtype, 1536, weights)], 1088)
    x, a, b = draw(rng, kind, 700, 1088), draw(rng, kind, 1, 2048), draw(rng, kind, 1, 2048)

    def sums(rows: int, of: object = matrix, n: int = 1536) -> Array:
        y = np.zeros((rows, n), np.uint16)
        backend.linear(of, x[:rows], y)
        return y

    def products(rows: int, of: object = matrix) -> Array:
        y, mid = np.zeros((rows, 768), np.uint16), np.zeros((rows, 1536), np.uint16)
        backend.linear(of, x[:rows], y, mid=mid)
        return y

    def logits(rows: int, router: object) -> Array:
        y = np.zeros((rows, 40), np.float32)
        backend.linear(router, x[:rows], y, is_float_out=True)
        return y

    def normed(large: object) -> Array:
        total, out, y = (np.zeros((1, n), np.uint16) for n in (2048, 2048, 5120))
        backend.norm_linear(a, b, total, np.ones(2048, np.float32), out, 1e-6, large, y)
        return np.concatenate([total, y], axis=1)

    for rows in (1, 2, 17, 64, 65, 300, 700):
        few = ["row", "skinny"] if rows == 1 else ["skinny"] if rows <= 64 else []
        sync = ["sync_few", "sync_many"] if rows <= 32 else ["sync_many"]
        ways.check(partial(sums, rows), [*few, "gemm", *sync, "parts"])
        ways.check(partial(products, rows), [*few, "gemm", *sync, "twice"])
    wide, short = backend.matrix([(dtype, 13000, draw(rng, kind, 13000, 320))], 320), draw(rng, kind, 32, 320)

    def wide_sums(rows: int) -> Array:
        y = np.zeros((rows, 13000), np.uint16)
        backend.linear(wide, short[:rows], y)
        return y

    for rows in (1, 16, 32):
        few = ["row", "skinny"] if rows == 1 else ["skinny"]
        ways.check(partial(wide_sums, rows), [*few, "gemm", "sync_few", "sync_many", "parts"])
    ragged, x_all = backend.matrix([(dtype, 1536, draw(rng, kind, 1536, 1076))], 1076), x
    x = x_all[:, :1076]
    for rows in (33, 64, 65, 300, 700):
        ways.check(partial(sums, rows, ragged), ["sync_ragged", "parts"])
        ways.check(partial(products, rows, ragged), ["sync_ragged", "twice"])
    x = x_all
    router = backend.matrix([(dtype, 40, weights[:40].copy())], 1088, LINEAR | ROUTER)
    other = backend.matrix([("float32", 40, np.ones((40, 1088), np.float32))], 1088)
    large = backend.matrix([(dtype, 5120, draw(rng, kind, 5120, 2048))], 2048)
    for rows in (1, 9):
        ways.check(partial(logits, rows, router), ["router"])
        ways.check(partial(sums, rows, other, 40), ["parts"])
    ways.check(partial(normed, large), ["row_normed"], inner="sync_few sync_many parts")
    bytes_of_rows = np.zeros((1536, 9, 132), np.uint8)
    bytes_of_rows[:, :, :4] = np.full((1536, 9, 1), 1e-3, np.float32).view(np.uint8)
    bytes_of_rows[:, :, 4:] = rng.integers(0, 0x60, (1536, 9, 128), dtype=np.uint8)
    fp8 = backend.matrix([("fp8", 1536, bytes_of_rows.reshape(1536, -1))], 1088)
    for rows in (1, 64, 65, 300):
        few = [*(["fp8_row"] if rows == 1 else []), *(["fp8_few"] if rows <= 64 else [])]
        ways.check(partial(sums, rows, fp8), [*few, "fp8_many", "fp8_plain"])
        ways.check(partial(products, rows, fp8), [*few, "fp8_many", "twice"], inner="fp8_plain")
    large_rows = np.zeros((5120, 16, 132), np.uint8)
    large_rows[:, :, :4] = np.full((5120, 16, 1), 1e-3, np.float32).view(np.uint8)
    large_rows[:, :, 4:] = rng.integers(0, 0x60, (5120, 16, 128), dtype=np.uint8)
    large8 = backend.matrix([("fp8", 5120, large_rows.reshape(5120, -1))], 2048)
    ways.check(partial(normed, large8), ["fp8_row", "fp8_few", "fp8_many"], inner="fp8_plain")
    both = backend.matrix([(dtype, 1536, weights), ("fp8", 1536, bytes_of_rows.reshape(1536, -1))], 1088)
    backend.linear(both, x[:3], np.zeros((3, 3072), np.uint16))
    assert "runs" in ways.put_first(0)
    # units_plain takes x that the copy engine cannot read; others come behind others
    unreached = {"library", "runs", "units_plain"}
    if not ways.is_portable:
        unreached |= {"twice", "sync_few", "sync_many", "sync_units_few", "sync_units_many"}
    if dtype == "bfloat16":
        numbers, scales = rng.integers(0, 16, (1536, 1088)), rng.uniform(1e-3, 1e-2, (1536, 9))
        w4 = backend.matrix([("int4_g128", 1536, int4_rows(numbers, scales, np.full((1536, 9), 8), 128)[0])], 1088)
        for rows in (1, 16, 17, 300):
            few, sync = (["units_few"], ["sync_units_few"]) if rows <= 16 else ([], [])
            ways.check(partial(sums, rows, w4), [*few, "units_many", *sync, "sync_units_many", "units_plain"])
            ways.check(partial(products, rows, w4), [*few, "units_many", *sync, "sync_units_many", "twice"])
        deep, long = draw(rng, kind, 16, 6144), rng.uniform(1e-3, 1e-2, (96, 48))
        numbers = rng.integers(0, 16, (96, 6144))
        w4 = backend.matrix([("int4_g128", 96, int4_rows(numbers, long, np.full((96, 48), 8), 128)[0])], 6144)

        def deep_sums(rows: int) -> Array:
            y = np.zeros((rows, 96), np.uint16)
            backend.linear(w4, deep[:rows], y)
            return y

        for rows in (1, 8, 9, 16):
            own = ["units_few", "units_many", "sync_units_few", "sync_units_many", "units_plain"]
            ways.check(partial(deep_sums, rows), own)
    of_units = {name for name in ways.here if "units" in name}
    assert ways.unreached() == (unreached if dtype == "bfloat16" else unreached | of_units)
    odd = backend.matrix([(dtype, 22, weights[:22].copy())], 1088)  # halves that are no whole eights
    y, mid = np.zeros((3, 11), np.uint16), np.zeros((3, 22), np.uint16)
    ways.put_first(0)
    backend.linear(odd, x[:3], y, mid=mid)
    assert ways.put_first(0) == ["sync_few" if ways.is_portable else "skinny", "twice"]


@pytest.mark.parametrize("dtype", list(KINDS))
def test_linear_of_the_library(dtype: str, cuda: str) -> None:
    """The library's rows, where `prepare` has chosen it for some number of rows."""
    if not (library := hardware.cublaslt_library()):
        pytest.skip("no cuBLASLt")
    n, k, rng = 4096, 4096, np.random.default_rng(1)
    backend = Backend(cuda, max_rows=4096, dtype=dtype, library=hardware.cuda_library(), cublaslt=library)
    ways, matrix = Ways(backend, "linear"), backend.matrix([(dtype, n, np.zeros((n, k), np.uint16))], k)
    backend.matrix_fill(matrix, 0, 3, dtype, n, k)
    backend.prepare()
    if "for 0 of" in backend.description:
        pytest.skip("our own kernels serve every number of rows")
    x = draw(rng, KINDS[dtype], 4096, k)

    def sums(rows: int) -> Array:
        y = np.zeros((rows, n), np.uint16)
        backend.linear(matrix, x[:rows], y)
        return y

    taken = [ways.takers(partial(sums, rows)) for rows in (128, 192, 256, 384, 512, 1024, 2048, 4096)]
    own = [name for name in ("gemm", "sync_many", "parts") if name in ways.here]
    assert ["library", *own] in taken and all(found[-len(own) :] == own for found in taken)


class Mixture:
    """Random experts with biases; a type of weights, "mxfp4" among them."""

    def __init__(self, backend: Backend, activations: str, dtype: str, n: int, k: int, form: int = CLAMPED) -> None:
        rng = np.random.default_rng(n)
        self.backend, self.n, self.k, self.form, self.cols, self.inner = backend, n, k, form, 256, 192
        rows = self.inner if form == UNGATED else 2 * self.inner

        def matrix(rows: int, cols: int) -> object:
            if dtype == "mxfp4":
                blocks = rng.integers(0, 256, (n, rows, cols // 32, 17), dtype=np.uint8)
                blocks[..., 0] = 119
                values = blocks.reshape(n, rows, -1)
            elif dtype == "fp8":
                blocks = rng.integers(0, 0x70, (n, rows, -(-cols // 128), 132), dtype=np.uint8)
                blocks[..., :4] = rng.uniform(1e-4, 4e-4, (*blocks.shape[:3], 1)).astype(np.float32).view(np.uint8)
                values = blocks.reshape(n, rows, -1)
            elif dtype == "q8_0":
                blocks = rng.integers(0, 256, (n, rows, cols // 32, 34), dtype=np.uint8)
                blocks[..., :2] = np.full(1, 1e-3, np.float16).view(np.uint8)
                values = blocks.reshape(n, rows, -1)
            else:
                values = (rng.standard_normal((n, rows, cols)) / 16).astype(KINDS.get(dtype, np.float32)).view(np.uint8)
            return backend.matrix([(dtype, rows, one) for one in values], cols, LINEAR | EXPERTS, n_experts=n)

        self.up, self.down = matrix(rows, self.cols), matrix(self.cols, self.inner)
        self.biases = [rng.standard_normal((n, width)).astype(np.float32) for width in (rows, self.cols)]
        self.x = draw(rng, KINDS[activations], 700, self.cols)
        self.routes = np.zeros((700, 2 * k), np.int32)
        self.routes[:, 0::2] = np.stack([rng.permutation(n)[:k] for _ in range(700)])
        self.routes.view(np.float32)[:, 1::2] = rng.uniform(0, 1, (700, k))

    def run(self, rows: int, scaled: bool = False) -> Array:
        y = np.zeros((rows, self.cols), np.uint16)
        self.backend.experts(
            self.up, self.down, self.routes[:rows].copy(), self.x[:rows], y, self.n, self.inner, self.form, 0, 0.7,
            *self.biases, scaled,
        )  # fmt: skip
        return y


@pytest.mark.parametrize("dtype", list(KINDS))
def test_experts(dtype: str, opened: Callable[[str], Backend]) -> None:
    """The whole operation, by rows, types of weights and forms."""
    backend = opened(dtype)
    ways, mixture = Ways(backend, "experts"), Mixture(backend, dtype, dtype, 6, 2)
    ways.check(partial(mixture.run, 1), ["row_2byte", "unsorted", "sorted"])
    ways.check(partial(mixture.run, 8), ["unsorted", "sorted"])
    for one in (partial(mixture.run, 9), partial(mixture.run, 8, True)):
        ways.check(one, ["sorted"])
    for rows in (1, 8):
        ways.check(partial(Mixture(backend, dtype, dtype, 12, 9).run, rows), ["unsorted", "sorted"])
        ways.check(partial(Mixture(backend, dtype, dtype, 6, 2, UNGATED).run, rows), ["unsorted", "sorted"])
        ways.check(partial(Mixture(backend, dtype, "float32", 6, 2).run, rows), ["sorted"])
        ways.check(partial(Mixture(backend, dtype, "fp8", 6, 2).run, rows), ["unsorted", "sorted"])
    if dtype == "float16":
        return  # packed weights are for bfloat16
    packed, many = Mixture(backend, dtype, "mxfp4", 6, 4), Mixture(backend, dtype, "mxfp4", 6, 5)
    ways.check(partial(packed.run, 1), ["row_mxfp4", "rows8_mxfp4", "sorted"])
    for one in (partial(packed.run, 8), partial(many.run, 1)):
        ways.check(one, ["rows8_mxfp4", "sorted"])
    ways.check(partial(packed.run, 9), ["sorted"])
    assert not ways.unreached()


@pytest.mark.parametrize("dtype", list(KINDS))
def test_linears_of_experts(dtype: str, opened: Callable[[str], Backend]) -> None:
    """Up and down, where they are launches of their own."""
    backend = opened(dtype)
    ways, mixture = Ways(backend, "experts_linear"), Mixture(backend, dtype, dtype, 6, 2)
    for rows in (9, 64, 100):
        ways.check(partial(mixture.run, rows), ["streamed", "grouped", "plain"])
    ways.check(partial(mixture.run, 700), ["grouped", "plain"])
    ways.check(partial(mixture.run, 3, True), ["streamed", "grouped", "plain"])
    ungated = Mixture(backend, dtype, dtype, 6, 2, UNGATED)
    ways.check(partial(ungated.run, 3), ["streamed"], inner="plain")  # of routes that no kernel has sorted
    ways.check(partial(ungated.run, 30), ["streamed", "grouped", "plain"])
    ways.check(partial(Mixture(backend, dtype, "float32", 6, 2).run, 5), ["plain"])
    for form in (CLAMPED, UNGATED):
        rounded = Mixture(backend, dtype, "fp8", 6, 2, form)
        ways.check(partial(rounded.run, 3), ["fp8_streamed"], inner="fp8_plain")
        ways.check(partial(rounded.run, 3, True), ["fp8_streamed", "fp8_grouped", "fp8_plain"])
        for rows in (9, 30, 64, 100):
            ways.check(partial(rounded.run, rows), ["fp8_streamed", "fp8_grouped", "fp8_plain"])
        ways.check(partial(rounded.run, 700), ["fp8_grouped", "fp8_plain"])
    if dtype == "float16":
        return  # packed weights are for bfloat16
    ways.check(partial(Mixture(backend, dtype, "mxfp4", 6, 2).run, 9), ["grouped"], inner="plain")
    for rows in (1, 9, 700):
        ways.check(partial(Mixture(backend, dtype, "q8_0", 6, 2).run, rows), ["units", "units_plain"])
    assert not ways.unreached()


class Pages:
    """Keys and values of sequences, and rows at their ends; a call is one attention, after qkv's work or with it.

    Args:
        backend: The backend, on a CUDA device.
        dtype: Type of the activations.
        dim: Values of a head.
        group: Query heads of each of the two kv heads.
        counts: Rows of the step, a sequence.
        length: Tokens of a sequence.
        pages: Type of the pages.
    """

    def __init__(
        self, backend: Backend, dtype: str, dim: int, group: int, counts: tuple[int, ...], length: int = 300, pages: str = ""
    ) -> None:
        rng, kv, n = np.random.default_rng(dim), 2, len(counts)
        self.backend, self.dim, self.heads, self.n_rows = backend, dim, 2 * group, sum(counts)
        self.table = np.arange(1, n * (-(-length // 16)) + 1, dtype=np.int32).reshape(n, -1)
        self.pool = backend.kv_pool(self.table.size + 1, kv, dim, pages or dtype, 16, fill=0)
        for seq in range(n):
            batch = np.arange(length, dtype=np.int32), np.full(length, seq, np.int32)
            starts = np.where(np.arange(n + 1) > seq, length, 0).astype(np.int32)
            k, v = (draw(rng, KINDS[dtype], length, kv * dim) for _ in range(2))
            backend.kv_write(self.pool, (*batch, starts), self.table, k, v)
        positions = np.concatenate([np.arange(length - count, length) for count in counts]).astype(np.int32)
        seqs, starts = np.repeat(np.arange(n), counts).astype(np.int32), np.cumsum([0, *counts]).astype(np.int32)
        self.batch = positions, seqs, starts
        self.q, self.k, self.v = (draw(rng, KINDS[dtype], self.n_rows, width * dim) for width in (self.heads, kv, kv))
        self.rope = rng.uniform(-1, 1, (self.n_rows, dim // 2, 2)).astype(np.float32)

    def attend(self, does_qkv: bool = False, softcap: float = 0.0, sinks: bool = False) -> Array:
        out = np.zeros((self.n_rows, self.heads * self.dim), np.uint16)
        heads = (self.k.copy(), self.v.copy(), None, None, self.rope, 0.0, False) if does_qkv else None
        extras = np.linspace(-1, 1, self.heads).astype(np.float32) if sinks else None
        scale = self.dim**-0.5
        self.backend.attention(
            self.pool, self.batch, self.table, self.q.copy(), out, scale, 0, softcap, sinks=extras, heads=heads
        )
        return out


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention(dim: int, dtype: str, opened: Callable[[str], Backend]) -> None:
    """Sequences with one row and with several, with and without qkv's work, few heads of a kv head and many."""
    backend = opened(dtype)
    ways = Ways(backend, "attention")
    few = ["few", "decode_qkv"] if dim < 256 else ["decode_qkv"]
    sync, one = ["sync_prefill", "sync_decode"], "sync_decode"
    for sinks in (False, True):
        narrow, wide = (Pages(backend, dtype, dim, group, (1,) * 5) for group in (4, 12))
        ways.check(partial(narrow.attend, sinks=sinks), ["decode", "decode_wide", one])
        ways.check(partial(wide.attend, sinks=sinks), ["decode_wide", one])
        ways.check(partial(narrow.attend, True, sinks=sinks), few, inner=one)
        ways.check(partial(narrow.attend, True, 20.0, sinks=sinks), ["decode_qkv"], inner=one)
        ways.check(partial(wide.attend, True, sinks=sinks), ["decode_wide", one])
        mixed = Pages(backend, dtype, dim, 4, (1, 7, 1, 40))
        ways.check(partial(mixed.attend, True, sinks=sinks), ["prefill", "decode", "decode_wide", *sync])
    ways.check(Pages(backend, dtype, dim, 1, (3, 9)).attend, ["prefill", sync[0]])
    ways.check(partial(Pages(backend, dtype, dim, 8, (1, 1), 700).attend, True), ["decode_qkv"], inner=one)
    ways.check(Pages(backend, dtype, dim, 4, (1, 5), pages="float32").attend, ["plain"])
    for does_qkv, pages in itertools.product((False, True), ("fp8", "int8")):
        portable = ["plain_bytes"] if pages == "fp8" else ["plain"] if ways.is_portable else []
        for group in (4, 12):
            single = Pages(backend, dtype, dim, group, (1,) * 5, pages=pages)
            ways.check(partial(single.attend, does_qkv), ["decode_bytes", *portable])
        mixed = Pages(backend, dtype, dim, 4, (1, 7, 1, 40), pages=pages)
        ways.check(partial(mixed.attend, does_qkv), ["prefill_bytes", "decode_bytes", *portable])
    behind = {*sync, *([] if dim < 256 else ["few"])}  # others
    assert ways.unreached() == (set() if ways.is_portable else behind)
