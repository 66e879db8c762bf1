"""Sleep: its levels and tags, and the calls of LLM that stop it and go on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import _core
from ..checks import as_int
from ..errors import InvalidRequestError

if TYPE_CHECKING:
    from .._core import Engine
    from ..outputs import RequestOutput
    from ..weights.calls import Weights
    from .driver import Driver
    from .requests import Request

PAUSES = {"wait": _core.PAUSE_WAIT, "keep": _core.PAUSE_KEEP, "abort": _core.PAUSE_ABORT}
PARTS = {"weights": _core.PART_WEIGHTS, "kv_cache": _core.PART_POOL, "scheduling": _core.PART_SCHEDULING}
_HOLDS = {
    _core.HOLD_WEIGHTS: _core.PART_WEIGHTS,
    _core.HOLD_POOL: _core.PART_POOL,
    _core.HOLD_SCHEDULING: _core.PART_SCHEDULING,
}
"""What an engine says of a part that sleeps, and the part."""


def parts_of(tags: str | Iterable[str] | None) -> int:
    """The core's bits for tags; None = all.

    Raises:
        InvalidRequestError: There is no such tag.
    """
    names = list(PARTS) if tags is None else [tags] if isinstance(tags, str) else list(tags)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        known = ", ".join(repr(name) for name in PARTS)
        raise InvalidRequestError(f"tags must be among {known}, got {unknown[0]!r}.", parameter="tags", value=unknown[0])
    return sum(PARTS[name] for name in set(names))


def check_mode(mode: str) -> int:
    """The core's number for a mode of pausing.

    Raises:
        InvalidRequestError: There is no such mode.
    """
    if mode not in PAUSES:
        raise InvalidRequestError(f"mode must be 'abort', 'wait' or 'keep', got {mode!r}.", parameter="mode", value=mode)
    return PAUSES[mode]


def check_level(level: int) -> int:
    """A level of sleep, checked.

    Raises:
        InvalidRequestError: It is not 0, 1 or 2.
    """
    if as_int("level", level) not in (0, 1, 2):
        raise InvalidRequestError(f"level must be 0, 1 or 2, got {level}.", parameter="level", value=level)
    return level


def parts_asleep(engine: Engine) -> int:
    """Which of PARTS sleep."""
    holds = engine.holds()
    return sum(part for hold, part in _HOLDS.items() if holds & hold)


def sleeps_so(engine: Engine, level: int, parts: int) -> bool:
    """Whether an engine is in the state already that a call asks for."""
    asleep = parts_asleep(engine)
    memory = parts & (_core.PART_WEIGHTS | _core.PART_POOL) if level else 0
    has_copy = drops_weights(level, parts) and engine.stats()["sleep_level"] < 2
    return bool(asleep & _core.PART_SCHEDULING) and asleep & memory == memory and not has_copy


def drops_weights(level: int, parts: int) -> bool:
    """Whether a sleep keeps no copy of the weights."""
    return level == 2 and bool(parts & PARTS["weights"])


class SleepingLLM:
    """Calls of LLM that stop it and go on."""

    _driver: Driver
    _weights: Weights
    _named: dict[str, Request]

    def abort(self, request_ids: str | Iterable[str] | None = None) -> list[RequestOutput]:
        """Ends queued requests at once.

        Args:
            request_ids: Their ids; None = all. Unknown and finished ones are passed over.

        Returns:
            What each of them had made, with `finish_reason` "abort"; `step` returns it, too.

        Raises:
            EngineBusyError: Another thread uses the engine.
        """
        with self._driver.driving(steps=False):
            ids = list(self._named) if request_ids is None else [request_ids] if isinstance(request_ids, str) else request_ids
            found = [self._named[name] for name in ids if name in self._named]
            requests = [request for request in found if not request.finished]
            self._driver.abort(requests)
            self._driver.collect()
            return [
                request.output() for request in requests if any(sample.finish == "abort" for sample in request.samples)
            ]

    def pause(self, mode: str = "abort", clear_cache: bool = False, timeout: float | None = None) -> None:
        """Stops the device; new requests queue until `resume`. `generate` and its kin raise EngineAsleepError meanwhile.

        Args:
            mode: "abort" ends what `add_request` and `stream` queued, "wait" runs it to its end, "keep" freezes it.
            clear_cache: Also forget the prefix cache; never needed for right results.
            timeout: Seconds; None = no limit.

        Raises:
            TimeoutError: "wait" took longer; new requests still queue, `step` goes on with the others.
            EngineBusyError: Another thread uses the engine.
        """
        check_mode(mode)
        driver = self._driver
        with driver.driving(steps=False):
            driver.pause()
            self._quiet(mode, timeout)
            driver.frozen = True
            driver.engine.settle()
            driver.collect()
            if clear_cache:
                driver.engine.reset_prefix_cache(False)

    def resume(self) -> None:
        """Ends a pause; without one it does nothing. It ends no sleep and no update."""
        with self._driver.driving(steps=False):
            self._driver.resume()

    @property
    def is_paused(self) -> bool:
        """Whether a pause was asked for and not ended."""
        self._driver.check()
        return self._driver.is_paused

    pause_generation = pause
    resume_generation = resume

    def _quiet(self, mode: str, timeout: float | None = None) -> None:
        """Does to the requests in flight what a pause does. The caller drives."""
        driver = self._driver
        if mode == "abort":
            driver.engine.abort(None)
            driver.collect()
        elif mode == "wait" and not driver.frozen and not driver.engine.holds():
            deadline, pending = None if timeout is None else time.monotonic() + timeout, driver.in_flight()
            while any(not request.finished for request in pending):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"requests still run after {timeout} s")
                driver.advance(until_finished=False)

    def sleep(self, level: int = 1, mode: str = "abort", tags: str | Iterable[str] | None = None) -> None:
        """Gives memory back until `wake_up`; addresses and captured graphs stay good.

        Args:
            level: 0 only stops; 1 keeps the weights in host memory; 2 keeps nothing, so that a full update has to follow.
            mode: What becomes of the requests in flight: "abort", "wait", or "keep" (they go on after waking).
            tags: "weights", "kv_cache": give back only these; None = both.

        Raises:
            UnsupportedError: Level 2, and no update could bring these weights back: quantised ones, or a Llama's GGUF file.
            DeviceMemoryError: The host has no memory for the weights; nothing has changed but what `mode` ended.
            EngineBusyError: Another thread uses the engine, or its weights are being updated.
        """
        parts, level = parts_of(tags), check_level(level)
        check_mode(mode)
        with self._driver.driving(steps=False):
            if not sleeps_so(self._driver.engine, level, parts):
                if drops_weights(level, parts):
                    self._weights.check_updatable("sleep(level=2)")
                self._quiet(mode)
                self._driver.engine.sleep(level, parts)

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Ends sleep, whole or in part; what is awake stays so.

        Args:
            tags: "weights", "kv_cache", "scheduling"; None = all. Steps run again with the last part that comes back.

        Raises:
            DeviceMemoryError: The device has less memory free than that; the engine sleeps on, and can be woken later.
            EngineBusyError: Another thread uses the engine.
        """
        parts = parts_of(tags)
        with self._driver.driving(steps=False):
            self._driver.engine.wake(parts)
