"""The threads of an AsyncEngine's replicas: objects with the calls of the core's EngineThread, Subscription and Notifier."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ... import _core
from ...errors import QueueFullError
from .members import sleep_all

if TYPE_CHECKING:
    from ..._core import CoreOutput, Subscription
    from .members import ReplicaEngine

HAS_ROOM, DEAD, CLOSED, BOUNDARY = _core.DRIVER_HAS_ROOM, _core.DRIVER_DEAD, _core.DRIVER_CLOSED, _core.DRIVER_BOUNDARY
STATES = (_core.DRIVER_IDLE, HAS_ROOM, _core.DRIVER_PAUSED, DEAD, CLOSED)


class ReplicaThread:
    """The threads of all replicas. A state holds if it holds for every thread; there is room if a living replica has room.

    Args:
        engine: The replicas.
        max_queued: Most samples that may wait, shared out among the replicas; 0 = no limit.
    """

    def __init__(self, engine: ReplicaEngine, max_queued: int) -> None:
        self.engine, count = engine, len(engine.engines)
        shares = [max_queued // count + (replica < max_queued % count) for replica in range(count)]
        self.threads = tuple(_core.EngineThread(one, share) for one, share in zip(engine.engines, shares, strict=True))
        engine.threads = self.threads
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._boundaries: deque[tuple[int, tuple[int, ...]]] = deque()
        """Boundaries that have not passed: number here, and the number for each thread."""
        self._asked = self._passed = 0

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, notifier: ReplicaNotifier | None, prompt: bytes, params: dict[str, Any], ends_only: bool, /
    ) -> ReplicaSubscription:
        """Like the core's. A replica whose queue is full passes the request on to the least loaded one with room.

        Raises:
            QueueFullError: The queues of all replicas are full.
            EngineDeadError: All replicas are dead.
        """
        first = self.engine.route(prompt, params)
        others = [replica for replica in self.engine.alive() if replica != first]
        others.sort(key=lambda replica: self.engine.engines[replica].stats()["num_unfinished"])
        for replica in (first, *others):
            own = None if notifier is None else notifier.notifiers[replica]
            try:
                subscription = self.threads[replica].submit(own, prompt, params, ends_only)
            except QueueFullError:
                continue
            return ReplicaSubscription(subscription, replica, len(self.threads))
        count = int(self.engine.stats()["num_waiting"])
        message = f"queue: wanted fewer than {self._max_queued} waiting requests, have {count}; raise max_queued_requests"
        raise QueueFullError(message, num_waiting=count)

    def abort_all(self) -> None:
        """Like the core's."""
        for thread in self.threads:
            thread.abort_all()

    def raise_fault_of(self, number: int) -> None:
        """Raises what killed the replica of a request, if it is dead."""
        if number % len(self.threads) not in self.engine.alive():
            raise self.engine.faults[number % len(self.threads)]

    # ---- commands ---------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, recompute: bool, /) -> None:
        """Like the core's."""
        for replica in self.engine.check_alive():
            self.threads[replica].reset_prefix_cache(recompute)

    def move_adapter(self, from_number: int, to_number: int, /) -> None:
        """Like the core's."""
        for replica in self.engine.check_alive():
            self.threads[replica].move_adapter(from_number, to_number)

    def pause(self, mode: int, /) -> None:
        """Like the core's."""
        for thread in self.threads:
            thread.pause(mode)

    def begin_sleep(self, mode: int, /) -> None:
        """Like the core's."""
        for thread in self.threads:
            thread.begin_sleep(mode)

    def end_sleep(self) -> None:
        """Like the core's."""
        for thread in self.threads:
            thread.end_sleep()

    def sleep(self, level: int, parts: int, /) -> None:
        """Like the core's. If a replica fails, those that slept before it are woken."""
        living = self.engine.check_alive()
        sleep_all([self.engine.engines[one] for one in living], [self.threads[one] for one in living], level, parts)

    def wake(self, parts: int, /) -> None:
        """Like the core's."""
        for replica in self.engine.check_alive():
            self.threads[replica].wake(parts)

    def check(self) -> None:
        """Like the core's."""
        for replica in self.engine.check_alive():
            self.threads[replica].check()

    def stop(self) -> None:
        """Like the core's."""
        for thread in self.threads:
            thread.stop()

    def close(self) -> None:
        """Like the core's."""
        self.stop()
        for thread in self.threads:
            thread.close()

    # ---- states -----------------------------------------------------------------------------------------------------

    def is_pausing(self) -> bool:
        """Like the core's."""
        return self.threads[0].is_pausing()

    def state(self) -> int:
        """The states that hold for all threads, and HAS_ROOM if a living replica has room."""
        found = [thread.state() for thread in self.threads]
        every = found[0]
        for states in found[1:]:
            every &= states
        has_room = any(states & HAS_ROOM and not states & DEAD for states in found)
        return every & ~HAS_ROOM | (HAS_ROOM if has_room else 0)

    def next_boundary(self) -> int:
        """Like the core's; it has passed when every thread has passed its own."""
        with self._lock:
            self._asked += 1
            self._boundaries.append((self._asked, tuple(thread.next_boundary() for thread in self.threads)))
            return self._asked

    def boundary(self) -> int:
        """Like the core's."""
        with self._lock:
            while self._boundaries and not self._late(self._boundaries[0][1]):
                self._passed = self._boundaries.popleft()[0]
            return self._passed

    def _late(self, wanted: tuple[int, ...]) -> list[int]:
        """Replicas that have not passed their boundaries."""
        return [one for one, (thread, own) in enumerate(zip(self.threads, wanted, strict=True)) if thread.boundary() < own]

    def place_of_boundary(self, number: int) -> tuple[int, int]:
        """A replica that has not passed a boundary, and its own number of it; one that has passed if there is no other."""
        with self._lock:
            wanted = next((own for other, own in self._boundaries if other == number), None)
            late = [] if wanted is None else self._late(wanted)
            return (late[0], wanted[late[0]]) if wanted and late else (0, self.threads[0].boundary())

    def places_of_state(self, state: int) -> list[int]:
        """Replicas where a state must come about before it can hold here; one that has the state if it holds."""
        found = [thread.state() for thread in self.threads]
        if state == HAS_ROOM:
            living = [replica for replica, states in enumerate(found) if not states & DEAD]
            return [replica for replica in living if found[replica] & state][:1] or living
        return [replica for replica, states in enumerate(found) if not states & state][:1] or [0]

    def wait(self, states: int, boundary: int, seconds: float, /) -> bool:
        """Like the core's."""
        deadline = time.monotonic() + seconds
        while not (self.state() & states or (boundary and self.boundary() >= boundary)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def raise_fault(self) -> None:
        """Raises what killed the first replica, if all are dead."""
        self.engine.check_alive()


class ReplicaSubscription:
    """A subscription of a replica, under the number that the request has for all of them. It ends the request when dropped.

    Args:
        subscription: The core's.
        replica: Number of the replica.
        count: Number of replicas.
    """

    __slots__ = ("_move", "_replica", "abort", "number", "take", "take_more", "wait")

    def __init__(self, subscription: Subscription, replica: int, count: int) -> None:
        self.number = subscription.number * count + replica
        self._replica = replica
        self._move = subscription.move
        # Bound methods: reading a token costs no call more than with one engine.
        self.take: Callable[[], list[CoreOutput]] = subscription.take
        self.take_more: Callable[[], tuple[tuple[bytes, ...], float, int, int] | None] = subscription.take_more
        self.wait: Callable[[float], bool] = subscription.wait
        self.abort: Callable[[], None] = subscription.abort

    def move(self, notifier: ReplicaNotifier | None, ends_only: bool, /) -> None:
        """Like the core's."""
        self._move(None if notifier is None else notifier.notifiers[self._replica], ends_only)


class ReplicaNotifier:
    """The notifiers of all replicas for one event loop.

    A state that must hold for all threads is watched at one thread that lacks it, then at the next one, so that a waiting loop
    is woken at most once for each thread.

    Args:
        thread: The replicas' threads.
    """

    def __init__(self, thread: ReplicaThread) -> None:
        self._thread = thread
        self.notifiers = tuple(_core.Notifier(one) for one in thread.threads)
        self._states = 0
        """Watched states that have not come about."""
        self._boundaries: set[int] = set()
        """Watched boundaries that have not passed."""

    def filenos(self) -> list[int]:
        """Descriptors, of which one is readable when `take` has a result."""
        return [notifier.fileno() for notifier in self.notifiers]

    def take(self) -> tuple[int, list[int]]:
        """Like the core's."""
        numbers: list[int] = []
        found, count = 0, len(self.notifiers)
        for replica, notifier in enumerate(self.notifiers):
            states, own = notifier.take()
            found |= states
            numbers += [number * count + replica for number in own]
        return (self._look() if found else 0), numbers

    def watch(self, states: int, boundary: int, /) -> None:
        """Like the core's."""
        self._states |= states
        if boundary:
            self._boundaries.add(boundary)
        self._arm()

    def _look(self) -> int:
        """The watched states that hold now. The others are watched on."""
        held = self._thread.state() & self._states
        self._states &= ~held
        passed = {number for number in self._boundaries if self._thread.boundary() >= number}
        self._boundaries -= passed
        self._arm()
        return held | (BOUNDARY if passed else 0)

    def _arm(self) -> None:
        thread, notifiers = self._thread, self.notifiers
        for state in STATES:
            for replica in thread.places_of_state(state) if self._states & state else ():
                notifiers[replica].watch(state, 0)
        for number in self._boundaries:
            replica, own = thread.place_of_boundary(number)
            notifiers[replica].watch(0, own)

    def close(self) -> None:
        """Like the core's."""
        for notifier in self.notifiers:
            notifier.close()
