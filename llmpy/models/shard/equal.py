"""Which operations of ranks' programs give the same values on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Spec


def equal_operations(specs: Sequence[Spec]) -> list[int]:
    """For each operation 1 if all ranks have the same values in all columns of its outputs, else 0.

    Gathers give such values, and so do operations without a difference between ranks on such inputs. Not all such operations
    are found: a value that is gathered in parts counts once all of its parts are there.

    Args:
        specs: The program of each rank.
    """
    values = specs[0]["values"]
    alike = [len(set(each)) == 1 for each in zip(*(spec["values"] for spec in specs), strict=True)]
    same_weight = [all(one == each[0] for one in each) for each in zip(*(spec["weights"] for spec in specs), strict=True)]
    equal: set[int] = set()
    gathered: dict[int, int] = {}  # columns of a value that have been gathered in parts
    found = []

    def is_equal(value: int) -> bool:
        while value >= 0 and alike[value]:
            if value in equal:
                return True
            value = values[value][1]
        return False

    for number, (name, op) in enumerate(specs[0]["ops"]):
        each = [spec["ops"][number][1]["attributes"] for spec in specs]
        same = all(one == each[0] for one in each) and all(same_weight[weight] for weight in op["weights"] if weight >= 0)
        same = same and all(is_equal(value) for value in op["in"] if value >= 0)
        found.append(int((same or name == "gather") and all(alike[value] for value in op["out"] if value >= 0)))
        if not found[-1]:
            continue
        for value in op["out"]:
            equal.add(value)
            width, of, _ = values[value]
            if name == "gather" and of >= 0:
                gathered[of] = gathered.get(of, 0) + width
                if gathered[of] == values[of][0]:
                    equal.add(of)
    return found
