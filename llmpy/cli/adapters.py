"""--lora-modules: adapters that a server loads before it listens, or a benchmark before it measures."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..llm import LLM


def modules(chosen: Namespace) -> dict[str, str]:
    """Name -> directory of every adapter.

    Raises:
        ConfigError: A word is neither NAME=PATH nor JSON with name and path, a name occurs twice, or adapters are off.
    """
    found: dict[str, str] = {}
    for word in chosen.lora_modules:
        name, path = _module(word)
        if not name or not path or name in found:
            message = f"--lora-modules: wanted NAME=PATH, or JSON with name and path, each name once, have {word!r}"
            raise ConfigError(message, option="lora_modules", value=word)
        found[name] = path
    if found and not getattr(chosen, "enable_lora", False):
        raise ConfigError("--lora-modules: wanted --enable-lora beside it", option="enable_lora", value=False)
    return found


def _module(word: str) -> tuple[str, str]:
    if not word.startswith("{"):
        name, _, path = word.partition("=")
        return name, path
    try:
        given: Any = json.loads(word)
    except ValueError:
        given = {}
    return str(given.get("name") or ""), str(given.get("path") or "")


def load(engine: AsyncEngine | LLM, wanted: dict[str, str], names: tuple[str, ...]) -> None:
    """Loads adapters.

    Args:
        engine: The engine.
        wanted: Name -> directory.
        names: Names of the model, which no adapter may have.

    Raises:
        ConfigError: An adapter has a name of the model.
    """
    for name, path in wanted.items():
        if name in names:
            message = f"--lora-modules: {name!r} is a name of the model; use another one"
            raise ConfigError(message, option="lora_modules", value=name)
        engine.load_adapter(name, path)
