"""The checks of SamplingParams: types first, then values, in one order; the first failure is raised."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .checks import as_bool, as_float, as_int, is_int, is_number, lone_surrogate
from .errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from .sampling_params import SamplingParams

_FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_BOOLS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "routed_experts",
)
_LATER = {
    "prompt_logprobs_start": 0,
    "logprob_token_ids": None,
    "stream_interval": 1,
    "routed_experts": False,
    "repetition_detection": None,
    "thinking_token_budget": None,
    "extra_args": None,
}
# Logits are float32. Within these bounds no finite logit becomes infinite, whatever the other parameters are.
_REPETITION = (1e-6, 1e6)
_BIAS = 1e20
_LATER_MODES = ("raw_logits", "processed_logits")


def check(params: SamplingParams) -> None:
    """Checks all fields and stores them in their plain forms: int, float, bool, tuple, dict."""
    values = params.__dict__
    _check_types(values)
    _check_numbers(values)
    _check_logprobs(values)
    _check_ids_and_strings(values)
    _check_masks(values)
    if values["n"] != 1 and params.is_greedy:
        raise _bad("n", values["n"], "n must be 1 when using greedy sampling, got {}.")
    _require(values, "seed", lambda seed: seed is None or 0 <= seed < 2**64, "must be in [0, 2**64), got {}.")
    _require(values, "sample_index", lambda index: index >= 0, "must be at least 0, got {}.")
    _require(values, "sample_index", lambda index: index <= 2**31, "must be at most 2**31, got {}.")
    for name, default in _LATER.items():
        if values[name] != default:
            raise UnsupportedError(f"SamplingParams({name}=...) is not supported yet; leave it at {default!r}")


def _bad(name: str, value: object, message: str) -> InvalidRequestError:
    return InvalidRequestError(message.format(value), parameter=name, value=value)


def _require(values: dict[str, Any], name: str, test: Any, message: str) -> None:
    """Raises InvalidRequestError unless the field passes the test."""
    if not test(values[name]):
        raise _bad(name, values[name], f"{name} {message}")


def _check_types(values: dict[str, Any]) -> None:
    values["n"] = as_int("n", values["n"])
    for name in _FLOATS:
        values[name] = as_float(name, values[name])
    if not is_int(values["top_k"]):
        raise TypeError(f"top_k must be an integer, got {type(values['top_k']).__name__}")
    values["top_k"] = operator.index(values["top_k"])
    for name in ("min_tokens", "sample_index", "prompt_logprobs_start", "stream_interval"):
        values[name] = as_int(name, values[name])
    for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
        if values[name] is True and name in ("logprobs", "prompt_logprobs"):
            values[name] = 1
        elif values[name] is not None:
            values[name] = as_int(name, values[name])
    if values["seed"] == -1:
        values["seed"] = None
    for name in _BOOLS:
        values[name] = as_bool(name, values[name])
    values["stop"] = _strings("stop", values["stop"])
    values["bad_words"] = _strings("bad_words", values["bad_words"], alone=False)
    if not (values["logit_bias"] is None or isinstance(values["logit_bias"], Mapping)):
        raise TypeError(f"logit_bias must be a dict, but is of type {type(values['logit_bias']).__name__}")
    values["output_kind"] = _kind(values["output_kind"])
    values["structured_outputs"] = _structured(values["structured_outputs"])
    for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logprob_token_ids"):
        if isinstance(values[name], str | bytes) or not isinstance(values[name], Iterable | None):
            raise TypeError(f"{name} must be a list of ints, but is of type {type(values[name]).__name__}")


def _strings(name: str, value: object, alone: bool = True) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        if alone:
            return (value,)
        raise TypeError(f"{name} must be a list of strings, but is of type str")
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of strings, but is of type {type(value).__name__}")
    found = tuple(value)
    for item in found:
        if not isinstance(item, str):
            raise TypeError(f"{name} must contain only strings, but has one of type {type(item).__name__}")
    return found


def _structured(value: object) -> object:
    if value is None:
        return None
    from .structured.params import StructuredOutputsParams

    if isinstance(value, Mapping):
        return StructuredOutputsParams(**value)
    if not isinstance(value, StructuredOutputsParams):
        raise TypeError(f"structured_outputs must be StructuredOutputsParams, but is of type {type(value).__name__}")
    return value


def _kind(value: object) -> object:
    from .sampling_params import RequestOutputKind

    if isinstance(value, str) and value in RequestOutputKind.__members__:
        return RequestOutputKind[value]
    if not isinstance(value, RequestOutputKind):
        raise TypeError(f"output_kind must be a RequestOutputKind, but is of type {type(value).__name__}")
    return value


def _check_numbers(values: dict[str, Any]) -> None:
    _require(values, "n", lambda n: n >= 1, "must be at least 1, got {}.")
    _require(values, "n", lambda n: n <= 16384, "must be at most 16384, got {}.")
    for name in ("presence_penalty", "frequency_penalty"):
        _require(values, name, lambda penalty: -2 <= penalty <= 2, "must be in [-2, 2], got {}.")
    _require(values, "repetition_penalty", math.isfinite, "must be a finite number, got {}.")
    _require(values, "repetition_penalty", lambda penalty: penalty > 0, "must be greater than zero, got {}.")
    low, high = _REPETITION
    _require(values, "repetition_penalty", lambda penalty: low <= penalty <= high, f"must be in [{low:g}, {high:g}], got {{}}.")
    _require(values, "temperature", math.isfinite, "must be a finite number, got {}.")
    _require(values, "temperature", lambda temperature: temperature >= 0, "must be non-negative, got {}.")
    _require(values, "top_p", lambda top_p: 0 < top_p <= 1, "must be in (0, 1], got {}.")
    _require(values, "top_k", lambda top_k: top_k >= -1, "must be 0 (disable), or at least 1, got {}.")
    _require(values, "min_p", lambda min_p: 0 <= min_p <= 1, "must be in [0, 1], got {}.")
    short = "must be at least 1, got {}. To score a prompt without generating, call score()."
    _require(values, "max_tokens", lambda most: most is None or most >= 1, short)
    _require(values, "min_tokens", lambda least: least >= 0, "must be greater than or equal to 0, got {}.")
    most = values["max_tokens"]
    if most is not None and values["min_tokens"] > most:
        raise _bad("min_tokens", values["min_tokens"], f"min_tokens must be less than or equal to max_tokens={most}, got {{}}.")


def _check_logprobs(values: dict[str, Any]) -> None:
    from .sampling_params import LOGPROBS_MODES

    for name in ("logprobs", "prompt_logprobs"):
        _require(values, name, lambda count: count is None or count >= -1, "must be non-negative or -1, got {}.")
    ids = values["logprob_token_ids"]
    if ids is not None and values["logprobs"] is not None and values["logprobs"] != len(list(ids)):
        message = "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids)."
        raise _bad("logprobs", values["logprobs"], message)
    mode = values["logprobs_mode"]
    if not (mode is None or mode in LOGPROBS_MODES):
        usable = [name for name in LOGPROBS_MODES if name not in _LATER_MODES]
        raise _bad("logprobs_mode", mode, f"logprobs_mode must be one of {', '.join(usable)}, got {{}}.")
    if mode in _LATER_MODES:
        raise UnsupportedError(f"logprobs_mode={mode!r} is not supported yet; use 'raw_logprobs'")
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] == -1:
            raise UnsupportedError(f"{name}=-1 (the whole vocabulary) is not supported yet; ask for a number")


def _ids(name: str, value: Iterable[object]) -> tuple[int, ...]:
    found = tuple(value)
    for item in found:
        if not is_int(item):
            raise _bad(name, item, f"{name} must contain only integers, got {{!r}}.")
    return tuple(operator.index(item) for item in found)  # type: ignore[arg-type]


def _check_ids_and_strings(values: dict[str, Any]) -> None:
    values["stop_token_ids"] = _ids("stop_token_ids", values["stop_token_ids"] or ())
    if values["allowed_token_ids"] is not None:
        values["allowed_token_ids"] = _ids("allowed_token_ids", values["allowed_token_ids"])
    sequences = [
        _ids("bad_token_ids", item if isinstance(item, Iterable) else (None,)) for item in values["bad_token_ids"] or ()
    ]
    values["bad_token_ids"] = tuple(sequences)
    _require(values, "bad_token_ids", all, "cannot contain an empty sequence, got {}.")
    _require(values, "stop", all, "cannot contain an empty string.")
    if values["stop"] and not values["detokenize"]:
        message = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
        raise _bad("stop", values["stop"], message)
    if not all(values["bad_words"]):
        words = list(values["bad_words"])
        raise _bad("bad_words", words, "bad_words cannot contain an empty string. Got bad_words={}")
    for word in values["bad_words"]:
        if lone_surrogate(word) is not None:
            raise _bad("bad_words", word, "bad_words must be Unicode text, but {!r} holds half a surrogate pair.")


def _check_masks(values: dict[str, Any]) -> None:
    if values["logit_bias"] is not None:
        values["logit_bias"] = _bias(values["logit_bias"])
    allowed = values["allowed_token_ids"]
    if allowed is not None and not allowed:
        raise _bad("allowed_token_ids", allowed, "allowed_token_ids is not None and empty!")


def _bias(given: Mapping[object, object]) -> dict[int, float]:
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
            raise TypeError(f"logit_bias values must be numbers, but is of type {type(value).__name__} for token {token}")
        bias[token] = float(value)
    if wrong:
        message = "logit_bias contains key(s) that cannot be converted to integer token IDs: {}"
        raise _bad("logit_bias", wrong, message)
    for token, number in bias.items():
        if not (math.isfinite(number) or number == -math.inf):
            raise _bad("logit_bias", number, f"logit_bias values must be finite or -inf, got {{}} for token {token}.")
        if abs(number) > _BIAS and number != -math.inf:
            wanted = f"-inf, which bans the token, or in [{-_BIAS:g}, {_BIAS:g}]"
            raise _bad("logit_bias", number, f"logit_bias values must be {wanted}, got {{}} for token {token}.")
    return bias
