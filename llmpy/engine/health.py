"""Finds what an engine is doing and whether it would serve a request."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from .. import _core
from ..errors import EngineAsleepError, EngineClosedError, EngineStuckError
from . import jobs

if TYPE_CHECKING:
    from .._core import Engine
    from .thread import ThreadDriver

STUCK_AFTER_S = 300.0
"""Seconds without progress after which an engine counts as stuck, unless the caller says otherwise."""
UPDATING, TORN = _core.HOLD_UPDATE, _core.HOLD_TORN
ASLEEP = _core.HOLD_SCHEDULING | _core.HOLD_WEIGHTS | _core.HOLD_POOL
RESTART = "restart the process, or raise the limit"
STATES = ("serving", "paused", "updating", "weights missing", "asleep", "dead", "stuck", "draining")


def check_open(pid: int, is_closed: bool) -> None:
    """Raises unless an engine is open in this process.

    Args:
        pid: Of the process that made the engine.
        is_closed: Whether it was closed.

    Raises:
        EngineClosedError: The engine was closed, or belongs to another process.
    """
    if os.getpid() != pid:
        raise EngineClosedError(f"engine belongs to process {pid}; create one in this process")
    if is_closed:
        raise EngineClosedError("engine is closed")


def states_of(engine: Engine, is_paused: bool) -> tuple[str, ...]:
    """The STATES that keep steps from running; ("serving",) if there is none. A dead engine has no other state."""
    if engine.is_dead():
        return ("dead",)
    holds = engine.holds()
    found = {"asleep": holds & ASLEEP, "weights missing": holds & TORN, "updating": holds & UPDATING, "paused": is_paused}
    return tuple(name for name, has in found.items() if has) or ("serving",)


def check_serving(engine: Engine, is_paused: bool) -> None:
    """Raises if a request is not served before a call such as `wake_up`. An open update does not count: it ends by itself.

    Raises:
        EngineAsleepError: The engine sleeps or is paused.
        WeightsMissingError: The weights are incomplete.
    """
    if engine.holds() & ASLEEP or not engine.holds() & UPDATING:
        engine.raise_refusal()
    if is_paused:
        raise EngineAsleepError("engine is paused; call resume()")


class Watch:
    """Finds between two calls of `check` what has made no progress.

    Args:
        driver: The engine.
    """

    def __init__(self, driver: ThreadDriver) -> None:
        self._driver = driver
        self._awaited: tuple[int, float] | None = None
        """The step boundary that the engine's thread was asked for, and the time of asking."""
        self._update_began: float | None = None

    def check(self, limit: float) -> None:
        """Raises if something has made no progress for longer than a limit.

        Args:
            limit: Seconds. The time of a step or an update counts from the first `check` that found it.

        Raises:
            EngineStuckError: The message names what is stuck.
        """
        found = (
            (self._step_seconds(), "a step of the engine has not ended", RESTART),
            (self._driver.jobs.stuck_seconds(), "the text of a request is being tokenised", RESTART),
            (jobs.shared_stuck_seconds(), "every helper thread of the process is busy", RESTART),
            (self._update_seconds(), "a weight update is open", "commit or abort it"),
        )
        for age, what, advice in found:
            if age > limit:
                raise EngineStuckError(f"engine is stuck: {what} for {age:.0f} s, longer than {limit:g} s; {advice}")

    def _step_seconds(self) -> float:
        """Seconds since the awaited step boundary was asked for."""
        thread, now = self._driver.thread, time.monotonic()
        if self._awaited is None or thread.boundary() >= self._awaited[0]:
            self._awaited = thread.next_boundary(), now
        return now - self._awaited[1]

    def _update_seconds(self) -> float:
        if not self._driver.engine.holds() & UPDATING:
            self._update_began = None
            return 0.0
        if self._update_began is None:
            self._update_began = time.monotonic()
        return time.monotonic() - self._update_began
