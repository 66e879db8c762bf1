"""Compares a program with its class. Of a large model a small configuration of the same class is compared, with every kind of
layer that the large one has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..models.interpret import Interpreter
from ..models.program import Spec
from .refusal import Refusal
from .trace import build, randomise

LENGTHS = (1, 7, 33)
SCALES = (1.0, 3.0, 0.003)  # of the random weights; with the last one the eps of norms count
TOLERANCE = 1e-4  # of the largest logit
SMALL = 1 << 24  # parameters of a model that is compared itself
LARGEST = 1 << 29  # parameters of a small configuration

_DIVIDED = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_WINDOW = 16  # of a small configuration
_PAST = 1024  # the longest window that is passed otherwise
_WIDEST = 512  # columns that a small configuration has at most, if its class allows other widths

_LAYER = re.compile(r"\.(\d+)\.")


def verify(kind: Any, config: Any, spec: Spec, program_of: Callable[[Any], Spec]) -> None:
    """Refusal if the program, or that of a small configuration, gives other logits than the class.

    Args:
        kind: The class of transformers.
        config: Its configuration.
        spec: The program.
        program_of: Converts a module.
    """
    if _size(build(kind, config)) <= SMALL:
        return _compare(kind, config, spec)
    problem = "no small configuration can be made"
    for small in _small(config):
        try:
            model = build(kind, small)
            if _size(model) > LARGEST:
                problem = f"the smallest configuration has {_size(model)} parameters"
                continue
            own = program_of(model)
        except Exception as error:  # a class may demand sizes that fit each other
            problem = str(error)
            continue
        if missing := _layers(spec) - _layers(own):
            problem = f"no small configuration has a layer of {' '.join(name for name, _ in next(iter(missing)))}"
            continue
        return _compare(kind, small, own)
    raise Refusal(f"the program cannot be compared with the class: {problem}")


def _size(model: Any) -> int:
    return sum(int(parameter.numel()) for parameter in model.parameters())


def _small(config: Any) -> Iterator[Any]:
    """Smaller configurations, the smallest one first."""
    for divides in (True, False):
        small = deepcopy(config)
        text = small.get_text_config()
        kinds = list(getattr(text, "layer_types", None) or [])
        dense = int(getattr(text, "first_k_dense_replace", 0) or 0)
        n = max([2, dense + 2, *(kinds.index(each) + 1 for each in set(kinds))])
        n = min(n, int(text.num_hidden_layers))
        text.num_hidden_layers = n
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) > n and len(value) == int(config.get_text_config().num_hidden_layers):
                setattr(text, name, value[:n])
        text.vocab_size = min(int(text.vocab_size), 512)
        for name in _WINDOWS:
            if (getattr(text, name, None) or 0) > _WINDOW:
                setattr(text, name, _WINDOW)
        if divides:
            _divide(text)
        yield small


def _divide(text: Any) -> None:
    """Divides the widths of a configuration by a power of two; heads keep their size."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    by = 1
    while text.hidden_size // by > _WIDEST and text.num_attention_heads % (2 * by) == 0:
        by *= 2
    ratio = text.num_attention_heads // (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    for name in _DIVIDED:
        if isinstance(size := getattr(text, name, None), int):
            setattr(text, name, max(size // by, 1))
    text.num_attention_heads //= by
    if hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = max(text.num_attention_heads // ratio, 1)
    if hasattr(text, "head_dim"):
        text.head_dim = head_dim


def _layers(spec: Spec) -> set[tuple[tuple[str, str], ...]]:
    """The different layers of a program: their operations with those attributes that are words."""
    layers: dict[str, list[tuple[str, str]]] = {}
    layer = ""
    for name, op in spec["ops"]:
        parts = [part.name for weight in op["weights"] if weight >= 0 for part in spec["weights"][weight]["parts"]]
        if parts:
            found = _LAYER.search(parts[0])
            layer = found[1] if found else ""
        words = ",".join(str(value) for value in op["attributes"].values() if isinstance(value, str))
        layers.setdefault(layer, []).append((name, words))
    return {tuple(ops) for ops in layers.values()}


def _compare(kind: Any, config: Any, spec: Spec) -> None:
    """Refusal if a program and its class give different logits with the same random parameters."""
    lengths = sorted({*LENGTHS, *(window + 1 for *_, window in spec["layers"] if 0 < window <= _PAST)})
    for scale in SCALES:
        model = build(kind, config)
        randomise(model, scale)
        weights = _checkpoint(model)
        interpreter = Interpreter(spec, lambda name, shape: weights[name].reshape(shape))  # noqa: B023
        for n in lengths:
            ids = np.random.default_rng(n).integers(0, spec["vocab_size"], n)
            with torch.no_grad():
                wanted = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].double().numpy()
            difference = float(np.abs(interpreter.logits(ids.tolist()) - wanted).max() / max(np.abs(wanted).max(), 1e-30))
            if not difference <= TOLERANCE:
                reason = f"the program differs from the class: {difference:.1e} of the largest logit for {n} tokens"
                raise Refusal(reason, _first_other(model, interpreter, ids))


def _first_other(model: Any, interpreter: Interpreter, ids: NDArray[np.int64]) -> str:
    """The module of the first linear or norm that gave something else than the interpreter's last run, in words."""
    theirs: dict[str, NDArray[np.float64]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, given: Any, result: Any) -> None:
            if isinstance(result, torch.Tensor) and result.shape[:2] == (1, len(ids)):  # a router gives rows alone
                theirs[name] = result[0].double().numpy().reshape(len(ids), -1)

        return hook

    modules = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "weight")}
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    with torch.no_grad():
        model(torch.from_numpy(ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    for op in (op for name, op in interpreter.spec["ops"] if name in ("linear", "rms_norm", "layer_norm")):
        mine, first = interpreter.values[op["out"][0]], 0
        weights = [interpreter.spec["weights"][weight] for weight in op["weights"][:1] if weight >= 0]
        for part in (part for weight in weights for part in weight["parts"]):
            other, width = theirs.get(part.name), part.rows if len(part.shape) > 1 else mine.shape[1]
            own = mine[:, first : first + width]
            first += width
            if other is None or other.shape != own.shape or part.inner not in (None, part.rows):
                continue
            if np.abs(own - other).max() > TOLERANCE * max(np.abs(other).max(), 1e-30):
                return f"{part.name.removesuffix('.weight')} ({type(modules[part.name]).__name__})"
    return ""


def _checkpoint(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint of this module."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tensor.detach().numpy() for name, tensor in found.items()}
