"""The sleep of AsyncEngine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .jobs import beside
from .sleep import PAUSES, check_level, check_mode, drops_weights, parts_of, sleeps_so
from .thread import OVER, PAUSED

if TYPE_CHECKING:
    from ..weights.calls import Weights
    from .thread import ThreadDriver


class SleepingAsyncEngine:
    """Calls of AsyncEngine for sleep."""

    _driver: ThreadDriver
    _weights: Weights

    async def sleep(self, level: int = 1, mode: str = "abort", tags: str | Iterable[str] | None = None) -> None:
        """Gives memory back until `wake_up`; addresses and captured graphs stay good. New requests queue.

        Cancelled while requests end, it leaves the engine awake; later it goes on to its end.

        Args:
            level: 0 only stops; 1 keeps the weights in host memory; 2 keeps nothing, so that a full update has to follow.
            mode: What becomes of the requests in flight: "abort", "wait", or "keep" (they go on after waking).
            tags: "weights", "kv_cache": give back only these; None = both.

        Raises:
            UnsupportedError: Level 2, and no update could bring these weights back: quantised ones, or a Llama's GGUF file.
            DeviceMemoryError: The host has no memory for the weights; nothing has changed but what `mode` ended.
            EngineBusyError: The weights are being updated.
        """
        parts, level, number = parts_of(tags), check_level(level), check_mode(mode)
        driver = self._driver
        driver.check_alive()
        if sleeps_so(driver.engine, level, parts):
            return
        if drops_weights(level, parts):
            self._weights.check_updatable("sleep(level=2)")
        if mode == "wait" and driver.engine.holds():  # nothing can end meanwhile
            number = PAUSES["keep"]
        driver.thread.begin_sleep(number)
        try:
            await driver.until(PAUSED | OVER)
            driver.check_alive()
            await beside(driver.thread.sleep, level, parts)
        finally:
            driver.thread.end_sleep()

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Ends sleep, whole or in part; what is awake stays so.

        Args:
            tags: "weights", "kv_cache", "scheduling"; None = all. Steps run again with the last part that comes back.

        Raises:
            DeviceMemoryError: The device has less memory free than that; the engine sleeps on, and can be woken later.
        """
        parts = parts_of(tags)
        self._driver.check_alive()
        await beside(self._driver.thread.wake, parts)
