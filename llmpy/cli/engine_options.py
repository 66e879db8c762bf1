"""Every option of an engine as a flag: `max_model_len` is --max-model-len."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import fields
from typing import Any

from ..config import EngineConfig

LEFT_OUT = ("model", "hf_token")
"""One is a word of its own, the other comes from the environment: arguments can be read by everybody on the machine."""


def add_engine_options(parser: ArgumentParser) -> None:
    """Adds the flags; what is not given keeps the engine's own default."""
    group = parser.add_argument_group("engine", "see EngineConfig; mappings are given as JSON, lists with commas")
    for field in fields(EngineConfig):
        if field.name in LEFT_OUT:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            group.add_argument(flag, action=BooleanOptionalAction, default=SUPPRESS)
        else:
            group.add_argument(flag, type=_reader(str(field.type)), default=SUPPRESS, metavar="VALUE")


def engine_options(chosen: Namespace) -> dict[str, Any]:
    """The options that were given."""
    return {field.name: getattr(chosen, field.name) for field in fields(EngineConfig) if _is_given(chosen, field.name)}


def _is_given(chosen: Namespace, name: str) -> bool:
    return name not in LEFT_OUT and hasattr(chosen, name)


def _reader(kind: str) -> Any:
    """What turns a word into a value of an option's type."""
    if "Mapping" in kind:
        import json

        return json.loads
    if "tuple" in kind:
        return lambda text: tuple(int(part) for part in text.split(","))
    if "float" in kind:
        return float
    if "int" in kind and "str" not in kind:
        return int
    return _number_or_text if "int" in kind else str


def _number_or_text(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
