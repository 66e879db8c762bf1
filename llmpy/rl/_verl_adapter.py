"""The classes that verl calls: the adapter in the worker's process, the replica, and the actor that forwards requests.

Written to verl 0.9: `BaseRollout` (verl/workers/rollout/base.py) and `RolloutReplica` (replica.py).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from ..async_engine import AsyncEngine
from ..errors import UnsupportedError
from ._rpc import Client
from ._verl_engine import NAMES, EngineHost, Settings

_adapters: dict[int, ServerAdapter] = {}
"""Replica rank -> adapter in this process."""


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The engine of one replica, in the process that trains or receives the weights. One device per replica.

    Args:
        config: verl's RolloutConfig; `engine_kwargs.llmpy` holds options of EngineConfig.
        model_config: verl's HFModelConfig.
        device_mesh: Unused.
        replica_rank: Number of the replica; -1 = the process's rank.
    """

    is_leader_rank = True

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.sleep_level = 1 if adapter_rank(model_config) else 2
        self._host: EngineHost | None = None
        _refuse(self.config)
        _adapters[self.replica_rank] = self

    def launch(self, mode: str) -> str:
        """Creates the engine on the first call.

        Args:
            mode: "hybrid", "colocated" or "standalone".

        Returns:
            Path of the engine's socket.
        """
        if self._host is None:
            options = engine_options(self.config, self.model_config, self.replica_rank, mode)
            self._host = EngineHost(AsyncEngine(**options), _settings(self.config, self.model_config, self.replica_rank, mode))
        return self._host.path

    @property
    def host(self) -> EngineHost:
        """The engine's host."""
        if self._host is None:
            raise RuntimeError("the engine is not launched: the replica's launch_servers() comes first")
        return self._host

    async def resume(self, tags: list[str]) -> None:
        """Allocates the memory of "weights" or "kv_cache" again."""
        if self.config.free_cache_engine:
            await self.host.wake_up(tags)

    async def release(self) -> None:
        """Frees the memory of weights and cache."""
        self.host.sleep_level = self.sleep_level
        await self.host.sleep()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = False,
        **_: Any,
    ) -> None:
        """Replaces all weights, or the adapter.

        Args:
            weights: A generator or async generator of (name, tensor).
            global_steps: The trainer's step.
            wire_format: Must be "named_tensors".
            peft_config: The content of adapter_config.json, if the trainer trains an adapter that is not merged; else None.
            base_sync_done: With peft_config: the weights are those of the adapter, else those of the model that it changes.
        """
        if wire_format != "named_tensors":
            raise UnsupportedError(f"wire_format {wire_format!r} is not supported; use another checkpoint_engine.backend")
        if peft_config is not None and base_sync_done:
            await self.host.update_adapter(weights, peft_config, global_steps)
        else:
            await self.host.update_weights(weights if peft_config is None else _without_wrappers(weights), global_steps)


async def _without_wrappers(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """The weights of the model that an adapter changes, without the names of PEFT's wrappers."""
    if isinstance(weights, AsyncIterator):
        async for name, tensor in weights:
            yield name.replace(".base_layer.", "."), tensor
    else:
        for name, tensor in weights:
            yield name.replace(".base_layer.", "."), tensor


def adapter_rank(model_config: Any) -> int:
    """Rank of an adapter that is trained without merging; 0: there is none."""
    options: Mapping[str, Any] = getattr(model_config, "lora", None) or {}
    rank = int(options.get("rank", 0) or 0) or int(getattr(model_config, "lora_rank", 0) or 0)
    return 0 if options.get("merge", False) else rank


def _refuse(config: Any) -> None:
    """Refuses configurations that llmpy does not support."""
    wanted = {
        "tensor_model_parallel_size": (config.tensor_model_parallel_size, 1),
        "data_parallel_size": (config.data_parallel_size, 1),
        "pipeline_model_parallel_size": (config.pipeline_model_parallel_size, 1),
        "quantization": (config.quantization, None),
        "enable_rollout_routing_replay": (config.enable_rollout_routing_replay, False),
    }
    for name, (have, want) in wanted.items():
        if have != want:
            raise UnsupportedError(f"rollout.{name}={have!r} is not supported by llmpy; set it to {want!r}")


def engine_options(config: Any, model_config: Any, replica_rank: int, mode: str) -> dict[str, Any]:
    """The options of the engine."""
    own: Mapping[str, Any] = (config.engine_kwargs or {}).get("llmpy") or {}
    share = config.gpu_memory_utilization
    if mode == "standalone" and config.standalone_gpu_memory_utilization is not None:
        share = config.standalone_gpu_memory_utilization
    return {
        "model": model_config.local_path or model_config.path,
        "tokenizer": model_config.local_tokenizer_path or model_config.tokenizer_path,
        "dtype": config.dtype,
        "device": torch.cuda.current_device() if torch.cuda.is_available() else "cpu",
        "load_format": config.load_format,
        "gpu_memory_utilization": share,
        "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "scheduling_policy": config.scheduling_policy or "fcfs",
        "seed": config.seed + replica_rank,
        **_adapter_options(adapter_rank(model_config)),
        **own,
    }


def _adapter_options(rank: int) -> dict[str, Any]:
    """Options of an engine whose adapter is replaced while requests run with the one before."""
    return {"enable_lora": True, "max_loras": 2, "max_lora_rank": rank} if rank else {}


def _settings(config: Any, model_config: Any, replica_rank: int, mode: str) -> Settings:
    return Settings(
        prompt_length=config.prompt_length,
        response_length=config.response_length,
        logprobs_mode=config.logprobs_mode or "processed_logprobs",
        repetition_penalty=config.repetition_penalty,
        ignore_eos=config.ignore_eos,
        seed=config.seed + replica_rank if config.full_determinism else None,
        frees_memory=config.free_cache_engine,
        mode=mode,
        has_adapter=adapter_rank(model_config) > 0,
    )


def _launch(worker: Any, replica_rank: int, mode: str) -> tuple[str, str]:
    """Runs in the worker's process; returns its node and the path of its engine's socket."""
    return ray.get_runtime_context().get_node_id(), _adapters[replica_rank].launch(mode)


class LlmpyServer:
    """The Ray actor of a replica. It forwards calls to the EngineHost in the worker's process on the same node.

    Args:
        path: Path of the engine's socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._client: Client | None = None

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the EngineHost."""
        if self._client is None:
            self._client = Client(self._path)
        return await self._client.call(name, *args, **kwargs)

    async def generate(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> TokenOutput:
        """See EngineHost.generate."""
        return TokenOutput(**await self.call("generate", [int(token) for token in prompt_ids], *args, **kwargs))

    async def start_profile(self, **_: Any) -> None:
        """Does nothing: llmpy has no profiler; see `AsyncEngine.step_log` and `stats`."""

    async def stop_profile(self, **_: Any) -> None:
        """Does nothing."""


def _forward(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(self: LlmpyServer, *args: Any, **kwargs: Any) -> Any:
        return await self.call(name, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"See EngineHost.{name}."
    return call


for _name in NAMES:
    if _name != "generate":
        setattr(LlmpyServer, _name, _forward(_name))


class LlmpyReplica(RolloutReplica):  # type: ignore[misc]
    """One engine on one device. It has no HTTP server; its address is only a name."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        _refuse(self.config)

    async def launch_servers(self) -> None:
        """Creates the engine in the worker's process, and the actor on the same node."""
        (worker,) = self.workers
        node_id, path = await worker.__ray_call__.remote(_launch, self.replica_rank, self.rollout_mode.value)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = f"llmpy_server_{kind}{self.replica_rank}{self.name_suffix}"
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        actor = ray.remote(LlmpyServer).options(
            scheduling_strategy=near, name=name, num_cpus=0, max_concurrency=self.max_concurrency
        )
        self._server_handle: Any = actor.remote(path)
        self._server_address = name
        self.servers = [self._server_handle]

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Aborts one request."""
        found: dict[str, Any] = await self._server_handle.abort_request.remote(request_id)
        return found
