"""Q2_K, Q4_K, Q5_K and Q6_K as `llmpy convert` rounds them, read back by gguf-py."""

import numpy as np
import pytest

from llmpy.convert import k_quants

gguf = pytest.importorskip("gguf")


def read_back(values: np.ndarray, kind: str) -> np.ndarray:
    stored = gguf.GGMLQuantizationType[kind.upper()]
    packed = k_quants.quantise(values, kind)
    assert packed.shape == gguf.quant_shape_to_byte_shape(values.shape, stored)
    return gguf.dequantize(packed, stored).reshape(values.shape)


def error(values: np.ndarray, read: np.ndarray) -> float:
    return float(np.sqrt(np.mean((values - read) ** 2) / np.mean(values**2)))


@pytest.mark.parametrize(("kind", "wider"), [("q2_k", "tq2_0"), ("q4_k", "q4_1"), ("q5_k", "q5_0"), ("q6_k", "q5_1")])
def test_random_values(kind: str, wider: str) -> None:
    """The error is less than that of the next type of GGUF, which has as many bits or more (Q2_K and Q6_K: fewer)."""
    values = (np.random.default_rng(1).standard_t(4, (48, 768)) * 0.02).astype(np.float32)
    other = gguf.GGMLQuantizationType[wider.upper()]
    assert error(values, read_back(values, kind)) < error(values, gguf.dequantize(gguf.quantize(values, other), other))


@pytest.mark.parametrize(("kind", "steps"), [("q2_k", 3), ("q4_k", 15), ("q5_k", 31), ("q6_k", 31)])
def test_hard_blocks(kind: str, steps: int) -> None:
    """Zeros stay zeros; ramps, constants, one sign, one large value and scales of both signs lie within a step."""
    ramp, one = np.linspace(-1, 1, 256, dtype=np.float32), np.zeros(256, np.float32)
    one[17] = -3
    blocks = np.stack([np.zeros(256, np.float32), ramp, -ramp, np.abs(ramp), -np.abs(ramp), np.full(256, 0.7, np.float32), one])
    read = read_back(blocks, kind)
    assert not read[0].any()
    spans = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    assert (np.abs(read - blocks).max(-1) <= spans / steps).all()


def test_chunks_of_rows() -> None:
    """A matrix of more blocks than are rounded at a time has the bytes of its rows."""
    values = np.random.default_rng(2).standard_normal((k_quants._AT_A_TIME // 256 + 3, 256), dtype=np.float32)
    whole = k_quants.quantise(values, "q4_k")
    assert np.array_equal(whole[-5:], k_quants.quantise(values[-5:], "q4_k"))
