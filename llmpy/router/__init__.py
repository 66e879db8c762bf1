"""`llmpy route`: a proxy before several engines that sends a prompt to the engine that holds its beginning."""

from __future__ import annotations

from .engines import parsed
from .proxy import build_router

__all__ = ["build_router", "parsed"]
