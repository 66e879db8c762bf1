"""Replaces the weights of a running engine in one transaction: from tensors, a directory, or another process."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from .. import _core
from ..checks import check_label
from ..engine.jobs import JobQueue
from ..errors import EngineBusyError, InvalidRequestError, ModelNotFoundError, UnsupportedError, WeightUpdateError
from ..options import parse_size
from . import stacked
from .joint import JointUpdate
from .shards import Shards

if TYPE_CHECKING:
    from typing import Self

    from .buckets import IpcBucket
    from .calls import Weights
    from .group import WeightGroup
    from .shards import Shard

Named: TypeAlias = "tuple[str, Any]"
Rename: TypeAlias = "Callable[[str], str | None] | None"
Result = TypeVar("Result")

DEFAULT_BUCKET_BYTES = "256MiB"
STAGING_BYTES = 32 << 20
"""Size of the staging memory on the device; it is allocated at the first tensor that needs staging."""
_NAMED_IN_ERRORS = 8


@dataclass(frozen=True)
class UpdateReport:
    """Result of an update.

    Attributes:
        epoch: Epoch of the new weights.
        version: Label of the new weights.
        num_tensors: Number of names written.
        num_bytes: Bytes of the tensors written.
        seconds: Time from the begin of the update to the end of its commit.
        pause_seconds: Time during which no step could run.
        gb_per_s: 1e-9 * num_bytes / seconds.
        skipped: Names that are not separate weights: aliases of tied weights, derived tensors, names dropped by `rename`.
        missing: Names that were not written and keep their weights (`partial`).
        repeated: Names that were written more than once; the last write counts.
        borrowed: Names whose weights the engine reads from the source's tensors from now on (`borrow`).
    """

    epoch: int
    version: int | str
    num_tensors: int
    num_bytes: int
    seconds: float
    pause_seconds: float
    gb_per_s: float
    skipped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)


class WeightUpdate:
    """A transaction over the weights of an engine. `begin_update` creates it.

    No step runs from the first write to `commit`. As a context manager it commits at a clean end and aborts after an
    exception. If the check of a tensor fails, the transaction stays open: write a correct tensor, or abort.
    """

    def __init__(
        self,
        host: Weights,
        *,
        version: int | str | None = None,
        partial: bool = False,
        rename: Rename = None,
        on_running: str = "keep",
        staging: str = "in_place",
        bucket_bytes: int | str = DEFAULT_BUCKET_BYTES,
        check_finite: bool = False,
        borrow: bool = False,
        drafts: bool = False,
    ) -> None:
        self._is_over = True
        for name, value, known in (
            ("on_running", on_running, ("keep", "recompute")),
            ("staging", staging, ("in_place", "double")),
        ):
            if value not in known:
                message = f"{name} must be {known[0]!r} or {known[1]!r}, got {value!r}."
                raise InvalidRequestError(message, parameter=name, value=value)
        if staging == "double":
            raise UnsupportedError("staging='double' is not supported yet; use 'in_place'")
        self.bucket_bytes: int = parse_size("bucket_bytes", bucket_bytes)
        """Most bytes of staging memory on the device."""
        if self.bucket_bytes < STAGING_BYTES:
            message = f"bucket_bytes must be at least 32MiB, got {bucket_bytes!r}."
            raise InvalidRequestError(message, parameter="bucket_bytes", value=bucket_bytes)
        self.report: UpdateReport | None = None
        """The report of the update after its commit; None before."""
        self._version = None if version is None else check_label(version)
        self._host, self._partial, self._rename = host, partial, rename
        self._borrow, self._drafts = borrow, drafts
        self._recompute, self._check_finite = on_running == "recompute", check_finite
        self._begun, self._held = time.perf_counter(), 0.0
        self._skipped: dict[str, None] = {}
        self._shards = Shards(lambda name, dtype, shape: self.check_memory([(name, 0, dtype, shape, None)]))
        with host.claim():
            self.core: _core.WeightUpdate = host.open_update(drafts)
            self.core.check_awake()
        self._is_over = False

    # ---- writes -----------------------------------------------------------------------------------------------------

    def write(self, name: str, tensor: Any, *, shard: Shard | None = None) -> None:
        """Writes one tensor, or a shard of it.

        Args:
            name: Name in the checkpoint, or a name that `rename` maps to it.
            tensor: Any object with `__dlpack__`, or a NumPy array: float32, bfloat16 or float16, of the weight's shape and any
                strides, in host memory or on the engine's device.
            shard: (axis, index, count): the tensor is part `index` of `count` equal parts along an axis. Shards come in any
                order; they are joined in memory of their device, and written with the last one. None: the whole tensor.

        Raises:
            WeightUpdateError: The name is unknown, or the tensor does not fit; nothing was written.
            InvalidRequestError: `shard` names no part of a tensor.
        """
        if shard is not None:
            if self._borrow:
                raise UnsupportedError("shard= is not supported with borrow=True; write whole tensors")
            whole = self._shards.add(name, tensor, shard)
            if whole is None:
                return
            tensor = whole
        self._write([(name, tensor)])

    def write_all(self, source: Mapping[str, Any] | Iterable[Named]) -> None:
        """Writes (name, tensor) pairs, one after the other. A mapping, list or tuple is first checked as a whole.

        Args:
            source: Names and tensors, as for `write`.

        Raises:
            WeightUpdateError: As for `write`.
        """
        if isinstance(source, Mapping):
            self._write(list(source.items()))
        elif isinstance(source, list | tuple):
            self._write(list(source))
        else:
            for name, tensor in source:
                self._write([(name, tensor)])

    def write_bucket(self, bucket: IpcBucket) -> None:
        """Writes tensors from memory of another process. That process may reuse the memory when this returns.

        Args:
            bucket: A llmpy.rl.IpcBucket. It is checked as a whole before the first byte is written.

        Raises:
            WeightUpdateError: A tensor is unknown or does not fit; nothing was written.
            DeviceError: The handle has expired, or is of another device or of this process.
        """
        from .buckets import write

        write(self, [bucket])

    def read_dir(self, path: str | os.PathLike[str]) -> None:
        """Writes the tensors of a directory's safetensors files. All headers are checked before the first byte is written.

        Args:
            path: The directory.

        Raises:
            ModelNotFoundError: The directory has no such files.
            CheckpointError: A file is torn.
            WeightUpdateError: A tensor is unknown or does not fit; nothing was written.
        """
        self._write(stored_tensors(path))

    def receive(
        self,
        group: WeightGroup | str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        timeout: float | None = None,
    ) -> None:
        """Writes tensors that the trainer broadcasts, as they arrive.

        Args:
            group: The group that `init_weight_group` returned, or its name.
            names, dtypes, shapes: The tensors that the trainer sends, in its order.
            timeout: Seconds until everything has arrived; None: the group's timeout.

        Raises:
            WeightUpdateError: A tensor is unknown or does not fit; nothing was received.
            DeviceError: The trainer has gone, does not answer or sends something else; the group has ended.
        """
        from .group import receive

        with self._claimed():
            self.core.check_awake()  # before the trainer begins to send
        receive(self, group, names, dtypes, shapes, timeout=timeout)

    @property
    def device(self) -> str:
        """Name of the engine's device."""
        return self._host.device

    @property
    def groups(self) -> dict[str, WeightGroup]:
        """The engine's weight groups by name."""
        return self._host.groups

    def check_memory(self, items: Iterable[tuple[str, int, str, Sequence[int], Sequence[int] | None]]) -> None:
        """Checks names, types and shapes of tensors before `write_memory`; addresses are ignored."""
        kept = self._places(items)
        with self._claimed():
            self.core.check_memory(kept)

    def write_memory(
        self,
        items: Iterable[tuple[str, int, str, Sequence[int], Sequence[int] | None]],
        on_device: bool,
        stream: int = 0,
    ) -> None:
        """Writes tensors that lie at given addresses; all are checked before the first byte is written.

        Args:
            items: Name, address, type ("bfloat16"), shape, strides in items, or None for contiguous rows.
            on_device: Whether the addresses are on the engine's device; else they are in host memory.
            stream: Device stream that produced the tensors; the copies are enqueued on it. 0: the default stream. Later work
                on the stream may change device memory; host memory may change when this returns.
        """
        kept = self._places(items)
        with self._writing():
            self._pass_over(self.core.write_memory(kept, on_device, stream, self._check_finite))

    def write_shared(self, items: Iterable[tuple[str, int, int, str, Sequence[int], Sequence[int] | None]]) -> None:
        """Writes tensors from files, which other processes may share. The tensors are read one after the other.

        Args:
            items: Name, descriptor, offset in bytes, type ("bfloat16"), shape, strides in items or None for rows one after
                the other.
        """
        kept = [
            (name, descriptor, *rest)
            for own, descriptor, *item in items
            for name, *rest in self._places([cast("stacked.Item", (own, *item))])
        ]
        with self._writing():
            self._pass_over(self.core.write_shared(kept, self._check_finite))

    def finish(self) -> None:
        """Waits until all writes are complete."""
        with self._writing():
            self.core.finish()

    def _write(self, items: list[Named]) -> None:
        renamed = items if self._rename is None else self._rename_all(items)
        renamed = [one for name, tensor in renamed for one in stacked.slices(name, tensor, self.core.knows)]
        stream = stream_of(renamed, self._host.ordinal)
        with self._writing():
            self._pass_over(self.core.write(renamed, stream, self._check_finite, self._borrow))
            if not stream and self._host.ordinal >= 0:
                self.core.finish()  # the producer may change the tensor on a stream that is not known here

    def _renamed(self, name: str) -> str | None:
        """The checkpoint's name for a source's name; None: the tensor is dropped."""
        if self._rename is None:
            return name
        found = self._rename(name)
        if found is None:
            self._skipped[name] = None
        return found

    def _rename_all(self, items: Iterable[Named]) -> list[Named]:
        return [(found, tensor) for name, tensor in items if (found := self._renamed(name)) is not None]

    def _places(self, items: Iterable[stacked.Item]) -> list[Any]:
        """The items with the checkpoint's names."""
        from .buckets import ITEM_BYTES

        renamed = ((self._renamed(name), *rest) for name, *rest in items)
        kept: list[Any] = [item for item in renamed if item[0] is not None]
        return [one for item in kept for one in stacked.memory_slices(item, ITEM_BYTES.get(item[2], 0), self.core.knows)]

    def _pass_over(self, names: Iterable[str]) -> None:
        self._skipped.update(dict.fromkeys(names))

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Keeps other threads from using the engine."""
        if self._is_over:
            raise WeightUpdateError("the weight update is over; begin another")
        with self._host.claim():
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Like `_claimed`, and stops steps until the update ends."""
        with self._claimed():
            started = self._held or time.perf_counter()
            yield
            self._held = started

    # ---- the end ----------------------------------------------------------------------------------------------------

    def commit(self, version: int | str | None = None) -> UpdateReport:
        """Makes all later steps use the new weights.

        Args:
            version: Label of the weights; None: the `version` of `begin_update`, or else the new epoch.

        Returns:
            The report; also kept in `report`.

        Raises:
            WeightUpdateError: Names were not written, and `partial` is False, or shards of a tensor were not written; the
                update stays open.
        """
        label = self._version if version is None else check_label(version)
        self._shards.refuse_parts()
        with self._writing():
            missing = self.core.names("missing")
            if missing:
                self._refuse_missing(missing)
            epoch = self._commit_as(label)
            now, (_, written, num_bytes, _) = time.perf_counter(), self.core.progress()
        seconds = now - self._begun
        self.report = UpdateReport(
            epoch=epoch,
            version=self._host.frontend.context.version(epoch),
            num_tensors=written,
            num_bytes=num_bytes,
            seconds=seconds,
            pause_seconds=now - self._held if num_bytes else 0.0,
            gb_per_s=1e-9 * num_bytes / seconds,
            skipped=list(self._skipped),
            missing=missing,
            repeated=self.core.names("repeated"),
            borrowed=self.core.names("lent"),
        )
        self._end()
        return self.report

    def _refuse_missing(self, missing: list[str]) -> None:
        """Raises if names are missing, unless the update is partial and the current weights are complete."""
        total = self.core.progress()[0]
        names = ", ".join(f"{name!r}" for name in missing[:_NAMED_IN_ERRORS])
        names += ", ..." if len(missing) > _NAMED_IN_ERRORS else "."
        text = f"{len(missing)} of {total} weights were not written: {names}"
        if not self._partial:
            raise WeightUpdateError(f"{text} Pass partial=True to keep the others.", missing=missing)
        if self.core.wants_all():
            raise WeightUpdateError(f"{text} The engine's own are torn: all are wanted.", missing=missing)

    def _commit_as(self, label: int | str | None) -> int:
        """Commits. The label is set before the new epoch begins."""
        host, runner = self._host, self.core
        versions, epoch = host.frontend.context.versions, runner.epoch() + (not self._drafts)
        reaches_drafter = self._drafts or (isinstance(runner, JointUpdate) and runner.has_written_others())
        if label is not None and not self._drafts:
            versions[epoch] = label
        try:
            epoch = runner.commit(self._recompute)
        except BaseException:
            if not self._drafts:
                versions.pop(epoch, None)
            raise
        if reaches_drafter:
            host.drafter_version = host.frontend.context.version(epoch) if label is None else label
        return epoch

    def abort(self) -> None:
        """Abandons the update. If anything was written, the weights are incomplete: no step runs until a full update commits.

        Raises:
            EngineBusyError: Another thread uses the engine; the update stays open.
        """
        if self._is_over:
            return
        try:
            with self._host.claim():
                self.core.abort()
        except EngineBusyError:
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._host.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_over:
            return
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            try:
                self.abort()
            except EngineBusyError:
                self._host.abandoned = self.core
            except Exception:  # the engine may be closed
                pass

    # ---- everything in one call -------------------------------------------------------------------------------------

    def run(self, source: Any) -> UpdateReport:
        """Writes all of a source and commits."""
        from .buckets import IpcBucket
        from .group import WeightGroup, receive_all

        with self:
            if isinstance(source, str | os.PathLike):
                self._write_source(stored_tensors(source))
            elif isinstance(source, WeightGroup):
                receive_all(self, source)
            elif isinstance(source, IpcBucket):
                self._write_buckets([source])
            elif isinstance(source, list | tuple) and source and isinstance(source[0], IpcBucket):
                self._write_buckets(source)
            else:
                self._write_source(source)
            return self.commit()

    def _write_source(self, source: Mapping[str, Any] | Iterable[Named]) -> None:
        """Writes (name, tensor) pairs. A mapping, list or tuple is first checked for completeness."""
        if isinstance(source, Mapping):
            source = list(source.items())
        if isinstance(source, list | tuple):
            self._check_complete(name for name, _ in source)
        self.write_all(source)

    def _write_buckets(self, buckets: Sequence[IpcBucket]) -> None:
        """Writes buckets; all are opened and checked before the first byte is written."""
        from .buckets import write

        self._check_complete(item.name for bucket in buckets for item in getattr(bucket, "items", ()))
        write(self, buckets)

    def _check_complete(self, names: Iterable[str]) -> None:
        """Raises if an update of only these names would leave weights out. Unknown names are found when they are written."""
        renamed = {name if self._rename is None else self._rename(name) for name in names}
        given = {place.name for name in renamed if name is not None for place in stacked.places(name, self.core.knows)}
        missing = [name for name in self.core.names("missing") if name not in given]
        unknown = [name for name in given if not self.core.knows(name)]
        if missing and not unknown:
            self._refuse_missing(missing)


def stored_tensors(path: str | os.PathLike[str]) -> list[Named]:
    """The tensors of a directory's safetensors files, as the core takes them."""
    files = sorted(Path(path).absolute().glob("*.safetensors"))  # other hosts have other working directories
    if not files:
        raise ModelNotFoundError(f"{path}: wanted a directory of safetensors files, have none")
    checkpoint = _core.Checkpoint([str(file) for file in files])
    return [(name, (checkpoint, name)) for name in checkpoint.tensors()]


def stream_of(items: list[Named], ordinal: int) -> int:
    """torch's current stream if these are torch tensors on the device; 0 if their stream is unknown."""
    torch = sys.modules.get("torch")
    if ordinal < 0 or torch is None or not items:
        return 0
    if not all(isinstance(tensor, torch.Tensor) and tensor.is_cuda for _, tensor in items):
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream) or 1


class AsyncWeightUpdate:
    """A WeightUpdate with awaited calls. The calls run in order on one thread that belongs to the update.

    A cancelled call still runs to its end.
    """

    def __init__(self, update: WeightUpdate, worker: Worker) -> None:
        self._update, self._worker = update, worker

    @property
    def report(self) -> UpdateReport | None:
        """The report of the update after its commit; None before."""
        return self._update.report

    async def write(self, name: str, tensor: Any, *, shard: Shard | None = None) -> None:
        """Like WeightUpdate.write."""
        await self._worker.run(functools.partial(self._update.write, shard=shard), name, tensor)

    async def write_all(self, source: Mapping[str, Any] | Iterable[Named] | AsyncIterable[Named]) -> None:
        """Like WeightUpdate.write_all; the source may also be an asynchronous iterable."""
        if isinstance(source, AsyncIterable):
            async for name, tensor in source:
                await self.write(name, tensor)
        else:
            await self._worker.run(self._update.write_all, source)

    async def write_bucket(self, bucket: IpcBucket) -> None:
        """Like WeightUpdate.write_bucket."""
        await self._worker.run(self._update.write_bucket, bucket)

    async def read_dir(self, path: str | os.PathLike[str]) -> None:
        """Like WeightUpdate.read_dir."""
        await self._worker.run(self._update.read_dir, path)

    async def receive(
        self,
        group: WeightGroup | str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        timeout: float | None = None,
    ) -> None:
        """Like WeightUpdate.receive."""
        receive = functools.partial(self._update.receive, timeout=timeout)
        await self._worker.run(receive, group, names, dtypes, shapes)

    async def commit(self, version: int | str | None = None) -> UpdateReport:
        """Like WeightUpdate.commit."""
        return await self._worker.run(self._update.commit, version)

    async def abort(self) -> None:
        """Like WeightUpdate.abort."""
        await self._worker.run(self._update.abort)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._worker.run(self._update.__exit__, kind, error, trace)


class Worker:
    """A thread for one update or one call. On CUDA it uses torch's current stream of the thread that created it."""

    def __init__(self, ordinal: int) -> None:
        self._jobs = JobQueue("llmpy-weights")
        torch = sys.modules.get("torch") if ordinal >= 0 else None
        on_cuda = torch is not None and torch.cuda.is_initialized()
        self._stream = torch.cuda.current_stream(ordinal) if torch is not None and on_cuda else None

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Runs a function on the thread. If the caller is cancelled, the function still runs to its end."""
        return await self._jobs.call(self._work, function, *args)

    def _work(self, function: Callable[..., Result], *args: Any) -> Result:
        if self._stream is None:
            return function(*args)
        with sys.modules["torch"].cuda.stream(self._stream):
            return function(*args)
