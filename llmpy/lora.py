"""`llmpy.lora.request.LoRARequest`, where code written for vLLM looks for it. Adapters are not supported yet."""

from __future__ import annotations

import sys

from ._later import LoRARequest

__all__ = ["LoRARequest"]

sys.modules[f"{__name__}.request"] = sys.modules[__name__]
