"""Random adapters as PEFT stores them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def factors(shapes: dict[str, tuple[int, int]], rank: int = 4, seed: int = 0, scale: float = 0.3) -> dict[str, np.ndarray]:
    """A and B of each linear, by PEFT's names. shapes: (rows, columns) of a linear's weight."""
    rng, found = np.random.default_rng(seed), {}
    for module, (rows, columns) in shapes.items():
        prefix = f"base_model.model.{module}"
        found[f"{prefix}.lora_A.weight"] = (scale * rng.standard_normal((rank, columns))).astype(np.float32)
        found[f"{prefix}.lora_B.weight"] = (scale * rng.standard_normal((rows, rank))).astype(np.float32)
    return found


def save(path: Path, tensors: dict[str, np.ndarray], rank: int = 4, **config: object) -> Path:
    """Writes a PEFT directory."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(known | config))
    return path
