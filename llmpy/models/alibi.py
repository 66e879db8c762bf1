"""The slopes of ALiBi (Press and others, 2022): the number that a head adds to a score for each position of distance."""

import numpy as np

from .rope import Floats


def slopes(n_heads: int, most: float = 8.0) -> Floats:
    """float32 [n_heads]: 2^(-most * i / n) for i = 1 ... n, n the largest power of two that fits; the other heads take those of
    2 n with odd i.
    """
    n = 1 << (n_heads.bit_length() - 1)
    exponents = np.concatenate([np.arange(1, n + 1) / n, np.arange(1, 2 * (n_heads - n), 2) / (2 * n)])
    return np.exp2(-most * exponents).astype(np.float32)
