"""Engines on several machines: one model over several hosts, and Ray, which places and monitors engines (extra `ray`).

The engine does not depend on Ray.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._data import LLMPredictor
    from ._hosts import Followed

__all__ = ["Followed", "LLMPredictor"]


def __getattr__(name: str) -> object:
    if name == "Followed":
        from ._hosts import Followed

        return Followed
    if name != "LLMPredictor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._data import LLMPredictor

    return LLMPredictor
