"""The option `speculative_config`: which source proposes drafts, and how many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..checks import refuse_names
from ..errors import ConfigError
from ..options import integer, parse_size, refuse, text

if TYPE_CHECKING:
    from ..config import EngineConfig

NAME = "speculative_config"
HEADS = ("eagle", "eagle3", "mtp", "medusa")
"""Methods whose drafter is a head on the hidden states of the model."""
METHODS = ("ngram", "suffix", "draft", *HEADS)
WITH_MODEL = ("draft", "eagle", "eagle3", "medusa")
"""Methods whose drafter has files of its own."""
VLLM_METHODS = {"draft_model": "draft"}
VLLM_KEYS = {"num_speculative_tokens": "k", "prompt_lookup_min": "min", "prompt_lookup_max": "max"}
MOST_DRAFTS, LONGEST_MATCH, MOST_LENGTHS = 16, 32, 8
SHARED_BYTES = 64 << 20
"""Memory for finished outputs with `shared=True`."""


def _count(name: str, value: object) -> object:
    return value if value == "auto" else integer(1, MOST_DRAFTS)(name, value)


def _shared(name: str, value: object) -> int:
    return SHARED_BYTES * value if isinstance(value, bool) else parse_size(name, value)


_LENGTH = integer(1, LONGEST_MATCH)
RULES: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "ngram": {"k": _count, "min": _LENGTH, "max": _LENGTH},
    "suffix": {"k": _count, "shared": _shared},
    **{method: {"k": _count, "model": text} for method in WITH_MODEL},
    "mtp": {"k": _count},
}
"""Keys of each method beside `method`, and their rules."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "ngram": {"k": 4, "min": 2, "max": 4},
    "suffix": {"k": "auto", "shared": SHARED_BYTES},
    **{method: {"k": 4} for method in WITH_MODEL},
    "mtp": {"k": 1},
}


def _method(found: Mapping[str, Any]) -> str:
    name = str(found.get("method"))
    name = "mtp" if name.endswith("_mtp") else VLLM_METHODS.get(name, name)
    if name not in METHODS:
        refuse(NAME, "a dict with a 'method' among " + ", ".join(METHODS), dict(found))
    return name


def speculation(name: str, value: object) -> dict[str, Any]:
    """A dict with all keys of its method, under our names.

    Raises:
        ConfigError: The method or a key is unknown, or a value is bad.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, but is of type {type(value).__name__}")
    method = _method(value)
    rules = RULES[method]
    given: dict[str, Any] = {}
    for key, item in value.items():
        own = VLLM_KEYS.get(str(key), str(key))
        if own in given:
            raise ConfigError(f"{name} must have one of {own!r} and {key!r}, got both.", option=name, value=dict(value))
        if own == "method":
            continue
        if own not in rules:
            refuse_names(f"{name} of the method {method!r}", [key], ["method", *rules])
        given[own] = rules[own](f"{name}: {key}", item)
    if method == "ngram":
        _complete_lengths(given)
    if "model" in rules and "model" not in given:
        refuse(NAME, f"a dict with the 'model' of the method {method!r}", dict(value))
    return {"method": method, **DEFAULTS[method], **given}


def _complete_lengths(given: dict[str, Any]) -> None:
    """Fills in the missing one of `min` and `max`, so that both agree."""
    defaults = DEFAULTS["ngram"]
    least = given.setdefault("min", min(defaults["min"], given.get("max", defaults["max"])))
    most = given.setdefault("max", max(defaults["max"], least))
    if not least <= most < least + MOST_LENGTHS:
        refuse(f"{NAME}: max", f"from min={least} to {least + MOST_LENGTHS - 1}", most)


def has_model(config: EngineConfig) -> bool:
    """Whether a second model or a head proposes drafts."""
    return config.speculative_config is not None and config.speculative_config["method"] in ("draft", *HEADS)


def most_draft_rows(config: EngineConfig) -> int:
    """Most rows of a step with drafts for which the model captures a graph; 0 without speculation."""
    from .. import _core

    if config.speculative_config is None:
        return 0
    k = config.speculative_config["k"]
    seqs, tokens = config.max_num_seqs or 1, config.max_num_batched_tokens or 1
    return min(_core.MOST_GRAPH_ROWS, seqs * (1 + (_core.ADAPTIVE_DRAFTS if k == "auto" else k)), tokens)


_CORE_METHODS = {**dict.fromkeys(HEADS, "head"), "medusa": "heads"}


def core_options(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The core's options of drafts."""
    if config is None:
        return {}
    return {
        "draft_method": _CORE_METHODS.get(config["method"], config["method"]),
        "draft_k": 0 if config["k"] == "auto" else config["k"],
        "draft_min": config.get("min", 0),
        "draft_max": config.get("max", 0),
        "draft_shared_bytes": config.get("shared", 0),
    }
