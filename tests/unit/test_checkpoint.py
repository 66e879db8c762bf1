"""The readers from Python: exact values of every type, key-values, names of what is wrong, speed."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from safetensors.torch import save_file

from llmpy import _core
from llmpy.errors import CheckpointError, UnsupportedError

FLOAT_TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
FLOAT_TYPES += ["IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"]
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_one(path: Path) -> _core.Checkpoint:
    return _core.Checkpoint([str(path)])


def write_safetensors(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_gguf(path: Path, keys: list[tuple[str, Any, GGUFValueType, GGUFValueType | None]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value, kind, inner in keys:
        writer.add_key_value(name, value, kind, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def every_type(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file with random blocks of every type, and the bytes."""
    path = tmp_path_factory.mktemp("checkpoint") / "types.gguf"
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    stored = {}
    for name in FLOAT_TYPES:
        kind = GGMLQuantizationType[name]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        stored[name] = rng.integers(0, 256, (48, 8 * block_bytes), dtype=np.uint8)
        writer.add_tensor(name, stored[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, stored


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_random_blocks_have_the_values_that_the_gguf_package_gives(
    every_type: tuple[Path, dict[str, np.ndarray]], name: str
) -> None:
    path, stored = every_type
    checkpoint = open_one(path)
    kind = GGMLQuantizationType[name]
    block_values = gguf.GGML_QUANT_SIZES[kind][0]
    assert checkpoint.tensors()[name] == (NAMES.get(name, name.lower()), (48, 8 * block_values), str(path))
    assert checkpoint.read(name) == stored[name].tobytes()
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = gguf.dequantize(stored[name], kind).astype(np.float32).ravel()
    have = np.frombuffer(checkpoint.read_float32(name), np.float32)
    finite = ~np.isnan(wanted)
    assert have.size == 48 * 8 * block_values and finite.mean() > 0.8
    assert np.isnan(have[~finite]).all()
    np.testing.assert_array_equal(have[finite].view(np.uint32), wanted[finite].view(np.uint32))


@pytest.mark.parametrize("name", ["IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"])
def test_every_entry_of_a_grid(tmp_path: Path, name: str) -> None:
    """Enough random indices that each of up to 2048 entries occurs."""
    kind, path = GGMLQuantizationType[name], tmp_path / "grid.gguf"
    blocks = np.random.default_rng(2).integers(0, 256, (1500, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    have = np.frombuffer(open_one(path).read_float32(name), np.float32)
    np.testing.assert_array_equal(have, gguf.dequantize(blocks, kind).ravel())


def test_safetensors_files_of_the_safetensors_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = {
        "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
        "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
        "bool": torch.bool,
    }  # fmt: skip
    first = {f"model.{name}.weight": (torch.randn(3, 5) * 40).to(kind) for name, kind in kinds.items()}
    second = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "vector": torch.arange(7.0)}
    paths = [str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")]
    save_file(first, paths[0], metadata={"format": "pt", "é\n": '"'})
    save_file(second, paths[1])
    checkpoint = _core.Checkpoint(paths)
    assert checkpoint.format == "safetensors" and checkpoint.metadata == {}
    tensors = checkpoint.tensors()
    assert len(tensors) == 13
    for name, tensor in (first | second).items():
        kind, shape, file = tensors[name]
        assert kinds[kind] == tensor.dtype and shape == tuple(tensor.shape) and file == paths[name in second]
        assert checkpoint.read(name) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.dim() else True
        if tensor.dtype.is_floating_point:
            assert checkpoint.read_float32(name) == tensor.float().numpy().tobytes()
        else:
            with pytest.raises(UnsupportedError, match=f"{name}: wanted a type with float values, have {kind}"):
                checkpoint.read_float32(name)
    assert checkpoint.read("scalar") == struct.pack("<f", 2.5)


def test_half_values_match_numpy(tmp_path: Path) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    header = {
        "f16": {"dtype": "F16", "shape": [65536], "data_offsets": [0, 131072]},
        "bf16": {"dtype": "BF16", "shape": [65536], "data_offsets": [131072, 262144]},
    }
    checkpoint = open_one(write_safetensors(tmp_path / "half", header, bits.tobytes() * 2))
    for name, kind in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        have = np.frombuffer(checkpoint.read_float32(name), np.float32)
        np.testing.assert_array_equal(have, bits.view(kind).astype(np.float32))


def test_key_values_of_every_type(tmp_path: Path) -> None:
    kind = GGUFValueType
    keys: list[tuple[str, Any, GGUFValueType, GGUFValueType | None]] = [
        ("u8", 255, kind.UINT8, None), ("i8", -128, kind.INT8, None), ("u16", 65535, kind.UINT16, None),
        ("i16", -32768, kind.INT16, None), ("u32", 2**32 - 1, kind.UINT32, None), ("i32", -(2**31), kind.INT32, None),
        ("u64", 2**64 - 1, kind.UINT64, None), ("i64", -(2**63), kind.INT64, None), ("f32", 0.5, kind.FLOAT32, None),
        ("f64", 1 / 3, kind.FLOAT64, None), ("yes", True, kind.BOOL, None), ("no", False, kind.BOOL, None),
        ("text", "naïve ✓ 😀", kind.STRING, None), ("nothing", "", kind.STRING, None),
        ("texts", ["a", "", "é"], kind.ARRAY, kind.STRING), ("floats", [1.0, -2.5], kind.ARRAY, kind.FLOAT32),
        ("ints", [3, -4], kind.ARRAY, kind.INT32), ("flags", [True, False], kind.ARRAY, kind.BOOL),
        ("nested", [[1, 2], [3]], kind.ARRAY, kind.ARRAY),
    ]  # fmt: skip
    metadata = open_one(write_gguf(tmp_path / "keys.gguf", keys)).metadata
    assert metadata == {"general.architecture": "llama"} | {name: value for name, value, _, _ in keys}
    assert type(metadata["yes"]) is bool and type(metadata["flags"][0]) is bool and type(metadata["u8"]) is int


def test_strings_that_are_not_utf8_lose_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bytes.gguf", [("tokens", ["??", "ok"], GGUFValueType.ARRAY, GGUFValueType.STRING)])
    path.write_bytes(path.read_bytes().replace(b"??", b"\xe2\x82"))
    tokens = open_one(path).metadata["tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == [b"\xe2\x82", b"ok"]


def test_a_large_vocabulary_opens_fast(tmp_path: Path) -> None:
    tokens = [f"token{i}é" for i in range(150_000)]
    keys = [
        ("tokens", tokens, GGUFValueType.ARRAY, GGUFValueType.STRING),
        ("merges", [f"{t} {t}" for t in tokens], GGUFValueType.ARRAY, GGUFValueType.STRING),
        ("types", list(range(150_000)), GGUFValueType.ARRAY, GGUFValueType.INT32),
    ]
    path = write_gguf(tmp_path / "large.gguf", keys)
    text = json.dumps([value for _, value, *_ in keys])
    times = []
    for _ in range(5):
        start = time.process_time()
        metadata = open_one(path).metadata
        opened = time.process_time()
        json.loads(text)
        times.append((opened - start, time.process_time() - opened))
    assert metadata["tokens"] == tokens and len(metadata["merges"]) == 150_000 and metadata["types"][-1] == 149_999
    assert min(opened / parsed for opened, parsed in times) < 4, f"and json.loads of the same: {times}"


def test_key_values_are_made_once(tmp_path: Path) -> None:
    checkpoint = open_one(write_gguf(tmp_path / "one.gguf", []))
    assert checkpoint.metadata is checkpoint.metadata


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "cut": ({"layer.weight": ENTRY}, 5, "data_offsets: wanted begin <= end <= 5 bytes"),
    "shape": ({"layer.weight": ENTRY | {"shape": [3]}}, 8, r"data: wanted 12 bytes for F32 \[3\], have 8"),
    "huge": ({"layer.weight": ENTRY | {"shape": [2**40, 2**40]}}, 8, "size below 2^64"),
    "overlap": ({"a": ENTRY, "layer.weight": ENTRY | {"data_offsets": [4, 12]}}, 12, "data: wanted at byte"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_errors_name_file_and_tensor(tmp_path: Path, case: str) -> None:
    header, n_bytes, text = BROKEN[case]
    path = write_safetensors(tmp_path / "model.safetensors", header, bytes(n_bytes))
    with pytest.raises(CheckpointError, match=text.replace("^", r"\^")) as caught:
        open_one(path)
    assert caught.value.file == str(path) and caught.value.tensor == "layer.weight"
    assert str(caught.value).startswith("model.safetensors: tensor layer.weight: ")


def test_a_cut_gguf_file_is_an_error(tmp_path: Path, every_type: tuple[Path, dict[str, np.ndarray]]) -> None:
    whole = every_type[0].read_bytes()
    path = tmp_path / "cut.gguf"
    for n_bytes in [*range(0, 900, 7), len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(CheckpointError) as caught:
            open_one(path)
        assert caught.value.file == str(path)


def test_absent_and_unreadable_tensors(tmp_path: Path) -> None:
    header = {"a": ENTRY, "eight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [8, 12]}}
    path = write_safetensors(tmp_path / "model.safetensors", header, bytes(12))
    checkpoint = open_one(path)
    assert checkpoint.tensors()["eight"][0] == "f8_e4m3"
    with pytest.raises(UnsupportedError, match="tensor eight: wanted a type that this build reads, have F8_E4M3"):
        checkpoint.read("eight")
    with pytest.raises(CheckpointError, match="tensor b: wanted in the checkpoint") as caught:
        checkpoint.read_float32("b")
    assert caught.value.tensor == "b" and caught.value.file == str(path)
    with pytest.raises(CheckpointError):
        checkpoint.read("\ud800")
    with pytest.raises(TypeError, match="name: wanted a str"):
        checkpoint.read(3)  # type: ignore[arg-type]


def test_arguments(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "mödel\udcff.safetensors", {"a": ENTRY}, bytes(8))
    assert _core.Checkpoint((path,)).tensors()["a"][2] == str(path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wanted a sequence of paths"):
        _core.Checkpoint(str(path))
    with pytest.raises(TypeError):
        _core.Checkpoint([3])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _core.Checkpoint(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        _core.Checkpoint(["a\0b"])
    with pytest.raises(CheckpointError, match="at least one file"):
        _core.Checkpoint([])
    missing = tmp_path / "missing\udcff"
    with pytest.raises(FileNotFoundError) as caught:
        open_one(missing)
    assert caught.value.filename == str(missing)
    with pytest.raises(IsADirectoryError):
        open_one(tmp_path)
    path.write_bytes(b"\x80\x02}q\x00(X\x05\x00\x00\x00layer")  # a pickle
    with pytest.raises(CheckpointError, match="neither safetensors nor GGUF"):
        open_one(path)


def test_failed_allocations_are_memory_errors(every_type: tuple[Path, dict[str, np.ndarray]]) -> None:
    failed = 0
    while True:
        _core.fail_allocation_after(failed)
        try:
            open_one(every_type[0])
            break
        except MemoryError:
            failed += 1
        finally:
            _core.fail_allocation_after(-1)
    assert failed >= 5
