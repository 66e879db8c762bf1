"""What each replica gets of the machine: devices, threads, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import _core


def replica_options(options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The core's options of each replica.

    Threads of the CPU are shared out, at least one each. Replicas on one GPU share `memory_share`. The core takes it as the
    part of the device that may be in use in all, so each replica's bound is higher than that of the replica before it.

    Args:
        options: The options of one engine; `devices` has the ranks of all replicas, one replica after the other.
        count: Number of replicas.
    """
    threads = options["num_threads"] or _core.cpu_threads()
    devices, n_ranks = options["devices"], len(options["devices"]) // count
    found = []
    for replica in range(count):
        own = devices[replica * n_ranks : (replica + 1) * n_ranks]
        earlier, others = devices[: replica * n_ranks].count(own[0]), devices.count(own[0])
        found.append(
            {
                **options,
                "device": own[0],
                "devices": own,
                "num_threads": max(1, threads // count + (replica < threads % count)),
                "memory_share": options["memory_share"] * (earlier + own.count(own[0])) / others,
            }
        )
    return found


def progress_of(replica: int, count: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int, int], None] | None:
    """The progress of one replica's load as a part of all loads."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(replica * total + done, count * total)
