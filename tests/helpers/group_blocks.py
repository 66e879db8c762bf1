"""Random headers for blocks of int4 and int8 types, as csrc/base/dtype.h has them."""

import numpy as np

GROUPS = {"int4_g128": (68, 128, []), "int4_g32": (20, 32, [])}  # bytes of a block, values of a block, no float16 fields


def headers(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Scales of both signs, whose lowest byte is the zero at 4 bits.

    Args:
        dtype: A type of GROUPS.
        shape: Of the blocks.
        rng: Makes them.

    Returns:
        Bytes [*shape, 4].
    """
    scales = rng.uniform(1e-3, 1e-2, (*shape, 1)) * rng.choice([-1, 1], (*shape, 1))
    if not dtype.startswith("int4"):
        return (scales / 16).astype(np.float32).view(np.uint8)
    words = scales.astype(np.float32).view(np.uint32) & 0xFFFFFF00
    return (words | rng.integers(0, 16, (*shape, 1), np.uint32)).view(np.uint8)
