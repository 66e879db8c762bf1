"""Runs the core's engine from one thread at a time and hands updates from the core to their requests."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import EngineAsleepError, EngineBusyError, LlmpyError, with_partial
from ..outputs import RequestOutputs
from .cores import halt
from .health import check_open

if TYPE_CHECKING:
    from .._core import CoreOutput, Engine, Model
    from .requests import Request

logger = logging.getLogger("llmpy")

SLICE_MS = 40
"""Milliseconds in the core between two checks for signals, not counting the step in flight."""


class Driver:
    """One engine of the core and its requests.

    Args:
        model, engine: Objects of the core; `close` closes them.
    """

    def __init__(self, model: Model, engine: Engine) -> None:
        self.model = model
        self.engine = engine
        self.closed = False
        self.frozen = False
        """Whether a pause has taken effect, so that no step may run."""
        self._gate: frozenset[int] | None = None
        """Numbers of the requests that a pause has found."""
        self._pid = os.getpid()
        self.queued_outputs: dict[int, Request] = {}
        """Requests with updates that `step` has not returned yet."""
        self.deliveries = 0
        """Number of times that updates were handed out."""
        self._requests: dict[int, Request] = {}
        self._inbox: deque[CoreOutput] = deque()
        self._table = threading.Lock()
        self._busy = threading.Lock()
        self._driving_thread = 0

    def check(self) -> None:
        """Raises unless the engine can be used.

        Raises:
            EngineClosedError: The engine was closed, or belongs to another process.
        """
        check_open(self._pid, self.closed)

    @contextmanager
    def driving(self, steps: bool = True) -> Iterator[None]:
        """Claims the engine for this thread.

        Args:
            steps: Whether the block will run steps.

        Raises:
            EngineBusyError: Another thread uses the engine, or the weights are being updated.
            EngineAsleepError: `steps`, and the engine sleeps or is paused.
            WeightsMissingError: `steps`, and the weights are incomplete.
            GenerationInterrupted: Ctrl-C in the block; `partial` is empty unless the block has set it.
        """
        self.check()
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError("engine is in use by another thread; use AsyncEngine, which serves several, or a lock")
        self._driving_thread = threading.get_ident()
        try:
            if steps:
                self.engine.raise_refusal()
                if self.is_paused:
                    raise EngineAsleepError("engine is paused; call resume()")
            yield
        except KeyboardInterrupt as error:
            with_partial(error, RequestOutputs())
            raise
        finally:
            halt(self.engine)
            self._driving_thread = 0
            self._busy.release()

    def submit(self, request: Request, params: Mapping[str, Any]) -> None:
        """Queues a request. Any thread may call it."""
        assert request.prompt.ids is not None
        with self._table:
            self.check()
            request.number = self.engine.submit(request.prompt.ids.tobytes(), dict(params))
            self._requests[request.number] = request

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends requests at the next step boundary; finished requests are ignored. Any thread may call it."""
        numbers = [request.number for request in requests if not request.finished and request.number >= 0]
        if numbers and not self.closed:
            self.engine.abort(numbers)

    def advance(self, until_finished: bool) -> list[Request]:
        """Runs the engine and hands out updates. The caller has claimed the engine.

        Args:
            until_finished: Run until a sample finishes or a short time has passed, and take only finished samples; else
                run one step and take all updates.

        Returns:
            The requests with output.
        """
        self.check()
        if not self._inbox:
            if until_finished:
                self.engine.run(SLICE_MS)
            else:
                self.engine.step()
            return self.collect(until_finished)
        return self._deliver()

    def collect(self, finished_only: bool = False) -> list[Request]:
        """Acts on aborts and hands out updates without running a step. The caller has claimed the engine.

        Returns:
            The requests with output.
        """
        with self._table:
            self._inbox.extend(self.engine.take(finished_only))
        return self._deliver()

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait outside the core's queue."""
        return self._gate is not None

    def pause(self) -> None:
        """Makes new requests wait outside the core's queue until `resume`. The caller has claimed the engine."""
        with self._table:
            if self._gate is None:
                self.engine.hold_new(True)
                self._gate = frozenset(self._requests)

    def resume(self) -> None:
        """Lets the waiting requests enter the core's queue. The caller has claimed the engine."""
        self.engine.hold_new(False)
        self._gate, self.frozen = None, False

    def in_flight(self) -> list[Request]:
        """Unfinished requests without those that wait until `resume`."""
        with self._table:
            return [request for number, request in self._requests.items() if self._gate is None or number in self._gate]

    def _deliver(self) -> list[Request]:
        """Hands updates to their requests. After an interruption an update may come twice; requests ignore known data."""
        self.deliveries += 1
        touched: dict[int, Request] = {}
        while self._inbox:
            output = self._inbox[0]
            number = output["request"]
            request = self._requests.get(number)
            if request is not None:
                request.absorb(output)
                touched[number] = request
                if request.queued:
                    self.queued_outputs[number] = request
                if request.finished:
                    if not output["is_last"]:
                        self.engine.abort([number])
                    del self._requests[number]
            self._inbox.popleft()
        return list(touched.values())

    def finish(self, requests: Iterable[Request], progress: Callable[[int], None]) -> None:
        """Runs the engine until these requests are finished. The caller has claimed the engine.

        Args:
            requests: Submitted requests.
            progress: Called after every slice with the number of these requests that finished in it.
        """
        pending = {request.number: request for request in requests if not request.finished}
        stepwise = any(request.match_stops for request in pending.values())
        try:
            while pending:
                touched = self.advance(until_finished=not stepwise)
                done = [pending.pop(request.number) for request in touched if request.finished and request.number in pending]
                if pending and not touched and not self.engine.has_unfinished():
                    raise RuntimeError(f"engine lost {len(pending)} requests")
                progress(len(done))
        except BaseException:
            self.drop(pending.values())
            raise

    def drop(self, requests: Iterable[Request]) -> None:
        """Aborts requests and collects their last outputs."""
        left = [request for request in requests if not request.finished]
        try:
            self.abort(left)
            for _ in range(2):
                if any(request.number in self._requests and not request.finished for request in left):
                    self.advance(until_finished=False)
        except LlmpyError:
            logger.debug("abort failed", exc_info=True)  # the caller raises the error that led here
        finally:
            for request in left:
                self._requests.pop(request.number, None)
                request.abort()

    def forget(self, request: Request) -> None:
        """Aborts a request and drops its output. Any thread may call it, even without a claim on the engine."""
        self.abort([request])
        self._requests.pop(request.number, None)

    def close(self) -> None:
        """Frees the engine and interrupts a thread that runs steps. A second call, or one in a child process, frees nothing."""
        with self._table:
            if self.closed:
                return
            self.closed = True
            self._requests.clear()
            self.queued_outputs.clear()
        if os.getpid() != self._pid:
            return
        if self._driving_thread == threading.get_ident():
            self._free()
        else:
            with self._busy:
                self._free()

    def _free(self) -> None:
        self.engine.close()
        self.model.close()
