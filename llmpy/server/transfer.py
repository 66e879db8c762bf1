"""Weight updates that a trainer runs over HTTP. No received data is unpickled."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

import msgspec

from ..async_engine import AsyncEngine
from ..errors import InvalidRequestError
from ..weights.buckets import IpcBucket
from ..weights.updates import AsyncWeightUpdate, UpdateReport
from .errors import HttpError, log

GROUP = "default"


class InitInfo(msgspec.Struct, kw_only=True):
    """Address of the trainer's group; without an address the weights come by buckets or directories."""

    master_address: str | None = None
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 2
    timeout: float = 300.0
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


class StartRequest(msgspec.Struct, kw_only=True):
    """Body of /start_weight_update."""

    is_checkpoint_format: bool = True
    partial: bool = False
    on_running: str = "keep"
    check_finite: bool = False


class Bucket(msgspec.Struct, kw_only=True):
    """Memory of another process: `llmpy.rl.IpcBucket` as JSON; a CUDA handle is base64."""

    handle: str
    nbytes: int
    items: list[list[Any]]
    device_uuid: str | None = None


class UpdateInfo(msgspec.Struct, kw_only=True):
    """The weights to receive: tensors that the trainer broadcasts, or buckets."""

    names: list[str] | None = None
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int | None = None
    buckets: list[Bucket] | None = None
    ipc_handles: Any = None
    ipc_handles_pickled: Any = None


class UpdateRequest(msgspec.Struct, kw_only=True):
    """Body of /update_weights."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class Transfer:
    """The weight update of a trainer over HTTP. Calls run one after the other.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._update: AsyncWeightUpdate | None = None
        self._lock = asyncio.Lock()

    async def init(self, info: InitInfo) -> None:
        """Joins the trainer's group; leaves an earlier one."""
        async with self._lock:
            with contextlib.suppress(InvalidRequestError):
                await self._engine.destroy_weight_group(GROUP)
            if info.master_address is not None:
                await self._engine.init_weight_group(
                    info.master_address,
                    info.master_port,
                    info.rank_offset,
                    info.world_size,
                    timeout=info.timeout,
                    buffer_bytes=info.packed_buffer_size_bytes if info.packed else 1,
                    num_buffers=info.packed_num_buffers,
                )

    async def start(self, body: StartRequest) -> None:
        """Begins an update. An unfinished update is aborted, because its trainer may be gone."""
        async with self._lock:
            if self._update is not None:
                log.warning("a weight update was not finished; another begins")
                await self._update.abort()
                self._update = None
            options = {"partial": body.partial, "on_running": body.on_running, "check_finite": body.check_finite}
            self._update = self._engine.begin_update(**options)  # type: ignore[arg-type]

    async def update(self, body: UpdateRequest) -> None:
        """Writes received weights. Without an open update, this is a whole update."""
        async with self._lock:
            if self._update is not None:
                await self._write(self._update, body)
                return
            async with self._engine.begin_update() as update:
                await self._write(update, body)

    async def _write(self, update: AsyncWeightUpdate, body: UpdateRequest) -> None:
        if body.weight_dir is not None:
            await update.read_dir(body.weight_dir)
            return
        info = body.update_info
        assert info is not None
        if info.buckets is not None:
            for bucket in info.buckets:
                await update.write_bucket(_bucket(bucket))
            return
        assert info.names is not None
        group = self._engine._weights.groups.get(GROUP)
        if group is not None and info.packed is not None:
            group.buffer_bytes = (info.packed_buffer_size_bytes or group.buffer_bytes) if info.packed else 1
            group.num_buffers = info.packed_num_buffers or group.num_buffers
        await update.receive(GROUP, info.names, info.dtype_names, info.shapes)

    async def finish(self, version: str | int | None) -> UpdateReport:
        """Commits the update: all later steps use the new weights. If names are missing, the update stays open."""
        async with self._lock:
            if self._update is None:
                raise HttpError(400, "no weight update has begun; /start_weight_update")
            report = await self._update.commit(version)
            self._update = None
        return report


def _bucket(given: Bucket) -> IpcBucket:
    handle: str | bytes = given.handle
    if given.device_uuid != "":
        try:
            handle = base64.b64decode(given.handle, validate=True)
        except ValueError:
            raise HttpError(400, "buckets: wanted a CUDA handle in base64", "update_info") from None
    try:
        return IpcBucket(handle, given.nbytes, given.items, given.device_uuid)
    except (ValueError, TypeError, OverflowError) as error:
        raise HttpError(400, f"buckets: {error}", "update_info") from None
