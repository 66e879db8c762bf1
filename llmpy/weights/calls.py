"""Calls of LLM and AsyncEngine that inspect and replace the weights (docs/use/rl.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from .. import _core, hardware
from ..engine.cores import update_of
from ..errors import EngineBusyError, UnsupportedError
from .joint import JointUpdate
from .shared import SharedMatrix, matrices
from .updates import DEFAULT_BUCKET_BYTES, AsyncWeightUpdate, UpdateReport, WeightUpdate, Worker, stored_tensors, stream_of

if TYPE_CHECKING:
    from typing import Unpack

    from ..engine.frontend import Frontend
    from ..keywords import BeginOptions, UpdateOptions
    from .group import WeightGroup
    from .updates import Rename

_opening = threading.Lock()


@dataclass(frozen=True)
class WeightComparison:
    """Result of comparing the engine's weights with a source. True if all compared weights are equal, bit for bit.

    Attributes:
        num_equal: Number of names with equal weights.
        different: Names with different weights.
        missing: Names of the engine that the source does not have.
        skipped: Names of the source that are not separate weights of the engine.
    """

    num_equal: int
    different: list[str]
    missing: list[str]
    skipped: list[str]

    def __bool__(self) -> bool:
        return not self.different


class Weights:
    """Inspects and replaces the weights of an engine. Only one update can be open.

    Args:
        model: The core's model.
        runner: The core object that runs steps.
        device: Name of the engine's device.
        frontend: Holds the labels of the weights.
        claim: A context manager that keeps other threads from running the engine; raises if the engine is closed or in use.
        drafter: The core's models that draft.
    """

    def __init__(
        self,
        model: _core.Model,
        runner: _core.Engine | _core.EngineThread,
        device: str,
        frontend: Frontend,
        claim: Callable[[], AbstractContextManager[None]],
        drafter: tuple[_core.Model, ...] = (),
    ) -> None:
        self.drafter = drafter
        self.drafter_version: int | str | None = None
        """Label of the drafter's weights; None: those that were loaded."""
        self.model, self.runner, self.frontend, self.claim = model, runner, frontend, claim
        self.device = device
        self.groups: dict[str, WeightGroup] = {}
        """The weight groups that the engine has joined, by name."""
        self.ordinal = hardware.ordinal(device)
        """Ordinal of the CUDA device; -1 for the CPU."""
        self.shared: WeakSet[SharedMatrix] = WeakSet()
        """The matrices that `share_weights` gave out and that tensors still use."""
        self._is_open = False
        self.abandoned: _core.WeightUpdate | None = None
        """An open update that was dropped while another thread used the engine, so that it could not be aborted."""

    def open_update(self, drafts: bool) -> _core.WeightUpdate:
        """The core's transaction over the weights of the model, or with `drafts` of the drafter.

        The layers of the method "mtp" are weights of the model's checkpoint, so an update of the model reaches them, too.

        Raises:
            UnsupportedError: The engine has no drafter.
        """
        if drafts and not self.drafter:
            raise UnsupportedError(
                "update_drafter() wants an engine with a drafter: speculative_config with a method that has weights, "
                "such as 'draft', 'eagle3' or 'medusa'"
            )
        speculation = self.frontend.config.speculative_config
        models = [] if drafts else [update_of(self.model, self.runner, self.ordinal)]
        if drafts or (speculation is not None and speculation["method"] == "mtp"):
            models += [update_of(model, self.runner, self.ordinal, True) for model in self.drafter]
        if len(models) == 1:
            return models[0]
        return cast("_core.WeightUpdate", JointUpdate(models, len(models) if drafts else 1))

    def drafter_info(self) -> list[dict[str, Any]]:
        """The weights of the drafter, with the label of their version."""
        infos = [info for model in self.drafter for info in model.weight_info()]
        version = self.frontend.context.version(0) if self.drafter_version is None else self.drafter_version
        return [{**info, "version": version} for info in infos]

    def check_updatable(self, what: str) -> None:
        """Raises if no update could restore the weights.

        Args:
            what: The call that would drop the weights, for the message.

        Raises:
            UnsupportedError: The files store the weights in a form that updates cannot produce.
        """
        reason = None
        try:
            update_of(self.model, self.runner, self.ordinal)
            for info in self.model.weight_info():
                if not _core.WeightUpdate.takes(info["dtype"]):
                    reason = f"weight {info['name']!r} is stored as {info['dtype']}, which updates cannot write"
                    break
        except UnsupportedError as error:
            reason = str(error)
        if reason is not None:
            raise UnsupportedError(f"{what} drops the weights, and no update could bring them back: {reason}; or use level=1")

    def begin(self, **options: Any) -> WeightUpdate:
        """Begins an update; raises EngineBusyError if one is open."""
        with _opening:
            if self.abandoned is not None:
                with self.claim():
                    self.abandoned.abort()
                self.abandoned, self._is_open = None, False
            if self._is_open:
                raise EngineBusyError("a weight update is open; commit or abort it")
            self._is_open = True
        try:
            return WeightUpdate(self, **options)
        except BaseException:
            self._is_open = False
            raise

    def end(self) -> None:
        """Marks the open update as ended."""
        self._is_open = False

    def checksums(self, names: str | Iterable[str] | None) -> dict[str, int]:
        """Checksums by name."""
        found: dict[str, int] = {}
        with self.claim():
            core = update_of(self.model, self.runner, self.ordinal)
            names = core.names("all") if names is None else names
            for name in [names] if isinstance(names, str) else names:
                value = core.checksum(name)
                if value is not None:
                    found[name] = value
        return found

    def compare(self, source: Any, rename: Rename) -> WeightComparison:
        """Compares the weights with a source of tensors."""
        if isinstance(source, str | os.PathLike):
            source = stored_tensors(source)
        pairs = source.items() if isinstance(source, Mapping) else source
        core = update_of(self.model, self.runner, self.ordinal)
        left = set(core.names("all"))
        order, different, skipped, equal = sorted(left), [], [], 0
        for given, tensor in pairs:
            name = given if rename is None else rename(given)
            if name is None:
                skipped.append(given)
                continue
            with self.claim():
                theirs = core.checksum(name, tensor, stream_of([(name, tensor)], self.ordinal))
                ours = None if theirs is None else core.checksum(name)
            if ours is None:
                skipped.append(given)
                continue
            left.discard(name)
            if ours == theirs:
                equal += 1
            else:
                different.append(name)
        return WeightComparison(equal, different, [name for name in order if name in left], skipped)


class UpdateCalls:
    """Weight calls of LLM."""

    _weights: Weights

    def update_weights(
        self,
        source: Any,
        *,
        version: int | str | None = None,
        partial: bool = False,
        rename: Rename = None,
        on_running: str = "keep",
        check_finite: bool = False,
        borrow: bool = False,
    ) -> UpdateReport:
        """Replaces the weights in place, as one transaction.

        Args:
            source: A mapping or an iterable of (name, tensor), a directory of safetensors files, buckets that another process
                shares, or a WeightGroup. Names are those of the checkpoint; tensors are float32, bfloat16 or float16, anything
                with `__dlpack__` or a NumPy array, in host memory or on the engine's device.
            version: Label of the new weights; None = their epoch.
            partial: Whether weights that the source does not have are kept.
            rename: Maps a name of the source to the checkpoint's name, or to None to drop the tensor.
            on_running: Cache of requests in flight: "keep" goes on with the cache of the old weights (a sample without a token
                yet starts its prompt over), "recompute" rebuilds the cache.
            check_finite: Also refuse tensors that hold NaN or inf.
            borrow: The engine reads the source's tensors in place from now on, where it can, and keeps them alive; the
                report's `borrowed` names these. Change their values only between two calls, and update again before the next
                call, which copies only the others.

        Returns:
            A report of the update.

        Raises:
            WeightUpdateError: A tensor is unknown or does not fit, or some are missing.
            EngineBusyError: Another thread uses the engine, or an update is open.
            UnsupportedError: `borrow` on a device that reads weights from its own memory alone (CUDA: `share_weights`).
        """
        update = self.begin_update(
            version=version,
            partial=partial,
            rename=rename,
            on_running=on_running,
            check_finite=check_finite,
            borrow=borrow,
        )
        return update.run(source)

    def share_weights(self) -> dict[str, SharedMatrix]:
        """The engine's matrices, for a trainer that computes with them and changes them in place; on CUDA, with one rank.

        `torch.as_tensor(matrix)` is a tensor in the engine's memory (of bfloat16: `.view(torch.bfloat16)`). Change the values
        only between two calls, and then call `update_weights` with these tensors: it copies only the others, and drops the
        cached prefixes. Weights that the engine stores otherwise have no matrix: vectors, quantised and transposed ones,
        stacked experts, and tied ones that are stored twice. `OnPolicy(in_place=True)` does all this.

        Returns:
            Matrices by the checkpoint's names. While one is alive, `sleep` frees no weights and `close` raises.

        Raises:
            UnsupportedError: The device's backend shares no weights (the CPU reads the trainer's: `borrow`), or there are
                several ranks or replicas.
            EngineAsleepError: The weights sleep.
        """
        return matrices(self._weights, self)

    def begin_update(
        self,
        *,
        version: int | str | None = None,
        partial: bool = False,
        rename: Rename = None,
        on_running: str = "keep",
        staging: str = "in_place",
        bucket_bytes: int | str = DEFAULT_BUCKET_BYTES,
        check_finite: bool = False,
        borrow: bool = False,
    ) -> WeightUpdate:
        """Begins a transaction that takes the weights piece by piece. No step runs from its first write to its end.

        Args:
            staging: "in_place".
            bucket_bytes: Most bytes of staging memory on the device; at least 32 MiB, which staging uses.
            version, partial, rename, on_running, check_finite, borrow: As in `update_weights`.

        Returns:
            The transaction; use it as a context manager, or commit or abort it.

        Raises:
            EngineBusyError: Another update is open.
        """
        return self._weights.begin(
            version=version,
            partial=partial,
            rename=rename,
            on_running=on_running,
            staging=staging,
            bucket_bytes=bucket_bytes,
            check_finite=check_finite,
            borrow=borrow,
        )

    def update_drafter(
        self,
        source: Any,
        *,
        version: int | str | None = None,
        partial: bool = False,
        rename: Rename = None,
        check_finite: bool = False,
    ) -> UpdateReport:
        """Replaces the weights of the second model or the head that drafts (`speculative_config`). No output changes.

        Args:
            source, partial, rename, check_finite: As in `update_weights`; names are those of the drafter's checkpoint.
            version: Label of the drafter's weights, which `weight_info(drafter=True)` tells; None = that of the model's.

        Returns:
            A report of the update. Epoch and version are those of the model, which stay.

        Raises:
            UnsupportedError: The engine has no drafter, or its weights cannot be updated.
            WeightUpdateError, EngineBusyError: As in `update_weights`.
        """
        options = {"version": version, "partial": partial, "rename": rename, "check_finite": check_finite}
        return self._weights.begin(drafts=True, **options).run(source)

    def weight_checksum(self, names: str | Iterable[str] | None = None) -> dict[str, int]:
        """Checksums of the stored weights, independent of their layout (docs/use/rl.md has the formula).

        Args:
            names: Names of the checkpoint; None = all.

        Returns:
            64-bit sums by name.
        """
        return self._weights.checksums(names)

    def compare_weights(self, source: Any, *, rename: Rename = None) -> WeightComparison:
        """Compares the stored weights, bit for bit, with the weights that an update from the source would store.

        Args:
            source: A mapping or an iterable of (name, tensor), or a directory of safetensors files.
            rename: As in `update_weights`.

        Returns:
            A comparison; it is true if all weights are equal, and lists the names that differ.
        """
        return self._weights.compare(source, rename)


class AsyncUpdateCalls:
    """Weight calls of AsyncEngine: those of LLM, awaited. A thread does the work while the event loop runs."""

    _weights: Weights

    async def update_weights(self, source: Any, **options: Unpack[UpdateOptions]) -> UpdateReport:
        """Like LLM.update_weights, with its arguments; requests may be in flight. A cancelled call still runs to its end."""
        worker = Worker(self._weights.ordinal)
        return await worker.run(self._weights.begin(**options).run, source)

    async def update_drafter(
        self,
        source: Any,
        *,
        version: int | str | None = None,
        partial: bool = False,
        rename: Rename = None,
        check_finite: bool = False,
    ) -> UpdateReport:
        """Like LLM.update_drafter; requests may be in flight. A cancelled call still runs to its end."""
        options = {"version": version, "partial": partial, "rename": rename, "check_finite": check_finite}
        return await Worker(self._weights.ordinal).run(self._weights.begin(drafts=True, **options).run, source)

    def begin_update(self, **options: Unpack[BeginOptions]) -> AsyncWeightUpdate:
        """Like LLM.begin_update, with its arguments; the transaction is an asynchronous context manager with awaited calls."""
        worker = Worker(self._weights.ordinal)
        return AsyncWeightUpdate(self._weights.begin(**options), worker)

    async def weight_checksum(self, names: str | Iterable[str] | None = None) -> dict[str, int]:
        """Like LLM.weight_checksum; runs between two steps."""
        return await Worker(self._weights.ordinal).run(self._weights.checksums, names)

    async def compare_weights(self, source: Any, *, rename: Rename = None) -> WeightComparison:
        """Like LLM.compare_weights; runs between two steps."""
        return await Worker(self._weights.ordinal).run(self._weights.compare, source, rename)
