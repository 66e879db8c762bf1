"""The recurrence of Mamba against float64; a sequence's bits depend on nothing but its rows."""

from collections.abc import Callable

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
LENGTHS = [1, 7, 2, 90, 3]


def exact(rows: dict[str, Array], weights: dict[str, Array | None]) -> Array:
    x, dt, b, c = (rows[name].astype(np.float64) for name in ("x", "dt", "b", "c"))
    rate, skip, bias = -np.exp(weights["a_log"].astype(np.float64)), weights["skip"], weights["dt_bias"]
    step = np.logaddexp(0, dt + (0 if bias is None else bias))
    out, at = np.empty_like(x), 0
    for n in LENGTHS:
        state = np.zeros_like(rate)
        for t in range(at, at + n):
            state = np.exp(rate * step[t][:, None]) * state + (step[t] * x[t])[:, None] * b[t]
            out[t] = state @ c[t] + skip * x[t]
        at += n
    return out


@pytest.mark.parametrize(("width", "n_state", "per_page"), [(64, 8, 20), (37, 16, 37), (130, 5, 64), (5, 64, 1)])
def test_values_and_rows(
    width: int, n_state: int, per_page: int, open_backend: Callable[..., Backend], recurrence: type
) -> None:
    random, n = np.random.default_rng(width), sum(LENGTHS)
    widths = {"x": width, "dt": width, "b": n_state, "c": n_state}
    rows = {name: random.standard_normal((n, wide)).astype(np.float32) for name, wide in widths.items()}
    rows["dt"] *= 4  # steps of 1e-4 to 10
    weights: dict[str, Array | None] = {
        "a_log": np.log(random.uniform(0.05, 8, (width, n_state))).astype(np.float32),
        "dt_bias": random.standard_normal(width).astype(np.float32) if width > 5 else None,
        "skip": random.standard_normal(width).astype(np.float32),
    }
    operation = recurrence(
        open_backend, "selective_scan", LENGTHS, (width, n_state, per_page), rows, width, **weights
    )  # fmt: skip
    operation.check(exact(rows, weights), 2e-6)
