"""What load_adapter costs the host for a trainer's tensors: 32 layers of Llama's kind, so narrow that bytes cost nothing.

    python benchmarks/adapters_load.py [--rounds 30]

A row is the median time of load_adapter in milliseconds, and the smallest, for tensors of torch or NumPy by PEFT's names. The
first call, which reads names and shapes, is left out. benchmarks/adapters_cuda.py --update measures the whole on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from llmpy import LLM

RANK = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 224,
    "num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def adapter_of(llm: LLM, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random factors of all linears."""
    taken = {place[0] for place in llm._driver.model.adapter_places()[1]}
    found = {}
    for info in llm.weight_info():
        if (name := info["name"]) in taken:
            module, (rows, columns) = name.removesuffix(".weight"), info["shape"]
            found[f"base_model.model.{module}.lora_A.default.weight"] = torch.randn(RANK, columns).to(dtype)
            found[f"base_model.model.{module}.lora_B.default.weight"] = torch.randn(rows, RANK).to(dtype)
    return found


def measure(llm: LLM, tensors: dict[str, Any], rounds: int) -> list[float]:
    """Milliseconds of each call but the first."""
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        llm.load_adapter("a", tensors, {"r": RANK, "lora_alpha": 2 * RANK})
        times.append(1e3 * (time.perf_counter() - begun))
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB"}
    with LLM(folder, enable_lora=True, max_lora_rank=RANK, device="cpu", max_model_len=64, **options) as llm:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = adapter_of(llm, dtype)
            print(f"{len(tensors)} tensors of {dtype}: ", end="")
            times = measure(llm, tensors, args.rounds)
            print(f"{statistics.median(times):.2f} ms ({min(times):.2f})")
        times = measure(llm, {name: tensor.float().numpy() for name, tensor in tensors.items()}, args.rounds)
        print(f"{len(tensors)} arrays of float32: {statistics.median(times):.2f} ms ({min(times):.2f})")


if __name__ == "__main__":
    main()
