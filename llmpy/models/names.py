"""Names of a program's values for `LLM.tap`: the names of the modules that compute them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .program import Operands, Spec

LOGITS = -1  # logits are not a value of the program
_LAYER = re.compile(r"(.*?\.\d+)\.")
_KINDS = (".weight", ".bias")


class Named(NamedTuple):
    """A value with a name.

    Attributes:
        name: Name in `LLM.tap`.
        value: Number of the value; -1: the logits.
        op: Number of the operation that writes the value.
    """

    name: str
    value: int
    op: int


def module_of(tensor: str) -> str:
    """The module of a tensor: its name without ".weight"."""
    kind = next((kind for kind in _KINDS if tensor.endswith(kind)), "")
    return tensor.removesuffix(kind)


def of_program(spec: Spec) -> list[Named]:
    """Names every value that an operation writes, in the order of the operations.

    | Value | Name |
    |---|---|
    | output of an operation with weights | its module |
    | output of an operation without weights | layer and operation, "model.layers.3.attention" |
    | a later one of the same name | the name and a number, "model.layers.3.add.2" |
    | parts of one matrix | the module of each part |
    | output of a layer | the layer |
    """
    found: list[Named] = []
    taken: dict[str, int] = {}
    owners, last = _owners(spec), -1

    def put(name: str, value: int, op: int) -> None:
        taken[name] = taken.get(name, 0) + 1
        found.append(Named(name if taken[name] == 1 else f"{name}.{taken[name]}", value, op))

    for number, ((kind, op), layer) in enumerate(zip(spec["ops"], owners, strict=True)):
        if number and owners[number - 1] not in ("", layer):
            put(owners[number - 1], last, number - 1)
        if kind == "logits":
            put("logits", LOGITS, number)
        elif op["out"]:
            last = op["out"][0]
            for name, value in _outputs(spec, kind, op, layer):
                put(name, value, number)
    return found


def of_tower(spec: Spec) -> list[Named]:
    """Names the values of a program's tower, whose numbers follow those of the program.

    They are the names of modules, as above. A value that no module or layer makes is named "image." and its operation.
    """
    towers = spec.get("towers")
    if not towers:
        return []
    first, found = len(spec["values"]), of_program({**towers["image"], "weights": spec["weights"]})
    return [one._replace(name=one.name if "." in one.name else f"image.{one.name}", value=first + one.value) for one in found]


def _tensors(spec: Spec, op: Operands) -> list[str]:
    """Names of the tensors of an operation's first weight."""
    return [part[0] for weight in op["weights"][:1] if weight >= 0 for part in spec["weights"][weight]["parts"]]


def _owners(spec: Spec) -> list[str]:
    """The layer of every operation, "" outside of layers. An operation without tensors is in the layer of the operation before
    it; a norm without tensors is in the layer of the next operation with tensors."""
    owners: list[str | None] = []
    for kind, op in spec["ops"]:
        tensors = _tensors(spec, op)
        inside = _LAYER.match(tensors[0]) if tensors else None
        is_outside = kind in ("logits", "states")
        owners.append("" if is_outside or (tensors and not inside) else inside[1] if inside else None)
    known = ""
    for number in reversed(range(len(owners))):
        known = known if owners[number] is None else owners[number] or ""
        if spec["ops"][number][0] in ("rms_norm", "layer_norm"):
            owners[number] = known
    for number in range(len(owners)):
        if owners[number] is None:
            owners[number] = owners[number - 1] if number else ""
    return [owner or "" for owner in owners]


def _outputs(spec: Spec, kind: str, op: Operands, layer: str) -> list[tuple[str, int]]:
    """Names and numbers of an operation's outputs."""
    tensors = _tensors(spec, op)
    own = f"{layer}.{kind}" if layer else kind
    if kind == "route":
        return []  # pairs of expert and weight are not activations
    if kind == "rope":
        return [(f"{own}.q", op["out"][0]), (f"{own}.k", op["out"][1])]
    modules = list(dict.fromkeys(module_of(tensor) for tensor in tensors))
    if kind != "linear" or len(modules) == 1:
        return [(modules[0] if len(modules) == 1 else own, op["out"][0])]
    rows = [part[2] for part in spec["weights"][op["weights"][0]]["parts"]]
    named, start = [("|".join(modules), op["out"][0])], 0
    for module, width in zip(modules, rows, strict=True):
        columns = (width, op["out"][0], start)
        named += [(module, value) for value, where in enumerate(spec["values"]) if where == columns][:1]
        start += width
    return named


def find(spec: Spec, wanted: str | int, named: Mapping[str, Named]) -> int:
    """Finds a value by its name or by the number of its operation.

    Raises:
        KeyError: there is no such value; the text shows the nearest names.
    """
    if isinstance(wanted, int):
        if not 0 <= wanted < len(spec["ops"]) or not (spec["ops"][wanted][1]["out"] or spec["ops"][wanted][0] == "logits"):
            raise KeyError(f"operation {wanted} makes no value; they are numbered from 0 to {len(spec['ops']) - 1}")
        outs = spec["ops"][wanted][1]["out"]
        return outs[0] if outs else LOGITS
    if wanted not in named:
        from difflib import get_close_matches

        if any(letter in wanted for letter in "*?["):
            raise KeyError(f"{wanted!r} is a pattern, wanted names: LLM.tap_names({wanted!r}) gives those that it fits")
        near = ", ".join(get_close_matches(wanted, named, n=3, cutoff=0.0))
        raise KeyError(f"no value is called {wanted!r}; nearest: {near}. LLM.tap_names() has them all")
    return named[wanted].value


def width(spec: Spec, value: int) -> int:
    """Columns of a value, also of a tower's."""
    if value == LOGITS:
        return spec["vocab_size"]
    first = len(spec["values"])
    return spec["values"][value][0] if value < first else spec["towers"]["image"]["values"][value - first][0]
