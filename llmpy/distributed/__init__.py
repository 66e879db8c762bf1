"""Engines on several machines: one model over several hosts, and Ray, which places and monitors engines (extra `ray`).

The engine does not depend on Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._data import LLMPredictor
    from ._executor import RayExecutor
    from ._hosts import Followed

__all__ = ["Followed", "LLMPredictor", "RayExecutor"]

_MODULES = {"Followed": "_hosts", "LLMPredictor": "_data", "RayExecutor": "ray"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
