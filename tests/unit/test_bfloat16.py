"""Rounding to bfloat16 in NumPy against ml_dtypes."""

import ml_dtypes
import numpy as np

from llmpy.weights import bfloat16


def test_every_kind_of_value():
    some = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([some, ties, ties - 1, ties + 1, ties ^ 0x8000]).view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = values.astype(ml_dtypes.bfloat16)
    are_numbers = ~np.isnan(values)
    assert np.array_equal(bfloat16.bits(values)[are_numbers], wanted.view(np.uint16)[are_numbers])
    assert np.isnan(bfloat16.rounded(values[~are_numbers])).all()
    assert np.array_equal(bfloat16.rounded(values), wanted.astype(np.float32), equal_nan=True)
