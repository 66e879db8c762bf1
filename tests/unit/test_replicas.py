"""What replicas are made of: the choice of a replica, their shares of the machine, sums of statistics, and the core's calls."""

from typing import Any

import numpy as np
import pytest

from llmpy import ConfigError, _core, hardware
from llmpy.config import EngineConfig
from llmpy.engine.replicas import members, placing, statistics, threads, update
from llmpy.engine.replicas.routing import MAX_IMBALANCE, PIECE_TOKENS, Router

STAND_INS = [
    (_core.Model, members.ReplicaModel),
    (_core.Engine, members.ReplicaEngine),
    (_core.EngineThread, threads.ReplicaThread),
    (_core.Subscription, threads.ReplicaSubscription),
    (_core.WeightUpdate, update.ReplicaUpdate),
]


@pytest.mark.parametrize(("core", "replicas"), STAND_INS)
def test_the_cores_calls_are_there(core: type, replicas: type) -> None:
    """But for models over several hosts and prompts of other engines, which replicas lack."""
    handed_over = {"save_prompt", "fetch_prompt", "lend_prompt", "borrow_prompt"}
    refused = {_core.Model: {"follow"}, _core.Engine: {"save_prompt"}, _core.EngineThread: handed_over}
    refused |= {_core.Subscription: {"end_wait"}, _core.WeightUpdate: {"takes"}}  # `takes` asks no model
    missing = {name for name in dir(core) if not name.startswith("_")} - set(dir(replicas))
    assert missing == refused.get(core, set())


def test_the_notifiers_calls_are_there() -> None:
    missing = {name for name in dir(_core.Notifier) if not name.startswith("_")} - set(dir(threads.ReplicaNotifier))
    assert missing == {"fileno"}  # there are several: filenos


def prompt(*parts: int) -> bytes:
    """Pieces of a prompt, each with one token over and over."""
    return b"".join(np.full(PIECE_TOKENS, part, np.int32).tobytes() for part in parts)


def test_the_least_loaded_replica_gets_an_unknown_prompt() -> None:
    router = Router()
    assert router.choose(prompt(1), b"", {0: 3, 1: 2, 2: 2}) == 1
    assert router.choose(prompt(2), b"", {0: 0, 1: 0, 2: 0}) == 0
    assert router.choose(b"", b"", {0: 1, 1: 0}) == 1
    assert router.choose(prompt(3)[:-4], b"", {0: 0, 1: 1}) == 0  # too short for a piece: it belongs to no replica
    assert router.choose(prompt(3)[:-4], b"", {0: 1, 1: 0}) == 1


def test_the_replica_with_the_longest_beginning_gets_a_prompt() -> None:
    router = Router()
    assert router.choose(prompt(1, 2), b"", {0: 1, 1: 0}) == 1
    assert router.choose(prompt(1, 3), b"", {0: 0, 1: 5}) == 1  # it shares one piece
    assert router.choose(prompt(2, 1), b"", {0: 0, 1: 5}) == 0  # the pieces are not at the beginning
    assert router.choose(prompt(1, 2, 9), b"salt", {0: 0, 1: 5}) == 0  # another salt shares no block
    assert router.choose(prompt(1, 2), b"", {0: 7}) == 0  # the owner is dead


def test_an_overloaded_owner_loses_its_beginning() -> None:
    router = Router()
    assert router.choose(prompt(1), b"", {0: 0, 1: 0}) == 0
    assert router.choose(prompt(1), b"", {0: MAX_IMBALANCE - 1, 1: 0}) == 0
    assert router.choose(prompt(1), b"", {0: MAX_IMBALANCE, 1: 0}) == 1
    assert router.choose(prompt(1), b"", {0: 0, 1: 0}) == 1


@pytest.mark.parametrize(("threads", "count", "shares"), [(8, 3, [3, 3, 2]), (2, 2, [1, 1]), (1, 3, [1, 1, 1])])
def test_threads_are_shared_out(threads: int, count: int, shares: list[int]) -> None:
    options = {"num_threads": threads, "devices": ["cpu"] * count, "device": "cpu", "memory_share": 0.9}
    assert [own["num_threads"] for own in placing.replica_options(options, count)] == shares


def test_all_cores_are_shared_out_by_default() -> None:
    options = {"num_threads": 0, "devices": ["cpu"] * 2, "device": "cpu", "memory_share": 0.9}
    found = [own["num_threads"] for own in placing.replica_options(options, 2)]
    assert sum(found) == max(_core.cpu_threads(), 2) and max(found) - min(found) <= 1


def test_replicas_have_their_devices_and_share_the_memory_of_one() -> None:
    options = {"num_threads": 1, "devices": ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "device": "cuda:0", "memory_share": 0.8}
    found = placing.replica_options(options, 2)
    assert [(own["device"], own["devices"]) for own in found] == [
        ("cuda:0", ["cuda:0", "cuda:1"]), ("cuda:2", ["cuda:2", "cuda:3"])
    ]  # fmt: skip
    assert [own["memory_share"] for own in found] == [0.8, 0.8]
    found = placing.replica_options({**options, "devices": ["cuda:0", "cuda:0"]}, 2)
    assert [own["memory_share"] for own in found] == [0.4, 0.8]


def gpus(*names: str) -> list[dict[str, Any]]:
    return [{"device": f"cuda:{index}", "name": name, "available": True} for index, name in enumerate(names)]


def test_each_replica_gets_a_device_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cuda_devices", lambda wants_free: gpus("A", "B", "B", "A"))
    config = EngineConfig(device="cuda:1", data_parallel_size=2)
    assert hardware.devices_of(config) == ["cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match=r"data_parallel_size=3: wanted so many devices like cuda:1 \(B\), have 2") as error:
        hardware.devices_of(config.replace(data_parallel_size=3))
    assert error.value.option == "data_parallel_size"
    assert hardware.devices_of(config.replace(data_parallel_size=3, device_ids=(2, 2, 2))) == ["cuda:2"] * 3
    with pytest.raises(ConfigError, match=r"device_ids must have data_parallel_size=2 numbers, got \[1\]"):
        hardware.devices_of(config.replace(device_ids=(1,)))
    assert hardware.devices_of(config.replace(data_parallel_size=1, tensor_parallel_size=2)) == ["cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 \* tensor_parallel_size=2: wanted so many devices like"):
        hardware.devices_of(config.replace(tensor_parallel_size=2))


def test_a_short_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_queued_requests must be at least data_parallel_size=3, got 2"):
        EngineConfig(data_parallel_size=3, max_queued_requests=2)


def test_a_load_reports_its_part_of_all_loads() -> None:
    seen: list[tuple[int, int]] = []
    report = placing.progress_of(1, 2, lambda done, total: seen.append((done, total)))
    assert report is not None
    report(0, 10)
    report(10, 10)
    assert seen == [(10, 20), (20, 20)] and placing.progress_of(0, 2, None) is None


def test_counters_are_summed_and_levels_are_not() -> None:
    one = {"num_running": 2, "generation_tokens": 10, "weight_epoch": 3, "uptime_s": 2.0, "last_step_ms": 5.0}
    two = {"num_running": 1, "generation_tokens": 5, "weight_epoch": 3, "uptime_s": 1.0, "last_step_ms": 7.0}
    assert statistics.total([one, two]) == {
        "num_running": 3, "generation_tokens": 15, "weight_epoch": 3, "uptime_s": 2.0, "last_step_ms": 7.0
    }  # fmt: skip
    bounds = (1.0, 2.0)
    found = statistics.summed_histograms([{"a": (bounds, (1, 0, 2), 9.0)}, {"a": (bounds, (0, 4, 1), 8.0)}])
    assert found == {"a": (bounds, (1, 4, 3), 17.0)}


def test_steps_are_merged_by_their_start() -> None:
    logs: list[list[tuple[Any, ...]]] = [[(1, 1.0), (2, 3.0)], [(1, 2.0), (2, 3.0)]]
    assert statistics.merged_steps(logs, 9) == [(1, 1.0, 0), (1, 2.0, 1), (2, 3.0, 0), (2, 3.0, 1)]
    assert statistics.merged_steps(logs, 1) == [(2, 3.0, 1)] and statistics.merged_steps(logs, 0) == []


class Ring:
    """The cache events of one engine: it keeps the last `capacity` of `count`."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count = capacity, 0

    def kv_events(self, start: int) -> tuple[int, list[tuple[Any, ...]]]:
        first = max(start, self.count - self.capacity)
        return min(first + 64, self.count), [(number, "event") for number in range(first, min(first + 64, self.count))]


def test_events_of_all_caches_have_one_numbering_and_losses_leave_gaps() -> None:
    rings: list[Any] = [Ring(100), Ring(100)]
    events = statistics.Events(rings, 100)
    assert events.read(0) == (0, [])
    rings[0].count, rings[1].count = 2, 1
    assert events.read(0) == (3, [(0, "event", 0), (1, "event", 0), (2, "event", 1)])
    rings[1].count += 150  # of these 50 are lost before they are read
    behind, found = events.read(3)
    assert [event[0] for event in found] == list(range(53, 53 + 64)) and behind == 117
    assert {event[-1] for event in found} == {1}
    behind, found = events.read(behind)
    assert (behind, len(found)) == (153, 36) and events.read(behind) == (153, [])
