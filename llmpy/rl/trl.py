"""llmpy as the rollout engine of TRL: a `rollout_func` for GRPOTrainer, and the two objects of AsyncGRPOTrainer.

Written to the protocols of TRL 1.16: `RolloutFunc` of trl/trainer/grpo_trainer.py, `WeightTransferProtocol` and
`RolloutWorkerProtocol` of trl/experimental/async_grpo/async_grpo_trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ._loop import LoopThread, transaction
from ._trl_worker import RolloutWorker, trainer_params

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..llm import LLM

__all__ = ["Rollout", "RolloutWorker", "WeightTransfer", "rollout"]

Rename = Callable[[str], "str | None"]


def rollout(llm: LLM, *, rename: Rename | None = None, sleep_level: int | None = None, **sampling: Any) -> Rollout:
    """Makes the `rollout_func` of a GRPOTrainer with `use_vllm=False`.

    Args:
        llm: The engine that generates. One per process.
        rename: Parameter name -> name in the checkpoint, or None to leave the parameter out; None = names are equal.
        sleep_level: Sleep level between rollouts, 1 or 2, so that the trainer can use the memory; None = no sleep.
        sampling: Fields of SamplingParams that override the trainer's arguments.

    Returns:
        The function, called by the trainer as `rollout_func(prompts, trainer)`.
    """
    return Rollout(llm, rename, sleep_level, sampling)


class Rollout:
    """A `rollout_func`: updates the engine's weights after a trainer's step, then generates one completion per prompt.

    Args:
        llm, rename, sleep_level, sampling: See `rollout`.
    """

    def __init__(self, llm: LLM, rename: Rename | None, sleep_level: int | None, sampling: Mapping[str, Any]) -> None:
        self.llm = llm
        self.last_update: Any = None
        """The UpdateReport of the last update."""
        self._rename = rename
        self._sleep_level = sleep_level
        self._sampling = dict(sampling)
        self._pushed: tuple[object, int] | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generates completions.

        Args:
            prompts: Texts or conversations, repeated once per completion.
            trainer: The GRPOTrainer.

        Returns:
            `prompt_ids`, `completion_ids`, and `logprobs` under the sampling distribution; one list per prompt.
        """
        self._prepare(trainer)
        prompt_ids = _tokenize(prompts, trainer)
        sampling = {**(trainer.args.generation_kwargs or {}), **self._sampling}
        params = trainer_params(trainer.args, trainer.eos_token_ids, sampling)
        outputs = self.llm.generate(prompt_ids, params, use_tqdm=False)
        if self._sleep_level is not None:
            self.llm.sleep(self._sleep_level)
        samples = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [sample.sampled.processed.tolist() for sample in samples if sample.sampled is not None],
        }

    def _prepare(self, trainer: Any) -> None:
        """Wakes the engine and updates its weights from the trainer."""
        if self._sleep_level is None:
            self._push(trainer)
        else:
            self.llm.wake_up(["weights"])  # the cache wakes after the update, which may need the memory
            self._push(trainer)
            self.llm.wake_up()

    def _push(self, trainer: Any) -> None:
        step = int(trainer.state.global_step)
        is_new = self._pushed is None or self._pushed[0] is not trainer or self._pushed[1] != step
        if not is_new and self._sleep_level != 2:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "merge_adapter"):
            raise UnsupportedError("rollout(): adapters of peft are not supported; train the whole model")
        self.last_update = self.llm.update_weights(model.named_parameters(), version=step, rename=self._rename)
        self._pushed = trainer, step


def _tokenize(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids of texts or conversations, by the trainer's tokenizer and template."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    return [
        list(
            tokenizer.apply_chat_template(
                prompt,
                tools=trainer.tools or None,
                chat_template=trainer.chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **trainer.chat_template_kwargs,
            )
        )
        for prompt in prompts
    ]


class WeightTransfer:
    """The `weight_transfer` of an AsyncGRPOTrainer: replaces the engine's weights in place, between two engine steps.

    Args:
        engine: The engine, in this process.
        rename: Parameter name -> name in the checkpoint, or None to leave the parameter out; None = names are equal.
        on_running: "keep": requests in flight continue with the cache of the old weights; "recompute": the cache is rebuilt
            first.
    """

    def __init__(self, engine: AsyncEngine, rename: Rename | None = None, on_running: str = "keep") -> None:
        self.engine = engine
        self.last_update: Any = None
        """The UpdateReport of the last update."""
        self._rename = rename
        self._on_running = on_running
        self._thread: LoopThread | None = None

    def init_weight_transfer(self) -> None:
        """Starts the thread; TRL calls this before the first update."""
        if self._thread is None:
            self._thread = LoopThread("llmpy-weight-transfer")

    def pause(self) -> None:
        """Pauses the requests in flight between two steps."""
        self._loop.run(self.engine.pause("keep"))

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Writes all weights, then commits them at once. The caller's thread reads the iterator, which may run collectives.

        Args:
            iterator: Pairs of name and tensor.
        """
        update = self.engine._weights.begin(**transaction(rename=self._rename, on_running=self._on_running))
        self.last_update = update.run(iterator)

    def resume(self) -> None:
        """Resumes the requests."""
        self._loop.run(self.engine.resume())

    def destroy(self) -> None:
        """Ends the thread; the engine is not changed. A second call does nothing."""
        if self._thread is not None:
            self._thread.close()
        self._thread = None

    @property
    def _loop(self) -> LoopThread:
        self.init_weight_transfer()
        assert self._thread is not None
        return self._thread
