"""`llmpy convert`: copies have the bits of quantisation at load, and of gguf-py's rounding."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from modules import load
from packed_files import answers, change, open_llm

from llmpy import CheckpointError, ConfigError, UnsupportedError
from llmpy.cli import main
from llmpy.convert import convert
from llmpy.models.quantise import OWN

RAGGED = {"hidden_size": 160, "intermediate_size": 288}  # 128 + 32 and 2 * 128 + 32 columns
CASES = {"llama": RAGGED, "mixtral": {}, "phi3": {}}
FLOAT = {"activation_dtype": "float", "dtype": "float32"}


@pytest.mark.parametrize("scheme", OWN)
@pytest.mark.parametrize("case", CASES)
def test_bits(tiny, tmp_path: Path, prompts, scheme: str, case: str) -> None:
    """Tokens, logprob bits and stored bytes are those of quantisation at load, also from several files and bfloat16."""
    source = tiny(case, dtype="bfloat16", shards=2, **CASES[case]).directory
    out = convert(str(source), tmp_path / "out", scheme)
    assert answers(out, prompts, **FLOAT) == answers(source, prompts, quantization=scheme, **FLOAT)
    with open_llm(out, **FLOAT) as llm, open_llm(source, quantization=scheme, **FLOAT) as wanted:
        assert llm.weight_checksum() == wanted.weight_checksum()
        assert OWN[scheme] in {info["dtype"] for info in llm.weight_info()}


def load_file(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint; NumPy's reader has no FP8."""
    import torch
    from safetensors.torch import load_file

    (file,) = directory.glob("*.safetensors")
    fp8 = torch.float8_e4m3fn
    return {
        name: value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if value.dtype == fp8 else value.float().numpy()
        if value.dtype == torch.bfloat16 else value.numpy() for name, value in load_file(file).items()
    }  # fmt: skip


def values_of(out: Path, module: str) -> np.ndarray:
    """The weight of a module, by the format's definition."""
    tensors = load_file(out)
    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]["weights"]
    scales = tensors[f"{module}.weight_scale"].astype(np.float64)
    if group["type"] == "float":
        return tensors[f"{module}.weight"].astype(np.float64) * scales
    rows, cols = tensors[f"{module}.weight_shape"]
    bits = group["num_bits"]

    def unpacked(words: np.ndarray) -> np.ndarray:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        return (words.view(np.uint32)[..., None] >> shifts & (2**bits - 1)).reshape(len(words), -1).astype(int)

    numbers = unpacked(tensors[f"{module}.weight_packed"])[:, :cols]
    if group["symmetric"]:
        zeros = np.full_like(scales, 2 ** (bits - 1))
    else:
        zeros = unpacked(np.ascontiguousarray(tensors[f"{module}.weight_zero_point"].T)).T[:rows]
    size = group["group_size"]
    return (numbers - zeros.repeat(size, 1)[:, :cols]) * scales.repeat(size, 1)[:, :cols]


@pytest.mark.parametrize(("scheme", "steps"), [("fp8", 0), ("int8", 127), ("int4", 7.5), ("int4_g32", 7.5)])
def test_values(tiny, tmp_path: Path, scheme: str, steps: float) -> None:
    """The files say what the format says: within half a step of the source."""
    source = tiny("llama", **RAGGED).directory
    out = convert(str(source), tmp_path / "out", scheme)
    module = "model.layers.1.mlp.down_proj"
    wanted = load_file(source)[f"{module}.weight"].astype(np.float64)
    error, largest = np.abs(values_of(out, module) - wanted), np.abs(wanted).max()
    assert 0 < error.max() <= (np.abs(wanted) / 16 + 1e-4 * largest if not steps else 1.02 * largest / steps / 2).max()


def test_files(tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a copy has: the source's other files and tensors, a new index, and the modules that stay in floats."""
    source = tmp_path / "source"
    shutil.copytree(tiny("llama", shards=2).directory, source)
    for name in ("tokenizer.json", "LICENSE", "old.bin", ".hidden"):
        (source / name).write_text("{}")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "int4"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {path.name for path in source.glob("*.safetensors")}
    assert len(shards) == 2 and shards | {"tokenizer.json", "LICENSE", "config.json"} <= names
    assert not names & {"old.bin", ".hidden"}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    kept = {}
    for shard in shards:
        with safetensors.safe_open(tmp_path / "out" / shard, "np") as file:
            assert set(file.keys()) == {name for name, place in index["weight_map"].items() if place == shard}
            kept |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for shard in shards:
        for name, value in safetensors.numpy.load_file(source / shard).items():
            assert ("_proj" in name and name not in kept) or np.array_equal(kept[name], value)
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored and not any("_proj" in name for name in ignored)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16"])
def test_gguf(tiny, tmp_path: Path, prompts, kind: str) -> None:
    """Matrices have gguf-py's values; norms and metadata stay."""
    gguf = pytest.importorskip("gguf")
    gguf_files, kind_of = (load(Path(__file__).with_name(f"{name}.py")) for name in ("gguf_files", "gguf_kinds"))
    model = tiny("llama").directory
    config, tensors = json.loads((model / "config.json").read_text()), load_file(model)
    source = gguf_files.write(kind_of.KINDS["llama"], config, tensors, tmp_path / "source.gguf")
    wanted = gguf_files.write(kind_of.KINDS["llama"], config, tensors, tmp_path / "wanted.gguf", kind.upper())
    out = convert(str(source), tmp_path / "out.gguf", f"gguf-{kind}")
    have = {each.name: each for each in gguf.GGUFReader(out).tensors}
    for each in gguf.GGUFReader(wanted).tensors:
        assert (have[each.name].tensor_type, have[each.name].data.tobytes()) == (each.tensor_type, each.data.tobytes())
    assert answers(out, prompts) == answers(wanted, prompts)


def test_k_types(demo_model: Path, tmp_path: Path) -> None:
    """Matrices with columns in multiples of 256 take the K type, others a narrower block."""
    gguf = pytest.importorskip("gguf")
    out = convert(str(demo_model), tmp_path / "out.gguf", "gguf-q6_k")
    for each in gguf.GGUFReader(out).tensors:
        if each.name.startswith("blk.0") and each.data.ndim == 2:
            assert each.tensor_type.name == ("Q6_K" if each.name == "blk.0.ffn_down.weight" else "Q8_0"), each.name


def test_errors(tiny, tmp_path: Path, demo_model: Path) -> None:
    source, out = str(tiny("llama").directory), tmp_path / "out"
    refused = {
        "int3": (ConfigError, "to='int3': wanted fp8, int8, int4, int4_g32 or gguf-TYPE"),
    }
    for to, (kind, text) in refused.items():
        with pytest.raises(kind, match=text):
            convert(source, out, to)
    for to, text in {"gguf-q3_k": "neither llmpy nor gguf-py", "gguf-q9": "no such type", "int4": "is a GGUF file"}.items():
        with pytest.raises(UnsupportedError, match=text):
            convert(str(demo_model), out, to)
    with pytest.raises(UnsupportedError, match="tq1_0 needs columns in multiples of 256, have 576"):
        convert(str(demo_model), out, "gguf-tq1_0")
    with pytest.raises(UnsupportedError, match=r"c_attn.*transposed.*load the model with quantization='int8'"):
        convert(str(tiny("gpt2").directory), out, "int8")
    assert not out.exists()
    convert(source, out, "fp8")
    with pytest.raises(ConfigError, match="out exists"):
        convert(source, out, "fp8")
    with pytest.raises(ConfigError, match="no linears of floats"):
        convert(str(out), tmp_path / "again", "fp8")
    bad = tmp_path / "bad"
    shutil.copytree(source, bad)
    change(bad, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"][0].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*wanted finite values"):
        convert(str(bad), tmp_path / "never", "int8")
