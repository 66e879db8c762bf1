"""Looking at an engine's weights and replacing them: the calls of LLM and AsyncEngine (docs/use/rl.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _core, hardware
from ..errors import EngineBusyError, UnsupportedError
from .updates import DEFAULT_BUCKET_BYTES, AsyncWeightUpdate, UpdateReport, WeightUpdate, Worker, stored_tensors, stream_of

if TYPE_CHECKING:
    from ..engine.frontend import Frontend
    from .group import WeightGroup
    from .updates import Rename

_opening = threading.Lock()
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class WeightComparison:
    """How the engine's weights compare with others. True if all that were compared are equal, bit for bit.

    Attributes:
        num_equal: Names whose weights are equal.
        different: Names whose weights are not.
        missing: Names of the engine that the others do not have.
        skipped: Names of the others without a weight of their own.
    """

    num_equal: int
    different: list[str]
    missing: list[str]
    skipped: list[str]

    def __bool__(self) -> bool:
        return not self.different


class Weights:
    """The weights of an engine, which can be looked at and replaced. One update at a time.

    Args:
        model: The core's.
        runner: What steps the model.
        device: Name of the engine's device.
        frontend: Knows the labels of the weights.
        claim: Keeps others from driving the engine for a while; raises if it is closed or in use.
    """

    def __init__(
        self,
        model: _core.Model,
        runner: _core.Engine | _core.EngineThread,
        device: str,
        frontend: Frontend,
        claim: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.runner, self.frontend, self.claim = model, runner, frontend, claim
        self.device = device
        self.groups: dict[str, WeightGroup] = {}
        """Those that the engine has joined, by name."""
        self.ordinal = hardware.ordinal(device)
        """Of the CUDA device; -1: the CPU."""
        self._is_open = False
        self.abandoned: _core.WeightUpdate | None = None
        """An open update that nobody holds, and that could not be given up while another thread used the engine."""

    def check_updatable(self, what: str) -> None:
        """Raises if no update could bring the weights back.

        Args:
            what: The call that would drop them, for the message.

        Raises:
            UnsupportedError: The files keep the weights in a form that updates cannot make.
        """
        reason = None
        try:
            _core.WeightUpdate(self.model, self.runner, self.ordinal)
            quantized = [info for info in self.model.weight_info() if info["dtype"] not in FLOATS]
            if quantized:
                reason = f"weight {quantized[0]['name']!r} is stored as {quantized[0]['dtype']}, which updates cannot make"
        except UnsupportedError as error:
            reason = str(error)
        if reason is not None:
            raise UnsupportedError(f"{what} drops the weights, and no update could bring them back: {reason}; or use level=1")

    def begin(self, **options: Any) -> WeightUpdate:
        """An update; EngineBusyError if one is open."""
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
        """The update that was open is over."""
        self._is_open = False

    def checksums(self, names: str | Iterable[str] | None) -> dict[str, int]:
        """Checksums by name."""
        if names is None:
            names = [info["name"] for info in self.model.weight_info()]
        found: dict[str, int] = {}
        with self.claim():
            core = _core.WeightUpdate(self.model, self.runner, self.ordinal)
            for name in [names] if isinstance(names, str) else names:
                value = core.checksum(name)
                if value is not None:
                    found[name] = value
        return found

    def compare(self, source: Any, rename: Rename) -> WeightComparison:
        """The comparison with a source of tensors."""
        if isinstance(source, str | os.PathLike):
            source = stored_tensors(source)
        pairs = source.items() if isinstance(source, Mapping) else source
        left = {info["name"] for info in self.model.weight_info()}
        order, different, skipped, equal = sorted(left), [], [], 0
        core = _core.WeightUpdate(self.model, self.runner, self.ordinal)
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
    """What LLM has."""

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
    ) -> UpdateReport:
        """Replaces the weights in place, as one transaction.

        Args:
            source: A mapping or an iterable of (name, tensor), a directory of safetensors files, buckets that another process
                shares, or a WeightGroup. Names are those of the checkpoint; tensors are float32, bfloat16 or float16, anything
                with `__dlpack__` or a NumPy array, in host memory or on the engine's device.
            version: Label of the new weights; None = their epoch.
            partial: Whether names that the source does not have keep their weights.
            rename: Checkpoint's name of a source's name; None for one that is to be dropped.
            on_running: What requests in flight do: "keep" goes on with the cache of the old weights (a sample without a token
                yet starts its prompt over), "recompute" rebuilds it.
            check_finite: Also refuse tensors that hold NaN or inf.

        Returns:
            What was done.

        Raises:
            WeightUpdateError: A tensor is unknown or does not fit, or some are missing.
            EngineBusyError: Another thread uses the engine, or an update is open.
        """
        update = self.begin_update(
            version=version, partial=partial, rename=rename, on_running=on_running, check_finite=check_finite
        )
        return update.run(source)

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
    ) -> WeightUpdate:
        """Begins a transaction that takes the weights piece by piece. From its first write to its end nothing runs.

        Args:
            staging: "in_place".
            bucket_bytes: Most bytes of staging memory on the device; 32 MiB or more, which is what it takes.
            version, partial, rename, on_running, check_finite: As in `update_weights`.

        Returns:
            The transaction, to be used as a context manager, or to be committed or aborted.

        Raises:
            EngineBusyError: Another one is open.
        """
        return self._weights.begin(
            version=version,
            partial=partial,
            rename=rename,
            on_running=on_running,
            staging=staging,
            bucket_bytes=bucket_bytes,
            check_finite=check_finite,
        )

    def weight_checksum(self, names: str | Iterable[str] | None = None) -> dict[str, int]:
        """Checksums of the weights as they are stored, whatever their layout (docs/use/rl.md has the formula).

        Args:
            names: Names of the checkpoint; None = all.

        Returns:
            64-bit sums by name.
        """
        return self._weights.checksums(names)

    def compare_weights(self, source: Any, *, rename: Rename = None) -> WeightComparison:
        """Compares the weights, bit for bit as they are stored, with what they would be after an update from the source.

        Args:
            source: A mapping or an iterable of (name, tensor), or a directory of safetensors files.
            rename: As in `update_weights`.

        Returns:
            True if all are equal, with the names that are not.
        """
        return self._weights.compare(source, rename)


class AsyncUpdateCalls:
    """What AsyncEngine has: the same, awaited. The work is done on a thread, while the event loop goes on."""

    _weights: Weights

    async def update_weights(
        self,
        source: Any,
        *,
        version: int | str | None = None,
        partial: bool = False,
        rename: Rename = None,
        on_running: str = "keep",
        check_finite: bool = False,
    ) -> UpdateReport:
        """As LLM.update_weights, with requests in flight. A call that is cancelled goes on to its end."""
        worker = Worker(self._weights.ordinal)
        update = self._weights.begin(
            version=version,
            partial=partial,
            rename=rename,
            on_running=on_running,
            staging="in_place",
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            check_finite=check_finite,
        )
        return await worker.run(update.run, source)

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
    ) -> AsyncWeightUpdate:
        """As LLM.begin_update; the transaction's calls are awaited, and it is an asynchronous context manager."""
        worker = Worker(self._weights.ordinal)
        update = self._weights.begin(
            version=version,
            partial=partial,
            rename=rename,
            on_running=on_running,
            staging=staging,
            bucket_bytes=bucket_bytes,
            check_finite=check_finite,
        )
        return AsyncWeightUpdate(update, worker)

    async def weight_checksum(self, names: str | Iterable[str] | None = None) -> dict[str, int]:
        """As LLM.weight_checksum, between two steps."""
        return await Worker(self._weights.ordinal).run(self._weights.checksums, names)

    async def compare_weights(self, source: Any, *, rename: Rename = None) -> WeightComparison:
        """As LLM.compare_weights, between two steps."""
        return await Worker(self._weights.ordinal).run(self._weights.compare, source, rename)
