"""One model over several machines of a Ray cluster: Ray places an actor on each and watches them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import DeviceError
from ..llm import LLM
from ._hosts import Followed
from ._rollout import RolloutActor

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

CLOSE_S = 30.0
"""Seconds that actors have to end by themselves."""


def _free_address() -> tuple[str, int]:
    """The address of this machine, and a port that is free there now."""
    with socket.create_server(("", 0)) as server:
        return get_node_ip_address(), server.getsockname()[1]


class _Follower:
    def follow(self, model: str, options: dict[str, Any]) -> None:
        """Computes for host 0 until that one closes its engine."""
        with contextlib.suppress(Followed):
            LLM(model, **options)


_FreeAddress = ray.remote(num_cpus=0)(_free_address)
_FollowerActor = ray.remote(_Follower)


class RayExecutor:
    """One model over several machines of a Ray cluster, an actor a machine, whose ranks are threads.

    `engine` is the actor of host 0, a `RolloutActor` with AsyncEngine's calls. It is a context manager; leaving it closes all.

    Args:
        model: Hub id, or a path that all machines have.
        nnodes: Number of hosts, at least 2.
        num_cpus: Processors of each actor, for Ray's bookkeeping and for its threads.
        num_gpus: GPUs of each actor, one for each of its ranks; with device="cuda:0" those that Ray gives the actor.
        placement_group: A placement group with a bundle for each host; None: one is made.
        strategy: Of the group that is made: "STRICT_SPREAD" wants a machine for each host, "SPREAD" takes fewer if need be.
        timeout_s: Seconds to wait for room in the cluster, and then for the engine.
        options: Options of AsyncEngine, such as `tensor_parallel_size`.

    Raises:
        TimeoutError: The cluster has no room, or the engine is not up in time.
        DeviceError: An actor failed before the engine was up.
    """

    engine: ActorHandle[Any]

    def __init__(
        self,
        model: str,
        *,
        nnodes: int,
        num_cpus: int = 1,
        num_gpus: int = 0,
        placement_group: PlacementGroup | None = None,
        strategy: str = "STRICT_SPREAD",
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        self._own_group = placement_group is None
        self._group = placement_group or _make_group(nnodes, num_cpus, num_gpus, strategy)
        self._actors: list[ActorHandle[Any]] = []
        self._following: list[ray.ObjectRef[None]] = []
        try:
            self._start(model, nnodes, {"num_cpus": num_cpus, "num_gpus": num_gpus}, timeout_s, options)
        except BaseException:
            self.kill()
            raise

    def _start(self, model: str, nnodes: int, room: dict[str, int], timeout_s: float, options: dict[str, Any]) -> None:
        try:
            ray.get(self._group.ready(), timeout=timeout_s)
        except GetTimeoutError:
            each = f"{room['num_cpus']} CPUs" + (f" and {room['num_gpus']} GPUs" if room["num_gpus"] else "")
            message = f"RayExecutor: no room for {nnodes} hosts of {each} within {timeout_s:g} s (timeout_s)"
            raise TimeoutError(f"{message}; the cluster has {ray.cluster_resources()}") from None
        end = time.monotonic() + timeout_s
        address, port = ray.get(_FreeAddress.options(**self._place(0)).remote())
        env = {"LLMPY_HOSTS_TOKEN": secrets.token_hex(), "LLMPY_HOSTS_TIMEOUT": str(timeout_s)}
        how = {**room, "runtime_env": {"env_vars": env}}
        shared = {**options, "nnodes": nnodes, "master_addr": address, "master_port": port}
        self.engine = RolloutActor.options(**how, **self._place(0)).remote(model, **shared, node_rank=0)
        self._actors = [self.engine]
        for host in range(1, nnodes):
            follower = _FollowerActor.options(**how, **self._place(host)).remote()
            self._actors.append(follower)
            self._following.append(follower.follow.remote(model, {**shared, "node_rank": host}))
        self._await(self.engine.check_health.remote(), end, timeout_s)

    def _place(self, host: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host)}

    def _await(self, is_up: ray.ObjectRef[None], end: float, timeout_s: float) -> None:
        """Waits for the engine; an actor that ends before it is the error."""
        wanted = [is_up, *self._following]
        ended, _ = ray.wait(wanted, timeout=max(end - time.monotonic(), 0))
        if not ended:
            raise TimeoutError(f"RayExecutor: the engine was not up within {timeout_s:g} s (timeout_s)")
        host = wanted.index(ended[0])
        try:
            ray.get(ended[0])
        except RayError as error:
            raise DeviceError(f"RayExecutor: host {host} failed: {error}", operation="open") from error
        if host:
            raise DeviceError(f"RayExecutor: host {host} has ended before the engine was up", operation="open")

    def check(self) -> None:
        """Raises if an actor has ended.

        Raises:
            DeviceError: It names the host.
        """
        for host, following in enumerate(self._following, 1):
            if ray.wait([following], timeout=0)[0]:
                try:
                    ray.get(following)
                    why = "it has ended"
                except RayError as error:
                    why = str(error)
                raise DeviceError(f"RayExecutor: host {host} has gone: {why}", operation="follow")

    def shutdown(self) -> None:
        """Closes the engine, waits for the other hosts, and gives the room back. A second call does nothing."""
        if self._actors:
            with contextlib.suppress(RayError):
                ray.get(self.engine.shutdown.remote(), timeout=CLOSE_S)
            ray.wait(self._following, num_returns=len(self._following), timeout=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Ends all actors at once, without waiting for requests."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._following = [], []
        if self._own_group:
            remove_placement_group(self._group)
            self._own_group = False

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *unused: object) -> None:
        self.shutdown()


def _make_group(nnodes: int, num_cpus: int, num_gpus: int, strategy: str) -> PlacementGroup:
    bundle = {"CPU": float(num_cpus)} | ({"GPU": float(num_gpus)} if num_gpus else {})
    return placement_group([bundle] * nnodes, strategy=strategy)
