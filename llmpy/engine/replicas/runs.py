"""Runs the engines of an LLM's replicas at the same time, and collects their output."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ...errors import EngineClosedError
from ..jobs import JobQueue

if TYPE_CHECKING:
    from ..._core import CoreOutput, Engine
    from .members import ReplicaEngine

STEP_S = 0.0
"""A time that is over after one step."""


class Runs:
    """One helper thread a replica, which runs the replica's engine and takes its output.

    `run` and `step` start the threads; they end when their engine has no work, or when the time that the last `run` gave is
    over. So a replica that finishes a sample does not wait for the others. All methods are for the thread that drives the LLM.

    Args:
        owner: The engines.
    """

    def __init__(self, owner: ReplicaEngine) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._deadline = 0.0
        self._running: set[int] = set()
        self._outputs: list[CoreOutput] = []
        self._errors: list[BaseException] = []
        """What ended a run, but the death of a replica: `run` and `step` raise it."""
        self._jobs: JobQueue | None = None

    def run(self, seconds: float) -> None:
        """Runs all replicas until one has output or the time is over."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._start(deadline)
            while self._running and not self._outputs and not self._errors and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        self._raise_error()

    def step(self) -> bool:
        """Runs one step of every replica that has work. Returns whether one had."""
        self.halt()
        with self._changed:
            has_work = self._start(time.monotonic() + STEP_S)
            self._await_all()
        self._raise_error()
        return has_work

    def halt(self) -> None:
        """Waits until no engine runs."""
        with self._changed:
            self._deadline = 0.0
            self._await_all()

    def take(self, finished_only: bool) -> list[CoreOutput]:
        """The output so far. Engines that run hand it over themselves; if all output is wanted, they are stopped first."""
        if not finished_only:
            self.halt()
        owner = self._owner
        with self._changed:
            outputs, self._outputs = self._outputs, []
            running = set(self._running)
        for replica in owner.alive():
            if replica not in running:
                outputs += owner.number_outputs(replica, owner.engines[replica].take(finished_only))
        return outputs

    def has_output(self) -> bool:
        """Whether there is output to take, or an engine runs that may make some."""
        with self._changed:
            return bool(self._running or self._outputs)

    def close(self) -> None:
        """Ends the threads. The engines are closed, so none of them runs."""
        if self._jobs is not None:
            self._jobs.close()

    # ---- with the lock ----------------------------------------------------------------------------------------------

    def _start(self, deadline: float) -> bool:
        """Lets every replica with work run until the deadline. Returns whether one has work."""
        owner = self._owner
        self._deadline = deadline
        if self._jobs is None:
            self._jobs = JobQueue("llmpy-replica", len(owner.engines))
        for replica in owner.alive():
            if replica not in self._running and owner.engines[replica].has_unfinished():
                self._jobs.put(_Run(self, replica))
                self._running.add(replica)
        return bool(self._running)

    def _await_all(self) -> None:
        while self._running:
            self._changed.wait()

    def _raise_error(self) -> None:
        with self._changed:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    # ---- on the helper threads --------------------------------------------------------------------------------------

    def drive(self, replica: int) -> None:
        """Runs a replica until it has no work or the time is over; at least one step."""
        engine, left = self._owner.engines[replica], STEP_S
        while left >= 0:
            with self._changed:
                left = max(self._deadline - time.monotonic(), STEP_S)
            outputs = self._advance(replica, engine, left)
            with self._changed:
                self._outputs += outputs
                left = self._deadline - time.monotonic()
                if left <= 0 or replica in self._owner.faults or not engine.has_unfinished():
                    self._running.discard(replica)
                    left = -1
                self._changed.notify_all()

    def _advance(self, replica: int, engine: Engine, seconds: float) -> list[CoreOutput]:
        """Runs steps until a sample finishes or the time is over; all output of finished samples, at the death of all."""
        owner = self._owner
        try:
            if seconds > STEP_S:
                engine.run(max(1, int(seconds * 1000)))
            else:
                engine.step()
        except EngineClosedError:
            raise
        except Exception as error:
            if not engine.is_dead():
                raise
            owner.bury(replica, error)
        return owner.number_outputs(replica, engine.take(seconds > STEP_S or replica in owner.faults))

    def fail(self, replica: int, error: BaseException) -> None:
        """Ends a run with an error that is not the replica's death."""
        with self._changed:
            if not isinstance(error, EngineClosedError):
                self._errors.append(error)
            self._running.discard(replica)
            self._changed.notify_all()


class _Run:
    """The job of a helper thread."""

    def __init__(self, runs: Runs, replica: int) -> None:
        self._runs, self._replica = runs, replica

    def run(self) -> None:
        self._runs.drive(self._replica)

    def fail(self, error: BaseException) -> None:
        self._runs.fail(self._replica, error)
