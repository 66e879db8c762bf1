"""Views of outputs and engines for notebooks: HTML and SVG without JavaScript. All text from models is escaped."""

from __future__ import annotations

from .charts import LineChart
from .live import LiveBar

__all__ = ["LineChart", "LiveBar"]
