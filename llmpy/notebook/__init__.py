"""What notebooks show of outputs and engines; HTML and SVG of ours, with no JavaScript. All text of models is escaped."""

from __future__ import annotations

from .charts import LineChart
from .live import LiveBar

__all__ = ["LineChart", "LiveBar"]
