"""llmpy as the rollout engine of TRL: a `rollout_func` for GRPOTrainer, and the two objects of AsyncGRPOTrainer.

Written to the protocols of TRL 1.16: `RolloutFunc` of trl/trainer/grpo_trainer.py, `WeightTransferProtocol` and
`RolloutWorkerProtocol` of trl/experimental/async_grpo/async_grpo_trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..async_engine import AsyncEngine
from ..errors import UnsupportedError
from ..outputs import RequestOutput
from ._loop import LoopThread, transaction
from ._trl_worker import RolloutWorker, trainer_params

if TYPE_CHECKING:
    from ..llm import LLM
    from ..sampling_params import SamplingParams

__all__ = ["Rollout", "RolloutWorker", "WeightTransfer", "rollout"]

Rename = Callable[[str], "str | None"]
BASE_STAYS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Initialisations of peft (`init_lora_weights`) that leave the weights of the model as they are."""


def rollout(
    llm: LLM | AsyncEngine,
    *,
    rename: Rename | None = None,
    sleep_level: int | None = None,
    adapter: str = "policy",
    **sampling: Any,
) -> Rollout:
    """Makes the `rollout_func` of a GRPOTrainer with `use_vllm=False`.

    If the trainer trains an adapter of peft (`peft_config`), the engine gets the adapter alone, under a name. The engine needs
    `enable_lora=True`, and has to be made from the model that the adapter changes.

    Args:
        llm: The engine that generates. One per process. An AsyncEngine may serve other requests meanwhile.
        rename: Parameter name -> name in the checkpoint, or None to leave the parameter out; None = names are equal. Of an
            adapter's model the names are those without peft's.
        sleep_level: Sleep level of an LLM between rollouts, 1 or 2, so that the trainer can use the memory; None = no sleep.
        adapter: The engine's name for a trained adapter, for `lora_request` of other requests.
        sampling: Fields of SamplingParams that override the trainer's arguments.

    Returns:
        The function, called by the trainer as `rollout_func(prompts, trainer)`.
    """
    return Rollout(llm, rename, sleep_level, sampling, adapter)


class Rollout:
    """A `rollout_func`: updates the engine's weights after a trainer's step, then generates one completion per prompt.

    Args:
        llm, rename, sleep_level, sampling, adapter: See `rollout`.

    Raises:
        UnsupportedError: `sleep_level` with an AsyncEngine.
    """

    def __init__(
        self,
        llm: LLM | AsyncEngine,
        rename: Rename | None,
        sleep_level: int | None,
        sampling: Mapping[str, Any],
        adapter: str = "policy",
    ) -> None:
        if sleep_level is not None and isinstance(llm, AsyncEngine):
            raise UnsupportedError("rollout(): sleep_level wants an LLM; an AsyncEngine may serve other requests meanwhile")
        self.llm = llm
        self.last_update: Any = None
        """The UpdateReport of the last update of the model's weights; adapters have none."""
        self._adapter = adapter
        self._lora: str | None = None
        """The adapter that the completions have."""
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
        outputs = self._generate(prompt_ids, params)
        samples = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [sample.sampled.processed.tolist() for sample in samples if sample.sampled is not None],
        }

    def _generate(self, prompt_ids: list[list[int]], params: SamplingParams) -> Sequence[RequestOutput]:
        """One completion per prompt; then the engine sleeps, if it should."""
        if isinstance(self.llm, AsyncEngine):
            add = self.llm.add_request
            handles = [add({"prompt_token_ids": ids}, params, lora_request=self._lora) for ids in prompt_ids]
            return [handle.wait() for handle in handles]
        outputs = self.llm.generate(prompt_ids, params, use_tqdm=False, lora_request=self._lora)
        if self._sleep_level is not None:
            self.llm.sleep(self._sleep_level)
        return outputs

    def _prepare(self, trainer: Any) -> None:
        """Wakes the engine and updates its weights from the trainer."""
        if self._sleep_level is None or isinstance(self.llm, AsyncEngine):
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
        if hasattr(model, "peft_config"):
            tensors, config = adapter_of(model)
            is_first = self._pushed is None or self._pushed[0] is not trainer
            if self._sleep_level == 2 or (is_first and config["init_lora_weights"] not in BASE_STAYS):
                self._update(_base(model), step)
            self.llm.load_adapter(self._adapter, tensors, config)
            self._lora = self._adapter
        else:
            self._update(model.named_parameters(), step)
        self._pushed = trainer, step

    def _update(self, named: Iterable[tuple[str, Any]], step: int) -> None:
        """Writes the model's weights."""
        update = self.llm._weights.begin(**transaction(version=step, rename=self._rename))
        self.last_update = update.run(named)


def adapter_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The active adapter of a model of peft, as `load_adapter` takes it.

    Args:
        model: A PeftModel.

    Returns:
        Its tensors by name, and its config.

    Raises:
        UnsupportedError: Several adapters are active.
    """
    name = model.active_adapter
    if not isinstance(name, str):
        raise UnsupportedError(f"rollout(): wanted one active adapter, have {name}")
    trained = {key: tensor for key, tensor in model.named_parameters() if "lora_" in key and f".{name}" in key}
    return trained, model.peft_config[name].to_dict()


def _base(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of the model that adapters change, without peft's names."""
    for name, tensor in model.named_parameters():
        if "lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor


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
