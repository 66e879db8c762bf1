"""The HTTP server: OpenAI's and Anthropic's protocols over one AsyncEngine (extra `server`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import build_app
    from .render import Renderer

__all__ = ["Renderer", "build_app"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import app, render
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("llmpy"):
            raise
        raise ImportError(f"the server needs the package {error.name}; pip install 'llmpy[server]'") from error
    return app.build_app if name == "build_app" else render.Renderer
