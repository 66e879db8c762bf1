"""Control paths for operators: pause, sleep, cache, calls by name. Off by default; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from .. import __version__
from ..config import EngineConfig
from ..engine.rpc import METHODS
from .errors import HttpError, answer
from .requests import read, read_if_any
from .service import Service


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of /abort_requests; without ids it aborts all requests."""

    request_ids: list[str] | None = None


class RpcRequest(msgspec.Struct, kw_only=True):
    """Body of /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


def query(request: Request, name: str, kind: Callable[[str], Any], default: Any = None) -> Any:
    """Reads a query parameter.

    Args:
        request: The request.
        name: Name of the parameter.
        kind: Converts the text to a value.
        default: Value if the parameter is absent.

    Raises:
        HttpError: 400, `kind` cannot read the text.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        return kind(given)
    except ValueError:
        raise HttpError(400, f"{name}: cannot read {given[:40]!r}", name) from None


def truth(text: str) -> bool:
    """Reads a bool in a query."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def seconds(text: str) -> float:
    """Reads a number of seconds in a query."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _tags(request: Request) -> list[str] | None:
    return request.query_params.getlist("tags") or None


async def pause(service: Service, request: Request) -> ASGIApp:
    """Stops the engine at a step boundary; new requests wait."""
    mode = request.query_params.get("mode", "abort")
    if query(request, "wait_for_inflight_requests", truth, False):
        mode = "wait"
    clears = query(request, "clear_cache", truth, False)
    try:
        await service.engine.pause(mode, clears, query(request, "timeout", seconds))
    except TimeoutError:
        raise HttpError(504, "requests still run; new ones wait for /resume") from None
    return answer({"status": "paused"})


async def resume(service: Service, request: Request) -> ASGIApp:
    """Ends a pause."""
    await service.engine.resume()
    return answer({"status": "resumed"})


async def is_paused(service: Service, request: Request) -> ASGIApp:
    """Whether the engine is paused."""
    return answer({"is_paused": service.engine.is_paused})


async def abort_requests(service: Service, request: Request) -> ASGIApp:
    """Aborts requests; their answers hold the tokens so far."""
    body = await read_if_any(request, AbortRequest)
    aborted = await service.engine.abort(body.request_ids)
    return answer({"status": "aborted", "aborted": len(aborted)})


async def sleep(service: Service, request: Request) -> ASGIApp:
    """Puts the engine to sleep: frees its memory."""
    mode = request.query_params.get("mode", "abort")
    await service.engine.sleep(query(request, "level", int, 1), mode, _tags(request))
    return answer({"status": "asleep"})


async def wake_up(service: Service, request: Request) -> ASGIApp:
    """Wakes the engine: allocates its memory again and continues."""
    await service.engine.wake_up(_tags(request))
    return answer({"status": "awake" if not service.engine.is_sleeping() else "asleep"})


async def is_sleeping(service: Service, request: Request) -> ASGIApp:
    """Whether any part of the engine is asleep."""
    return answer({"is_sleeping": service.engine.is_sleeping()})


async def reset_prefix_cache(service: Service, request: Request) -> ASGIApp:
    """Drops the prefix cache."""
    done = await service.engine.reset_prefix_cache(query(request, "reset_running_requests", truth, False))
    return answer({"success": done})


async def drain(service: Service, request: Request) -> ASGIApp:
    """Shuts down like SIGTERM: refuses new requests, lets running ones finish within a time limit, then ends the server."""
    service.is_draining = True
    if service.options.on_drain is not None:
        service.options.on_drain()
    return answer({"status": "draining"}, 202)


async def no_profiler(service: Service, request: Request) -> ASGIApp:
    """Answers 501: the engine has no profiler."""
    raise HttpError(501, f"{request.url.path}: the engine has no profiler; attach one to the process")


async def world_size(service: Service, request: Request) -> ASGIApp:
    """Number of members of a trainer's weight group that the engine is."""
    return answer({"world_size": service.engine.get_world_size()})


async def server_info(service: Service, request: Request) -> ASGIApp:
    """The engine's options, also under vLLM's names for clients that read those."""
    engine, config = service.engine, service.engine.config
    parts = {
        "model_config": {
            "model": str(config.model),
            "served_model_name": service.names[0],
            "dtype": f"torch.{config.dtype}",
            "max_model_len": service.max_model_len,
        },
        "cache_config": {"block_size": config.block_size, "num_gpu_blocks": engine.stats().kv_blocks_total},
        "parallel_config": {
            "world_size": engine.get_world_size(),
            "tensor_parallel_size": config.tensor_parallel_size,
            "data_parallel_size": config.data_parallel_size,
        },
        "lora_config": _lora_config(config) if config.enable_lora else None,
        "weight_transfer_config": {"backend": "nccl"},
    }
    return answer({"llmpy_version": __version__, "engine": repr(engine), "vllm_config": parts})


def _lora_config(config: EngineConfig) -> dict[str, Any]:
    return {"max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank}


async def collective_rpc(service: Service, request: Request) -> ASGIApp:
    """Calls a method by name, as AsyncEngine.collective_rpc."""
    body = await read(request, RpcRequest)
    if body.method not in METHODS:
        raise HttpError(501, f"collective_rpc: wanted one of {', '.join(METHODS)}, have {body.method[:60]!r}", "method")
    try:
        results = await service.engine.collective_rpc(body.method, args=body.args, kwargs=body.kwargs)
    except TypeError as error:
        raise HttpError(400, f"collective_rpc: {error}", "args") from None
    return answer({"results": [_plain(result) for result in results]})


def _plain(result: Any) -> Any:
    """A result for JSON: checksums become text, because they have 64 bits; objects without a JSON form become null."""
    if isinstance(result, Mapping):
        return {name: f"{value:016x}" for name, value in result.items()}
    if hasattr(result, "epoch"):
        return msgspec.to_builtins(result)
    return result if isinstance(result, str | int | bool) else None


POST = {
    "/pause": pause,
    "/resume": resume,
    "/abort_requests": abort_requests,
    "/sleep": sleep,
    "/wake_up": wake_up,
    "/reset_prefix_cache": reset_prefix_cache,
    "/drain": drain,
    "/collective_rpc": collective_rpc,
    "/start_profile": no_profiler,
    "/stop_profile": no_profiler,
}
GET = {
    "/is_paused": is_paused,
    "/is_sleeping": is_sleeping,
    "/get_world_size": world_size,
    "/server_info": server_info,
}
