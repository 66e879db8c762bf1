"""Every CUDA kernel once on small shapes, near the CPU backend's results; compute-sanitizer runs this file (-m sanitize).

The sizes are large enough for every tile, split and tail, but small enough for the slow racecheck. The files of the families
values and bits must be is tested in the files of the families.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from group_blocks import GROUPS, headers

from binding import Backend

pytestmark = pytest.mark.sanitize
Array = np.ndarray
KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NEAR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of the largest value
# bytes of a block, values of a block, offsets of its float16 fields
BLOCKS = {
    "q8_0": (34, 32, [0]), "q4_0": (18, 32, [0]), "q4_1": (20, 32, [0, 2]), "q4_k": (144, 256, [0, 2]),
    "q6_k": (210, 256, [208]), "fp8": (132, 128, []), **GROUPS,
}  # fmt: skip


class Both:
    """A CUDA backend with a type of activations, and the CPU's. Arrays are of that type; the CPU gets their exact values."""

    def __init__(self, cuda: dict[str, str], dtype: str) -> None:
        self.dtype, self.kind = dtype, KINDS[dtype]
        self.cuda = Backend(**cuda, dtype=dtype, vocab_size=300)
        self.cpu = Backend("cpu", num_threads=1, vocab_size=300)

    def draw(self, *shape: int) -> Array:
        return np.random.default_rng(shape[-1]).standard_normal(shape).astype(self.kind)

    def form(self, x: Array) -> Array:
        """Items that the buffer protocol knows."""
        return x if x.dtype == np.float32 else x.view(np.uint16)

    def check(self, got: Array, want: Array) -> None:
        """Equal up to the roundings of the type."""
        difference = np.abs(got.astype(np.float32) - want).max()
        assert difference <= NEAR[self.dtype] * max(1.0, np.abs(want).max())


@pytest.fixture(scope="module", params=list(KINDS))
def both(request: pytest.FixtureRequest, cuda: str, core_options: Callable[[str], dict[str, str]]) -> Both:
    return Both(core_options(cuda), request.param)


def stored(dtype: str, rows: int, cols: int) -> Array:
    """Weights as a file has them."""
    rng = np.random.default_rng(cols)
    if dtype in KINDS:
        return (0.05 * rng.standard_normal((rows, cols))).astype(KINDS[dtype]).view(np.uint8).reshape(rows, -1)
    n_bytes, n_values, scales = BLOCKS[dtype]
    blocks = rng.integers(0, 256, (rows, cols // n_values, n_bytes), dtype=np.uint8)
    for offset in scales:
        blocks[:, :, offset : offset + 2] = np.full((*blocks.shape[:2], 1), 0.003, np.float16).view(np.uint8)
    if dtype == "fp8":
        blocks[blocks & 0x7F == 0x7F] = 0x81  # no NaN
        blocks[:, :, :4] = np.full((*blocks.shape[:2], 1), 5e-4, np.float32).view(np.uint8)
    if dtype in GROUPS:
        blocks[:, :, :4] = headers(dtype, blocks.shape[:2], rng)
    return np.ascontiguousarray(blocks.reshape(rows, -1))


@pytest.mark.parametrize(("n", "k"), [(72, 256), (19, 40)])
@pytest.mark.parametrize("dtype", [*KINDS, *BLOCKS])
def test_embed_and_linear(dtype: str, n: int, k: int, both: Both) -> None:
    if dtype in BLOCKS and k % BLOCKS[dtype][1]:
        pytest.skip("no whole blocks")
    raw = stored(dtype, n, k)
    device, host = (backend.matrix([(dtype, n, raw)], k, 3, 1) for backend in (both.cuda, both.cpu))
    ids, embedded, wide = np.array([n - 1, 0, 3], np.int32), np.zeros((3, k), both.kind), np.zeros((3, k), np.float32)
    both.cuda.embed(device, ids, both.form(embedded))
    both.cpu.embed(host, ids, wide)
    both.check(embedded, wide)
    bias = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    for rows in (1, 9, 70, 130):
        x, add, y = both.draw(rows, k), both.draw(rows, n), np.zeros((rows, n), both.kind)
        both.cuda.linear(device, both.form(x), both.form(y), bias, both.form(add))
        want = np.zeros((rows, n), np.float32)
        both.cpu.linear(host, x.astype(np.float32), want, bias, add.astype(np.float32))
        both.check(y, want)
        logits = np.zeros((rows, n), np.float32)
        both.cuda.linear(device, both.form(x), logits, is_float_out=True)
        if n % 2 == 0:
            product, middle = np.zeros((rows, n // 2), both.kind), np.zeros((rows, n), both.kind)
            both.cuda.linear(device, both.form(x), both.form(product), bias, mid=both.form(middle))
            both.cpu.linear(host, x.astype(np.float32), want, bias)
            both.cpu.gated(want[:, : n // 2], want[:, n // 2 :], wanted := np.zeros((rows, n // 2), np.float32), 0)
            both.check(product, wanted)


def test_made_up_weights(both: Both) -> None:
    raw = stored(both.dtype, 33, 64)
    read = np.empty((33, 64), np.float32)
    matrix = both.cuda.matrix([(both.dtype, 33, raw)], 64, 3)
    both.cuda.matrix_fill(matrix, 0, 7, both.dtype, 33, 64)
    both.cuda.matrix_read(matrix, 0, 33, read)
    assert read.std() > 0.01


def check_rounded(both: Both, dtype: str, n: int, k: int, matrix: object, place: tuple[object, ...]) -> None:
    """Tensors are rounded on the device: near their values, in any strides, with checksums of what is stored."""
    x = (0.05 * both.draw(n, k)).astype(both.kind)
    read, found = np.empty((n, k), np.float32), set()
    for laid, strides in ((x, (k, 1)), (np.ascontiguousarray(x.T), (1, n))):
        tensor = both.form(laid).reshape(-1).view(np.int32), (0, n, k, *strides), both.dtype, True
        wanted = both.cuda.tensor_sum(place, *tensor)
        both.cuda.tensor_write(place, *tensor)
        assert both.cuda.tensor_sum(place) == wanted
        both.cuda.matrix_read(matrix, 0, n, read)
        found.add(read.tobytes())
        step = np.abs(x.astype(np.float32)).max() / (7.5 if "int4" in dtype else 15 if dtype == "fp8" else 127)
        assert np.abs(read - x.astype(np.float32)).max() <= step
    assert len(found) == 1


@pytest.mark.parametrize(("n", "k"), [(70, 72), (19, 256)])
@pytest.mark.parametrize("dtype", [*KINDS, *BLOCKS])
def test_tensors_as_weights(dtype: str, n: int, k: int, both: Both) -> None:
    """Tensors as weights from rows, from columns and with gaps; checksums equal the CPU's."""
    if dtype in BLOCKS and k % BLOCKS[dtype][1]:
        pytest.skip("no whole blocks")
    device, host = (backend.matrix([(dtype, n, stored(dtype, n, k))], k) for backend in (both.cuda, both.cpu))
    device_place, host_place = ((matrix, 0, 0, n, 0, k, 1) for matrix in (device, host))
    assert both.cuda.tensor_sum(device_place) == both.cpu.tensor_sum(host_place)
    if dtype in BLOCKS:
        if dtype in ("fp8", *GROUPS):
            check_rounded(both, dtype, n, k, device, device_place)
        return
    memory = both.draw(2 * n, 2 * k).view(np.int32)
    vector = np.zeros(n * k, np.float32)
    for on_device in (True, False):
        for strides in ((k, 1), (1, n), (2 * k + 2, 2), (k, -1)):
            tensor = memory, (k - 1 if strides[1] < 0 else 0, n, k, *strides), both.dtype, on_device
            both.cuda.tensor_write(device_place, *tensor)
            sums = both.cuda.tensor_sum(device_place), both.cuda.tensor_sum(device_place, *tensor)
            assert sums[0] == sums[1] == both.cpu.tensor_sum(host_place, *tensor)
        row = memory, (0, 1, n * k, 0, 1), both.dtype, on_device, 1.0
        both.cuda.tensor_write(vector, *row)
        assert both.cuda.tensor_sum(vector) == both.cpu.tensor_sum(vector, *row)


@pytest.mark.parametrize("width", [40, 1024, 1030])
def test_rows(width: int, both: Both) -> None:
    a, b, weight = both.draw(19, width), both.draw(19, 2 * width)[:, :width].copy(), both.draw(19, width + 1)[0, :width]
    weight = weight.astype(np.float32)
    floats, results = (a.astype(np.float32), b.astype(np.float32)), []
    for backend, x, y, kind in ((both.cuda, a, b, both.kind), (both.cpu, *floats, np.float32)):
        outs = [np.zeros((19, width), kind) for _ in range(12)]
        f = [both.form(out) if backend is both.cuda else out for out in outs]
        x, y = (both.form(x), both.form(y)) if backend is both.cuda else (x, y)
        backend.rms_norm(x, weight, f[0], 1e-6)
        backend.rms_norm(x, weight[: width // 2], f[1], 1e-6, 2)
        backend.add(x, y, f[2])
        backend.gated(x, y, f[3], 0)
        backend.select(x, np.array([18, 0, 7], np.int32), f[4][:3])
        backend.act(x, f[7], 1)
        backend.layer_norm(x, weight, weight, f[8], 1e-6)
        backend.take(x, np.arange(width)[::-1].astype(np.float32), f[11])
        backend.position_scale(x, np.arange(19, dtype=np.int32), f[10], 4, 0.5, 1)
        heads = (1, 1) if width > 256 else (4, 2)
        backend.row_attention(np.array([0, 5, 6, 19], np.int32), x, y[:, : width // heads[0] * heads[1]],
                              y[:, : width // heads[0] * heads[1]], f[9], *heads, 0.1)  # fmt: skip
        backend.add(x, y, f[5])
        if backend is both.cuda and hasattr(backend, "add_rms_norm"):
            backend.add_rms_norm(x, y, f[5], weight, f[6], 1e-6)
        else:
            backend.rms_norm(f[5], weight, f[6], 1e-6)
        results.append(outs)
    for got, want in zip(*results, strict=True):
        both.check(got, want)


@pytest.mark.parametrize("n", [3, 70])
def test_head_linear(n: int, both: Both) -> None:
    heads, keys, values, cols = 2, 64, 64, 128
    raw = stored(both.dtype, heads * (keys + values), cols)
    device, host = (b.matrix([(both.dtype, len(raw), raw)], cols) for b in (both.cuda, both.cpu))
    for width, outs, first, is_transposed in ((keys, cols, 0, True), (cols, values, keys, False)):
        x, got = both.draw(n, heads * width), np.zeros((n, heads * outs), both.kind)
        want = np.zeros((n, heads * outs), np.float32)
        rest = heads, keys + values, first, keys, is_transposed
        both.cuda.head_linear(device, both.form(x), both.form(got), *rest)
        both.cpu.head_linear(host, x.astype(np.float32), want, *rest)
        both.check(got, want)


# heads, latent, rope key
@pytest.mark.parametrize("shape", [(20, 512, 64), (5, 40, 8)])
def test_latent_attention(shape: tuple[int, int, int], both: Both) -> None:
    """A prompt and single rows in one step, then single rows alone."""
    heads, latent, rope = shape
    lengths, block = (300, 21, 260), 16
    table = np.arange(1, 3 * 20 + 1, dtype=np.int32).reshape(3, 20)
    pools = [backend.kv_pool(61, 0, latent + rope, both.dtype if backend is both.cuda else "float32", block)
             for backend in (both.cuda, both.cpu)]  # fmt: skip
    for spans in (((0, 299), (0, 20), (0, 259)), ((299, 300), (10, 21), (259, 260)), ((299, 300), (20, 21), (259, 260))):
        positions = np.concatenate([np.arange(a, b) for a, b in spans]).astype(np.int32)
        starts = np.cumsum([0, *(b - a for a, b in spans)]).astype(np.int32)
        batch = positions, np.repeat(np.arange(3), np.diff(starts)).astype(np.int32), starts
        widths = heads * latent, heads * (rope + 8), latent, rope
        rows = [both.draw(max(lengths), width)[positions].copy() for width in widths]
        got, want = np.zeros((len(positions), widths[0]), both.kind), np.zeros((len(positions), widths[0]), np.float32)
        both.cuda.latent_attention(pools[0], batch, table, *map(both.form, rows), both.form(got), heads, 0.05)
        both.cpu.latent_attention(pools[1], batch, table, *(r.astype(np.float32) for r in rows), want, heads, 0.05)
        both.check(got, want)


# heads, kv heads, head size, type of pages, window, soft cap
@pytest.mark.parametrize(
    "shape",
    [
        (8, 2, 128, "bfloat16", 0, 0.0), (4, 4, 64, "bfloat16", 40, 0.0), (6, 2, 24, "float16", 0, 30.0),
        (2, 1, 256, "float16", 0, 0.0), (9, 3, 64, "float32", 0, 0.0), (3, 1, 80, "float32", 100, 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_rope_cache_and_attention(shape: tuple[int, int, int, str, int, float], both: Both, paged: type) -> None:
    """A prompt of 330 rows (two splits) at once, then its last rows again, one of them alone."""
    heads, kv, dim, dtype, window, cap = shape
    n, results = 330, []
    data = both.draw(n, (heads + 2 * kv) * dim)
    table = np.random.default_rng(0).permutation(30).astype(np.int32)[None, :21]
    norms = [np.full(dim, 0.5 + i, np.float32) for i in range(2)]
    for backend, row in ((both.cuda, data.copy()), (both.cpu, data.astype(np.float32))):
        own = both.form(row) if backend is both.cuda else row
        q, k, v = own[:, : heads * dim], own[:, heads * dim : (heads + kv) * dim], own[:, (heads + kv) * dim :]
        angles = np.empty((n, dim // 4, 2), np.float32)
        frequencies = (100.0 ** (-np.arange(dim // 4) / dim)).astype(np.float32)
        backend.rope_table(np.arange(n, dtype=np.int32), frequencies, angles)
        pool, fused = (backend.kv_pool(31, kv, dim, dtype, 16, fill=0) for _ in range(2))
        batch = paged.batch([(0, 0, n)], 1)
        copies = [part.copy() for part in (q, k, v)]
        backend.qkv(fused, batch, table, *copies, *norms, 1e-6, angles)
        backend.rope(angles, q, k, dim)
        backend.kv_write(pool, batch, table, k, v)
        outs = [
            np.zeros((n, heads * dim), row.dtype),
            np.zeros((5, heads * dim), row.dtype),
            np.zeros((1, heads * dim), row.dtype),
        ]
        for out in outs:
            rows = len(out)
            target = both.form(out) if backend is both.cuda else out
            backend.attention(
                pool, paged.batch([(0, n - rows, n)], 1), table, np.ascontiguousarray(q[n - rows :]), target, 0.1, window, cap
            )
        for turns in (angles[n - 1 :], None) if backend is both.cuda else ():
            last, ends = paged.batch([(0, n - 1, n)], 1), [np.zeros((1, heads * dim), row.dtype) for _ in range(2)]
            raw, parts = (
                np.split(both.form(data[n - 1 :].copy()), [heads * dim, (heads + kv) * dim], axis=1) for _ in range(2)
            )
            joint = (raw[1], raw[2], *norms, turns, 1e-6, False)
            backend.attention(fused, last, table, raw[0], both.form(ends[0]), 0.1, window, cap, heads=joint)
            backend.qkv(fused, last, table, *parts, *norms, 1e-6, turns)
            backend.attention(fused, last, table, parts[0], both.form(ends[1]), 0.1, window, cap)
            assert ends[0].tobytes() == ends[1].tobytes()
        backend.copy_pages(pool, np.array([[table[0, 0], 30]], np.int32))
        assert outs[1].tobytes() == outs[0][n - 5 :].tobytes() and outs[2].tobytes() == outs[0][n - 1 :].tobytes()
        results.append(outs[0])
    both.check(*results)


def recurrent_case(name: str, sizes: tuple[int, ...], n: int, draw: Callable[..., Array]) -> tuple[dict, dict, int, int, int]:
    """Rows, other arguments, columns of the output, units and their floats; heads, size, groups or keys, and state first."""
    heads, size, groups, n_state = sizes
    vectors = {"a_log": (heads,), "dt_bias": (heads,), "skip": (heads,)}
    widths, rest, width, unit = {"x": heads * size, "dt": heads}, {}, heads * size, size * n_state
    if name == "conv":
        widths, vectors, width, unit = {"x": heads}, {"weight": (heads * n_state,), "bias": (heads,)}, heads, n_state - 1
        rest = {"n_taps": n_state, "act": 0}
    elif name == "delta":
        widths = {"q": groups * n_state, "k": groups * n_state, "v": heads * size, "a": heads, "b": heads}
        rest, vectors = {"n_key_heads": groups}, {"a_log": (heads,), "dt_bias": (heads,)}
    else:
        widths |= {"b": groups * n_state, "c": groups * n_state}
        rest = {"n_groups": groups} if name == "ssm" else {}
        if name == "selective_scan":
            vectors["a_log"] = (heads, n_state)
    rest |= {key: draw(*shape).astype(np.float32) for key, shape in vectors.items()}
    return {key: draw(n, wide) for key, wide in widths.items()}, rest, width, heads, unit


@pytest.mark.parametrize(
    "case",
    [
        ("ssm", 3, 40, 1, 64), ("ssm", 2, 32, 2, 128), ("ssm", 1, 24, 1, 256), ("selective_scan", 40, 1, 1, 16),
        ("selective_scan", 33, 1, 1, 32), ("selective_scan", 8, 1, 1, 64), ("delta", 2, 40, 1, 32), ("delta", 2, 32, 2, 64),
        ("delta", 1, 32, 1, 128), ("delta", 1, 12, 1, 256), ("conv", 40, 1, 1, 4), ("conv", 35, 1, 1, 8),
    ],
    ids=str,
)  # fmt: skip
def test_recurrent(case: tuple[str, int, int, int, int], both: Both) -> None:
    """Two prompts, then a row of each."""
    name, sizes, n, results = case[0], case[1:], 23, []
    rows, rest, width, units, floats = recurrent_case(name, sizes, n + 2, both.draw)
    batches = [
        (np.r_[0:3, 0:20].astype(np.int32), np.r_[[0] * 3, [1] * 20].astype(np.int32), np.array([0, 3, 23], np.int32)),
        (np.array([3, 20], np.int32), np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32)),
    ]
    for backend, kind in ((both.cuda, both.kind), (both.cpu, np.float32)):
        pool, table = np.zeros((4, (units + 1) // 2 * floats), np.float32), np.array([[2, 0], [1, 3]], np.int32)
        out = np.zeros((n + 2, width), kind)
        for batch, part in zip(batches, (slice(0, n), slice(n, n + 2)), strict=True):
            given = {key: both.form(x[part]) if backend is both.cuda else x[part].astype(np.float32) for key, x in rows.items()}
            own = np.zeros_like(out[part])
            target = both.form(own) if backend is both.cuda else own
            state = pool, table, 0, (units + 1) // 2
            getattr(backend, name)(state=state, batch=batch, **given, **rest, out=target)
            out[part] = own
        results.append(out)
    both.check(*results)


def test_sample(both: Both) -> None:
    logits = np.random.default_rng(4).standard_normal((3, 300)).astype(np.float32)
    tasks = [
        {"is_greedy": 1},
        {"is_greedy": 1, "wants_logprobs": 1, "n_top": 3},
        {"seed": 1, "wants_logprobs": 1, "temperature": 0.7, "top_p": 0.9, "n_top": 2, "mode": 2},
        {"seed": 1, "temperature": 1.3, "top_k": 7, "min_p": 0.001},
        {"seed": 1, "seen": [(5, 2, 0), (9, 0, 1)], "repetition_penalty": 1.3, "bias": [(4, 2.0)], "banned": [8]},
        {"is_score": 1, "target": 77, "wants_logprobs": 1, "temperature": 0.7, "mode": 1, "n_top": 5},
        {"seed": 1, "allowed": [3, 4, 5, 99], "wants_logprobs": 1},
        {"seed": 1, "mask": [0, 0x7000F0, *[0] * 8], "wants_logprobs": 1},
    ]
    tasks = [task | {"logits_row": row} for row in range(3) for task in tasks]
    banned = np.array([2], np.int32)
    device, host = (backend.sample(logits, tasks, vocab_limit=290, banned=banned) for backend in (both.cuda, both.cpu))
    assert [result[0] for result in device] == [result[0] for result in host]
    greedy = [{"is_greedy": 1, "logits_row": row} for row in range(3)]
    device, host = (backend.sample(logits, greedy, vocab_limit=290) for backend in (both.cuda, both.cpu))
    assert [result[0] for result in device] == [result[0] for result in host]


def test_routes(both: Both) -> None:
    grouped = {"score": 1, "n_groups": 8, "chosen_groups": 4}
    for n, options in ((20, {}), (60, {"score": 2}), (128, grouped), (250, {}), (300, {})):
        logits = np.random.default_rng(n).standard_normal((5, n)).astype(np.float32)
        found = [np.zeros((5, 8), np.int32) for _ in range(2)]
        for backend, routes in zip((both.cuda, both.cpu), found, strict=True):
            backend.route(logits, routes, normalised=True, **options)
        assert (found[0][:, 0::2] == found[1][:, 0::2]).all()


def test_norm_and_routes(both: Both) -> None:
    """Few rows in one launch, more in three."""
    n, k, width, found = 32, 4, 1024, []
    matrix = both.cuda.matrix([(both.dtype, n, stored(both.dtype, n, width))], width, 9)  # linear, router
    weight = np.full(width, 0.5, np.float32)
    a, b = both.form(both.draw(2, 12, width))
    for rows in (2, 12):
        total, out = np.zeros_like(a[:rows]), np.zeros_like(a[:rows])
        logits, routes = np.zeros((rows, n), np.float32), np.zeros((rows, 2 * k), np.int32)
        both.cuda.norm_route(a[:rows], b[:rows], total, weight, out, 1e-6, matrix, None, logits, routes)
        found.append([x[:2].tobytes() for x in (total, out, routes)])
    assert found[0] == found[1]


# columns, inner, form: what the copy engine reads, and what it cannot
@pytest.mark.parametrize(("cols", "inner", "form"), [(64, 192, 0), (128, 64, 2), (40, 24, 1)])
def test_experts(cols: int, inner: int, form: int, both: Both) -> None:
    """Few rows, some, and many, one after the other."""
    n, k, rows = 4, 2, inner if form == 2 else 2 * inner
    parts = [(rows, cols), (cols, inner)]
    raw = [[(both.dtype, r, stored(both.dtype, r, c)) for _ in range(n)] for r, c in parts]
    device, host = ([b.matrix(w, c, 5, 1) for w, (_, c) in zip(raw, parts, strict=True)] for b in (both.cuda, both.cpu))
    for n_rows in (1, 8, 9, 12, 40, 66, 150):
        x, y, want = both.draw(n_rows, cols), np.zeros((n_rows, cols), both.kind), np.zeros((n_rows, cols), np.float32)
        routes = np.zeros((n_rows, 2 * k), np.int32)
        routes[:, 0::2] = np.arange(n_rows)[:, None] * 3 % n + np.array([0, 1]) & n - 1
        routes.view(np.float32)[:, 1::2] = 0.5
        options = {"limit": 0.5, "input_scaled": n_rows == 12}
        both.cuda.experts(*device, routes, both.form(x), both.form(y), n, inner, form, **options)
        both.cpu.experts(*host, routes, x.astype(np.float32), want, n, inner, form, **options)
        both.check(y, want)


@pytest.mark.parametrize("form", [0, 2])
def test_experts_of_fp8(form: int, both: Both) -> None:
    """Activations that are rounded: few rows, some, and many."""
    if both.dtype == "float32":
        pytest.skip("their activations are not rounded")
    n, k, cols, inner = 4, 2, 192, 128
    rows = inner if form == 2 else 2 * inner
    up, down = (
        both.cuda.matrix([("fp8", r, stored("fp8", r, -(-c // 128) * 128)) for _ in range(n)], c, 5)
        for r, c in ((rows, cols), (cols, inner))
    )
    x, routes, found = both.draw(300, cols), np.zeros((300, 2 * k), np.int32), []
    routes[:, 0::2] = np.arange(300)[:, None] * 3 % n + np.array([0, 1]) & n - 1
    routes.view(np.float32)[:, 1::2] = 0.5
    for n_rows in (1, 8, 9, 12, 40, 66, 150, 300):
        y = np.zeros((n_rows, cols), both.kind)
        both.cuda.experts(up, down, routes[:n_rows].copy(), both.form(x[:n_rows]), both.form(y), n, inner, form)
        found.append(y[:1].tobytes())
    assert len({*found}) == 1 and np.isfinite(y.astype(np.float32)).all() and y.any()


def test_memory_may_go_while_it_is_written(both: Both) -> None:
    """A pool is dropped at once: work enqueued to fill it must end before its memory is freed."""
    for pages in (1, 1, 40, 1, 40):
        both.cuda.kv_pool(pages, 1, 16, both.dtype)
    a, out = both.draw(3, 8), np.zeros((3, 8), both.kind)
    both.cuda.add(both.form(a), both.form(a), both.form(out))
    assert out.tobytes() == (a + a).tobytes()
