"""What the trace of a model keeps whole: attention, masks, experts and activations become nodes of their own.

transformers lets a model choose its functions for attention, masks and experts by name. This module registers ours, "llmpy".
They compute nothing: they are custom operators of torch, which a trace records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import activations
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.blocks import ACTIVATIONS
from .refusal import Refusal

NAME = "llmpy"
MASKS = ("causal", "window", "chunk")
NEAR = 40  # every pair of positions below is compared with a mask's rule

# Keyword arguments of attention functions that change no result here: there is no cache and no padding.
_HARMLESS = {
    "position_ids", "cache_position", "use_cache", "past_key_values", "past_key_value", "output_attentions", "return_dict",
    "output_hidden_states", "output_router_logits", "is_causal", "position_embeddings", "layer_idx", "sliding_window",
}  # fmt: skip

_library = torch.library.Library(NAME, "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? sinks, float scale, float softcap) -> Tensor")
_library.define("mask(Tensor like, int kind, int size) -> Tensor")
_library.define("experts(Tensor x, Tensor index, Tensor weights, str path) -> Tensor")
_library.define("act(Tensor x, str name) -> Tensor")
_results: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v, *rest: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]),
    "mask": lambda like, kind, size: like.new_empty(1),
    "experts": lambda x, index, weights, path: torch.empty_like(x),
    "act": lambda x, name: torch.empty_like(x),
}
for _name, _result in _results.items():
    torch.library.impl(_library, _name, "Meta")(_result)


def mask_of(rule: Callable[..., Any], sizes: list[int]) -> tuple[int, int] | None:
    """The kind of a mask (its number in MASKS) and its size, from the rule's answers for pairs of positions.

    Args:
        rule: transformers' function of batch, head, query and key.
        sizes: The integers of the configuration, one of which may be the size.

    Returns:
        None if the mask is none of MASKS.
    """
    far = {near for size in sizes for near in (*range(size - 4, size + 5), 2 * size)}
    positions = np.asarray(sorted({*range(NEAR), *far}))
    query, key = torch.from_numpy(positions)[:, None], torch.from_numpy(positions)[None]
    zero = torch.zeros((), dtype=torch.long)
    seen = torch.as_tensor(rule(zero, zero, query, key)).expand(len(positions), len(positions)).numpy()
    q, k = positions[:, None], positions[None]
    causal = k <= q
    if np.array_equal(seen, causal):
        return 0, 0
    for size in [*range(1, NEAR), *sorted({near for given in sizes for near in (given - 1, given, given + 1)})]:
        for kind, near in ((1, k > q - size), (2, k // size == q // size)):
            if np.array_equal(seen, causal & near):
                return kind, size
    return None


def _integers(value: object) -> set[int]:
    """All integers of a configuration that may be a mask's size."""
    if isinstance(value, dict):
        return set().union(*map(_integers, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_integers, value))
    return {value} if isinstance(value, int) and not isinstance(value, bool) and NEAR < value <= 1 << 24 else set()


_sizes: list[int] = []  # integers of the configuration of the model that is traced


def prepare(module: Any) -> None:
    """Sets our functions in a model. One model is traced at a time."""
    _sizes[:] = sorted(_integers(module.config.to_dict()))
    module.set_attn_implementation(NAME)
    for path, part in module.named_modules():
        part._llmpy_path = path
        if hasattr(part, "_apply_gate"):
            part.config._experts_implementation = NAME
        if (act := name_of_act(part)) is not None:
            part.forward = _act_as(act)


def _mask(*given: Any, mask_function: Any = None, device: Any = None, **rest: Any) -> Any:
    """The mask function of a traced model."""
    box: list[Any] = []

    def ask() -> None:
        try:
            box.append(mask_of(mask_function, _sizes))
        except Exception as error:  # the rule may read tensors of the trace
            box.append(error)

    thread = threading.Thread(target=ask)  # a new thread has no tracing modes
    thread.start()
    thread.join()
    if not isinstance(box[0], tuple):
        told = f": {box[0]}" if box[0] is not None else ""
        raise Refusal(f"a mask that is neither {', '.join(MASKS[:-1])} nor {MASKS[-1]}{told}")
    return torch.ops.llmpy.mask(torch.empty(1, device=device), *box[0])


def _attention(
    module: Any,
    q: Any,
    k: Any,
    v: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Any = None,
    **rest: Any,
) -> tuple[Any, None]:
    """The attention function of a traced model."""
    path = f"{module._llmpy_path} ({type(module).__name__})"
    for name, value in rest.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise Refusal(f"attention with {name}={str(value)[:60]}", path)
    if attention_mask is None:
        raise Refusal("attention without a mask", path)
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return torch.ops.llmpy.attention(q, k, v, attention_mask, s_aux, scale, float(softcap or 0)), None


def _experts(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The experts function of a traced model."""
    return torch.ops.llmpy.experts(hidden_states, top_k_index, top_k_weights, module._llmpy_path)


def _act_as(act: str) -> Callable[[Any], Any]:
    return lambda x: torch.ops.llmpy.act(x, act)


_CLASSES = {type(activations.ACT2FN[name]): name for name in reversed(ACTIVATIONS) if name in activations.ACT2FN}


def name_of_act(module: Any) -> str | None:
    """The name in configurations of an activation's module; None: not such a module, or one of unknown options."""
    name = _CLASSES.get(type(module))
    if name is None:
        return None
    usual = activations.ACT2FN[name]
    plain = {key: value for key, value in vars(usual).items() if not key.startswith("_") and key != "training"}
    own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key in plain}
    same = [key for key, value in plain.items() if own.get(key) == value or callable(value)]
    return name if len(same) == len(plain) else None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
ExpertsInterface.register(NAME, _experts)
