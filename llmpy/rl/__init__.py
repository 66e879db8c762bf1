"""What reinforcement-learning trainers need beside LLM and AsyncEngine. Importing it imports no trainer and no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compare import LogprobComparison, compare_logprobs
    from .partial import concat

_HOME = {"LogprobComparison": "compare", "compare_logprobs": "compare", "concat": "partial"}

__all__ = ["LogprobComparison", "compare_logprobs", "concat"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
