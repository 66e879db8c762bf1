"""Calls of vLLM for engines with worker processes. Here one object runs the engine, so there is one result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import InvalidRequestError, UnsupportedError

METHODS = (
    "get_world_size",
    "get_weight_version",
    "weight_checksum",
    "reset_prefix_cache",
    "sleep",
    "wake_up",
    "init_weight_group",
    "destroy_weight_group",
    "update_weights",
    "report_device_id",
)
"""Names that `collective_rpc` takes."""


def call(engine: Any, method: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Calls a method of an engine by name.

    Args:
        engine: LLM or AsyncEngine.
        method: One of METHODS.
        args, kwargs: Its arguments.

    Returns:
        What the method returns: of an AsyncEngine an awaitable, for most of them.
    """
    if not isinstance(method, str):
        raise UnsupportedError("collective_rpc() takes names: there are no worker processes that could run a function")
    if method not in METHODS:
        message = f"collective_rpc: wanted one of {', '.join(METHODS)}, have {method[:60]!r}"
        raise InvalidRequestError(message, parameter="method", value=method)
    if method == "get_weight_version":
        return engine.weight_version
    if method == "report_device_id":
        return str(engine.config.device)
    return getattr(engine, method)(*args, **(kwargs or {}))


class _Modules:
    """What LLM and AsyncEngine refuse alike."""

    def apply_model(self, func: Callable[[Any], Any]) -> NoReturn:
        """Always raises UnsupportedError: there is no module tree; `program`, `weight_info` and `tap` show the model."""
        raise UnsupportedError("apply_model(): there is no module tree; call program(), weight_info() or tap()")


class RpcCalls(_Modules):
    """LLM's calls by name."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method by name, for code that was written for engines with worker processes.

        Args:
            method: One of the names in `llmpy.engine.rpc.METHODS`. They are methods of this class, but for
                "get_weight_version", which is `weight_version`, and "report_device_id", the name of the device.
            timeout: Accepted without effect.
            args, kwargs: Arguments of the method.

        Returns:
            A list of one result: the method acts on all ranks.

        Raises:
            UnsupportedError: `method` is a function; no worker process could run it.
            InvalidRequestError: The name is not one of those.
        """
        return [call(self, method, args, kwargs)]


class AsyncRpcCalls(_Modules):
    """AsyncEngine's calls by name."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method by name, as `LLM.collective_rpc`.

        Args:
            method, args, kwargs: As in `LLM.collective_rpc`.
            timeout: Seconds; None = no limit.

        Returns:
            A list of one result.

        Raises:
            UnsupportedError, InvalidRequestError: As in `LLM.collective_rpc`.
            TimeoutError: The method took longer than `timeout`.
        """
        async with asyncio.timeout(timeout):
            found = call(self, method, args, kwargs)
            return [await found if hasattr(found, "__await__") else found]
