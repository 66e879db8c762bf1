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
_EMBEDDING = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_embedding_([AB])(?:\.\w+)?")
_ADDED_BIAS = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_B(?:\.\w+)?\.bias")
_BIAS = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.bias")
_SAVED = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save(?:\.\w+)?)?\.(weight|bias)")
_COPY = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight")
"""PEFT saves the model's own embeddings and head beside factors of them."""
_NESTED = re.compile(r"(\.base_layer)+$")
"""PEFT wraps a module with several target_parameters several times."""
_OTHERS = {
    "lora_magnitude_vector": "magnitudes (DoRA)",
    "modules_to_save": "a whole module (modules_to_save)",
}
"""What tensors with these words in their names are."""
_FEATURES = {
    "use_dora": "DoRA",
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
        embeddings: By the names of the weights: A has a column for each token id.
        biases: By the names of the weights: the bias of the linear with the adapter.
        added: By the names of the weights: what the adapter adds to it.
        copies: The shapes of the model's own weights that the files have, too.
        whole: By the names of the weights: matrices in place of the model's (modules_to_save).
    """

    matrices: dict[str, Factors]
    experts: dict[str, list[list[Factors]]]
    embeddings: dict[str, Factors]
    biases: dict[str, npt.NDArray[np.float32]]
    added: dict[str, npt.NDArray[np.float32]]
    copies: dict[str, tuple[int, ...]]
    whole: dict[str, npt.NDArray[np.float32]]


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
    adapter = Found({}, {}, {}, {}, {}, {}, {})
    found: dict[str, dict[str, Any]] = {}
    embeddings: dict[str, dict[str, Any]] = {}
    read = _checked if on_device else array
    for name, tensor in tensors.items():
        if match := _EMBEDDING.fullmatch(name):
            embeddings.setdefault(match[1], {}).update({match[2]: read(name, tensor, where), f"name {match[2]}": name})
            continue
        if (match := _FACTOR.fullmatch(name)) is None:
            _read_other(adapter, name, tensor, config, where)
            continue
        pair = found.setdefault(match[1], {})
        if match[2] in pair:
            message = f"{where}: tensor {name}: wanted one lora_{match[2]} of {match[1]}, have several"
            raise CheckpointError(message, file=where, tensor=name)
        pair |= {match[2]: read(name, tensor, where), f"name {match[2]}": name}
    for module, pair in embeddings.items():
        adapter.embeddings[f"{module}.weight"] = _pair(module, module, pair, config, where)
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
    for name, bias in adapter.added.items():
        factors_of = adapter.matrices.get(name)
        adapter.added[name] = bias * np.float32(1 if factors_of is None else factors_of.scale)
    return adapter


def _read_other(adapter: Found, name: str, tensor: Any, config: Mapping[str, Any], where: str) -> None:
    """Takes up a bias, or a copy of the model's own weight."""
    kind, saved = config.get("bias", "none"), config.get("modules_to_save") or ()
    if (match := _SAVED.fullmatch(name)) and any(f".{match[1]}".endswith(f".{module}") for module in saved):
        (adapter.whole if match[2] == "weight" else adapter.biases)[f"{match[1]}.weight"] = array(name, tensor, where)
    elif (match := _ADDED_BIAS.fullmatch(name)) and config.get("lora_bias"):
        adapter.added[f"{match[1]}.weight"] = array(name, tensor, where)
    elif (match := _BIAS.fullmatch(name)) and ".lora_" not in name and kind in ("all", "lora_only"):
        adapter.biases[f"{match[1]}.weight"] = array(name, tensor, where)
    elif (match := _COPY.fullmatch(name)) and ".lora_" not in name and (".base_layer." in name or _is_of_vocabulary(match[1])):
        adapter.copies[f"{match[1]}.weight"] = tuple(tensor.shape)
    else:
        _refuse_tensor(name, where)


def _is_of_vocabulary(module: str) -> bool:
    """Whether PEFT calls a module an embedding or a head, and saves it with factors of one."""
    return module.rpartition(".")[2] in ("embed_tokens", "lm_head")


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
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
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
