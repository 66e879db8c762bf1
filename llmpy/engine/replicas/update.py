"""A transaction over the weights of all replicas: an object with the calls of the core's WeightUpdate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ... import _core
from ...errors import UnsupportedError, WeightUpdateError
from ...hardware import ordinal
from .members import ReplicaEngine

if TYPE_CHECKING:
    from .members import ReplicaModel
    from .threads import ReplicaThread

Result = TypeVar("Result")
CUDA = 2
"""DLPack's number of the kind of devices."""


class ReplicaUpdate:
    """Writes the same weights to every replica that lives, one replica after the other.

    All replicas have the same weights, so a tensor that does not fit is refused by the first, before a byte is written.

    Args:
        model: The replicas' models.
        runner: What runs them.
    """

    def __init__(self, model: ReplicaModel, runner: ReplicaEngine | ReplicaThread) -> None:
        engine = runner if isinstance(runner, ReplicaEngine) else runner.engine
        runners: Sequence[_core.Engine | _core.EngineThread] = engine.threads or engine.engines
        living = engine.check_alive()
        ordinals = [ordinal(model.devices[replica][0]) for replica in living]
        self._has_devices = len({device for replica in living for device in model.devices[replica]}) > 1
        self._updates = [
            _core.WeightUpdate(model.models[replica], runners[replica], own)
            for replica, own in zip(living, ordinals, strict=True)
        ]

    def _each(self, call: Callable[[_core.WeightUpdate], Result]) -> Result:
        """Calls a function with every replica's update; the result is the first one's."""
        first, *_ = [call(update) for update in self._updates]
        return first

    def _refuse_device_memory(self) -> None:
        if self._has_devices:
            raise UnsupportedError(
                "weights in device memory cannot be written to replicas on several devices yet (data_parallel_size); "
                "pass tensors in host memory, a bucket of host memory, or a directory"
            )

    # ---- writes -----------------------------------------------------------------------------------------------------

    def write(
        self, items: list[tuple[str, Any]], stream: int = 0, wants_finite: bool = False, lends: bool = False, /
    ) -> list[str]:
        """Like the core's."""
        if self._has_devices and any(_is_on_cuda(tensor) for _, tensor in items):
            self._refuse_device_memory()
        return self._each(lambda update: update.write(items, stream, wants_finite, lends))

    def write_memory(
        self,
        items: list[tuple[str, int, str, Sequence[int], Sequence[int] | None]],
        on_device: bool,
        stream: int = 0,
        wants_finite: bool = False,
        /,
    ) -> list[str]:
        """Like the core's."""
        if on_device:
            self._refuse_device_memory()
        return self._each(lambda update: update.write_memory(items, on_device, stream, wants_finite))

    def write_shared(
        self, items: list[tuple[str, int, int, str, Sequence[int], Sequence[int] | None]], wants_finite: bool = False, /
    ) -> list[str]:
        """Like the core's."""
        return self._each(lambda update: update.write_shared(items, wants_finite))

    def check_memory(self, items: list[tuple[str, int, str, Sequence[int], Sequence[int] | None]], /) -> None:
        """Like the core's."""
        self._updates[0].check_memory(items)

    def finish(self) -> None:
        """Like the core's."""
        self._each(lambda update: update.finish())

    def commit(self, recompute: bool, /) -> int:
        """Like the core's. The writes to all replicas have ended before the first replica gets the new weights."""
        self.finish()
        return self._each(lambda update: update.commit(recompute))

    def abort(self) -> None:
        """Like the core's."""
        self._each(lambda update: update.abort())

    # ---- questions --------------------------------------------------------------------------------------------------

    def names(self, which: Literal["missing", "repeated", "lent"], /) -> list[str]:
        """Like the core's."""
        return self._updates[0].names(which)

    def rows(self) -> list[tuple[str, int, str, tuple[int, int], int]]:
        """Raises: the replicas' weights are several."""
        raise UnsupportedError("share_weights() with replicas is not supported; use data_parallel_size=1")

    def check_awake(self) -> None:
        """Like the core's."""
        self._each(lambda update: update.check_awake())

    def wants_all(self) -> bool:
        """Whether the weights of a replica are torn."""
        return any([update.wants_all() for update in self._updates])

    def epoch(self) -> int:
        """Like the core's."""
        return self._updates[0].epoch()

    def knows(self, name: str, /) -> bool:
        """Like the core's."""
        return self._updates[0].knows(name)

    def progress(self) -> tuple[int, int, int, bool]:
        """Names, names written and bytes read for one replica, and whether a weight of a replica may have changed."""
        found = [update.progress() for update in self._updates]
        return (*found[0][:3], any(one[3] for one in found))

    def checksum(self, name: str, tensor: Any = None, stream: int = 0, /) -> int | None:
        """Like the core's.

        Raises:
            WeightUpdateError: The replicas hold different values.
        """
        if tensor is not None:
            return self._updates[0].checksum(name, tensor, stream)
        sums = [update.checksum(name) for update in self._updates]
        if len(set(sums)) > 1:
            message = f"weight {name!r}: the replicas hold different values; commit a full update"
            raise WeightUpdateError(message, mismatched=[name])
        return sums[0]


def _is_on_cuda(tensor: object) -> bool:
    """Whether a tensor says that it lies in memory of a CUDA device."""
    try:
        return bool(tensor.__dlpack_device__()[0] == CUDA)  # type: ignore[attr-defined]
    except Exception:  # the core says what is wrong with the tensor
        return False
