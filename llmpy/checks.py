"""Checks of arguments: numbers, bools, and unknown keywords."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import SupportsFloat, SupportsIndex, TypeGuard


def is_int(value: object) -> TypeGuard[SupportsIndex]:
    """Whether the value has __index__ and is not a bool."""
    return type(value) is int or (hasattr(type(value), "__index__") and type(value).__name__ not in ("bool", "bool_"))


def lone_surrogate(text: str) -> int | None:
    """Index of the first lone surrogate, which tokenizers cannot encode; None: the text is Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whether the value is an int or a float of any library, and not a bool."""
    return type(value) is float or (
        hasattr(type(value), "__float__") and type(value).__name__ not in ("bool", "bool_", "ndarray")
    )


def as_int(name: str, value: object) -> int:
    """The value as an int, or TypeError."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, but is of type {type(value).__name__}")
    return operator.index(value)


def as_float(name: str, value: object) -> float:
    """The value as a float, or TypeError."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, but is of type {type(value).__name__}")
    return float(value)


def as_bool(name: str, value: object) -> bool:
    """The value as a bool, or TypeError."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be a bool, but is of type {type(value).__name__}")
    return bool(value)


def check_label(label: int | str) -> int | str:
    """A label of weights, or TypeError."""
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise TypeError(f"version must be an int or a str, but is of type {type(label).__name__}")
    return label


def refuse_names(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first unknown keyword, with advice on another library's name or the nearest name here."""
    for name in unknown:
        from .advice import KEYWORDS, plain

        if name in KEYWORDS:
            hint = f" What to do: {plain(KEYWORDS[name])}."
        else:
            from difflib import get_close_matches

            near = get_close_matches(name, list(known), 1, cutoff=0.7)
            hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}.{hint}")


def frozen(value: object) -> object:
    """A hashable copy of a value of dicts, lists and plain values; equal values give equal copies."""
    if isinstance(value, Mapping):
        return frozenset((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    return value
