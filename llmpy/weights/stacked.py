"""Maps names of transformers 5 models in memory (stacked experts, renamed modules) to names of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

_MODULES = (  # in memory, in checkpoints
    ("", ""),
    (".mlp.", ".block_sparse_moe."),
    (".router.weight", ".router.layer.weight"),
    (".gate.moe_statics.", ".moe_statics."),
    ("model.", "backbone."),
    ("lm_head.", "embed_out."),
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
)
_WHOLE = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
_EACH = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}

Item = tuple[str, int, str, Sequence[int], Sequence[int] | None]


class Place(NamedTuple):
    """The place of a checkpoint tensor inside a tensor in memory.

    Attributes:
        name: Name in the checkpoint.
        expert: Index of the expert; None: the whole tensor.
        part, parts: Index and number of equal parts of the expert's rows.
    """

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


def places(name: str, knows: Callable[[str], bool]) -> list[Place]:
    """The checkpoint tensors of a name in memory; the name itself if no mapping is known."""
    for old, new in _MODULES:
        found = name.replace(old, new, 1) if old else name
        if knows(found):
            return [Place(found)]
        stem, _, kind = found.rpartition(".experts.")
        if not stem or kind not in _EACH:
            continue
        if knows(f"{stem}.{_WHOLE.get(kind)}"):
            return [Place(f"{stem}.{_WHOLE[kind]}")]
        for parts in _EACH[kind]:
            each = list(_experts(f"{stem}.experts", parts, knows))
            if each:
                return each
    return [Place(name)]


def _experts(stem: str, parts: Sequence[str], knows: Callable[[str], bool]) -> Iterator[Place]:
    """The tensors of all experts that the checkpoint has."""
    expert = 0
    while knows(f"{stem}.{expert}.{parts[0]}.weight"):
        for part, name in enumerate(parts):
            yield Place(f"{stem}.{expert}.{name}.weight", expert, part, len(parts))
        expert += 1


def slices(name: str, tensor: Any, knows: Callable[[str], bool]) -> list[tuple[str, Any]]:
    """The checkpoint tensors in a tensor in memory, as views of it."""
    found = places(name, knows)
    if found[0].expert is None or len(tensor) * found[0].parts != len(found):
        return [(found[0].name if found[0].expert is None else name, tensor)]
    rows = tensor.shape[1] // found[0].parts
    return [(one.name, tensor[one.expert][one.part * rows : (one.part + 1) * rows]) for one in found]


def memory_slices(item: Item, item_bytes: int, knows: Callable[[str], bool]) -> list[Item]:
    """Like `slices`, for a tensor at an address with contiguous rows."""
    name, address, dtype, shape, strides = item
    found = places(name, knows)
    if found[0].expert is None:
        return [(found[0].name, address, dtype, shape, strides)]
    if len(shape) != 3 or shape[0] * found[0].parts != len(found):
        return [item]
    if strides is not None and tuple(strides) != (shape[1] * shape[2], shape[2], 1):
        return [item]
    rows = shape[1] // found[0].parts
    size = prod((rows, shape[2])) * item_bytes
    return [(one.name, address + number * size, dtype, (rows, shape[2]), None) for number, one in enumerate(found)]
