"""The engine of a verl replica. It runs in the trainer's process, so a weight update is a copy on the device. The replica's
Ray actor calls it through a Unix socket. This module needs neither verl nor Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InvalidRequestError, UnsupportedError
from ..sampling_params import RequestOutputKind, SamplingParams
from ._loop import LoopThread, transaction
from ._rpc import Server

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..outputs import RequestOutput

LogprobsMode = Literal["raw_logprobs", "full_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
ADAPTER = "verl"
"""Name of the trained adapter in the engine."""
_STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}
NAMES = (
    "generate",
    "wake_up",
    "sleep",
    "clear_kv_cache",
    "release_kv_cache",
    "resume_kv_cache",
    "abort_all_requests",
    "abort_request",
    "resume_generation",
    "set_global_steps",
    "wait_for_requests_to_drain",
)
"""Methods that the replica's actor may call."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of verl's RolloutConfig for all requests.

    Args:
        prompt_length, response_length: Planned tokens. A request without a limit gets at most response_length tokens, and
            at most the sum minus its prompt.
        logprobs_mode: Kind of `log_probs`.
        repetition_penalty, ignore_eos: Defaults of requests.
        seed: Default seed of requests; None = a random seed for each.
        frees_memory: `free_cache_engine`: whether the engine sleeps while the trainer trains.
        mode: "hybrid" (with the trainer), "colocated" (same device, separate weights) or "standalone" (separate device).
        has_adapter: Whether the trainer trains an adapter that is not merged.
    """

    prompt_length: int
    response_length: int
    logprobs_mode: LogprobsMode = "processed_logprobs"
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    frees_memory: bool = True
    mode: str = "hybrid"
    has_adapter: bool = False


class EngineHost:
    """An AsyncEngine with verl's calls: for the adapter in this process, and over a socket for the actor.

    Args:
        engine: The engine; `close` closes it.
        settings: See Settings.
    """

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.global_steps: int | None = None
        self.sleep_level = 1 if settings.has_adapter else 2
        """Sleep level of mode "hybrid"; updates of an adapter do not restore the other weights."""
        self._adapter: str | None = None
        """Name of the adapter, once it is loaded."""
        self._rejects = False
        self._thread = LoopThread("llmpy-verl")
        self._server = Server({name: getattr(self, name) for name in NAMES})
        try:
            self._thread.run(self._server.start())
        except BaseException:
            self._thread.close()
            raise

    @property
    def path(self) -> str:
        """Path of the socket."""
        return self._server.path

    def close(self) -> None:
        """Closes the socket, its thread and the engine."""
        self._thread.run(self._server.close())
        self._thread.close()
        self.engine.close()

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> dict[str, Any]:
        """Generates token ids for a prompt of token ids.

        Args:
            prompt_ids: The prompt.
            sampling_params: Fields of SamplingParams; `logprobs` is a bool, `max_new_tokens` is an alias of `max_tokens`.
            request_id: A name for `abort_request`.
            image_data, video_data, audio_data, mm_processor_kwargs: Not supported.
            priority: Lower runs first.

        Returns:
            The fields of verl's TokenOutput.
        """
        for name, value in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if value:
                raise UnsupportedError(f"{name} is not supported; llmpy takes token ids")
        if self._rejects:
            return self._token_output([], [])
        params = self._params(len(prompt_ids), dict(sampling_params))
        step, adapter = self.global_steps, self._adapter
        output = await self.engine.generate(prompt_ids, params, request_id, priority=priority, lora_request=adapter)
        answer = self._answer(output)
        if adapter is not None and step is not None:  # the request keeps the adapter that it began with
            answer["extra_fields"] |= {"min_global_steps": step, "max_global_steps": step}
        return answer

    def _params(self, prompt_tokens: int, fields: dict[str, Any]) -> SamplingParams:
        settings, room = self.settings, int(self.engine.config.max_model_len or 0) - prompt_tokens
        if room < 1:
            message = f"prompt_ids: wanted room for a token in max_model_len, have {prompt_tokens} tokens; raise max_model_len"
            raise InvalidRequestError(message, parameter="prompt_ids", value=prompt_tokens)
        planned = min(settings.response_length, settings.prompt_length + settings.response_length - prompt_tokens)
        asked = fields.pop("max_new_tokens", None)
        limit = fields.pop("max_tokens", asked)
        wants_logprobs = fields.pop("logprobs", False)
        defaults: dict[str, Any] = {
            "repetition_penalty": settings.repetition_penalty,
            "ignore_eos": settings.ignore_eos,
            "seed": settings.seed,
        }
        return SamplingParams(
            **{**defaults, **fields},
            max_tokens=max(1, min(planned if limit is None else limit, room)),
            logprobs=None if wants_logprobs is False or wants_logprobs is None else 0,
            logprobs_mode=settings.logprobs_mode,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        sample = output.outputs[0]
        values = None if sample.token_logprobs is None else sample.token_logprobs.tolist()
        reason = _STOP_REASONS.get(sample.finish_reason or "", sample.finish_reason)
        answer = self._token_output(sample.token_ids, values, reason)
        answer["num_preempted"] = output.metrics.num_preemptions if output.metrics is not None else 0
        answer["extra_fields"]["num_cached_tokens"] = output.num_cached_tokens
        steps = [span.version for span in sample.weight_versions if isinstance(span.version, int)]
        if self.global_steps is not None and steps:
            answer["extra_fields"] |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
        return answer

    def _token_output(self, ids: list[int], values: list[float] | None, reason: str | None = "aborted") -> dict[str, Any]:
        return {
            "token_ids": ids,
            "log_probs": values,
            "routed_experts": None,
            "stop_reason": reason,
            "num_preempted": 0,
            "extra_fields": {"global_steps": self.global_steps},
        }

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Aborts all requests, which return their tokens so far, and holds new requests until `resume_generation`.

        Args:
            reset_prefix_cache: Also drop the prefix cache.
            reject_request: Answer held and new requests with "aborted", so that verl sends them elsewhere.
        """
        self._rejects = reject_request
        count = self.engine.stats().num_unfinished
        await self.engine.pause("abort", clear_cache=reset_prefix_cache)
        if reject_request:
            await self.engine.abort()
        return {"aborted_count": count}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Aborts one request, which returns its tokens so far. The cache is keyed by the weights, so it needs no reset."""
        ended = await self.engine.abort(request_id)
        return {"aborted": bool(ended), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Lets requests run again after `abort_all_requests`."""
        self._rejects = False
        await self.engine.resume()

    async def wait_for_requests_to_drain(self) -> None:
        """Waits until no request runs or waits."""
        await self.engine.wait_for_requests_to_drain()

    # ---- weights and memory -----------------------------------------------------------------------------------------

    async def update_weights(
        self, weights: Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]], global_steps: int | None = None
    ) -> None:
        """Replaces all weights at once.

        Args:
            weights: Pairs of checkpoint name and tensor. The caller's thread reads them, as it may have to run collectives.
            global_steps: The trainer's step; it becomes the version of later tokens.
        """
        update = self.engine._weights.begin(**transaction(version=global_steps))
        with update:
            if isinstance(weights, AsyncIterator):
                async for name, tensor in weights:
                    update.write(name, tensor)
            else:
                update.write_all(weights)
        if global_steps is not None:
            self.global_steps = global_steps

    async def update_adapter(
        self,
        tensors: Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]],
        config: Mapping[str, Any],
        global_steps: int | None = None,
    ) -> None:
        """Loads the adapter, or replaces it for later requests; running requests keep the one that they began with.

        Args:
            tensors: Pairs of PEFT's name and tensor. The caller's thread reads them, as it may have to run collectives.
            config: The content of adapter_config.json.
            global_steps: The trainer's step.
        """
        found = dict([pair async for pair in tensors] if isinstance(tensors, AsyncIterator) else tensors)
        self.engine.load_adapter(ADAPTER, found, config)
        self._adapter = ADAPTER
        if global_steps is not None:
            self.global_steps = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        """Sets the label of the weights."""
        self.global_steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates memory again.

        Args:
            tags: "weights", "kv_cache"; None = all.
        """
        if self.settings.mode != "standalone":
            await self.engine.wake_up(tags)

    async def sleep(self) -> None:
        """Waits for running requests, then frees memory."""
        if not self.settings.frees_memory or self.settings.mode == "standalone":
            return
        await self.engine.sleep(self.sleep_level if self.settings.mode == "hybrid" else 1, mode="wait")

    async def clear_kv_cache(self) -> None:
        """Drops the prefix cache; correct results never require this."""
        await self.engine.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Frees the cache's memory during an update."""
        if self.settings.frees_memory and self.settings.mode != "colocated":
            await self.engine.sleep(1, mode="abort", tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Ends `release_kv_cache`."""
        if self.settings.frees_memory and self.settings.mode != "colocated":
            await self.engine.wake_up(["kv_cache"])
