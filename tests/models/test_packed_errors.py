"""Packed checkpoints that are malformed, or that llmpy does not support: errors that name the tensor and its file."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from malformed_files import check_changes
from packed_files import LAYOUTS, answers, change, configure, open_llm, quantise

from llmpy import CheckpointError, LlmpyError, UnsupportedError, _core

MODULE = "model.layers.1.mlp.down_proj"  # [160, 288] in groups of 128: [3, 160] scales


@pytest.fixture
def make(tiny, tmp_path: Path) -> Callable[..., Path]:
    model = tiny("llama", hidden_size=160, intermediate_size=288)
    return lambda layout: quantise(model.directory, tmp_path, LAYOUTS[layout]) / "packed"


@pytest.mark.parametrize(("layout", "ending", "value", "text"), [
    ("gptq", ".scales", None, "wanted a tensor MODULE.scales beside it, have none"),
    ("gptq", ".qzeros", None, "wanted a tensor MODULE.qzeros beside it"),
    ("gptq", ".qweight", None, "wanted a tensor MODULE.qweight that it belongs to"),
    ("gptq", ".scales", torch.ones(2, 160, dtype=torch.float16), r"wanted a shape of \[3, 160\].*have \[2, 160\]"),
    ("gptq", ".scales", torch.ones(5, 160, dtype=torch.float16), r"wanted a shape of \[3, 160\].*have \[5, 160\]"),
    ("gptq", ".scales", torch.ones(3, 160, dtype=torch.int32), "wanted type float32 or float16 or bfloat16, have int32"),
    ("gptq", ".scales", torch.full((3, 160), torch.nan, dtype=torch.float16), "wanted finite scales"),
    ("gptq", ".scales", torch.full((3, 160), torch.inf, dtype=torch.float16), "wanted finite scales"),
    ("gptq", ".qzeros", torch.ones(3, 21, dtype=torch.int32), r"wanted a shape of \[3, 20\].*have \[3, 21\]"),
    ("gptq", ".g_idx", torch.zeros(289, dtype=torch.int32), r"wanted a shape of \[288\].*have \[289\]"),
    ("gptq", ".g_idx", torch.full((288,), 3, dtype=torch.int32), "wanted groups from 0 to 2, have 3 to 3"),
    ("gptq", ".qweight", torch.ones(36, 160), "wanted type int32, have float32"),
    ("gptq", ".qweight", torch.ones(36, 160, 1, dtype=torch.int32), "wanted 2 dimensions, have 3"),
    ("awq", ".qzeros", torch.ones(3, 19, dtype=torch.int32), r"wanted a shape of \[3, 20\].*have \[3, 19\]"),
    ("awq", ".scales", torch.full((3, 160), torch.nan, dtype=torch.float16), "wanted finite scales"),
    ("rows", ".weight_scale", None, "wanted a tensor MODULE.weight_scale beside it"),
    ("rows", ".weight_scale", torch.full((160, 3), 2e37, dtype=torch.bfloat16), r"wanted scales below 2\^120"),
    ("rows", ".weight_shape", None, "wanted a tensor MODULE.weight_shape beside it"),
    ("rows", ".weight_shape", torch.tensor([160, 320]), r"wanted a shape of \[160, 40\].*have \[160, 36\]"),
    ("rows", ".weight_shape", torch.tensor([-160, 288]), "wanted rows and columns, have -160 and 288"),
    ("rows", ".weight_shape", torch.tensor([160]), r"wanted 2 integers, have int64 \[1\]"),
    ("rows", ".weight_scale", torch.full((160, 3), torch.nan), "wanted finite scales"),
    ("rows-asym", ".weight_zero_point", None, "wanted a tensor MODULE.weight_zero_point beside it"),
    ("rows-asym", ".weight_zero_point", torch.ones(160, 3, dtype=torch.int32), r"wanted a shape of \[20, 3\]"),
    ("int8", ".weight_scale", None, "wanted a tensor MODULE.weight_scale, have none"),
    ("int8", ".weight_scale", torch.ones(160, 2), r"wanted a shape of \[2, 3\], \[160, 3\], \[160, 1\].*have \[160, 2\]"),
    ("int8", ".weight_scale", torch.full((160, 1), torch.nan), "wanted finite scales"),
    ("int8", ".weight", torch.ones(160, 288), "wanted a weight MODULE.weight of type"),
])  # fmt: skip
def test_malformed(make: Callable[..., Path], layout: str, ending: str, value: torch.Tensor | None, text: str) -> None:
    path, name = make(layout), f"{MODULE}{ending}"
    change(path, lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    with pytest.raises(CheckpointError, match=text.replace("MODULE", MODULE)) as caught:
        open_llm(path)
    assert str(caught.value.tensor).startswith(MODULE)
    assert Path(caught.value.file or "").suffix == ".safetensors"


CHANGED = ["gptq", "gptq-8-32", "awq", "rows-asym", "rows-8-channel", "int8", "int8-tensor", "int8-group"]


@pytest.mark.parametrize("layout", CHANGED)
def test_changed_tensors(tiny, tmp_path: Path, layout: str) -> None:
    model = tiny("llama", hidden_size=128, intermediate_size=320, num_hidden_layers=1, vocab_size=64)
    path = quantise(model.directory, tmp_path, LAYOUTS[layout]) / "packed"
    check_changes(path, "model.layers.0.mlp.down_proj", str(LAYOUTS[layout].config["quant_method"]))


@pytest.mark.parametrize(("layout", "ending", "value", "text"), [
    ("gptq", ".g_idx", torch.arange(288, dtype=torch.int32) % 3, r"\(gptq\): act-order .* unlike"),
    ("rows", ".weight_g_idx", torch.arange(288, dtype=torch.int32) % 3, r"\(compressed-tensors\): act-order .* unlike"),
    ("gptq-8", ".qzeros", torch.full((3, 40), 5, dtype=torch.int32), r"row \d+ .*\(gptq, 8 bits\): a zero other than 128"),
    ("rows", ".weight_scale", torch.full((160, 3), 0.1), r"row \d+ .*\(compressed-tensors, 4 bits\): .* 16 signif"),
    ("int8", ".weight_scale", torch.ones(160, 1, dtype=torch.int32), r"\(compressed-tensors\): scales of type int32"),
])  # fmt: skip
def test_unsupported_tensors(make: Callable[..., Path], layout: str, ending: str, value: torch.Tensor, text: str) -> None:
    path = make(layout)
    change(path, lambda tensors: tensors.update({f"{MODULE}{ending}": value}))
    with pytest.raises(UnsupportedError, match=rf"\.safetensors: tensor {MODULE}{ending}.*{text}"):
        open_llm(path)


GROUP = LAYOUTS["rows"].config["config_groups"]["group_0"]  # type: ignore[index]


@pytest.mark.parametrize(("layout", "changes", "text"), [
    ("gptq", {"bits": 3}, r"\(gptq\): bits 3 is not supported; wanted 4 or 8"),
    ("gptq", {"group_size": 48}, r"\(gptq\): group_size 48"),
    ("gptq", {"checkpoint_format": "marlin"}, r"\(gptq\): checkpoint_format 'marlin'"),
    ("gptq", {"is_marlin_format": True}, r"\(gptq\): is_marlin_format True is not supported; wanted False"),
    ("gptq", {"dynamic": {"+:.*mlp.*": {"bits": 2}}}, r"dynamic\['\+:\.\*mlp\.\*'\]: bits 2"),
    ("gptq", {"dynamic": {"+:(": {"bits": 4}}}, r"wanted a regular expression, have '\('"),
    ("gptq", {"quant_method": {"a": 1}}, r"quant_method \{'a': 1\} is not supported"),
    ("gptq-8", {"sym": False}, "8 bits: sym False"),
    ("awq", {"bits": 8}, r"\(awq\): bits 8"),
    ("awq", {"version": "gemv"}, "version 'gemv' is not supported; wanted 'gemm'"),
    ("awq", {"zero_point": False}, "zero_point False"),
    ("awq", {"quant_method": "hqq"}, "quant_method 'hqq' is not supported; awq, bitsandbytes, compressed-tensors, .* and GGUF"),
    ("rows", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    ("rows", {"format": "mixed-precision"}, r"config_groups\['group_0'\]: format 'mixed-precision'"),
    ("rows", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config format 'sparse-24-bitmask'"),
    ("rows", {"config_groups": {"g": {**GROUP, "targets": ["re:.*attn.*"]}}}, "no target of config_groups names the packed"),
    ("rows", {"config_groups": {"g": {**GROUP, "weights": {**GROUP["weights"], "num_bits": 6}}}}, "'num_bits': 6"),
    ("rows", {"config_groups": {"g": {**GROUP, "weights": {**GROUP["weights"], "strategy": "tensor"}}}}, "strategy of weights"),
    ("rows-8", {"config_groups": {"g": {**GROUP, "weights": {
        **GROUP["weights"], "num_bits": 8, "symmetric": False}}}}, "weights of 8 bits: symmetric False"),
    ("int8", {"config_groups": {"g": {"weights": {"type": "int", "num_bits": 8, "strategy": "group"}}}}, "group_size"),
])  # fmt: skip
def test_unsupported_options(make: Callable[..., Path], layout: str, changes: dict[str, object], text: str) -> None:
    path = make(layout)
    configure(path, quantization_config={**LAYOUTS[layout].config, **changes})
    with pytest.raises(UnsupportedError, match=text):
        open_llm(path)


def test_static_scales(make: Callable[..., Path], prompts) -> None:
    """Static scales and zeros of INT8 activations change nothing."""
    path = make("int8")
    wanted = answers(path, prompts)
    config = copy.deepcopy(LAYOUTS["int8"].config)
    config["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "symmetric": False}  # type: ignore[index]
    configure(path, quantization_config=config)
    added = {f"{MODULE}.input_scale": torch.tensor([0.02]), f"{MODULE}.input_zero_point": torch.tensor([3], dtype=torch.int8)}
    change(path, lambda tensors: tensors.update(added))
    assert answers(path, prompts) == wanted


def test_order_by_module(make: Callable[..., Path], prompts) -> None:
    """A tensor of groups that is all zero is not used, even if desc_act is set."""
    path = make("gptq")
    wanted = answers(path, prompts)
    change(path, lambda tensors: [tensors[name].zero_() for name in tensors if name.endswith(".g_idx")])
    configure(path, quantization_config={**LAYOUTS["gptq"].config, "desc_act": True})
    assert answers(path, prompts) == wanted


def test_zero_scales(make: Callable[..., Path], prompts) -> None:
    """A scale of zero makes weights of zero."""
    path = make("gptq")
    change(path, lambda tensors: tensors[f"{MODULE}.scales"].zero_())
    change(path.parent / "plain", lambda tensors: tensors[f"{MODULE}.weight"].zero_())
    assert answers(path, prompts, dtype="float32") == answers(path.parent / "plain", prompts, dtype="float32")


def test_biases(make: Callable[..., Path], prompts) -> None:
    """A bias that the model has no place for may be zero, as files of GPTQ have it, and nothing else."""
    path = make("gptq")
    change(path, lambda tensors: tensors[f"{MODULE}.bias"].fill_(1))
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.bias.*has no place"):
        open_llm(path)


@pytest.mark.parametrize(("layout", "scheme"), [("gptq", "int4"), ("awq-32", "int4_g32"), ("rows-8", "int8"), ("int8", "int8")])
def test_dummies_and_updates(make: Callable[..., Path], layout: str, scheme: str) -> None:
    """Dummies have the types of the checkpoint. Updates round floats as quantisation at load does."""
    path = make(layout)
    (file,) = (path.parent / "plain").glob("*.safetensors")
    with open_llm(path) as llm:
        types = {info["name"]: info["dtype"] for info in llm.weight_info()}
        llm.update_weights(safetensors.numpy.load_file(file).items())
        updated = llm.weight_checksum()
    with open_llm(path.parent / "plain", quantization=scheme) as llm:
        assert llm.weight_checksum() == updated
    with open_llm(path, load_format="dummy") as llm:
        assert {info["name"]: info["dtype"] for info in llm.weight_info()} == types


def test_dummies_of_modules(make: Callable[..., Path]) -> None:
    """Excluded modules are floats, and other groups have their own type."""
    path = make("gptq")
    changes = {"+:.*mlp\\..*": {"bits": 8}, "-:.*o_proj": {}}
    configure(path, quantization_config={**LAYOUTS["gptq"].config, "dynamic": changes})
    with open_llm(path, load_format="dummy") as llm:
        types = {info["name"].split(".")[-2]: info["dtype"] for info in llm.weight_info() if ".layers." in info["name"]}
    assert types["o_proj"] == "float32" and types["q_proj"] == "int4_g128" and types["up_proj"] == "int8_g128"


def test_act_order_takes_no_updates(make: Callable[..., Path]) -> None:
    path = make("gptq")
    change(path, lambda tensors: tensors[f"{MODULE}.g_idx"].copy_(torch.arange(288).flip(0) // 128))
    with open_llm(path) as llm, pytest.raises(UnsupportedError, match="act-order"):
        llm.update_weights([(f"{MODULE}.weight", np.ones((160, 288), np.float32))], partial=True)


@pytest.mark.parametrize("layout", ["gptq", "awq", "rows-asym", "gptq-8-32"])
def test_random_shapes(tmp_path: Path, layout: str) -> None:
    """Tensors of any shapes and bytes are joined, left apart, or refused; a joined weight can be read whole."""
    rng = np.random.default_rng(8)
    n_joined = 0
    scheme = str(LAYOUTS[layout].config["quant_method"])
    for i in range(150):
        sizes = rng.choice([1, 2, 4, 8, 16, 32, 33, 64], 4)
        rows, cols = int(sizes[0]), int(sizes[1]) * 8
        groups = int(rng.choice([1, 1, 2, int(sizes[2])]))
        zeros = np.full((rows, groups), 2 ** (LAYOUTS[layout].bits - 1))
        parts = rng.integers(0, 16, (rows, cols)), np.ones((rows, groups), np.float16), zeros
        if scheme == "awq" and rows % 8:
            continue
        tensors = {f"a{ending}": tensor for ending, tensor in LAYOUTS[layout].write(LAYOUTS[layout], *parts).items()}
        if i % 2:
            name = str(rng.choice(list(tensors)))
            shape = [max(1, size + int(rng.integers(-1, 2))) for size in tensors[name].shape]
            tensors[name] = rng.integers(-9, 300, shape).astype(tensors[name].dtype)
        file = tmp_path / f"{i}.safetensors"
        safetensors.numpy.save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file)
        reader = _core.Checkpoint([str(file)], scheme=scheme)
        if "a.weight" not in reader.tensors():
            continue
        dtype, shape, _ = reader.tensors()["a.weight"]
        try:
            assert len(reader.read_float32("a.weight")) == 4 * shape[0] * shape[1]
            n_joined += 1
        except LlmpyError as error:
            assert dtype.startswith("int8") and "zeros" in str(error)
    assert n_joined > 10
