"""Rounds arrays to bfloat16, a type that NumPy does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each value, half to even; a NaN stays one.

    Args:
        values: float32, or a type that float32 holds.
    """
    exact = np.ascontiguousarray(values, np.float32)
    whole = exact.view(np.uint32)
    upper = ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)
    upper[np.isnan(exact)] = 0x7FC0
    return upper


def rounded(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The nearest bfloat16 of each value, as float32.

    Args:
        values: As for `bits`.
    """
    return (bits(values).astype(np.uint32) << 16).view(np.float32)
