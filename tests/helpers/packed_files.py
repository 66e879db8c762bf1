"""Writes models with GPTQ, AWQ, pack-quantized and INT8 linears, and the same models with the exact values in float32."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import safetensors.numpy

from llmpy import LLM, SamplingParams

if TYPE_CHECKING:
    import torch

Tensors = dict[str, np.ndarray]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Column 8c + AWQ_ORDER[n] is nibble n of word c."""


@dataclass(frozen=True)
class Layout:
    """How linears are written.

    Attributes:
        write: Turns numbers [rows, cols] from 0 on, scales and zeros [rows, groups] into tensors by ending.
        bits: Of a number.
        group: Columns of a group; -1: all.
        symmetric: Whether all zeros are half of the range.
        kind: The type of the scales.
        config: `quantization_config`.
    """

    write: Callable[["Layout", np.ndarray, np.ndarray, np.ndarray], Tensors]
    bits: int
    group: int
    symmetric: bool
    kind: type
    config: dict[str, object] = field(default_factory=dict)
    sorts: bool = False  # act-order: groups have columns that are not adjacent


def groups_of(layout: Layout, cols: int) -> np.ndarray:
    """The group of each column. All tensors with as many columns have the same groups, as linears with one input have."""
    groups = np.arange(cols) // (layout.group if layout.group > 0 else cols)
    return np.random.default_rng(cols).permutation(groups) if layout.sorts else groups


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs the last dimension into int32, the first number in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per_word)]).astype(np.uint32)
    parts = padded.reshape(*padded.shape[:-1], -1, per_word)
    shifts = bits * np.arange(per_word, dtype=np.uint32)
    return np.bitwise_or.reduce(parts << shifts, -1).astype(np.uint32).view(np.int32)


def write_gptq(layout: Layout, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensors:
    top = 2**layout.bits - 1
    stored = zeros if layout.config.get("checkpoint_format") == "gptq_v2" else (zeros.astype(int) - 1) & top
    return {
        ".qweight": words(q, layout.bits).T, ".scales": scales.T, ".qzeros": words(stored.T, layout.bits),
        ".g_idx": groups_of(layout, q.shape[1]).astype(np.int32), ".bias": np.zeros(len(q), np.float16),
    }  # fmt: skip


def write_awq(_layout: Layout, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensors:
    def interleaved(numbers: np.ndarray) -> np.ndarray:
        return words(numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER].reshape(len(numbers), -1), 4)

    return {".qweight": interleaved(q.T), ".scales": scales.T, ".qzeros": interleaved(zeros.T)}


def write_rows(layout: Layout, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensors:
    made = {".weight_packed": words(q, layout.bits), ".weight_scale": scales, ".weight_shape": np.array(q.shape, np.int64)}
    made |= {".weight_g_idx": groups_of(layout, q.shape[1]).astype(np.int32)} if layout.sorts else {}
    return made if layout.symmetric else {**made, ".weight_zero_point": words(zeros.T, layout.bits).T}


def write_int8(_layout: Layout, q: np.ndarray, scales: np.ndarray, _zeros: np.ndarray) -> Tensors:
    return {".weight": (q.astype(int) - 128).astype(np.int8), ".weight_scale": scales}


def write_int8_tensor(layout: Layout, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensors:
    return {**write_int8(layout, q, scales, zeros), ".weight_scale": scales[:1, 0]}


def compressed(
    stored: str, bits: int, group: int, symmetric: bool = True, strategy: str = "", **inputs: object
) -> dict[str, object]:
    weights = {
        "type": "int", "num_bits": bits, "symmetric": symmetric, "group_size": group if group > 0 else None,
        "strategy": strategy or ("group" if group > 0 else "channel"),
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs or None}}
    return {"quant_method": "compressed-tensors", "format": stored, "ignore": ["lm_head"], "config_groups": groups}


def gptq(bits: int, group: int, symmetric: bool = True, **more: object) -> Layout:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False, **more}
    return Layout(write_gptq, bits, group, symmetric, np.float16, config, bool(config["desc_act"]))


def awq(group: int) -> Layout:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Layout(write_awq, 4, group, False, np.float16, config)


def rows(bits: int, group: int, symmetric: bool = True, kind: type = ml_dtypes.bfloat16, sorts: bool = False) -> Layout:
    return Layout(write_rows, bits, group, symmetric, kind, compressed("pack-quantized", bits, group, symmetric), sorts)


def int8(strategy: str, kind: type = np.float32) -> Layout:
    group = 128 if strategy == "group" else -1
    config = compressed("int-quantized", 8, group, True, strategy, type="int", num_bits=8, dynamic=True)
    return Layout(write_int8_tensor if strategy == "tensor" else write_int8, 8, group, True, kind, config)


LAYOUTS = {
    "gptq": gptq(4, 128), "gptq-asym": gptq(4, 128, False), "gptq-v2": gptq(4, 64, False, checkpoint_format="gptq_v2"),
    "gptq-32": gptq(4, 32), "gptq-column": gptq(4, -1, False), "gptq-8": gptq(8, 128), "gptq-8-32": gptq(8, 32),
    "awq": awq(128), "awq-32": awq(32), "awq-64": awq(64), "rows": rows(4, 128), "rows-asym": rows(4, 128, False),
    "rows-32": rows(4, 32, False, np.float16), "rows-channel": rows(4, -1), "rows-8": rows(8, 128), "rows-8-64": rows(8, 64),
    "rows-8-channel": rows(8, -1, kind=np.float32), "int8": int8("channel"), "int8-bf16": int8("channel", ml_dtypes.bfloat16),
    "int8-tensor": int8("tensor"), "int8-group": int8("group"),
}  # fmt: skip


# Act-order.
SORTED = {
    "gptq": gptq(4, 128, False, desc_act=True), "gptq-8": gptq(8, 32, desc_act=True),
    "gptq-v2": gptq(4, 64, False, desc_act=True, checkpoint_format="gptq_v2"), "rows": rows(4, 32, False, sorts=True),
}  # fmt: skip


def numbers_of(layout: Layout, n_rows: int, n_cols: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random numbers, scales and zeros."""
    groups = 1 if layout.group < 0 else -(-n_cols // layout.group)
    half = 2 ** (layout.bits - 1)
    q = rng.integers(0, 2 * half, (n_rows, n_cols))
    scales = (rng.uniform(0.05, 0.2, (n_rows, groups)) / half).astype(layout.kind)
    if layout.write is write_int8_tensor:
        scales[:] = scales[0, 0]
    zeros = np.full((n_rows, groups), half) if layout.symmetric else rng.integers(0, 2 * half, (n_rows, groups))
    return q, scales, zeros


def values_of(layout: Layout, q: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The exact weights: (q - zero) * scale in float64, all of which float32 holds unless a float32 scale rounds them."""
    groups = groups_of(layout, q.shape[1])
    wide = [each.astype(np.float64)[:, groups] for each in (zeros, scales)]
    return ((q - wide[0]) * wide[1]).astype(np.float32)


def is_packed(name: str, value: np.ndarray) -> bool:
    return value.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "gate.weight"))


def quantise(source: Path, to: Path, layout: Layout, chosen: Callable[[str, np.ndarray], bool] = is_packed) -> Path:
    """Writes `source` with random packed linears to to/packed, and with their values in float32 to to/plain.

    GPT-2's linears of floats are [columns, rows], packed ones are as all others.
    """
    rng = np.random.default_rng(5)
    for name in ("packed", "plain"):
        shutil.copytree(source, to / name)
    (file,) = source.glob("*.safetensors")
    is_turned = "GPT2LMHeadModel" in json.loads((source / "config.json").read_text())["architectures"]
    packed: Tensors = {}
    plain: Tensors = {}
    for name, value in safetensors.numpy.load_file(file).items():
        if not chosen(name, value):
            packed[name] = plain[name] = value
            continue
        parts = numbers_of(layout, *value.shape[:: -1 if is_turned else 1], rng)
        for ending, tensor in layout.write(layout, *parts).items():
            packed.setdefault(name.removesuffix(".weight") + ending, np.ascontiguousarray(tensor))
        exact = values_of(layout, *parts)
        plain[name] = np.ascontiguousarray(exact.T) if is_turned else exact
    packed |= {name: value for name, value in plain.items() if name.endswith(".bias")}
    safetensors.numpy.save_file(packed, to / "packed" / file.name)
    safetensors.numpy.save_file(plain, to / "plain" / file.name)
    configure(to / "packed", quantization_config=layout.config)
    return to


def quantise_fp8(source: Path, to: Path, plain: Path | None = None) -> Path:
    """Writes `source` with its linears rounded to FP8, one scale a tensor; to `plain` with their values in float32."""
    shutil.copytree(source, to)
    (file,) = source.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    exact = dict(tensors)
    for name in [name for name, value in tensors.items() if is_packed(name, value)]:
        scale = np.abs(tensors[name]).max(keepdims=True).reshape(1).astype(np.float32) / 448
        tensors |= {name: (tensors[name] / scale).astype(ml_dtypes.float8_e4m3fn), f"{name}_scale": scale}
        exact[name] = tensors[name].astype(np.float32) * scale
    safetensors.numpy.save_file(tensors, to / file.name)
    configure(to, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    if plain:
        shutil.copytree(source, plain)
        safetensors.numpy.save_file(exact, plain / file.name)
    return to


def configure(directory: Path, **fields: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


def change(path: Path, edit: Callable[[dict[str, "torch.Tensor"]], object]) -> None:
    """Rewrites a model's tensors."""
    import safetensors.torch

    (file,) = path.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file)


def open_llm(path: Path, **options: object) -> LLM:
    return LLM(path, **{"skip_tokenizer_init": True, "kv_cache_memory_bytes": 32 << 20, "device": "cpu", **options})


def answers(path: Path, batch: list[list[int]], **options: object) -> list[tuple[bytes, bytes]]:
    """Greedy ids and logprob bits."""
    batch = [prompt[:50] for prompt in batch]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    with open_llm(path, enable_prefix_caching=False, **options) as llm:
        outputs = llm.generate(batch, params, use_tqdm=False)
    return [(o.outputs[0].token_ids_array.tobytes(), o.outputs[0].logprobs.values.tobytes()) for o in outputs]
