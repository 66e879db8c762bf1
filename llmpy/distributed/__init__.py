"""Several engines on several machines. Ray places and monitors them (extra `ray`); the engine does not depend on Ray."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._data import LLMPredictor

__all__ = ["LLMPredictor"]


def __getattr__(name: str) -> object:
    if name != "LLMPredictor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._data import LLMPredictor

    return LLMPredictor
