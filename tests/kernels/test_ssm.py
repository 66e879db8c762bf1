"""The recurrence of Mamba-2 against float64; a sequence's bits depend on nothing but its rows."""

from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
LENGTHS = [1, 7, 2, 90, 3]


def exact(rows: dict[str, Array], weights: dict[str, Array], groups: int, limits: tuple[float, float]) -> Array:
    x, dt, b, c = (rows[name].astype(np.float64) for name in ("x", "dt", "b", "c"))
    a_log, dt_bias, skip = (weights[name].astype(np.float64) for name in ("a_log", "dt_bias", "skip"))
    heads = len(a_log)
    step = np.clip(np.logaddexp(0, dt + dt_bias), *limits)
    x = x.reshape(len(x), heads, -1)
    b, c = (part.reshape(len(x), groups, -1).repeat(heads // groups, 1) for part in (b, c))
    out, at = np.empty_like(x), 0
    for n in LENGTHS:
        state = np.zeros((heads, x.shape[2], b.shape[2]))
        for t in range(at, at + n):
            decay = np.exp(-np.exp(a_log) * step[t])[:, None, None]
            state = decay * state + (step[t][:, None] * x[t])[..., None] * b[t][:, None]
            out[t] = (state * c[t][:, None]).sum(-1) + skip[:, None] * x[t]
        at += n
    return out.reshape(len(x), -1)


@pytest.mark.parametrize(
    ("heads", "size", "groups", "n_state", "per_page", "limits"),
    [(6, 24, 1, 8, 4, (0, 3e38)), (8, 16, 2, 8, 8, (0.05, 0.6)), (4, 64, 4, 128, 1, (0, 3e38)), (2, 133, 1, 5, 1, (0, 1))],
)
def test_values_and_rows(
    heads: int, size: int, groups: int, n_state: int, per_page: int, limits: tuple[float, float],
    open_backend: Callable[..., Backend], recurrence: type,
) -> None:  # fmt: skip
    random, n = np.random.default_rng(size), sum(LENGTHS)
    widths = {"x": heads * size, "dt": heads, "b": groups * n_state, "c": groups * n_state}
    rows = {name: random.standard_normal((n, width)).astype(np.float32) for name, width in widths.items()}
    rows["dt"] *= 4  # steps of 1e-4 to 10
    weights = {
        "a_log": np.log(random.uniform(0.05, 8, heads)).astype(np.float32),
        "dt_bias": random.standard_normal(heads).astype(np.float32),
        "skip": random.standard_normal(heads).astype(np.float32),
    }
    operation = recurrence(
        open_backend, "ssm", LENGTHS, (heads, size * n_state, per_page), rows, heads * size, **weights, n_groups=groups,
        dt_min=limits[0], dt_max=limits[1],
    )  # fmt: skip
    operation.check(exact(rows, weights, groups, limits), 2e-6)
