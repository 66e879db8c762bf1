"""What counts as a number in arguments, and which name a caller may have meant."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import SupportsFloat, SupportsIndex, TypeGuard

# Names from other libraries, and what they are called here.
EQUIVALENTS = {
    "swap_space": "host_cache_bytes",
    "task": "call embed()",
    "device_map": "device",
    "torch_dtype": "dtype",
    "max_new_tokens": "max_tokens",
    "do_sample": "temperature=0 is greedy",
    "prompt_token_ids": "pass lists of ids as prompts",
    "logits_processors": "there are no Python logits processors: use logit_bias, allowed_token_ids or bad_words",
    "best_of": "n",
    "guided_decoding": "structured_outputs",
    "use_beam_search": "call beam_search()",
    "stop_strings": "stop",
    "cpu_cores": "the variable LLMPY_NUM_THREADS",
    "max_seq_len": "max_model_len",
}


def is_int(value: object) -> TypeGuard[SupportsIndex]:
    """Whether the value has __index__ and is no bool."""
    return type(value) is int or (hasattr(type(value), "__index__") and type(value).__name__ not in ("bool", "bool_"))


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whether the value is an int or a float of any library, and no bool."""
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


def refuse_names(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first unknown keyword, with the name that may have been meant."""
    for name in unknown:
        hint = EQUIVALENTS.get(name)
        if hint is None:
            from difflib import get_close_matches

            hint = next(iter(get_close_matches(name, list(known), 1)), None)
        advice = f" Did you mean: {hint}?" if hint else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}.{advice}")
