"""What bitsandbytes writes. It is large, so the test extra does not have it: `pip install bitsandbytes` runs these tests."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from packed_files import open_llm

from llmpy import _core

functional = pytest.importorskip("bitsandbytes.functional")
SIZES = {"hidden_size": 128, "intermediate_size": 256}
FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
KINDS = {
    "nf4": {**FOUR, "bnb_4bit_quant_type": "nf4"}, "fp4": {**FOUR, "bnb_4bit_quant_type": "fp4"},
    "nested": {**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True},
}  # fmt: skip
ERROR = 0.08
"""Of the logits: on the CPU the package multiplies rounded activations."""


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_the_package(tiny, tmp_path: Path, prompts, error_of, kind: str) -> None:
    """The values are those that the package restores, and the logits are near its logits."""
    config, ids = transformers.BitsAndBytesConfig(**KINDS[kind]), prompts[2]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny("llama", **SIZES).directory, dtype=torch.float32, device_map="cpu", quantization_config=config
    )
    model.save_pretrained(tmp_path)  # a call packs the weights for the processor
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].float().numpy()
    with open_llm(tmp_path, dtype="float32", activation_dtype="float") as llm:
        assert error_of(llm.tap([ids], ["logits"])[0]["logits"], wanted) < ERROR
    reader = _core.Checkpoint([str(path) for path in tmp_path.glob("*.safetensors")], scheme="bitsandbytes")
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    linears = [(name, module.weight) for name, module in stored.named_modules() if "_proj" in name]
    assert len(linears) == 14
    for name, weight in linears:
        if kind == "int8":
            values = weight.data.float() * (weight.SCB.float() / 127)[:, None]
        else:
            values = functional.dequantize_4bit(weight.data, weight.quant_state).float()
        read = np.frombuffer(reader.read_float32(f"{name}.weight"), np.float32)
        assert read.tobytes() == values.numpy().tobytes(), name
