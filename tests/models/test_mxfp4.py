"""gpt-oss with experts in MXFP4 as in its files, packed here, against transformers on their values."""

import json
import shutil
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from malformed_files import check_changes

from llmpy import _core

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def packed(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks [..., n / 32, 16], scales [..., n / 32], and their values [..., n]."""
    rng = np.random.default_rng(seed)
    nibbles = rng.integers(0, 16, (*shape[:-1], shape[-1] // 32, 32), dtype=np.uint8)
    scales = rng.integers(121, 125, nibbles.shape[:-1], dtype=np.uint8)
    values = VALUES[nibbles] * np.ldexp(np.float32(1), scales.astype(int) - 127)[..., None]
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4, scales, values.reshape(shape).astype(np.float32)


def test_blocks_and_scales(tiny, open_engine, prompts, tmp_path: Path) -> None:
    model = tiny("gpt_oss", intermediate_size=64)
    directory = tmp_path / "packed"
    shutil.copytree(model.directory, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = dict(safetensors.torch.load_file(file))
    exact = {}
    parameters = dict(model.model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales, values = packed(len(name), experts, rows, columns)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
        exact[name] = values
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(values).transpose(1, 2))
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    reader = _core.Checkpoint([str(file)])
    for name, values in exact.items():
        assert reader.tensors()[name][:2] == ("mxfp4", values.shape)
        assert np.array_equal(np.frombuffer(reader.read_float32(name), np.float32).reshape(values.shape), values)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    logits = model.logits(prompts[2])
    with open_engine("cpu", directory) as engine:
        answer = engine.run([prompts[2]], top=99)[0]
    for n_ranks, experts in ((2, "rank"), (3, "rank"), (2, "width"), (4, "width")):
        shared = {"n_ranks": n_ranks, "replicate_bytes": 0, "experts": experts, "devices": ["cpu"] * n_ranks}
        with open_engine("cpu", directory, **shared) as engine:
            assert engine.run([prompts[2]], top=99)[0].prompt.tobytes() == answer.prompt.tobytes()
    shifted = logits - logits.max(-1, keepdims=True)
    wanted = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    assert np.abs(answer.table(99) - wanted[: len(prompts[2]) - 1]).max() <= 2e-4 * np.abs(logits).max()


def test_changed_tensors(tiny, tmp_path: Path) -> None:
    source = tiny("gpt_oss", intermediate_size=64, vocab_size=64).directory
    directory = tmp_path / "packed"
    shutil.copytree(source, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales, _ = packed(len(name), experts, rows, columns)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    safetensors.torch.save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    check_changes(directory, "model.layers.0.mlp.experts.down_proj", "mxfp4", ignored=("_bias",))
