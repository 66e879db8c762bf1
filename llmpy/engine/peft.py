"""Reads adapters (LoRA) as PEFT stores them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from .. import _core
from ..errors import CheckpointError, ModelNotFoundError, UnsupportedError
from ..json_files import read_json

if TYPE_CHECKING:
    import numpy.typing as npt

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge the adapter into the checkpoint"
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_OTHERS = {
    "lora_magnitude_vector": "magnitudes (DoRA)",
    "lora_embedding_": "factors of an embedding",
    "lora_B.bias": "a bias (lora_bias)",
    "modules_to_save": "a whole module (modules_to_save)",
}
"""What tensors with these words in their names are."""
_FEATURES = {
    "use_dora": "DoRA",
    "lora_bias": "lora_bias",
    "modules_to_save": "modules_to_save",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "layer_replication": "layer_replication",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "megatron_config": "megatron_config",
}
"""Fields of the config that change the arithmetic when they are set."""


class Factors(NamedTuple):
    """The change of one linear: W + scale * B A.

    Args:
        a: float32 [rank, columns].
        b: float32 [rows, rank].
        scale: A factor.
    """

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


def read(path: str | Path) -> dict[str, Factors]:
    """The factors of a PEFT directory by the names of the linears' weights.

    Args:
        path: The directory.

    Raises:
        ModelNotFoundError: The directory or one of its two files is missing.
        CheckpointError: A tensor has a wrong name, type or shape.
        UnsupportedError: The adapter changes more than linears.
    """
    folder = Path(path).expanduser()
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ModelNotFoundError(f"adapter {path}: wanted a directory with {CONFIG} and {TENSORS}, have no {name}")
    checkpoint = _core.Checkpoint([str(folder / TENSORS)])
    tensors = {
        name: np.frombuffer(checkpoint.read_float32(name), np.float32).reshape(shape)
        for name, (_, shape, _) in checkpoint.tensors().items()
    }
    return factors(tensors, read_json(folder / CONFIG), str(folder / TENSORS))


def factors(tensors: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Factors]:
    """The factors of named tensors.

    Args:
        tensors: Arrays under PEFT's names.
        config: The content of adapter_config.json.
        where: Where they come from, for errors.
    """
    _check_config(config, where)
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            _refuse_tensor(name, where)
        found.setdefault(match[1], {})[match[2]] = _float32(tensor)
    return {f"{module}.weight": _pair(module, pair, config, where) for module, pair in found.items()}


def _check_config(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{where}: peft_type {kind!r} is not supported, only 'LORA'; {MERGE}")
    named = [label for field, label in _FEATURES.items() if config.get(field)]
    if config.get("bias", "none") != "none":
        named.append(f"bias={config['bias']!r}")
    if named:
        raise UnsupportedError(f"{where}: {', '.join(named)} of the adapter is not supported yet; {MERGE}")


def _refuse_tensor(name: str, where: str) -> NoReturn:
    for word, what in _OTHERS.items():
        if word in name:
            raise UnsupportedError(f"{where}: tensor {name}: {what} of an adapter is not supported yet; {MERGE}")
    wanted = "base_model.model.<linear>.lora_A.weight or .lora_B.weight"
    raise CheckpointError(f"{where}: tensor {name}: wanted a name {wanted}", file=where, tensor=name)


def _float32(tensor: Any) -> npt.NDArray[np.float32]:
    if hasattr(tensor, "detach"):  # a tensor of torch: NumPy has no bfloat16
        tensor = tensor.detach().float().cpu().numpy()
    return np.ascontiguousarray(tensor, np.float32)


def _pair(module: str, pair: Mapping[str, Any], config: Mapping[str, Any], where: str) -> Factors:
    """A, B and the scale of one linear."""
    for letter in "AB":
        if letter not in pair:
            name = f"{module}.lora_{letter}.weight"
            raise CheckpointError(
                f"{where}: tensor {name}: wanted one beside the other factor, have none", file=where, tensor=name
            )
    a, b = pair["A"], pair["B"]
    rank = int(_of_pattern(config.get("rank_pattern"), module, config.get("r", len(a))))
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        name = f"{module}.lora_A.weight"
        raise CheckpointError(
            f"{where}: tensor {name}: wanted [{rank}, columns], and lora_B [rows, {rank}], "
            f"have {list(a.shape)} and {list(b.shape)}",
            file=where,
            tensor=name,
        )
    alpha = float(_of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank)))
    return Factors(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT matches it."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)
