"""The adapter (LoRA) of a request. Code written for vLLM imports `llmpy.lora.request.LoRARequest`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .checks import as_int
from .errors import InvalidRequestError

__all__ = ["LoRARequest"]


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request. The first request with a name loads the adapter.

    Args:
        lora_name: Name of the adapter; the engine knows adapters by name.
        lora_int_id: The caller's number for the adapter, at least 1; the engine only hands it back.
        lora_path: PEFT directory with adapter_config.json and adapter_model.safetensors; "" if `load_adapter` has loaded the
            adapter.

    Raises:
        InvalidRequestError: The name is empty, or the number is below 1.

    Example:
        >>> llm.generate("2 + 2 =", lora_request=LoRARequest("maths", 1, "adapters/maths"))
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str | Path = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            message = f"lora_name must be a name, got {self.lora_name!r}."
            raise InvalidRequestError(message, parameter="lora_name", value=self.lora_name)
        if as_int("lora_int_id", self.lora_int_id) < 1:
            message = f"lora_int_id must be at least 1, got {self.lora_int_id}."
            raise InvalidRequestError(message, parameter="lora_int_id", value=self.lora_int_id)

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """`lora_path` as text."""
        return str(self.lora_path)


sys.modules[f"{__name__}.request"] = sys.modules[__name__]
