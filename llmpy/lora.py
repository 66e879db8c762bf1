"""`llmpy.lora.request.LoRARequest`, the name that code written for vLLM imports. Adapters are not supported yet."""

from __future__ import annotations

import sys

from ._later import LoRARequest

__all__ = ["LoRARequest"]

sys.modules[f"{__name__}.request"] = sys.modules[__name__]
