"""The gated delta rule against float64; a sequence's bits depend on nothing but its rows."""

from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
LENGTHS = [1, 7, 2, 90, 3]


def exact(rows: dict[str, Array], weights: dict[str, Array], key_heads: int) -> Array:
    q, k, v, a, b = (rows[name].astype(np.float64) for name in ("q", "k", "v", "a", "b"))
    heads = a.shape[1]
    q, k = (x.reshape(len(x), key_heads, -1).repeat(heads // key_heads, 1) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = v.reshape(len(v), heads, -1)
    decay = np.exp(-np.exp(weights["a_log"].astype(np.float64)) * np.logaddexp(0, a + weights["dt_bias"]))
    out, at = np.empty_like(v), 0
    for n in LENGTHS:
        state = np.zeros((heads, q.shape[2], v.shape[2]))
        for t in range(at, at + n):
            state = state * decay[t][:, None, None]
            error = (v[t] - np.einsum("hk,hkv->hv", k[t], state)) / (1 + np.exp(-b[t]))[:, None]
            state = state + k[t][:, :, None] * error[:, None]
            out[t] = np.einsum("hk,hkv->hv", q[t], state) * q.shape[2] ** -0.5
        at += n
    return out.reshape(len(v), -1)


@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim", "per_page"),
    [(4, 2, 16, 12, 3), (2, 2, 24, 24, 1), (4, 2, 128, 128, 2), (3, 1, 37, 85, 3)],
)
def test_values_and_rows(
    heads: int, key_heads: int, key_dim: int, value_dim: int, per_page: int,
    open_backend: Callable[..., Backend], recurrence: type,
) -> None:  # fmt: skip
    random, n = np.random.default_rng(value_dim), sum(LENGTHS)
    widths = {"q": key_heads * key_dim, "k": key_heads * key_dim, "v": heads * value_dim, "a": heads, "b": heads}
    rows = {name: random.standard_normal((n, width)).astype(np.float32) for name, width in widths.items()}
    rows["a"] *= 4
    weights = {
        "a_log": np.log(random.uniform(0.05, 8, heads)).astype(np.float32),
        "dt_bias": random.standard_normal(heads).astype(np.float32),
    }
    operation = recurrence(
        open_backend, "delta", LENGTHS, (heads, key_dim * value_dim, per_page), rows, heads * value_dim, **weights,
        n_key_heads=key_heads,
    )  # fmt: skip
    operation.check(exact(rows, weights, key_heads), 2e-6)
