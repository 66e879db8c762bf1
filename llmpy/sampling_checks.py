"""What the table of sampling parameters is made of: forms, which check types, and rules, which check values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .checks import as_int, is_int, is_number, lone_surrogate
from .errors import InvalidRequestError, UnsupportedError

Form = Callable[[str, Any], Any]
"""Returns the plain form of a field's value (int, float, bool, tuple, dict), or raises TypeError."""
Rule = Callable[[str, dict[str, Any]], None]
"""Raises unless the named field of all fields, which have their plain forms, has a good value."""

LOGPROBS_MODES = ("raw_logprobs", "full_logprobs", "processed_logprobs")
LATER_MODES = ("raw_logits", "processed_logits")
_BIAS = 1e20  # logits are float32: within this bound no finite logit becomes infinite, whatever the other parameters are


class Row(NamedTuple):
    """A row of the table of sampling parameters.

    Args:
        form: Checks the type.
        rules: Check the value.
        off: Values without an effect; a server's path that lacks the field passes over them.
        key: The parameter's name in generation_config.json; "" = the file does not set it.
        is_plain: Whether the core takes the value as it is.
    """

    form: Form
    rules: tuple[Rule, ...]
    off: tuple[Any, ...]
    key: str
    is_plain: bool


def row(form: Form, *rules: Rule, off: tuple[Any, ...] = (), key: str = "", plain: bool = False) -> dict[str, Row]:
    """A row, as metadata of a dataclass field."""
    return {"row": Row(form, rules, off, key, plain)}


def check(values: dict[str, Any], rows: Mapping[str, Row]) -> None:
    """Checks all types and then all values, each in the order of the table, and stores the plain forms.

    Raises:
        TypeError, InvalidRequestError, UnsupportedError: The first failure.
    """
    for name, one in rows.items():
        values[name] = one.form(name, values[name])
    for name, one in rows.items():
        for rule in one.rules:
            rule(name, values)


# ---- forms ---------------------------------------------------------------------------------------------------------------


def anything(name: str, value: object) -> object:
    """The value itself."""
    return value


def optional_int(name: str, value: object) -> int | None:
    """None or an int."""
    return None if value is None else as_int(name, value)


def int_or_drawn(name: str, value: object) -> int | None:
    """None or an int; -1 is None."""
    number = optional_int(name, value)
    return None if number == -1 else number


def logprob_count(name: str, value: object) -> int | None:
    """None or an int; True is 1."""
    return 1 if value is True else optional_int(name, value)


def integer(name: str, value: object) -> int:
    """An int; `as_int` with the text that code written for vLLM knows of `top_k`."""
    if not is_int(value):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    return operator.index(value)


def strings(name: str, value: object) -> tuple[str, ...]:
    """Strings as a tuple; None is none."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of strings, but is of type {type(value).__name__}")
    found = tuple(value)
    for item in found:
        if not isinstance(item, str):
            raise TypeError(f"{name} must contain only strings, but has one of type {type(item).__name__}")
    return found


def string_or_strings(name: str, value: object) -> tuple[str, ...]:
    """A string, or strings, as a tuple."""
    return (value,) if isinstance(value, str) else strings(name, value)


def some_ids(name: str, value: object) -> object:
    """Something with elements, or None; `integers` checks the elements."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable | None):
        raise TypeError(f"{name} must be a list of ints, but is of type {type(value).__name__}")
    return value


def mapping(name: str, value: object) -> object:
    """A mapping or None."""
    if not (value is None or isinstance(value, Mapping)):
        raise TypeError(f"{name} must be a dict, but is of type {type(value).__name__}")
    return value


def structured(name: str, value: object) -> object:
    """StructuredOutputsParams, or None."""
    if value is None:
        return None
    from .structured.params import StructuredOutputsParams

    if isinstance(value, Mapping):
        return StructuredOutputsParams(**value)
    if not isinstance(value, StructuredOutputsParams):
        raise TypeError(f"{name} must be StructuredOutputsParams, but is of type {type(value).__name__}")
    return value


# ---- rules ---------------------------------------------------------------------------------------------------------------


def _bad(name: str, value: object, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter=name, value=value)


def must(test: Callable[[Any], bool], wanted: str, advice: str = "") -> Rule:
    """The value is None or passes the test."""

    def rule(name: str, values: dict[str, Any]) -> None:
        value = values[name]
        if value is not None and not test(value):
            raise _bad(name, value, f"{name} must {wanted}, got {value}.{advice}")

    return rule


def at_least(low: int, advice: str = "") -> Rule:
    """The value is None or not below a bound."""
    return must(lambda value: value >= low, f"be at least {low}", advice)


def within(low: float, high: float) -> Rule:
    """The value lies between two bounds or is one of them."""
    return must(lambda value: low <= value <= high, f"be in [{low:g}, {high:g}]")


finite = must(math.isfinite, "be a finite number")


def only(default: object) -> Rule:
    """The parameter is not supported yet: the value is its default."""

    def rule(name: str, values: dict[str, Any]) -> None:
        if values[name] != default:
            raise UnsupportedError(f"SamplingParams({name}=...) is not supported yet; leave it at {default!r}")

    return rule


def at_most_max_tokens(name: str, values: dict[str, Any]) -> None:
    """The value is not above `max_tokens`."""
    most = values["max_tokens"]
    if most is not None and values[name] > most:
        raise _bad(name, values[name], f"{name} must be less than or equal to max_tokens={most}, got {values[name]}.")


def agrees_with_ids(name: str, values: dict[str, Any]) -> None:
    """The value is the number of `logprob_token_ids`, if there are some."""
    ids = values["logprob_token_ids"]
    if ids is not None and values[name] is not None and values[name] != len(list(ids)):
        message = "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids)."
        raise _bad(name, values[name], message)


def known_mode(name: str, values: dict[str, Any]) -> None:
    """The value is None or a mode of logprobs."""
    mode = values[name]
    if mode in LATER_MODES:
        raise UnsupportedError(f"{name}={mode!r} is not supported yet; use 'raw_logprobs'")
    if not (mode is None or mode in LOGPROBS_MODES):
        raise _bad(name, mode, f"{name} must be one of {', '.join(LOGPROBS_MODES)}, got {mode}.")


def not_whole_vocabulary(name: str, values: dict[str, Any]) -> None:
    """The value is not -1."""
    if values[name] == -1:
        raise UnsupportedError(f"{name}=-1 (the whole vocabulary) is not supported yet; ask for a number")


def _ids(name: str, value: Iterable[object]) -> tuple[int, ...]:
    found = tuple(value)
    for item in found:
        if not is_int(item):
            raise _bad(name, item, f"{name} must contain only integers, got {item!r}.")
    return tuple(operator.index(item) for item in found)  # type: ignore[arg-type]


def integers(name: str, values: dict[str, Any]) -> None:
    """The elements are ints. The value becomes a tuple; None stays None."""
    if values[name] is not None:
        values[name] = _ids(name, values[name])


def no_ids_for_none(name: str, values: dict[str, Any]) -> None:
    """None becomes an empty tuple."""
    values[name] = values[name] or ()


def sequences_of_integers(name: str, values: dict[str, Any]) -> None:
    """The elements are sequences of ints, and none is empty. The value becomes a tuple of tuples."""
    found = tuple(_ids(name, item if isinstance(item, Iterable) else (None,)) for item in values[name] or ())
    values[name] = found
    if not all(found):
        raise _bad(name, found, f"{name} cannot contain an empty sequence, got {found}.")


def stops(name: str, values: dict[str, Any]) -> None:
    """No string is empty, and text is made if there are strings."""
    if not all(values[name]):
        raise _bad(name, values[name], f"{name} cannot contain an empty string.")
    if values[name] and not values["detokenize"]:
        message = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
        raise _bad(name, values[name], message)


def words(name: str, values: dict[str, Any]) -> None:
    """Each string is Unicode text and not empty."""
    if not all(values[name]):
        given = list(values[name])
        raise _bad(name, given, f"{name} cannot contain an empty string. Got {name}={given}")
    for word in values[name]:
        if lone_surrogate(word) is not None:
            raise _bad(name, word, f"{name} must be Unicode text, but {word!r} holds half a surrogate pair.")


def not_empty(name: str, values: dict[str, Any]) -> None:
    """The value is None or has elements."""
    if values[name] is not None and not values[name]:
        raise _bad(name, values[name], f"{name} is not None and empty!")


def biases(name: str, values: dict[str, Any]) -> None:
    """The keys are ids, or their texts; the numbers are -inf or within the bounds. The value becomes a dict."""
    if values[name] is None:
        return
    bias = values[name] = _bias(name, values[name])
    for token, number in bias.items():
        if not (math.isfinite(number) or number == -math.inf):
            raise _bad(name, number, f"{name} values must be finite or -inf, got {number} for token {token}.")
        if abs(number) > _BIAS and number != -math.inf:
            wanted = f"-inf, which bans the token, or in [{-_BIAS:g}, {_BIAS:g}]"
            raise _bad(name, number, f"{name} values must be {wanted}, got {number} for token {token}.")


def _bias(name: str, given: Mapping[object, object]) -> dict[int, float]:
    bias: dict[int, float] = {}
    wrong = []
    for key, value in given.items():
        try:
            token = operator.index(key) if is_int(key) else int(key) if isinstance(key, str) else None
        except ValueError:
            token = None
        if token is None:
            wrong.append(key)
            continue
        if not is_number(value):
            raise TypeError(f"{name} values must be numbers, but is of type {type(value).__name__} for token {token}")
        bias[token] = float(value)
    if wrong:
        raise _bad(name, wrong, f"{name} contains key(s) that cannot be converted to integer token IDs: {wrong}")
    return bias
