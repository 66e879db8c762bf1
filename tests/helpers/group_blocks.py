"""Blocks of int4 and int8 types, as csrc/base/dtype.h has them, and of types of GGUF."""

import numpy as np

# bytes of a block, values of a block, no float16 fields
GROUPS = {"int4_g128": (68, 128, []), "int4_g32": (20, 32, []), "int8_g128": (132, 128, []), "int8_g32": (36, 32, [])}

# the same of GGUF's IQ and TQ types, with the offsets of their float16 fields; IQ1_M has none in one piece
IQ = {
    "iq4_nl": (18, 32, [0]), "iq4_xs": (136, 256, [0]), "iq3_xxs": (98, 256, [0]), "iq3_s": (110, 256, [0]),
    "iq2_xxs": (66, 256, [0]), "iq2_xs": (74, 256, [0]), "iq2_s": (82, 256, [0]), "iq1_s": (50, 256, [0]),
    "iq1_m": (56, 256, []), "tq1_0": (54, 256, [52]), "tq2_0": (66, 256, [64]),
}  # fmt: skip


def scatter_scale(raw: np.ndarray, scale: np.ndarray) -> None:
    """Writes the scales of IQ1_M's blocks: 4 bits each at the top of the block's last four words."""
    for i in range(4):
        raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | (scale.view(np.uint16) >> 4 * i & 15) << 4


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


def int4_rows(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of int4 blocks.

    Args:
        numbers: [rows, columns] from 0 to 15.
        scales: [rows, groups] float32, whose lowest 8 bits are ignored.
        zeros: [rows, groups].
        group: Columns of a group.

    Returns:
        The rows as the checkpoint's reader gives them, and their values in float32.
    """
    rows, groups = scales.shape
    padded = np.zeros((rows, groups * group), np.uint8)
    padded[:, : numbers.shape[1]] = numbers
    words = scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFF00)
    raw = np.zeros((rows, groups, 4 + group // 2), np.uint8)
    raw[:, :, :4] = (words | zeros.astype(np.uint32))[..., None].view(np.uint8)
    raw[:, :, 4:] = (padded[:, ::2] | padded[:, 1::2] << 4).reshape(rows, groups, -1)
    wide = [each.repeat(group, 1)[:, : numbers.shape[1]] for each in (zeros.astype(np.float32), words.view(np.float32))]
    return raw.reshape(rows, -1), (numbers.astype(np.float32) - wide[0]) * wide[1]


def q4_0_rows(numbers: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Q4_0 blocks.

    Args:
        numbers: [rows, columns] from 0 to 15; columns are a multiple of 32.
        scales: [rows, groups], rounded to float16.

    Returns:
        The rows as a file has them, and their values in float32.
    """
    rows, groups = scales.shape
    halves, blocks = scales.astype(np.float16), numbers.astype(np.uint8).reshape(rows, groups, 32)
    raw = np.zeros((rows, groups, 18), np.uint8)
    raw[:, :, :2] = halves[..., None].view(np.uint8)
    raw[:, :, 2:] = blocks[..., :16] | blocks[..., 16:] << 4
    return raw.reshape(rows, -1), (numbers.astype(np.float32) - 8) * halves.astype(np.float32).repeat(32, 1)


def q8_0_rows(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of Q8_0 blocks.

    Args:
        numbers: [rows, columns] from -128 to 127; columns are a multiple of 32.
        scales: [rows, groups], float16.

    Returns:
        The rows as a file has them.
    """
    rows, groups = scales.shape
    raw = np.zeros((rows, groups, 34), np.uint8)
    raw[:, :, :2] = scales[..., None].view(np.uint8)
    raw[:, :, 2:] = numbers.astype(np.int8).view(np.uint8).reshape(rows, groups, 32)
    return raw.reshape(rows, -1)


def q4_k_rows(numbers: np.ndarray, scales: np.ndarray, minima: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Rows of Q4_K blocks.

    Args:
        numbers: [rows, columns] from 0 to 15; columns are a multiple of 256.
        scales: [rows, columns / 32] from 0 to 63.
        minima: The same.
        factors: [rows, columns / 256, 2], float16: d and dmin.

    Returns:
        The rows as a file has them.
    """
    rows, blocks = factors.shape[:2]
    raw = np.zeros((rows, blocks, 144), np.uint8)
    raw[:, :, :4] = factors.view(np.uint8).reshape(rows, blocks, 4)
    s, m = (each.astype(np.uint8).reshape(rows, blocks, 8) for each in (scales, minima))
    raw[:, :, 4:8] = s[..., :4] | s[..., 4:] >> 4 << 6
    raw[:, :, 8:12] = m[..., :4] | m[..., 4:] >> 4 << 6
    raw[:, :, 12:16] = (s[..., 4:] & 15) | (m[..., 4:] & 15) << 4
    q = numbers.astype(np.uint8).reshape(rows, blocks, 4, 2, 32)
    raw[:, :, 16:] = (q[:, :, :, 0] | q[:, :, :, 1] << 4).reshape(rows, blocks, 128)
    return raw.reshape(rows, -1)


def q6_k_rows(numbers: np.ndarray, scales: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Rows of Q6_K blocks.

    Args:
        numbers: [rows, columns] from 0 to 63; columns are a multiple of 256.
        scales: [rows, columns / 16] from -128 to 127.
        factors: [rows, columns / 256], float16: d.

    Returns:
        The rows as a file has them.
    """
    rows, blocks = factors.shape
    raw = np.zeros((rows, blocks, 210), np.uint8)
    q = numbers.astype(np.uint8).reshape(rows, blocks, 2, 4, 32)
    low = (q[:, :, :, :2] & 15) | (q[:, :, :, 2:] & 15) << 4
    high = q[:, :, :, 0] >> 4 | q[:, :, :, 1] >> 4 << 2 | q[:, :, :, 2] >> 4 << 4 | q[:, :, :, 3] >> 4 << 6
    raw[:, :, :128], raw[:, :, 128:192] = low.reshape(rows, blocks, 128), high.reshape(rows, blocks, 64)
    raw[:, :, 192:208] = scales.astype(np.int8).view(np.uint8).reshape(rows, blocks, 16)
    raw[:, :, 208:] = factors[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
