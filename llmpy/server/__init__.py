"""The HTTP server: OpenAI's and Anthropic's protocols over one AsyncEngine (extra `server`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> object:
    if name != "build_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .app import build_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("llmpy"):
            raise
        raise ImportError(f"the server needs the package {error.name}; pip install 'llmpy[server]'") from error
    return build_app
