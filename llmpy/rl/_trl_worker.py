"""RolloutWorker: generates and scores groups of completions for TRL's AsyncGRPOTrainer, in a thread of its process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.jobs import beside
from ..sampling_params import RequestOutputKind, SamplingParams
from ._loop import LoopThread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..async_engine import AsyncEngine
    from ..outputs import RequestOutput

RewardFunc = Callable[..., Any]
_POLL_S = 0.05


def trainer_params(args: Any, eos_token_ids: Iterable[int], more: Mapping[str, Any]) -> SamplingParams:
    """Converts a trainer's arguments to sampling parameters.

    Args:
        args: A GRPOConfig or AsyncGRPOConfig.
        eos_token_ids: Ids that end a completion.
        more: Further fields, which override the arguments.
    """
    fields: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
        "stop_token_ids": sorted(eos_token_ids),
        "logprobs": 0,
        "logprobs_mode": "processed_logprobs",
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**{**fields, **more})


class RolloutWorker:
    """The `rollout_worker` of an AsyncGRPOTrainer. Tools and environments are not supported: one turn per completion.

    Args:
        engine: The engine, in this process.
        dataset: Rows with `prompt`, a text or a conversation; read repeatedly. Other columns go to the reward functions.
        reward_funcs: Functions of (prompts, completions, completion_ids, **columns) that return a reward or None for each
            completion. They may be async; other functions run in threads.
        processing_class: The tokenizer, of transformers.
        args: The trainer's AsyncGRPOConfig.
        sampling: Fields of SamplingParams that override `args`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        processing_class: Any,
        args: Any,
        **sampling: Any,
    ) -> None:
        self.engine = engine
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        """Scored samples for the trainer."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(4096)
        """Figures for the trainer's log."""
        self._dataset = dataset
        self._rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._tokenizer = processing_class
        self._args = args
        self._params = trainer_params(args, [processing_class.eos_token_id], sampling)
        self._version = 0
        self._beat = 0.0
        self._stop = threading.Event()
        self._thread: LoopThread | None = None
        self._work: Future[None] | None = None

    # ---- the protocol -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is not None:
            return
        self._stop.clear()
        self._beat = time.monotonic()
        self._thread = LoopThread("llmpy-rollouts")
        self._work = self._thread.submit(self._run())

    def stop(self) -> None:
        """Ends the thread and the requests in flight. A second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.close()
        self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Sets the version of the weights with which the next groups start.

        Args:
            model_version: The trainer's count of its updates.
        """
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Checks that the thread makes progress.

        Args:
            stale_after_s: Most seconds without a sign of progress.

        Raises:
            RuntimeError: The thread has failed (the cause is chained), or has made no progress for longer.
        """
        if self._work is not None and self._work.done() and not self._work.cancelled():
            cause = self._work.exception()
            if cause is not None:
                raise RuntimeError(f"the rollout worker failed: {cause}") from cause
        age = time.monotonic() - self._beat
        if age > stale_after_s:
            raise RuntimeError(f"the rollout worker was silent for {age:.0f} s, more than {stale_after_s:.0f} s")

    # ---- the thread -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        size, samples = self._args.num_generations, self._args.max_inflight_tasks
        limit = max(1, (samples if samples > 0 else 4 * size) // size)
        rows, pending = self._rows(), set[asyncio.Task[list[Any]]]()
        try:
            while not self._stop.is_set():
                self._beat = time.monotonic()
                while len(pending) < limit:
                    pending.add(asyncio.create_task(self._group(*next(rows))))
                done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    for sample in task.result():
                        await self._deliver(sample)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Numbered rows of the dataset, repeated endlessly."""
        numbers = itertools.count()
        while True:
            row = None
            for row in self._dataset:
                yield next(numbers), row
            if row is None:
                raise ValueError("dataset: wanted at least one row, have none")

    async def _deliver(self, sample: Any) -> None:
        while not self._stop.is_set():
            sample.enqueued_at, self._beat = time.time(), time.monotonic()
            try:
                self.rollout_buffer.put_nowait(sample)
                return
            except queue.Full:
                await asyncio.sleep(_POLL_S)

    async def _group(self, number: int, row: Mapping[str, Any]) -> list[Any]:
        """Generates and scores the completions of a prompt."""
        started, version, size = time.monotonic(), self._version, self._args.num_generations
        prompt_ids = self._prompt_ids(row["prompt"])
        # The engine computes equal prompts in flight once, so a group is `size` separate requests.
        outputs = await asyncio.gather(*[self.engine.generate(prompt_ids, self._params) for _ in range(size)])
        completions = [self._completion(row["prompt"], output.token_ids) for output in outputs]
        scored = time.monotonic()
        rewards = await self._score(row, completions, outputs)
        self._measure(outputs, started, scored)
        return _samples(number, version, row["prompt"], completions, outputs, rewards)

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(text=prompt)["input_ids"])
        kwargs = self._args.chat_template_kwargs or {}
        return list(
            self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs)
        )

    def _completion(self, prompt: Any, ids: list[int]) -> Any:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    async def _score(
        self, row: Mapping[str, Any], completions: list[Any], outputs: list[RequestOutput]
    ) -> dict[str, list[float]]:
        """Rewards by function; NaN if a function returns None."""
        columns = {name: [value] * len(outputs) for name, value in row.items() if name != "prompt"}
        arguments = {
            **columns,
            "prompts": [row["prompt"]] * len(outputs),
            "completions": completions,
            "completion_ids": [output.token_ids for output in outputs],
        }

        async def call(reward: RewardFunc) -> list[float]:
            if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
                found = await reward(**arguments)
            else:
                found = await beside(functools.partial(reward, **arguments))
            return [math.nan if value is None else float(value) for value in found]

        found = await asyncio.gather(*[call(reward) for reward in self._rewards])
        names = [getattr(reward, "__name__", type(reward).__name__) for reward in self._rewards]
        return dict(zip(names, found, strict=True))

    def _measure(self, outputs: list[RequestOutput], started: float, scored: float) -> None:
        lengths = [len(output.token_ids) for output in outputs]
        ended = time.monotonic()
        figures = {
            "rollout/duration_s": scored - started,
            "rollout/score_s": ended - scored,
            "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
            "completions/max_length": float(max(lengths)),
            "completions/clipped_ratio": (
                float(sum(output.finish_reason == "length" for output in outputs)),
                float(len(outputs)),
            ),
        }
        with contextlib.suppress(queue.Full):
            self.metrics_queue.put_nowait(figures)


def _samples(
    number: int,
    version: int,
    prompt: Any,
    completions: list[Any],
    outputs: list[RequestOutput],
    rewards: Mapping[str, list[float]],
) -> list[Any]:
    """TRL's RolloutSamples of a group. A completion that no function scored has advantage 0."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    table = np.array(list(rewards.values()), np.float64)
    is_scored = ~np.isnan(table).all(axis=0)
    total = np.where(is_scored, np.nansum(table, axis=0), np.nan)
    advantages = np.zeros(len(outputs))
    mean = deviation = math.nan
    if is_scored.any():
        mean, deviation = float(total[is_scored].mean()), float(total[is_scored].std())
        advantages[is_scored] = (total[is_scored] - mean) / (deviation + 1e-8)
    made = []
    for i, output in enumerate(outputs):
        sampled = output.outputs[0].sampled
        assert sampled is not None
        before = len(output.prompt_token_ids_array)
        metrics = {"reward": float(total[i]), "reward_std": deviation}
        metrics |= {f"rewards/{name}": values[i] for name, values in rewards.items()}
        made.append(
            RolloutSample(
                prompt=prompt,
                completion=completions[i],
                input_ids=np.concatenate([output.prompt_token_ids_array, output.outputs[0].token_ids_array], dtype=np.int64),
                completion_mask=np.repeat(np.array([0, 1]), [before, len(sampled.processed)]),
                old_log_probs=np.concatenate([np.zeros(before, np.float32), sampled.processed]),
                advantage=float(advantages[i]),
                model_version=version,
                group_id=number,
                metrics=metrics,
            )
        )
    return made
