"""Paths for trainers that update and inspect the weights. Off by default; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.types import ASGIApp

from .errors import HttpError, answer
from .requests import read, read_if_any
from .service import Service
from .transfer import InitInfo, StartRequest, UpdateRequest


class InitRequest(msgspec.Struct, kw_only=True):
    """Body of /init_weight_transfer_engine."""

    init_info: InitInfo


class FinishRequest(msgspec.Struct, kw_only=True):
    """Body of /finish_weight_update."""

    weight_version: str | int | None = None


class VersionRequest(msgspec.Struct, kw_only=True):
    """Body of /update_weight_version."""

    new_version: str | int


class CheckRequest(msgspec.Struct, kw_only=True):
    """Body of /weight_checker."""

    action: str
    baseline: dict[str, str] | None = None


async def init_weight_transfer_engine(service: Service, request: Request) -> ASGIApp:
    """Joins the trainer's group."""
    await service.transfer.init((await read(request, InitRequest)).init_info)
    return answer({"message": "Weight transfer initialized"})


async def start_weight_update(service: Service, request: Request) -> ASGIApp:
    """Begins an update."""
    body = await read_if_any(request, StartRequest)
    if not body.is_checkpoint_format:
        raise HttpError(400, "is_checkpoint_format: weights come under the checkpoint's names", "is_checkpoint_format")
    await service.transfer.start(body)
    return answer({"message": "Weight update started"})


async def update_weights(service: Service, request: Request) -> ASGIApp:
    """Receives weights from the group, from buckets, or from a directory."""
    body = await read(request, UpdateRequest)
    info = body.update_info
    if (info is None) == (body.weight_dir is None):
        raise HttpError(400, "wanted either update_info or weight_dir", "update_info")
    if info is not None and (info.ipc_handles, info.ipc_handles_pickled) != (None, None):
        raise HttpError(400, "update_info: pickled handles are not taken; send buckets, as llmpy.rl.ipc_bucket makes them")
    if info is not None and (info.names is None) == (info.buckets is None):
        raise HttpError(400, "update_info: wanted either names, dtype_names and shapes, or buckets", "update_info")
    await service.transfer.update(body)
    return answer({"message": "Weights updated"})


async def finish_weight_update(service: Service, request: Request) -> ASGIApp:
    """Ends an update."""
    body = await read_if_any(request, FinishRequest)
    report = await service.transfer.finish(body.weight_version)
    return answer({"message": "Weight update finished", "report": msgspec.to_builtins(report)})


async def update_weight_version(service: Service, request: Request) -> ASGIApp:
    """Changes the label of the weights."""
    body = await read(request, VersionRequest)
    service.engine.set_weight_version(body.new_version)
    return answer({"success": True, "new_version": body.new_version})


async def weight_info(service: Service, request: Request) -> ASGIApp:
    """Labels of the weights and of the drafter's, and the epoch; with `pattern` also the names and shapes of weights."""
    engine = service.engine
    found: dict[str, Any] = {"weight_version": engine.weight_version, "weight_epoch": engine.weight_epoch}
    if drafter := engine.weight_info(drafter=True):
        found["drafter_version"] = drafter[0]["version"]
    if "pattern" in request.query_params:
        found["weights"] = engine.weight_info(request.query_params["pattern"])
    return answer(found)


def _noise(infos: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Random values for every weight, small enough to compute with."""
    random = np.random.default_rng()
    return ((info["name"], 0.02 * random.standard_normal(info["shape"], np.float32)) for info in infos)


async def weight_checker(service: Service, request: Request) -> ASGIApp:
    """Returns checksums, compares with earlier checksums, or writes random weights, which only a real update replaces."""
    body = await read(request, CheckRequest)
    if body.action not in ("checksum", "compare", "reset"):
        raise HttpError(400, f"action: wanted checksum, compare or reset, have {body.action[:40]!r}", "action")
    if body.action == "reset":
        await service.engine.update_weights(_noise(service.engine.weight_info()), version="reset")
        return answer({"status": "reset"})
    found = {name: f"{value:016x}" for name, value in (await service.engine.weight_checksum()).items()}
    if body.action == "checksum":
        return answer({"checksums": found})
    if body.baseline is None:
        raise HttpError(400, "baseline: wanted the checksums to compare with", "baseline")
    unlike = sorted(name for name in found.keys() | body.baseline.keys() if found.get(name) != body.baseline.get(name))
    return answer({"match": not unlike, "mismatches": unlike})


POST = {
    "/init_weight_transfer_engine": init_weight_transfer_engine,
    "/start_weight_update": start_weight_update,
    "/update_weights": update_weights,
    "/finish_weight_update": finish_weight_update,
    "/update_weight_version": update_weight_version,
    "/weight_checker": weight_checker,
}
GET = {"/weight_info": weight_info}
