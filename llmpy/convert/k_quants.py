"""Rounds matrices to GGUF's types on all processors (csrc/base/quantise_gguf.h)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from .. import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 256
"""Columns of a block of a K type."""
_AT_A_TIME = 1 << 20
"""Values that a thread rounds at a time."""
TYPES = ("q8_0", "q6_k", "q5_k", "q5_0", "q4_k", "q4_1", "q4_0", "q2_k")
"""The types that the core rounds to."""


def quantise(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """The bytes of a matrix.

    Args:
        values: float32 [..., columns], columns in multiples of the type's block.
        kind: One of TYPES.

    Returns:
        Bytes, [..., bytes of a row].

    Raises:
        ValueError: a value is not finite, or float16 cannot hold a scale.
    """
    cols = values.shape[-1]
    rows = np.ascontiguousarray(values).reshape(-1, cols)
    n_rows = _AT_A_TIME // cols + 1
    parts = (rows[at : at + n_rows] for at in range(0, len(rows), n_rows))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = b"".join(pool.map(lambda part: _core.quantise(part, cols, kind), parts))
    return np.frombuffer(made, np.uint8).reshape(*values.shape[:-1], -1)
