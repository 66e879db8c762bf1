"""Checkpoints of bitsandbytes and SqueezeLLM, written by definition, against the same model with exact values in float32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from malformed_files import check_changes
from packed_files import answers, change, configure, is_packed, open_llm, words

from llmpy import CheckpointError, UnsupportedError, _core

Tensors = dict[str, np.ndarray]
TABLES = {
    "nf4": [
        -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833334,
        -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
    ],
    "fp4": [sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)],
}  # fmt: skip
LAYOUTS = ["nf4", "nf4-nested", "fp4", "int8", "squeezellm", "squeezellm-f16"]
TYPES = {"int8": "int8_g128", "squeezellm": "table4"}
SIZES = {"hidden_size": 192, "intermediate_size": 320}


def write(layout: str, rows: int, cols: int, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """A random weight by the endings of its tensors' names, and its values."""
    if layout == "int8":
        numbers, scb = rng.integers(-127, 128, (rows, cols), dtype=np.int8), rng.uniform(0.1, 0.3, rows).astype(np.float32)
        made = {".weight": numbers, ".SCB": scb, ".weight_format": np.zeros((), np.uint8)}
        return made, numbers * (scb / np.float32(127))[:, None]
    if layout.startswith("squeezellm"):
        q, table = rng.integers(0, 16, (rows, cols)), rng.normal(0, 0.1, (rows, 16)).astype(np.float32)
        table = table.astype(np.float16) if layout.endswith("f16") else table
        made = {".qweight": words(q, 4).T, ".lookup_table": table, ".bias": np.zeros(rows, np.float16)}
        return made, np.take_along_axis(table, q, 1).astype(np.float32)
    kind, n = layout.removesuffix("-nested"), rows * cols
    numbers, table = rng.integers(0, 16, n), np.asarray(TABLES[kind], np.float32)
    state: dict[str, object] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, cols]}
    scales = rng.uniform(0.02, 0.2, n // 64).astype(np.float32)
    made = {".weight": (numbers[::2] << 4 | numbers[1::2]).astype(np.uint8)[:, None], ".weight.quant_map": table}
    if layout == "nf4-nested":
        codes, stored = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32), rng.integers(0, 256, n // 64, dtype=np.uint8)
        more, offset = rng.uniform(0.01, 0.03, -(-n // 64 // 256)).astype(np.float32), np.float32(0.1234567)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        made |= {".weight.nested_absmax": more, ".weight.nested_quant_map": codes}
        scales = codes[stored] * more.repeat(256)[: len(stored)] + offset
        made[".weight.absmax"] = stored
    else:
        made[".weight.absmax"] = scales
    made[f".weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return made, (table[numbers] * scales.repeat(64)).reshape(rows, cols)


def quantise(source: Path, to: Path, layout: str) -> Path:
    """Writes `source` with random quantised linears to to/packed, and with their values in float32 to to/plain."""
    rng = np.random.default_rng(5)
    for name in ("packed", "plain"):
        shutil.copytree(source, to / name)
    (file,) = source.glob("*.safetensors")
    packed, plain = Tensors(), Tensors()
    for name, value in safetensors.numpy.load_file(file).items():
        plain[name] = value
        if not is_packed(name, value):
            packed[name] = value
            continue
        made, plain[name] = write(layout, *value.shape, rng)
        packed |= {name.removesuffix(".weight") + ending: np.ascontiguousarray(tensor) for ending, tensor in made.items()}
    safetensors.numpy.save_file(packed, to / "packed" / file.name)
    safetensors.numpy.save_file(plain, to / "plain" / file.name)
    method = layout.partition("-")[0]
    options = {"load_in_8bit": True} if layout == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": layout[:3]}
    options = {"wbits": 4} if method == "squeezellm" else options
    method = method if method == "squeezellm" else "bitsandbytes"
    configure(to / "packed", quantization_config={"quant_method": method, **options})
    return to


@pytest.fixture
def make(tiny, tmp_path: Path) -> Callable[..., Path]:
    return lambda layout="nf4", case="llama", **sizes: quantise(
        tiny(case, **(sizes or SIZES)).directory, tmp_path, layout
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(make: Callable[..., Path], layout: str, prompts, device: str) -> None:
    """Exact values, and the bits of float32 weights: alone, in a batch and in chunks, and on two ranks."""
    path = make(layout)
    (file,) = (path / "packed").glob("*.safetensors")
    method = layout.partition("-")[0]
    reader = _core.Checkpoint([str(file)], scheme=method)
    for name, value in safetensors.numpy.load_file(path / "plain" / file.name).items():
        if ".layers." in name and value.ndim == 2:
            assert reader.tensors()[name][:2] == (TYPES.get(method, method), value.shape)
        read = np.frombuffer(reader.read_float32(name), np.float32).reshape(value.shape)
        assert read.tobytes() == value.astype(np.float32).tobytes()
    options: dict[str, object] = {"dtype": "float32", "device": device}
    wanted = answers(path / "plain", prompts, **options)
    assert answers(path / "packed", prompts, **options) == wanted
    assert answers(path / "packed", prompts, **options, max_num_batched_tokens=16, max_num_seqs=2) == wanted
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], **options) == [one]
    if device == "cpu":
        assert answers(path / "packed", prompts, **options, tensor_parallel_size=2) == wanted


@pytest.mark.parametrize(("layout", "case", "sizes"), [
    ("nf4", "mixtral", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}), ("nf4-nested", "phi3", {}),
    ("int8", "glm4", {}), ("squeezellm", "mixtral", {}), ("squeezellm", "phi3", {}),
])  # fmt: skip
def test_families(
    make: Callable[..., Path], layout: str, case: str, sizes: dict[str, int], prompts, device: str
) -> None:
    path, options = make(layout, case, intermediate_size=128, **sizes), {"dtype": "float32", "device": device}
    assert answers(path / "packed", prompts, **options) == answers(path / "plain", prompts, **options)


def test_a_scheme_in_its_own_file(make: Callable[..., Path], prompts) -> None:
    """SqueezeLLM's quant_config.json beside config.json."""
    path = make("squeezellm")
    configure(path / "packed", quantization_config=None)
    (path / "packed/quant_config.json").write_text(json.dumps({"wbits": 4}))
    assert answers(path / "packed", prompts, dtype="float32") == answers(path / "plain", prompts, dtype="float32")


WEIGHT = "model.layers.1.mlp.down_proj.weight"  # [192, 320]
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
SCB = WEIGHT.replace("weight", "SCB")
QWEIGHT, LOOKUP = WEIGHT.replace("weight", "qweight"), WEIGHT.replace("weight", "lookup_table")


def state(**changes: object) -> torch.Tensor:
    fields = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [192, 320], **changes}
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(("layout", "name", "value", "error", "text"), [
    ("nf4", STATE, None, CheckpointError, "wanted a tensor .*bitsandbytes__nf4"),
    ("nf4", STATE, torch.ones(5, dtype=torch.uint8), CheckpointError, "wanted JSON with shape"),
    ("nf4", STATE, state(shape=[192, 640]), CheckpointError, r"absmax \(b.*\): wanted float32 \[1920\], have float32 \[960\]"),
    ("nf4", STATE, state(shape="x"), CheckpointError, "wanted JSON with shape"),
    ("nf4", STATE, state(shape=[-192, -320]), CheckpointError, "wanted"),
    ("nf4", STATE, state(shape=[192 * 2, 160]), UnsupportedError, r"\(bitsandbytes\): wanted .*a multiple of 64; have"),
    ("nf4", STATE, state(shape=[320, 192]), CheckpointError, r"wanted \[192, 320\], have \[320, 192\]"),
    ("nf4", STATE, state(blocksize=128), UnsupportedError, r"\(bitsandbytes\): .*have .* blocks of 128"),
    ("nf4", f"{WEIGHT}.absmax", None, CheckpointError, f"wanted a tensor {WEIGHT}.absmax"),
    ("nf4", f"{WEIGHT}.absmax", torch.ones(959), CheckpointError, r"absmax \(b.*\): wanted .* \[960\], have .* \[959\]"),
    ("nf4", f"{WEIGHT}.absmax", torch.full((960,), torch.inf), CheckpointError, r"absmax.*row \d+: wanted finite scales"),
    ("nf4", f"{WEIGHT}.quant_map", torch.ones(16), CheckpointError, r"quant_map \(b.*\): wanted the 16 values of nf4"),
    ("nf4", WEIGHT, torch.ones(9, 1, dtype=torch.uint8), CheckpointError, r"wanted 30720 bytes .*, have \[9, 1\]"),
    ("nf4", WEIGHT, torch.ones(192, 320), CheckpointError, r"absmax \(b.*\): wanted a quantised weight"),
    ("nf4-nested", f"{WEIGHT}.nested_absmax", None, CheckpointError, r"absmax \(b.*\): wanted float32"),
    ("nf4-nested", f"{WEIGHT}.nested_absmax", torch.ones(5), CheckpointError, r"nested_absmax \(b.*\): wanted float32 \[4\]"),
    ("nf4-nested", f"{WEIGHT}.nested_quant_map", None, CheckpointError, f"wanted a tensor {WEIGHT}.nested_quant_map"),
    ("nf4-nested", f"{WEIGHT}.nested_absmax", torch.full((4,), torch.nan), CheckpointError, "wanted finite scales"),
    ("int8", SCB, None, CheckpointError, f"wanted a tensor {SCB}"),
    ("int8", SCB, torch.ones(5), CheckpointError, r"SCB \(b.*\): wanted a tensor .* float32 \[192\], have float32 \[5\]"),
    ("int8", SCB, torch.full((192,), torch.nan), CheckpointError, "wanted finite scales"),
    ("squeezellm", LOOKUP, None, CheckpointError, f"wanted a tensor {LOOKUP} beside it"),
    ("squeezellm", QWEIGHT, None, CheckpointError, f"wanted a tensor {QWEIGHT} that it belongs to"),
    ("squeezellm", LOOKUP, torch.ones(192, 8), CheckpointError, r"lookup_table \(s.*\): wanted .*\[192, 16\].*have \[192, 8\]"),
    ("squeezellm", LOOKUP, torch.full((192, 16), torch.nan), CheckpointError, r"lookup_table: row \d+ .*wanted finite values"),
    ("squeezellm", QWEIGHT, torch.ones(40, 192), CheckpointError, r"qweight \(s.*\): wanted type int32, have float32"),
    ("squeezellm", QWEIGHT.replace("qweight", "vals"), torch.ones(4), UnsupportedError, r"\(squeezellm\): sparse outliers"),
])  # fmt: skip
def test_malformed(
    make: Callable[..., Path], layout: str, name: str, value: torch.Tensor | None, error: type[Exception], text: str
) -> None:
    path = make(layout) / "packed"
    change(path, lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    with pytest.raises(error, match=text) as caught:
        open_llm(path)
    assert f"model.safetensors: tensor {WEIGHT.removesuffix('weight')}" in str(caught.value)
    if error is CheckpointError:
        assert str(caught.value.tensor).startswith(WEIGHT.removesuffix("weight"))
        assert Path(caught.value.file or "").suffix == ".safetensors"


@pytest.mark.parametrize("layout", ["nf4", "nf4-nested", "int8", "squeezellm"])
def test_changed_tensors(make: Callable[..., Path], layout: str) -> None:
    path = make(layout, hidden_size=128, intermediate_size=320, num_hidden_layers=1, vocab_size=64) / "packed"
    check_changes(path, "model.layers.0.mlp.down_proj", "squeezellm" if layout == "squeezellm" else "bitsandbytes")


@pytest.mark.parametrize(("method", "changes"), [
    ("bitsandbytes", {"bnb_4bit_quant_type": "int4"}), ("bitsandbytes", {"bnb_4bit_quant_storage": "bfloat16"}),
    ("squeezellm", {"wbits": 3}),
])  # fmt: skip
def test_unsupported_options(make: Callable[..., Path], method: str, changes: dict[str, object]) -> None:
    path = make() / "packed"
    configure(path, quantization_config={"quant_method": method, "load_in_4bit": True, **changes})
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        open_llm(path)


def test_a_released_writer(tmp_path: Path) -> None:
    """Files of bitsandbytes itself, where it is installed: values within the rounding of its own dequantisation."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(192, 320)
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            numbers, stored = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
            tensors = {"a.weight": numbers, **{f"a.weight.{name}": t for name, t in stored.as_dict(packed=True).items()}}
            file = tmp_path / f"{kind}{nested}.safetensors"
            safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            reader = _core.Checkpoint([str(file)])
            assert reader.tensors()["a.weight"][:2] == (kind, (192, 320))
            read = np.frombuffer(reader.read_float32("a.weight"), np.float32).reshape(192, 320)
            assert np.allclose(read, functional.dequantize_4bit(numbers, stored).numpy(), rtol=1e-6, atol=1e-7)
