"""The engines of the replicas: one object with the calls of the core's Engine, and one with those of the core's Model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..._core import DRIVER_DEAD
from ...errors import EngineDeadError
from ..sleep import parts_asleep
from . import statistics
from .routing import Router
from .runs import Runs

if TYPE_CHECKING:
    from ..._core import CoreOutput, Engine, EngineThread, Model

Result = TypeVar("Result")
logger = logging.getLogger("llmpy")


class ReplicaModel:
    """The models of the replicas. They are equal, so a call that only describes the model asks the first.

    Args:
        models: The core's models, one a replica.
        devices: Names of the devices of each one's ranks.
    """

    def __init__(self, models: Sequence[Model], devices: Sequence[Sequence[str]]) -> None:
        self.models, self.devices = tuple(models), tuple(devices)

    def memory(self) -> list[dict[str, int]]:
        """Bytes by purpose of each rank, one replica after the other."""
        return [rank for model in self.models for rank in model.memory()]

    def weight_info(self) -> list[dict[str, Any]]:
        """Like the core's."""
        return self.models[0].weight_info()

    def program(self) -> list[str]:
        """Like the core's."""
        return self.models[0].program()

    def tap(self, ids: Any, values: list[int], runner: Any, params: dict[str, Any], /) -> list[list[bytes]]:
        """Like the core's, by the first replica that lives.

        Args:
            ids, values, params: As of the core.
            runner: The ReplicaEngine or ReplicaThread of these models.
        """
        engine: ReplicaEngine = getattr(runner, "engine", runner)
        first = engine.check_alive()[0]
        return self.models[first].tap(ids, values, (engine.threads or engine.engines)[first], params)

    def adapter_places(self) -> tuple[int, list[tuple[Any, ...]]]:
        """Like the core's."""
        return self.models[0].adapter_places()

    def lend_adapter(self, number: int, address: int, n_bytes: int, is_pinned: bool, /) -> None:
        """Like the core's, for each replica."""
        for model in self.models:
            model.lend_adapter(number, address, n_bytes, is_pinned)

    def holds_adapter(self, number: int, /) -> bool:
        """Like the core's, of any replica."""
        return any(model.holds_adapter(number) for model in self.models)

    def remove_adapter(self, number: int, /) -> None:
        """Like the core's, for each replica."""
        for model in self.models:
            model.remove_adapter(number)

    def running_adapters(self) -> list[int]:
        """Like the core's, of any replica."""
        return sorted({number for model in self.models for number in model.running_adapters()})

    def describe(self) -> dict[str, Any]:
        """Like the core's; `max_model_len` and `num_pages` are the least of all replicas."""
        found = [model.describe() for model in self.models]
        return {**found[0], **{name: min(one[name] for one in found) for name in ("max_model_len", "num_pages")}}

    def close(self) -> None:
        """Frees all models."""
        for model in self.models:
            model.close()


class ReplicaEngine:
    """The engines of the replicas. Request `n` of replica `r` has the number `n * replicas + r` here.

    A replica that meets a device fault is dead: its requests end with the fault, new requests go to the others, and calls that
    act on all replicas leave it out. When all are dead, calls raise the fault.

    Args:
        engines: The core's engines, one a replica.
        kv_event_capacity: Events of the prefix cache that each engine keeps.
    """

    def __init__(self, engines: Sequence[Engine], kv_event_capacity: int = 0) -> None:
        self.engines = tuple(engines)
        self.threads: tuple[EngineThread, ...] = ()
        """The threads that run the engines of an AsyncEngine; an LLM has none."""
        self.faults: dict[int, EngineDeadError] = {}
        """What killed a replica, by its number."""
        self._router = Router()
        self._runs = Runs(self)
        self._events = statistics.Events(self.engines, kv_event_capacity)

    # ---- replicas ---------------------------------------------------------------------------------------------------

    def alive(self) -> list[int]:
        """Numbers of the replicas that have not died."""
        for replica, thread in enumerate(self.threads):
            if replica not in self.faults and thread.state() & DRIVER_DEAD:
                try:
                    thread.raise_fault()
                except Exception as error:
                    self.bury(replica, error)
        return [replica for replica in range(len(self.engines)) if replica not in self.faults]

    def bury(self, replica: int, cause: Exception) -> EngineDeadError:
        """Notes the fault that killed a replica, and returns the error for its requests."""
        attributes = {name: getattr(cause, name, None) for name in ("operation", "code")}
        error = EngineDeadError(f"replica {replica} is dead: {cause}", **attributes)
        error.__cause__ = cause
        self.faults[replica] = error
        left = len(self.engines) - len(self.faults)
        logger.error("%s; its requests have failed, %d of %d replicas go on", error, left, len(self.engines))
        return error

    def check_alive(self) -> list[int]:
        """The replicas that live; raises the first fault if there is none."""
        living = self.alive()
        if not living:
            raise next(iter(self.faults.values()))
        return living

    def route(self, prompt: bytes, params: dict[str, Any]) -> int:
        """The replica for a request."""
        loads = {replica: int(self.engines[replica].stats()["num_unfinished"]) for replica in self.check_alive()}
        return self._router.choose(prompt, params.get("salt", b""), loads)

    def _first(self) -> Engine:
        """An engine that stands for all: the first that lives."""
        return self.engines[next(iter(self.alive()), 0)]

    def _each(self, call: Callable[[Engine], Result]) -> list[Result]:
        """Calls a function with every engine that lives, while none of them runs."""
        self.halt()
        return [call(self.engines[replica]) for replica in self.check_alive()]

    # ---- requests and steps -----------------------------------------------------------------------------------------

    def submit(self, prompt: bytes, params: dict[str, Any]) -> int:
        """Like the core's; the request goes to the replica that `Router` chooses."""
        replica = self.route(prompt, params)
        return self.engines[replica].submit(prompt, params) * len(self.engines) + replica

    def abort(self, numbers: Sequence[int] | None, /) -> None:
        """Like the core's."""
        count = len(self.engines)
        for replica, engine in enumerate(self.engines):
            own = None if numbers is None else [number // count for number in numbers if number % count == replica]
            if own != []:
                engine.abort(own)

    def step(self) -> bool:
        """One step of every replica that has work, at the same time."""
        self.check_alive()
        return self._runs.step()

    def run(self, timeout_ms: int, /) -> bool:
        """Runs all replicas until a sample finishes or the time is over. Unless `run` is called again, they stop then."""
        self.check_alive()
        self._runs.run(timeout_ms * 1e-3)
        return self.has_unfinished()

    def halt(self) -> None:
        """Stops the replicas after their current steps."""
        self._runs.halt()

    def take(self, finished_only: bool, /) -> list[CoreOutput]:
        """Like the core's."""
        return self._runs.take(finished_only)

    def number_outputs(self, replica: int, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """Outputs of a replica with the numbers that requests have here, and the replica's fault if it is dead."""
        fault, count = self.faults.get(replica), len(self.engines)
        for output in outputs:
            output["request"] = output["request"] * count + replica
            if fault is not None and output["finish"] == "error":
                output["fault"] = fault
        return outputs

    def has_unfinished(self) -> bool:
        """Whether a sample has not finished, or its output was not taken yet."""
        return self._runs.has_output() or any(engine.has_unfinished() for engine in self.engines)

    # ---- states -----------------------------------------------------------------------------------------------------

    def is_dead(self) -> bool:
        """Whether all replicas are dead."""
        return not self.alive()

    def raise_refusal(self) -> None:
        """Raises why a replica may run no step."""
        for replica in self.check_alive():
            self.engines[replica].raise_refusal()

    def hold_new(self, holds: bool, /) -> None:
        """Like the core's."""
        for engine in self.engines:
            engine.hold_new(holds)

    def settle(self) -> None:
        """Like the core's."""
        self._each(lambda engine: engine.settle())

    def holds(self) -> int:
        """The reasons of all replicas that live, or-ed."""
        found = 0
        for replica in self.alive():
            found |= self.engines[replica].holds()
        return found

    def sleep(self, level: int, parts: int, /) -> None:
        """Like the core's. If a replica fails, those that slept before it are woken."""
        self.halt()
        living = [self.engines[replica] for replica in self.check_alive()]
        sleep_all(living, living, level, parts)

    def wake(self, parts: int, /) -> None:
        """Like the core's."""
        self._each(lambda engine: engine.wake(parts))

    def weight_epoch(self) -> int:
        """Like the core's; equal for all replicas that live."""
        return self._first().weight_epoch()

    def reset_prefix_cache(self, recompute: bool, /) -> None:
        """Like the core's."""
        for replica in self.check_alive():
            self.engines[replica].reset_prefix_cache(recompute)

    def move_adapter(self, from_number: int, to_number: int, /) -> None:
        """Like the core's."""
        for replica in self.check_alive():
            self.engines[replica].move_adapter(from_number, to_number)

    # ---- statistics -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """The core's counters and gauges, summed (`statistics.total`)."""
        return {**statistics.total(self.stats_by_replica()), "num_dead_replicas": len(self.engines) - len(self.alive())}

    def stats_by_replica(self) -> list[dict[str, float]]:
        """The core's counters and gauges of every replica."""
        return [engine.stats() for engine in self.engines]

    def step_log(self, max: int, /) -> list[tuple[Any, ...]]:
        """The last steps of all replicas by their start, each with its replica's number at the end."""
        return statistics.merged_steps([engine.step_log(max) for engine in self.engines], max)

    def kv_events(self, next: int, /) -> tuple[int, list[tuple[Any, ...]]]:
        """Events of all replicas, numbered together, each with its replica's number at the end."""
        return self._events.read(next)

    def histograms(self) -> dict[str, tuple[tuple[float, ...], tuple[int, ...], float]]:
        """The core's histograms, summed."""
        return statistics.summed_histograms([engine.histograms() for engine in self.engines])

    def check(self) -> None:
        """Like the core's."""
        self._each(lambda engine: engine.check())

    def close(self) -> None:
        """Frees all engines."""
        for engine in self.engines:
            engine.close()
        self._runs.close()


def sleep_all(engines: Sequence[Engine], sleepers: Sequence[Engine | EngineThread], level: int, parts: int) -> None:
    """Puts replicas to sleep, all or none: if one fails, what the call has put to sleep before is woken again.

    Args:
        engines: The replicas' engines.
        sleepers: What puts each to sleep: the engine, or the thread that runs it.
        level, parts: As in the core's `sleep`.
    """
    before = [parts_asleep(engine) for engine in engines]
    for index, sleeper in enumerate(sleepers):
        try:
            sleeper.sleep(level, parts)
        except BaseException:
            for other in range(index):
                sleepers[other].wake(parts_asleep(engines[other]) & ~before[other])
            raise
