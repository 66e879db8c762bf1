"""Runs a program, or those of all ranks, with NumPy, one sequence at a time in float64: the oracle of every backend."""

from collections.abc import Callable, Mapping, Sequence
from math import erf, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block_tower import LISTS
from .program import Operands, RopeSpec, Spec, Weight

Array = NDArray[np.float64]
Piece = Mapping[str, NDArray[Any]]
"""What a program takes besides tokens: the tables of a piece of an image, or the features of a prompt's images, by name."""
TOWER = ("pixels", "embed_taps", "rows", "group", "mean_rows", "splice")
Read = Callable[[str, tuple[int, ...]], NDArray[np.float32]]


def _gelu(x: Array) -> Array:
    erfs: Array = np.vectorize(erf)(x / sqrt(2))
    return x * (1 + erfs) / 2


def _gelu_tanh(x: Array) -> Array:
    tanh: Array = np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
    return x * (1 + tanh) / 2


_ACTS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "identity": lambda x: x,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "none": lambda x: x,
}


def _scaled(rows: Array, weights: Sequence[Array]) -> Array:
    """Normalised heads [n, heads, size] times a weight, plus a bias; the heads share them or have their own."""
    size = rows.shape[-1]
    weight = weights[0].reshape(-1, size) if weights else 1
    bias = weights[1].reshape(-1, size) if len(weights) > 1 else 0
    return np.reshape(rows * weight + bias, (len(rows), -1))


def _rms_norm(x: Array, weights: Sequence[Array], eps: float, heads: int) -> Array:
    rows = x.reshape(len(x), heads, -1)
    return _scaled(rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps), weights)


def _layer_norm(x: Array, weights: Sequence[Array], eps: float, heads: int) -> Array:
    rows = x.reshape(len(x), heads, -1)
    shifted = rows - rows.mean(-1, keepdims=True)
    return _scaled(shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + eps), weights)


def _linear(x: Array, weights: Sequence[Array]) -> Array:
    """x W^T, plus a bias. The order of a sum does not depend on the number of W's rows, as in a matrix product it may."""
    y: Array = np.vecdot(x[:, None], weights[0])
    return y + weights[1] if len(weights) > 1 else y


def _logits(x: Array, weights: Sequence[Array], scale: float, softcap: float, first_id: int = 0) -> Array:
    y = scale * _linear(x, weights)
    return softcap * np.tanh(y / softcap) if softcap else y


def _act(x: Array, weights: Sequence[Array], act: str, limit: float = 0.0) -> Array:
    if act == "clip":
        return np.clip(x, -limit, limit)
    if act in _ACTS:
        return _ACTS[act](x)
    if act == "scale":
        return x * weights[0]
    alpha_p, alpha_n, beta, eps = weights[0]
    below = (np.expm1(np.minimum(x, eps)) - x) * (beta + np.logaddexp(0, alpha_n))
    return np.asarray(np.where(x > 0, np.logaddexp(0, alpha_p) * x * x, below) + beta * x)


def _rope(
    x: Array, rope: RopeSpec, head_dim: int, is_tail: float = False, positions: NDArray[np.int64] | None = None
) -> Array:
    """positions: [axes, rows]; None: the rows' numbers on all axes."""
    inv_freq = np.frombuffer(rope["inv_freq"], dtype=np.float32)
    n = inv_freq.size
    at = np.arange(len(x), dtype=np.float32)[:, None]
    if positions is not None and "axes" in rope:
        at = positions[np.frombuffer(rope["axes"], np.int32)].T.astype(np.float32)
    angles = at * inv_freq  # a float32 product, as in the kernels
    angles = angles.astype(np.float64)[:, None, :]
    cos, sin = rope["magnitude"] * np.cos(angles), rope["magnitude"] * np.sin(angles)
    heads = x.reshape(len(x), -1, head_dim)
    out = heads.copy()
    if is_tail:
        out[..., head_dim - 2 * n :] = _rope(heads[..., head_dim - 2 * n :].reshape(len(x), -1), rope, 2 * n).reshape(
            len(x), -1, 2 * n
        )
        return out.reshape(x.shape)
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rope["interleaved"] else (slice(0, n), slice(n, 2 * n))
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out.reshape(x.shape)


def _attention(
    q: Array,
    k: Array,
    v: Array,
    layer: tuple[int, int, int, int],
    scale: float,
    softcap: float,
    seen: Array | None = None,
    slopes: Array | None = None,
    sinks: Array | None = None,
    chunk: int = 0,
) -> Array:
    n_heads, n_kv_heads, head_dim, window = layer
    n = len(q)
    group = n_heads // n_kv_heads
    queries = q.reshape(n, n_heads, head_dim).transpose(1, 0, 2)
    keys = k.reshape(n, n_kv_heads, head_dim).transpose(1, 0, 2).repeat(group, 0)
    values = v.reshape(n, n_kv_heads, head_dim).transpose(1, 0, 2).repeat(group, 0)
    scores = queries @ keys.transpose(0, 2, 1) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    row, column = np.arange(n)[:, None], np.arange(n)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (column - row)
    near = column // chunk == row // chunk if chunk else column > row - (window or n)
    visible = (column <= row) & near if seen is None else seen
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (n_heads, n, 1))], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = (weights / weights.sum(-1, keepdims=True))[..., :n] @ values
    return np.reshape(out.transpose(1, 0, 2), (n, -1))


def _grid_attention(op: Operands, x: list[Array], piece: Piece, tables: Sequence[Array]) -> Array:
    """Attention within squares of rows, with scores of the distances of two rows."""
    given, table = op["attributes"], op["attributes"]["segments"]
    n_heads, number = given["n_heads"], piece[f"distances.{table}"]
    side = (number.shape[1] + 1) // 2
    head_dim = x[0].shape[1] // n_heads
    q, k, v = (part.reshape(-1, side * side, n_heads, head_dim).transpose(0, 2, 1, 3) for part in x)
    scores = given["scale"] * q @ k.transpose(0, 1, 3, 2)
    place = np.arange(side)
    distance = place[:, None] - place + side - 1
    lines, columns = (
        (piece[f"shares.{table}"][..., None] * each.reshape(-1, head_dim)[number]).sum(0)[distance] for each in tables
    )
    squares = q.reshape(*q.shape[:2], side, side, head_dim)
    by_line = np.einsum("bhyxc,ykc->bhyxk", squares, lines).reshape(*q.shape[:3], side, 1)
    by_column = np.einsum("bhyxc,xkc->bhyxk", squares, columns).reshape(*q.shape[:3], 1, side)
    scores = scores + (by_line + by_column).reshape(scores.shape)
    return np.asarray((_softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x[0].shape))


def _spans(n: int, window: int, piece: Piece, kind: float | str) -> Array:
    """Which keys [n, n] rows see that also see the rest of their image, or of the prompt; features of an image follow each
    other."""
    ends = np.arange(n) + 1 if kind == 1 else np.full(n, n)
    chosen = piece.get("visual", np.full(n, -1))
    for row in reversed(range(n - 1)):
        if chosen[row] >= 0 and chosen[row + 1] == chosen[row] + 1:
            ends[row] = ends[row + 1]
    rows, columns = np.arange(n)[:, None], np.arange(n)
    return np.asarray((columns < ends[:, None]) & (columns > rows - (window or n)))


def _conv(x: Array, weight: Array, bias: Array | float, taps: int) -> Array:
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    parts = [padded[k : k + len(x)] * weight.reshape(-1, taps)[:, k] for k in range(taps)]
    return np.asarray(np.sum(parts, 0) + bias)


def _scan(decay: Array, written: Array, c: Array) -> Array:
    """y_t = S_t c_t, S_t = decay_t S_(t-1) + written_t, where written_t is [..., state size]."""
    state, out = np.zeros(written.shape[1:]), np.empty(written.shape[:-1])
    for t in range(len(written)):
        state = decay[t] * state + written[t]
        out[t] = (state * c[t]).sum(-1)
    return out


def _ssm(op: Operands, x: list[Array], a_log: Array, dt_bias: Array, skip: Array) -> Array:
    given = op["attributes"]
    n, groups, heads = len(x[0]), given["n_groups"], len(a_log)
    step = np.clip(np.logaddexp(0, x[1] + dt_bias), given["dt_min"], given["dt_max"])
    b, c = (part.reshape(n, groups, 1, -1).repeat(heads // groups, 1) for part in x[2:])
    rows = x[0].reshape(n, heads, -1)
    written = (step[..., None] * rows)[..., None] * b
    out = _scan(np.exp(-np.exp(a_log) * step)[..., None, None], written, c) + skip[:, None] * rows
    return np.reshape(out, x[0].shape)


def _selective_scan(x: list[Array], a_log: Array, skip: Array, dt_bias: Array | float) -> Array:
    step = np.logaddexp(0, x[1] + dt_bias)[..., None]
    decay = np.exp(-np.exp(a_log.reshape(x[0].shape[1], -1)) * step)
    return np.asarray(_scan(decay, step * x[0][..., None] * x[2][:, None], x[3][:, None]) + skip * x[0])


def _delta(op: Operands, x: list[Array], a_log: Array, dt_bias: Array) -> Array:
    (n, heads), n_keys = x[3].shape, int(op["attributes"]["n_key_heads"])
    q, k = (part.reshape(n, n_keys, -1).repeat(heads // n_keys, 1) for part in x[:2])
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    values, beta = x[2].reshape(n, heads, -1), 1 / (1 + np.exp(-x[4]))
    decay = np.exp(-np.exp(a_log) * np.logaddexp(0, x[3] + dt_bias))
    state, out = np.zeros((heads, q.shape[2], values.shape[2])), np.empty_like(values)
    for t in range(n):
        state = decay[t][:, None, None] * state
        error = beta[t][:, None] * (values[t] - (k[t][..., None] * state).sum(1))
        state = state + k[t][..., None] * error[:, None]
        out[t] = (q[t][..., None] * state).sum(1) / sqrt(q.shape[2])
    return np.reshape(out, x[2].shape)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _route(logits: Array, bias: Array | None, op: Operands) -> Array:
    """Pairs of an expert and its weight, [rows, 4 * chosen]; the second half is unused."""
    given = op["attributes"]
    n_chosen, score, n_groups = given["n_chosen"], given["score"], given["n_groups"]
    scores = {"softmax": _softmax, "sigmoid": _ACTS["sigmoid"]}.get(score, _ACTS["identity"])(logits)
    values = scores if bias is None else scores + bias
    groups = np.sort(values.reshape(len(logits), n_groups, -1), -1)
    promise = groups[..., -2:].sum(-1) if given["sums_two"] else groups[..., -1]
    best = np.argsort(-promise, -1, kind="stable")[:, : given["chosen_groups"]]
    allowed = np.zeros((len(logits), n_groups), bool)
    np.put_along_axis(allowed, best, True, 1)
    values = np.where(allowed.repeat(logits.shape[1] // n_groups, 1), values, -np.inf)
    experts = np.argsort(-values, -1, kind="stable")[:, :n_chosen]
    chosen = np.take_along_axis(scores, experts, 1)
    weights = {"chosen_softmax": _softmax, "chosen_sigmoid": _ACTS["sigmoid"]}.get(score, _ACTS["identity"])(chosen)
    if given["is_normalised"]:
        weights = weights / (weights.sum(-1, keepdims=True) + given["sum_eps"])
    routes = np.stack([experts, weights * given["scale"]], -1).reshape(len(logits), -1)
    return np.concatenate([routes, np.zeros_like(routes)], 1)


def _experts(x: Array, routes: Array, op: Operands, weights: Sequence[Array]) -> Array:
    """The results of all routes, [rows, chosen * width]; those of experts that the rank does not have are NaN."""
    given = op["attributes"]
    first, n_local = given.get("first", 0), given.get("n_local", 0) or given["n_experts"]
    up, down, up_bias, down_bias = (
        weight.reshape(n_local, -1, *weight.shape[1:]) for weight in [*weights, *[np.zeros(n_local)] * 2][:4]
    )
    out = np.full((len(x), given["n_chosen"], x.shape[1]), np.nan)
    for results, row, pairs in zip(out, x, _pairs(routes, op), strict=True):
        for j, (number, weight) in enumerate(pairs):
            e = int(number) - first
            if 0 <= e < n_local:
                h = np.vecdot(row * weight if given["is_input_scaled"] else row, up[e]) + up_bias[e]
                results[j] = np.vecdot(_expert_act(h, op), down[e]) + down_bias[e]
    return out.reshape(len(x), -1)


def _experts_up(x: Array, routes: Array, op: Operands, weights: Sequence[Array], width: int) -> Array:
    """What goes down of all routes, [rows, width]; the columns that the rank does not have are NaN."""
    given = op["attributes"]
    n_experts, first = given["n_experts"], given["first"]
    matrices, biases = (weight.reshape(n_experts, -1, *weight.shape[1:]) for weight in [*weights, np.zeros(n_experts)][:2])
    out = np.full((len(x), given["n_chosen"], width // given["n_chosen"]), np.nan)
    for results, row, pairs in zip(out, x, _pairs(routes, op), strict=True):
        for j, (number, weight) in enumerate(pairs):
            e = int(number)
            h = np.vecdot(row * weight if given["is_input_scaled"] else row, matrices[e]) + biases[e]
            own = _expert_act(h, op)
            results[j, first : first + len(own)] = own
    return out.reshape(len(x), -1)


def _experts_down(products: Array, routes: Array, op: Operands, weights: Sequence[Array]) -> Array:
    """The weighted sum over the routes of down of their products."""
    n_experts, n_chosen = op["attributes"]["n_experts"], op["attributes"]["n_chosen"]
    matrices, biases = (weight.reshape(n_experts, -1, *weight.shape[1:]) for weight in [*weights, np.zeros(n_experts)][:2])
    chosen = _pairs(routes, op)[..., 0].astype(int)
    parts = products.reshape(len(products), n_chosen, -1)
    results = np.stack([
        np.concatenate([np.vecdot(part, matrices[e]) + biases[e] for part, e in zip(row, numbers, strict=True)])
        for row, numbers in zip(parts, chosen, strict=True)
    ])  # fmt: skip
    return _combine(results, routes, op)


def _pairs(routes: Array, op: Operands) -> Array:
    """An expert and its weight for each route, [rows, chosen, 2]."""
    n_chosen = op["attributes"]["n_chosen"]
    return routes[:, : 2 * n_chosen].reshape(len(routes), n_chosen, 2)


def _expert_act(h: Array, op: Operands) -> Array:
    given = op["attributes"]
    form, limit = given["form"], given["limit"]
    gate, linear = np.split(h, 2) if form != "plain" else (h, 1.0)
    if form == "clamped":
        gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit) + 1
        return np.asarray(gate * _ACTS["sigmoid"](1.702 * gate) * linear)
    return np.asarray(_ACTS[given["act"]](gate) * linear)


def _combine(results: Array, routes: Array, op: Operands) -> Array:
    """The sum of the routes' results times their weights, in the order of the routes."""
    given, pairs = op["attributes"], _pairs(routes, op)
    parts = results.reshape(len(results), given["n_chosen"], -1)
    out = np.zeros_like(parts[:, 0])
    for j in range(given["n_chosen"]):
        out += parts[:, j] * (1 if given["is_input_scaled"] else pairs[:, j, 1:])
    return out


def _head_linear(x: Array, w: Array, op: Operands) -> Array:
    given = op["attributes"]
    heads, first = given["n_heads"], given["first_row"]
    matrices = w.reshape(heads, given["head_rows"], -1)[:, first : first + given["used_rows"]]
    if not given["is_transposed"]:
        matrices = matrices.transpose(0, 2, 1)
    parts = x.reshape(len(x), heads, -1)[..., : matrices.shape[1]]
    return np.asarray(np.einsum("rhk,hkn->rhn", parts, matrices).reshape(len(x), -1))


def _latent_attention(q: Array, q_rope: Array, latent: Array, rope_key: Array, heads: int, scale: float) -> Array:
    n, rope = len(q), rope_key.shape[1]
    queries = np.concatenate([q.reshape(n, heads, -1), q_rope.reshape(n, heads, -1)[..., -rope:]], -1)
    scores = np.einsum("rhk,jk->hrj", queries, np.concatenate([latent, rope_key], -1)) * scale
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hrj,jk->rhk", weights / weights.sum(-1, keepdims=True), latent)
    return np.asarray(out.reshape(n, -1))


def _weight(weight: Weight, read: Read) -> Array:
    """The exact values of a weight; a part's rows are taken from the whole tensor."""
    if weight["values"] is not None:
        return np.frombuffer(weight["values"], np.float32).astype(np.float64)
    parts = []
    for part in weight["parts"]:
        tensor = read(part.source, part.shape)
        tensor = tensor.swapaxes(-1, -2) if part.transposed else tensor
        rows = tensor.reshape((-1, weight["cols"]) if weight["kind"] == "matrix" else (-1,))
        r = np.arange(part.rows)
        parts.append(rows[part.base + r // part.inner * part.stride + r % part.inner])
    made = np.asarray(np.concatenate(parts).astype(np.float64) + weight["offset"])
    return made / np.maximum(np.sqrt((made**2).sum(-1, keepdims=True)), 1e-12) if weight["unit_rows"] else made


class Interpreter:
    """A program with its weights.

    Args:
        spec: The program.
        read: Gives the exact values of a tensor as float32, for (name in the file, shape).

    Attributes:
        spec: The program.
        values: Every value of the last run, by its number, [n, width].
        kept: What `keep` operations of the last run have kept, by first column; of a head what its model has kept, under 0.
    """

    def __init__(self, spec: Spec, read: Read) -> None:
        self.spec = spec
        self.values: list[Array] = []
        self.kept: dict[int, Array] = {}
        self._piece: Piece = {}
        self._weights = [_weight(weight, read) for weight in spec["weights"]]

    def logits(self, token_ids: Sequence[int], images: Piece | None = None) -> Array:
        """Logits of every position, [n, vocab_size].

        Args:
            token_ids: One sequence.
            images: "features" of its images, "visual" [n], the feature of each token or -1, and "positions" [axes, n].
        """
        self._piece = images or {}
        return _walk([self], token_ids, "logits")

    def features(self, piece: Piece) -> Array:
        """Features of a piece by a tower's program, [n, width].

        Args:
            piece: "rows", the bytes uint8 [rows, patch bytes], and the tables of ImageItem by their names.
        """
        self._piece = piece
        sizes = [piece["rows"].shape[0], *(piece.get(f"rows.{name}", np.zeros(0)).shape[0] for name in LISTS[1:])]
        self.begin([sizes[number] // n for number, n in self.spec["rows"]])
        *ops, (name, last) = self.spec["ops"]
        for each, op in ops:
            self._put(op, *self._run(each, op, [self.values[i] for i in op["in"]]))
        assert name == "features"
        return np.concatenate([self.values[i] for i in last["in"]], 1)

    def _tower(self, name: str, op: Operands, x: list[Array], weights: Sequence[Array]) -> Array:
        """The result of an operation of a tower, or of `splice`."""
        given, piece = op["attributes"], self._piece
        if name == "splice":
            chosen, out = piece.get("visual", np.full(len(x[0]), -1)), x[0].copy()
            found = piece["features"][chosen[chosen >= 0], given["first"] :][:, : x[0].shape[1]] if "features" in piece else 0
            out[chosen >= 0] = found + (out[chosen >= 0] if given["is_sum"] else 0)
            return out
        if name == "pixels":
            bytes_ = piece["rows"].reshape(len(piece["rows"]), 3, -1)
            numbers = np.stack([weights[0].reshape(3, 256)[c][bytes_[:, c]] for c in range(3)], 1)
            return np.asarray(numbers[:, :, None].repeat(given["n_frames"], 2).reshape(len(bytes_), -1))
        if name == "embed_taps":
            width = self.spec["values"][op["out"][0]][0]
            table = "cells" if given.get("of_cells") else "taps"
            taps = piece[f"{table}.weight"][..., None] * weights[0].reshape(-1, width)[piece[f"{table}.index"]]
            return np.asarray(taps.sum(0))
        if name == "rows":
            chosen = piece["rows." + LISTS[given["list"]]]
            others = [*(weights[0].reshape(-1, x[0].shape[1])[::-1] if weights else ()), np.zeros(x[0].shape[1])]
            return np.asarray(np.concatenate([x[0], others])[chosen])  # -1, -2, ... count from the end
        parts = x[0].reshape(len(x[0]) // given["n"], given["n"], -1)
        if name == "group":
            return np.asarray(parts.reshape(len(parts), -1))
        assert name == "mean_rows"
        return np.asarray(parts.mean(1))

    def states(self, token_ids: Sequence[int], token_types: Sequence[int] | None = None) -> Array:
        """States of every position for pooling, [n, width]; token_types None: all are 0."""
        return _walk([self], token_ids, "states", token_types)

    def step(self, number: int, inputs: Mapping[str, NDArray[np.int64]]) -> None:
        """Runs operation `number`; `inputs` are the token ids, positions and token types that an embedding takes."""
        name, op = self.spec["ops"][number]
        if name == "embed":
            self._put(op, *self._embed(op, inputs))
        elif name not in ("logits", "states"):
            self._put(op, *self._run(name, op, [self.values[i] for i in op["in"]]))

    def combine(self, number: int) -> None:
        """Runs operation `number`, which adds up the results of all routes."""
        _, op = self.spec["ops"][number]
        self._put(op, _combine(self.values[op["in"][0]], self.values[op["in"][1]], op))

    def last(self, number: int) -> Array:
        """The result of operation `number`, which is the program's logits or states."""
        name, op = self.spec["ops"][number]
        x = self.values[op["in"][0]]
        if name == "states":
            return x
        if name == "logits":
            weights = [self._weights[i] for i in op["weights"] if i >= 0]
            if len(op["weights"]) < 3:
                return _logits(x, weights, **op["attributes"])
            rows = weights.pop().astype(int)
            return np.where(rows < 0, -1e30, _logits(x, weights, **op["attributes"])[:, rows])
        raise ValueError(f"operation {name!r} does not end a program")

    def _embed(self, op: Operands, inputs: Mapping[str, NDArray[np.int64]]) -> list[Array]:
        """Rows of a matrix; of a rank that has a part of it, the rows of other ids are NaN."""
        given, matrix = op["attributes"], self._weights[op["weights"][0]]
        first, end = given.get("first_id", 0), given.get("end_id", 0) or len(matrix)
        rows = inputs[given["source"]] + given.get("first_row", 0)
        is_own = (rows >= first) & (rows < end)
        found = matrix[np.where(is_own, rows - first, 0)] * given["scale"]
        return [np.where(is_own[:, None], found, np.nan)]

    def begin(self, n: int | Sequence[int]) -> None:
        """Makes an array of NaN for every value. A value that is columns of another is a view of that array.

        n: the number of rows, of all values or of each.
        """
        values: list[Array] = []
        for number, (width, of, offset) in enumerate(self.spec["values"]):
            n_rows = n if isinstance(n, int) else n[number]
            own = np.full((n_rows, width), np.nan) if of < 0 else values[of][:, offset : offset + width]
            values.append(own)
        self.values = values

    def _put(self, op: Operands, *results: Array) -> None:
        for index, result in zip(op["out"], results, strict=False):  # outputs without a result are scratch
            self.values[index][...] = result

    def _run(self, name: str, op: Operands, x: list[Array]) -> list[Array]:
        """The results of one operation."""
        given = op["attributes"]
        if name == "route":
            router, bias, selection_bias = (self._weights[i] if i >= 0 else None for i in op["weights"])
            assert router is not None
            return [_route(_linear(x[0], [router] if bias is None else [router, bias]), selection_bias, op)]
        weights = [self._weights[i] for i in op["weights"]]
        if name == "experts_up":
            return [_experts_up(x[0], x[1], op, weights, self.spec["values"][op["out"][0]][0])]
        if name == "experts_down":
            return [_experts_down(x[0], x[1], op, weights)]
        if name == "experts":
            results = _experts(x[0], x[1], op, weights)
            return [results if given.get("is_by_route", False) else _combine(results, x[1], op)]
        if name == "linear":
            return [_linear(x[0], weights)]
        if name == "rms_norm":
            return [_rms_norm(x[0], weights, given["eps"], given["n_heads"])]
        if name == "rope":
            rope, head_dim = self.spec["ropes"][given["rope"]], given["head_dim"]
            sizes = [head_dim, int(given.get("k_head_dim", 0)) or head_dim]
            return [_rope(x[i], rope, sizes[i], given.get("is_tail", False), self._piece.get("positions")) for i in range(2)]
        if name == "head_linear":
            return [_head_linear(x[0], weights[0], op)]
        if name == "latent_attention":
            n_heads = self.spec["layers"][given["layer"]][0]
            return [_latent_attention(x[0], x[1], x[2], x[3], n_heads, given["scale"])]
        if name == "attention":
            slopes, sinks = (self._weights[i] if i >= 0 else None for i in (*op["weights"], -1, -1)[:2])
            layer = self.spec["layers"][given["layer"]]
            seen = _spans(len(x[0]), layer[3], self._piece, given["spans"]) if given.get("spans", 0) else None
            numbers = given["scale"], given["softcap"], seen, slopes, sinks, given["chunk"]
            return [_attention(x[0], x[1], x[2], layer, *numbers)]
        if name == "layer_norm":
            return [_layer_norm(x[0], weights, given["eps"], given["n_heads"])]
        if name == "row_attention":
            n_heads = given["n_heads"]
            layer = (n_heads, given["n_kv_heads"], x[0].shape[1] // n_heads, 0)
            segments = self._piece.get(f"segments.{given.get('segments', 0)}", np.array([len(x[0])]))
            number = np.repeat(np.arange(segments.size), segments)
            return [_attention(x[0], x[1], x[2], layer, given["scale"], 0.0, number[:, None] == number)]
        if name == "grid_attention":
            return [_grid_attention(op, x, self._piece, weights)]
        if name == "conv":
            y = _conv(x[0], weights[0], weights[1] if len(weights) > 1 else 0.0, given["n_taps"])
            return [_ACTS[given["act"]](y)]
        if name == "ssm":
            return [_ssm(op, x, *weights)]
        if name == "selective_scan":
            return [_selective_scan(x, weights[0], weights[1], weights[2] if len(weights) > 2 else 0.0)]
        if name == "delta":
            return [_delta(op, x, *weights)]
        if name == "concat":
            return [np.concatenate(x, 1)]
        if name == "keep":
            self.kept[int(given["first"])] = x[0]
            return []
        if name == "kept":
            return [self.kept[0]]
        if name == "carry":
            return [x[0]]
        if name == "take":
            return [x[0][:, weights[0].astype(int)]]
        if name == "position_scale":
            n_steps = (np.arange(len(x[0])) + given["first"]) // given["every"]
            return [x[0] * (1 + given["slope"] * np.log1p(n_steps))[:, None]]
        if name == "act":
            return [_act(x[0], weights, given["act"], given.get("limit", 0.0))]
        if name == "gated":
            return [_ACTS[given["act"]](x[0]) * x[1]]
        if name == "add":
            return [x[0] + x[1]]
        if name in TOWER:
            return [self._tower(name, op, x, weights)]
        raise ValueError(f"unknown operation {name!r}")


def interpret_ranks(
    specs: Sequence[Spec], read: Read, token_ids: Sequence[int], wanted: str, token_types: Sequence[int] | None = None
) -> Array:
    """Runs the programs of all ranks in step, operation by operation.

    Args:
        specs: The result of `shard`, by rank.
        read: As in `Interpreter`.
        token_ids: One sequence.
        wanted: "logits" or "states".
        token_types: As in `Interpreter.states`.
    """
    return _walk([Interpreter(spec, read) for spec in specs], token_ids, wanted, token_types)


def _walk(
    ranks: Sequence[Interpreter], token_ids: Sequence[int], wanted: str, token_types: Sequence[int] | None = None
) -> Array:
    """The logits (joined in the order of ids) or the states of the ranks' programs."""
    ids = np.asarray(token_ids)
    types = np.zeros_like(ids) if token_types is None else np.asarray(token_types)
    inputs = {"tokens": ids, "positions": np.arange(len(ids)), "types": types}
    for rank in ranks:
        rank.begin(len(ids))
    for number, (name, op) in enumerate(ranks[0].spec["ops"]):
        if name == wanted:
            is_shared = wanted == "logits" and "first_id" in op["attributes"]
            parts = [rank.last(number) for rank in (ranks if is_shared else ranks[:1])]
            return np.concatenate(parts, 1)
        if name == "gather":
            _gather(ranks, number, ids)
        elif name == "combine":
            for rank in ranks:
                rank.combine(number)
        else:
            for rank in ranks:
                rank.step(number, inputs)
    raise ValueError(f"the program has no {wanted}")


def _gather(ranks: Sequence[Interpreter], number: int, ids: NDArray[np.int64]) -> None:
    """Copies into a value of all ranks what each rank has: columns, rows of token ids, or results of routes to experts."""
    for source in ranks:
        _, op = source.spec["ops"][number]
        own, given = source.values[op["in"][0]], op["attributes"]
        for target in ranks:
            whole = target.values[target.spec["ops"][number][1]["out"][0]]
            if given["kind"] == "columns" and given.get("n_chosen", 0):
                parts = [value.reshape(len(ids), given["n_chosen"], -1) for value in (whole, own)]
                parts[0][..., given["first"] : given["end"]] = parts[1][..., given["first"] : given["end"]]
                continue
            if given["kind"] == "columns":
                whole[:, given["first"] : given["first"] + own.shape[1]] = own
                continue
            rows = np.zeros_like(ids) if given.get("by_rank") else ids  # every rank computes the rows of rank 0
            keys = rows if given["kind"] == "rows" else _pairs(source.values[op["in"][1]], op)[..., 0]
            is_own = (keys >= given["first"]) & (keys < given["end"])
            shape = (*keys.shape, -1)
            whole.reshape(shape)[is_own] = own.reshape(shape)[is_own]
