"""Brings the operations of a walked program into the form of hand-written ones: neighbouring linears are one matrix, and the
rotations of a layer's queries and keys are one operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from ..models.program import Operands, Spec
from .refusal import Refusal

Op = tuple[str, Operands]


def tidy(spec: Spec) -> None:
    """Changes a program in place; Refusal if a rotation remains alone."""
    _join_linears(spec)
    spec["ops"] = _pair_ropes(spec["ops"])
    _leave_out_unused(spec)


# ---- linears ---------------------------------------------------------------------------------------------------------------


def _join_linears(spec: Spec) -> None:
    """Makes one matrix of linears that read the same value and belong to the same module, as q, k and v or gate and up."""
    uses = Counter(number for _, op in spec["ops"] for number in op["weights"])
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, (name, op) in enumerate(spec["ops"]):
        if name == "linear" and all(uses[weight] == 1 for weight in op["weights"]):
            parts = spec["weights"][op["weights"][0]]["parts"]
            module = parts[0].name.rsplit(".", 2)[0] if parts else ""
            groups[op["in"][0], len(op["weights"]), module].append(number)
    for members in groups.values():
        if len(members) > 1:
            _join(spec, members)
    spec["ops"] = [(name, op) for name, op in spec["ops"] if name != "joined"]


def _join(spec: Spec, members: list[int]) -> None:
    """Gives the first of some linears the rows of all; the outputs become columns of its output."""
    ops = [spec["ops"][number][1] for number in members]
    for i, first in enumerate(ops[0]["weights"]):
        others = [spec["weights"][op["weights"][i]] for op in ops]
        joined = others[0].copy()
        joined["parts"] = [part for one in others for part in one["parts"]]
        joined["rows"] = sum(one["rows"] for one in others)
        spec["weights"][first] = joined
    outs = [op["out"][0] for op in ops]
    whole = _insert_value(spec, min(outs), sum(spec["values"][out][0] for out in outs))
    offset = 0
    for op in ops:
        out = op["out"][0]
        width = spec["values"][out][0]
        for number, (own, of, start) in enumerate(spec["values"]):
            if of == out:
                spec["values"][number] = (own, whole, offset + start)
        spec["values"][out] = (width, whole, offset)
        offset += width
    ops[0]["out"] = [whole]
    for number in members[1:]:
        spec["ops"][number] = ("joined", spec["ops"][number][1])


def _insert_value(spec: Spec, place: int, width: int) -> int:
    """Adds a value before the number `place`; the numbers from there on grow by one."""

    def moved(number: int) -> int:
        return number + (number >= place)

    values = [(own, moved(of) if of >= 0 else of, start) for own, of, start in spec["values"]]
    spec["values"] = [*values[:place], (width, -1, 0), *values[place:]]
    for _, op in spec["ops"]:
        op["in"], op["out"] = [moved(each) for each in op["in"]], [moved(each) for each in op["out"]]
    return place


# ---- rotations -------------------------------------------------------------------------------------------------------------


def _pair_ropes(ops: list[Op]) -> list[Op]:
    """Makes one operation of two rotations of one value each, with everything that the second one reads before it."""
    alone = [number for number, (name, op) in enumerate(ops) if name == "rope" and len(op["in"]) == 1]
    if not alone:
        return ops
    first = alone[0]
    given = ops[first][1]["attributes"]
    second = next((number for number in alone[1:] if ops[number][1]["attributes"] == given), None)
    if second is None:
        raise Refusal("a rotation of queries or keys alone")
    needed = _producers(ops, first, second)
    a, b = ops[first][1], ops[second][1]
    both: Operands = {"in": a["in"] + b["in"], "out": a["out"] + b["out"], "weights": [], "attributes": given}
    rest = [op for number, op in enumerate(ops[first + 1 :], first + 1) if number not in needed and number != second]
    return _pair_ropes([*ops[:first], *(ops[number] for number in needed), ("rope", both), *rest])


def _producers(ops: list[Op], first: int, second: int) -> list[int]:
    """The operations after the first one from which the second one's inputs come."""
    wanted, needed = set(ops[second][1]["in"]), []
    for number in range(second - 1, first - 1, -1):
        op = ops[number][1]
        if wanted & set(op["out"]):
            if number == first:
                raise Refusal("a rotation of rotated values")
            wanted |= set(op["in"])
            needed.append(number)
    return needed[::-1]


# ---- weights ---------------------------------------------------------------------------------------------------------------


def _leave_out_unused(spec: Spec) -> None:
    """Removes weights that no operation reads."""
    used = sorted({number for _, op in spec["ops"] for number in op["weights"] if number >= 0})
    numbers: dict[Any, int] = {old: new for new, old in enumerate(used)} | {-1: -1}
    spec["weights"] = [spec["weights"][number] for number in used]
    for _, op in spec["ops"]:
        op["weights"] = [numbers[number] for number in op["weights"]]
