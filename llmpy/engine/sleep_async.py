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
        """Frees device memory until `wake_up`; addresses and captured graphs stay valid. New requests queue.

        A call cancelled while requests end leaves the engine awake. A call cancelled later still puts the engine to sleep.

        Args:
            level: 0 only stops; 1 keeps the weights in host memory; 2 drops the weights, so a full update must follow.
            mode: What happens to the requests in flight: "abort", "wait", or "keep" (they go on after waking).
            tags: "weights", "kv_cache": free only these; None = both.

        Raises:
            UnsupportedError: Level 2, and no update could restore these weights: quantised weights, or a Llama's GGUF file.
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
        if mode == "wait" and driver.engine.holds():  # no request can finish while the engine is held
            number = PAUSES["keep"]
        driver.thread.begin_sleep(number)
        try:
            await driver.until(PAUSED | OVER)
            driver.check_alive()
            await beside(driver.thread.sleep, level, parts)
        finally:
            driver.thread.end_sleep()

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Wakes the engine or some of its parts; parts that are awake stay awake.

        Args:
            tags: "weights", "kv_cache", "scheduling"; None = all. Steps run again with the last part that comes back.

        Raises:
            DeviceMemoryError: The device has too little free memory; the engine still sleeps and can be woken later.
        """
        parts = parts_of(tags)
        self._driver.check_alive()
        await beside(self._driver.thread.wake, parts)
