"""Reads adapters (LoRA) as PEFT stores them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from .. import _core
from ..errors import CheckpointError, ModelNotFoundError, UnsupportedError
from ..json_files import read_json

if TYPE_CHECKING:
    import numpy.typing as npt

_TYPES = ("float32", "bfloat16", "float16", "float64")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge the adapter into the checkpoint"
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_NESTED = re.compile(r"(\.base_layer)+$")
"""PEFT wraps a module with several target_parameters several times."""
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
    "trainable_token_indices": "trainable_token_indices",
    "layer_replication": "layer_replication",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "megatron_config": "megatron_config",
}
"""Fields of the config that change the arithmetic when they are set."""


class Factors(NamedTuple):
    """The change of one matrix: W + scale * B A.

    Args:
        a: float32 [rank, columns].
        b: float32 [rows, rank].
        scale: A factor.
        names: Of the tensors A and B; "" for parts of tensors.
    """

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float
    names: tuple[str, str] = ("", "")


class Found(NamedTuple):
    """The factors of an adapter.

    Args:
        matrices: By the names of the weights.
        experts: By the name of the module that holds a layer's experts: for each of its parameters the factors of all experts.
    """

    matrices: dict[str, Factors]
    experts: dict[str, list[list[Factors]]]


def read(path: str | Path) -> Found:
    """The factors of a PEFT directory.

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


def factors(tensors: Mapping[str, Any], config: Mapping[str, Any], where: str, on_device: bool = False) -> Found:
    """The factors of named tensors.

    Args:
        tensors: Arrays under PEFT's names.
        config: The content of adapter_config.json.
        where: Where they come from, for errors.
        on_device: Whether factors stay torch's tensors of their type where they are.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be the content of adapter_config.json, but is of type {type(config).__name__}")
    _check_config(config, where)
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            _refuse_tensor(name, where)
        pair = found.setdefault(match[1], {})
        if match[2] in pair:
            message = f"{where}: tensor {name}: wanted one lora_{match[2]} of {match[1]}, have several"
            raise CheckpointError(message, file=where, tensor=name)
        pair |= {match[2]: _checked(name, tensor, where) if on_device else array(name, tensor, where), f"name {match[2]}": name}
    adapter = Found({}, {})
    wrappers = Counter(_NESTED.sub("", module) for module in found)
    for module, pair in found.items():
        holder, is_nested = _NESTED.subn("", module)
        parameters = _parameters(holder, config)
        place = wrappers[holder] - 1 - module.count(".base_layer")
        key = f"{holder}.{parameters[place]}" if place < len(parameters) else holder
        n = _num_experts(key, pair, config, where) if is_nested or parameters else 1
        if n > 1:
            adapter.experts.setdefault(holder, []).append(_experts(holder, key, pair, n, config, where))
        else:
            adapter.matrices[f"{holder}.weight"] = _pair(holder, key, pair, config, where)
    return adapter


def _parameters(holder: str, config: Mapping[str, Any]) -> list[str]:
    """The parameters of a module that `target_parameters` names, in the module's order: PEFT wraps the first one first."""
    split = (target.rpartition(".") for target in config.get("target_parameters") or ())
    found = {name for module, _, name in split if f".{holder}".endswith(f".{module or 'experts'}")}
    return sorted(found, key=lambda name: (name.startswith("down_"), name))


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


def _checked(name: str, tensor: Any, where: str) -> Any:
    """The tensor, if it has a known type."""
    kind = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if kind not in _TYPES:
        message = f"{where}: tensor {name}: wanted {', '.join(_TYPES)}, have {kind}"
        raise CheckpointError(message, file=where, tensor=name)
    return tensor


def array(name: str, tensor: Any, where: str) -> npt.NDArray[np.float32]:
    """A tensor as an array of float32.

    Args:
        name: Its name, for errors.
        tensor: An array, or a tensor of torch.
        where: Where it comes from, for errors.
    """
    if hasattr(_checked(name, tensor, where), "detach"):  # a tensor of torch: NumPy has no bfloat16
        tensor = tensor.detach().float().cpu().numpy()
    return np.ascontiguousarray(tensor, np.float32)


def _number(config: Mapping[str, Any], field: str, module: str, default: float, where: str) -> float:
    """A module's `r` or `lora_alpha`: the value of the first pattern that matches, else the field's."""
    pattern = "rank_pattern" if field == "r" else "alpha_pattern"
    try:
        value = _of_pattern(config.get(pattern), module, config.get(field, default))
    except re.error as error:
        raise CheckpointError(f"{where}: {pattern}: wanted regular expressions, have {error.pattern!r}", file=where) from None
    is_rank, is_number = field == "r", isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (is_rank and (value < 1 or value != int(value))):
        wanted = "a whole number of at least 1" if is_rank else "a finite number"
        raise CheckpointError(f"{where}: {field} of {module}: wanted {wanted}, have {value!r}", file=where)
    return float(value)


def _pair(module: str, key: str, pair: Mapping[str, Any], config: Mapping[str, Any], where: str) -> Factors:
    """A, B and the scale of one linear, whose rank and alpha have this key."""
    for letter in "AB":
        if letter not in pair:
            name = f"{module}.lora_{letter}.weight"
            raise CheckpointError(
                f"{where}: tensor {name}: wanted one beside the other factor, have none", file=where, tensor=name
            )
    a, b = pair["A"], pair["B"]
    rank = int(_number(config, "r", key, a.shape[0] if a.ndim else 0, where))
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        name = f"{module}.lora_A.weight"
        raise CheckpointError(
            f"{where}: tensor {name}: wanted [{rank}, columns], and lora_B [rows, {rank}], "
            f"have {list(a.shape)} and {list(b.shape)}",
            file=where,
            tensor=name,
        )
    alpha = _number(config, "lora_alpha", key, rank, where)
    names = pair.get("name A", ""), pair.get("name B", "")
    return Factors(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), names)


def _num_experts(key: str, pair: Mapping[str, Any], config: Mapping[str, Any], where: str) -> int:
    """How many experts a parameter of `target_parameters` has; 1: it is a matrix."""
    columns = pair["B"].shape[-1] if "B" in pair and pair["B"].ndim == 2 else 0
    rank = int(_number(config, "r", key, columns, where)) or 1
    return 1 if columns % rank else columns // rank


def _experts(
    module: str, key: str, pair: dict[str, Any], n: int, config: Mapping[str, Any], where: str
) -> list[Factors]:
    """The factors of each of n experts: rows of A lie expert by expert, columns of B rank by rank."""
    a, b = pair.get("A"), pair["B"]
    if a is None or a.ndim != 2 or len(a) != b.shape[1]:
        name = f"{module}.lora_A.weight"
        have = "nothing" if a is None else list(a.shape)
        raise CheckpointError(f"{where}: tensor {name}: wanted [{b.shape[1]}, columns], have {have}", file=where, tensor=name)
    halves = [{"A": a[e * len(a) // n : (e + 1) * len(a) // n], "B": b[:, e::n]} for e in range(n)]
    return [_pair(module, key, each, config, where) for each in halves]


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT matches it."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)
