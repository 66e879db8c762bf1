"""Sleep levels and tags, and LLM's calls to pause, resume, sleep and wake."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import _core
from ..checks import as_int
from ..errors import InvalidRequestError
from ..weights.shared import check_unshared

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
"""The engine's hold bit of each sleeping part, and the part's bit."""


def parts_of(tags: str | Iterable[str] | None) -> int:
    """The core's bits for tags; None = all.

    Raises:
        InvalidRequestError: A tag is unknown.
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
        InvalidRequestError: The mode is unknown.
    """
    if mode not in PAUSES:
        raise InvalidRequestError(f"mode must be 'abort', 'wait' or 'keep', got {mode!r}.", parameter="mode", value=mode)
    return PAUSES[mode]


def check_level(level: int) -> int:
    """A level of sleep, checked.

    Raises:
        InvalidRequestError: The level is not 0, 1 or 2.
    """
    if as_int("level", level) not in (0, 1, 2):
        raise InvalidRequestError(f"level must be 0, 1 or 2, got {level}.", parameter="level", value=level)
    return level


def parts_asleep(engine: Engine) -> int:
    """The PARTS that sleep, or-ed."""
    holds = engine.holds()
    return sum(part for hold, part in _HOLDS.items() if holds & hold)


def sleeps_so(engine: Engine, level: int, parts: int) -> bool:
    """Whether an engine is already in the state that a call asks for."""
    asleep = parts_asleep(engine)
    memory = parts & (_core.PART_WEIGHTS | _core.PART_POOL) if level else 0
    has_copy = drops_weights(level, parts) and engine.stats()["sleep_level"] < 2
    return bool(asleep & _core.PART_SCHEDULING) and asleep & memory == memory and not has_copy


def drops_weights(level: int, parts: int) -> bool:
    """Whether a sleep keeps no copy of the weights."""
    return level == 2 and bool(parts & PARTS["weights"])


class SleepingLLM:
    """LLM's calls to pause, resume, sleep and wake."""

    _driver: Driver
    _weights: Weights
    _named: dict[str, Request]
    _enqueued: dict[str, Request]

    def abort(self, request_ids: str | Iterable[str] | None = None) -> list[RequestOutput]:
        """Ends queued requests at once.

        Args:
            request_ids: Ids of the requests; None = all. Unknown and finished requests are ignored.

        Returns:
            The output of each ended request so far, with `finish_reason` "abort"; `step` or `wait_for_completion`
            returns it, too.

        Raises:
            EngineBusyError: Another thread uses the engine.
        """
        with self._driver.driving(steps=False):
            requests = [request for request in self._queued(request_ids) if not request.finished]
            self._driver.abort(requests)
            self._driver.collect()
            return [request.output() for request in requests if any(sample.finish == "abort" for sample in request.samples)]

    def _queued(self, request_ids: str | Iterable[str] | None) -> list[Request]:
        """The requests of `add_request` and `enqueue` with these ids; None = all. Unknown ids are ignored."""
        known = self._named | self._enqueued
        if request_ids is None:
            return list(known.values())
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return [known[name] for name in ids if name in known]

    def pause(self, mode: str = "abort", clear_cache: bool = False, timeout: float | None = None) -> None:
        """Stops the device; new requests queue until `resume`. `generate` and its kin raise EngineAsleepError meanwhile.

        Args:
            mode: "abort" ends what `add_request` and `stream` queued, "wait" runs it to its end, "keep" freezes it.
            clear_cache: Also clear the prefix cache; correct results never need this.
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
        """Ends a pause; does nothing without one. It does not end a sleep or an update."""
        with self._driver.driving(steps=False):
            self._driver.resume()

    @property
    def is_paused(self) -> bool:
        """True from `pause` until `resume`."""
        self._driver.check()
        return self._driver.is_paused

    pause_generation = pause
    resume_generation = resume

    def _quiet(self, mode: str, timeout: float | None = None) -> None:
        """Aborts, finishes or freezes the requests in flight, as `mode` says. The caller has claimed the engine."""
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
        """Frees device memory until `wake_up`; addresses and captured graphs stay valid.

        Args:
            level: 0 only stops; 1 keeps the weights in host memory; 2 drops the weights, so a full update must follow.
            mode: What happens to the requests in flight: "abort", "wait", or "keep" (they go on after waking).
            tags: "weights", "kv_cache": free only these; None = both.

        Raises:
            UnsupportedError: Level 2, and no update could restore these weights: quantised weights, or a Llama's GGUF file.
            DeviceMemoryError: The host has no memory for the weights; nothing has changed but what `mode` ended.
            EngineBusyError: Another thread uses the engine, its weights are being updated, or a trainer uses their memory
                (`share_weights`).
        """
        parts, level = parts_of(tags), check_level(level)
        check_mode(mode)
        with self._driver.driving(steps=False):
            if not sleeps_so(self._driver.engine, level, parts):
                if level and parts & _core.PART_WEIGHTS:
                    check_unshared(self._weights.shared, f"sleep(level={level})")
                if drops_weights(level, parts):
                    self._weights.check_updatable("sleep(level=2)")
                self._quiet(mode)
                self._driver.engine.sleep(level, parts)

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Wakes the engine or some of its parts; parts that are awake stay awake.

        Args:
            tags: "weights", "kv_cache", "scheduling"; None = all. Steps run again with the last part that comes back.

        Raises:
            DeviceMemoryError: The device has too little free memory; the engine still sleeps and can be woken later.
            EngineBusyError: Another thread uses the engine.
        """
        parts = parts_of(tags)
        with self._driver.driving(steps=False):
            self._driver.engine.wake(parts)
