"""The actor for rollouts: an AsyncEngine that a trainer calls over Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from ..async_engine import AsyncEngine
from ..sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from ..inputs import PromptType
    from ..outputs import EngineStats, RequestOutput, ScoreOutput
    from ..weights.group import WeightGroup
    from ..weights.updates import UpdateReport


class Rollout:
    """An engine with AsyncEngine's calls; arguments and results can be sent between processes.

    `RolloutActor` is this class as a Ray actor. Its calls run concurrently, so a weight update need not wait for requests.

    Args:
        model: Hub id, or a path that the actor's machine has.
        options: Options of AsyncEngine.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._engine = AsyncEngine(model, **options)
        self._groups: dict[str, WeightGroup] = {}

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **how: Any,
    ) -> RequestOutput:
        """Answers one prompt.

        Args:
            prompt: Token ids or a prompt in another form of `LLM.generate`; with `output_token_ids` the output continues them.
            sampling_params: If None, the defaults are `logprobs=0` (logprobs of the sampled tokens) and `detokenize=False`.
            request_id: A name for `abort`.
            how: `priority`, `cache_salt`, and fields of SamplingParams instead of `sampling_params`.

        Returns:
            The finished output with logprobs and the weights' version of every token; for an aborted request the tokens so far.
        """
        if sampling_params is None:
            how = {"logprobs": 0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY, **how}
        return await self._engine.generate(prompt, sampling_params, request_id, **how)

    async def generate_all(
        self, prompts: Sequence[PromptType], sampling_params: SamplingParams | None = None, **how: Any
    ) -> list[RequestOutput]:
        """Answers several prompts at once; arguments as in `generate`, outputs in the order of the prompts."""
        return await asyncio.gather(*(self.generate(prompt, sampling_params, **how) for prompt in prompts))

    async def score(self, sequence: PromptType, completion: PromptType | None = None, **how: Any) -> ScoreOutput:
        """Teacher-forced logprobs; see `AsyncEngine.score`."""
        return await self._engine.score(sequence, completion, **how)

    async def abort(self, request_ids: str | Iterable[str] | None = None) -> list[RequestOutput]:
        """Aborts requests (None = all) and returns their outputs so far; see `AsyncEngine.abort`."""
        return await self._engine.abort(request_ids)

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def update_weights(self, source: Any, **how: Any) -> UpdateReport:
        """Replaces the weights between two steps.

        Args:
            source: A mapping of names to tensors (or an object reference to one: arrays are read from Ray's shared memory), a
                directory, or one or more IpcBucket.
            how: `version`, `partial`, `rename`, `on_running`, `check_finite` of `AsyncEngine.update_weights`.
        """
        return await self._engine.update_weights(source, **how)

    async def init_weight_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, *, name: str = "default", **how: Any
    ) -> None:
        """Joins the group of a `llmpy.rl.WeightSender`; see `AsyncEngine.init_weight_group`."""
        self._groups[name] = await self._engine.init_weight_group(
            master_address, master_port, rank_offset, world_size, name=name, **how
        )

    async def receive_weights(self, name: str = "default", **how: Any) -> UpdateReport:
        """Receives the weights that the sender of this group broadcasts; `how` as in `update_weights`."""
        return await self._engine.update_weights(self._groups[name], **how)

    async def destroy_weight_group(self, name: str = "default") -> None:
        """Leaves a group."""
        await self._engine.destroy_weight_group(name)
        del self._groups[name]

    async def weight_version(self) -> int | str:
        """The label of the current weights."""
        return self._engine.weight_version

    async def weight_checksum(self, names: str | Iterable[str] | None = None) -> dict[str, int]:
        """Checksums of the weights; see `AsyncEngine.weight_checksum`."""
        return await self._engine.weight_checksum(names)

    # ---- pauses, sleep, life ----------------------------------------------------------------------------------------

    async def pause(self, mode: str = "abort", clear_cache: bool = False, timeout: float | None = None) -> None:
        """Pauses the engine; see `AsyncEngine.pause`."""
        await self._engine.pause(mode, clear_cache, timeout)

    async def resume(self) -> None:
        """Ends a pause."""
        await self._engine.resume()

    async def sleep(self, level: int = 1, mode: str = "abort", tags: str | Iterable[str] | None = None) -> None:
        """Frees memory; see `AsyncEngine.sleep`."""
        await self._engine.sleep(level, mode, tags)

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Allocates the memory again; see `AsyncEngine.wake_up`."""
        await self._engine.wake_up(tags)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drops all blocks from the prefix cache."""
        return await self._engine.reset_prefix_cache(reset_running_requests)

    async def stats(self) -> EngineStats:
        """Counters and gauges."""
        return self._engine.stats()

    async def check_health(self) -> None:
        """Raises if the engine cannot run requests."""
        self._engine.check_health()

    async def shutdown(self, mode: str = "abort", timeout: float | None = None) -> None:
        """Closes the engine; see `AsyncEngine.shutdown`."""
        await self._engine.shutdown(mode, timeout)


RolloutActor = ray.remote(Rollout)
"""`RolloutActor.options(num_gpus=1).remote(model)` starts an engine somewhere in the cluster."""
