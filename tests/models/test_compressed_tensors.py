"""The package compressed-tensors: transformers reads our copies with it, and we read what its compressors write."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from packed_files import answers, compressed, configure, is_packed, open_llm

from llmpy import _core
from llmpy.convert import convert
from llmpy.models.quantise import OWN

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")
SIZES = {"hidden_size": 128, "intermediate_size": 256}
FLOAT = {"activation_dtype": "float", "dtype": "float32"}
BFLOAT16 = 2.0**-8
"""Of a value: the package multiplies in the type of the scales, which is bfloat16 for 4 bits."""


def stored(directory: Path) -> dict[str, np.ndarray]:
    """The exact values of the quantised weights of a checkpoint."""
    reader = _core.Checkpoint([str(path) for path in directory.glob("*.safetensors")], scheme="compressed-tensors")
    names = {name: shape for name, (kind, shape, _) in reader.tensors().items() if kind.startswith(("fp8", "int4_g", "int8_g"))}
    return {name: np.frombuffer(reader.read_float32(name), np.float32).reshape(shape) for name, shape in names.items()}


@pytest.mark.parametrize("scheme", OWN)
def test_transformers_reads_copies(tiny, tmp_path: Path, prompts, error_of, scheme: str) -> None:
    """The weights that transformers restores, and its logits."""
    out = convert(str(tiny("llama", **SIZES).directory), tmp_path / "out", scheme)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=config)
    is_exact, ids, exact = "int4" not in scheme, prompts[2], stored(out)
    with open_llm(out, **FLOAT) as llm, torch.no_grad():
        logits = llm.tap([ids], ["logits"])[0]["logits"]
        assert error_of(logits, model(torch.tensor([ids])).logits[0].numpy()) < (1e-5 if is_exact else 0.05)
    restored = {name: value.float().numpy() for name, value in model.state_dict().items()}
    assert len(exact) == 14
    for name, values in exact.items():
        assert np.abs(restored[name] - values).max() <= (2.0**-22 if is_exact else BFLOAT16) * np.abs(values).max(), name


def arguments(form: str, bits: int, strategy: str, group: int, symmetric: bool) -> dict[str, object]:
    kind = "float" if form == "float-quantized" else "int"
    found: dict[str, object] = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy}
    return found | ({"group_size": group} if strategy == "group" else {})


def written(weight: torch.Tensor, form: str, args: dict[str, object]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the package's compressor makes of a weight, by local names, and what it restores."""
    group = int(str(args.get("group_size", weight.shape[1])))
    blocks = weight.reshape(len(weight), -1, group) if args["strategy"] != "tensor" else weight.reshape(1, 1, -1)
    top = 448 if args["type"] == "float" else 2 ** (int(str(args["num_bits"])) - 1) - 1
    scale = (blocks.abs().amax(-1) / top).bfloat16().float()
    state = {"weight": weight, "weight_scale": scale if args["strategy"] != "tensor" else scale.reshape(1)}
    if not args["symmetric"]:
        state["weight_zero_point"] = torch.arange(scale.numel()).reshape(scale.shape).remainder(7).sub(3).to(torch.int8)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**args))
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    made = compressor.compress(state, scheme)
    return made, compressor.decompress(made, scheme)["weight"].float()


@pytest.mark.parametrize(("form", "bits", "strategy", "group", "symmetric"), [
    ("pack-quantized", 4, "group", 32, False), ("pack-quantized", 4, "group", 128, True),
    ("pack-quantized", 4, "channel", 0, True), ("pack-quantized", 8, "group", 128, True),
    *((form, 8, strategy, 128, True) for form in ("int-quantized", "float-quantized")
      for strategy in ("channel", "tensor", "group")),
])  # fmt: skip
def test_files_of_the_package(
    tiny, tmp_path: Path, prompts, form: str, bits: int, strategy: str, group: int, symmetric: bool
) -> None:
    """Values and answers are those of the weights that the package restores."""
    args = arguments(form, bits, strategy, group, symmetric)
    for name in ("packed", "plain"):
        shutil.copytree(tiny("llama", **SIZES).directory, tmp_path / name)
    (file,) = (tmp_path / "plain").glob("*.safetensors")
    plain = safetensors.torch.load_file(file)
    packed = dict(plain)
    for name, weight in plain.items():
        if is_packed(name, weight):
            made, plain[name] = written(packed.pop(name), form, args)
            packed |= {f"{name.removesuffix('weight')}{local}": tensor.contiguous() for local, tensor in made.items()}
    safetensors.torch.save_file(packed, tmp_path / "packed" / file.name)
    safetensors.torch.save_file(plain, file)
    scheme = compressed(form, bits, group, symmetric, strategy)
    scheme["config_groups"]["group_0"]["weights"] = args  # type: ignore[index]
    configure(tmp_path / "packed", quantization_config=scheme)
    for name, values in stored(tmp_path / "packed").items():
        assert np.array_equal(values, plain[name].numpy()), name
    assert answers(tmp_path / "packed", prompts, **FLOAT) == answers(tmp_path / "plain", prompts, **FLOAT)
