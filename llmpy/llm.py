"""LLM: a model ready to generate, in this process."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from . import _calls, hardware
from ._driver import Driver
from ._frontend import Frontend, one_each, special_tokens_wanted
from ._later import LaterMethods
from .checks import as_int, refuse_names
from .config import EngineConfig
from .errors import InvalidRequestError, LlmpyError, UnsupportedError
from .inputs import Prompt, batch, is_single
from .options import check_keywords
from .outputs import Chunk, EngineStats, Histogram, RequestOutput, RequestOutputs, ScoreOutput, StepRecord
from .sampling_params import RequestOutputKind, SamplingParams, default_params

if TYPE_CHECKING:
    from pathlib import Path

    from ._requests import Request
    from .inputs import PromptType
    from .progress import UseTqdm
    from .tokenizer import Tokenizer

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

DEFAULT_MAX_TOKENS = 256
_FINISH_NAMES = {
    "stop": ("eos", "stop_id", "stop_string"),
    "length": ("length",),
    "abort": ("abort",),
    "error": ("error",),
}


class LLM(LaterMethods):
    """A model ready to generate.

    Args:
        model: Hub id, local directory or `.gguf` file; a path never touches the network.
        use_tqdm_on_load: A progress bar while weights are read: True, False, or None = if it lasts and somebody looks.
        others: See EngineConfig, which documents every option.

    Raises:
        ConfigError: An option has a bad value.
        ModelNotFoundError: No such path, repository or revision.
        CheckpointError: The files are torn or do not fit the architecture.
        UnsupportedError: Something that llmpy does not do; the message names it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        hf_token: str | None = None,
        hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        load_format: str = "auto",
        device: str | int | None = None,
        tensor_parallel_size: int = 1,
        device_ids: Sequence[int] | None = None,
        max_model_len: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.92,
        kv_cache_memory_bytes: int | str | None = None,
        host_cache_bytes: int | str = 0,
        kv_cache_dtype: str = "auto",
        activation_dtype: str = "auto",
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        scheduling_policy: str = "fcfs",
        seed: int | None = 0,
        logprobs_mode: str = "raw_logprobs",
        max_logprobs: int = 20,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        chat_template: str | Path | None = None,
        vocab_limit: int | None = None,
        banned_token_ids: Sequence[int] = (),
        enable_return_routed_experts: bool = False,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_queued_requests: int | None = None,
        pipeline_parallel_size: int = 1,
        speculative_config: Mapping[str, Any] | None = None,
        use_tqdm_on_load: UseTqdm = None,
        **others: object,
    ) -> None:
        given = dict(locals())
        check_keywords(others)
        options = {name: given[name] for name in EngineConfig.__dataclass_fields__}
        options["override_generation_config"] = override_generation_config or {}
        from ._loading import load
        from .progress import LoadBar

        with LoadBar(use_tqdm_on_load) as on_progress:
            loaded = load(EngineConfig(**options), on_progress)
        self._driver = Driver(loaded.model, loaded.engine)
        self._frontend = Frontend(loaded)
        self._named: dict[str, Request] = {}
        self.config: EngineConfig = loaded.config
        """The resolved options."""
        self.name: str = loaded.name
        """Short name of the model."""
        self.weight_type: str = loaded.weight_type
        """How the weights are stored: "float32", "float16", "bfloat16" or "quantized"."""

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An engine with the options of another one's `config`."""
        return cls(**{name: getattr(config, name) for name in EngineConfig.__dataclass_fields__})

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        priority: int | Sequence[int] = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        **sampling: Any,
    ) -> RequestOutputs:
        """Generates for one prompt or many.

        Args:
            prompts: Text, token ids, dicts of these (TextPrompt, TokensPrompt), or a sequence of them.
            sampling_params: One for all or one each; None = `get_default_sampling_params()`.
            use_tqdm: Progress bar: True, False, a callable like tqdm; None = if it lasts and somebody looks.
            lora_request: Not supported yet.
            priority: Lower runs first (scheduling_policy="priority"); one for all or one each.
            tokenization_kwargs: `add_special_tokens` (True).
            on_error: "raise", or "return": bad and failed requests come back with `.error`.
            sampling: Fields of SamplingParams on top of the model's defaults, instead of `sampling_params`.

        Returns:
            One RequestOutput per prompt, in order.

        Raises:
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.
            RequestFailedError: One failed while running; `.outputs` is the complete list.
            GenerationInterrupted: Ctrl-C; `.partial` holds the outputs so far.
            EngineBusyError: Another thread uses the engine.
            EngineClosedError: It was closed.
        """
        items = batch(prompts)
        special = special_tokens_wanted(tokenization_kwargs, True)
        return self._generate(items, sampling_params, sampling, use_tqdm, lora_request, priority, special, on_error)

    def chat(
        self,
        messages: str | Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        priority: int | Sequence[int] = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> RequestOutputs:
        """Answers one conversation or many.

        Args:
            messages: A conversation (list of dicts with `role` and `content`), a sequence of conversations, or a str
                meaning one user message.
            chat_template: Jinja text instead of the model's.
            add_generation_prompt: Ends the prompt where the answer begins.
            continue_final_message: Goes on with the last message instead.
            tools: Passed to the template.
            chat_template_kwargs: Passed to the template.
            sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, on_error, sampling: See `generate`.

        Returns:
            One RequestOutput per conversation, in order; `prompt` is the rendered text.

        Raises:
            ChatTemplateError: There is no template, or it refused the messages.
        """
        how = self._template_arguments(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        rendered = self._render(messages, how)
        special = special_tokens_wanted(tokenization_kwargs, False)
        return self._generate(rendered, sampling_params, sampling, use_tqdm, lora_request, priority, special, on_error)

    def _generate(
        self,
        items: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        use_tqdm: UseTqdm,
        lora_request: object,
        priority: int | Sequence[int],
        special_tokens: bool,
        on_error: str,
    ) -> RequestOutputs:
        with self._driver.driving():
            params = one_each(self._params(sampling_params, sampling), len(items))
            for param in params:
                _check_params_type(param)
            _refuse_adapters(one_each(lora_request, len(items), "lora_request"))
            priorities = [as_int("priority", item) for item in one_each(priority, len(items), "priority")]
            prompts = self._frontend.prompts(items, special_tokens)
            submissions = _calls.prepare(self._frontend, prompts, params, priorities)
            return _calls.generate(self._driver, submissions, use_tqdm, on_error)

    def score(
        self,
        sequences: PromptType | Sequence[PromptType],
        completions: PromptType | Sequence[PromptType] | None = None,
        *,
        temperature: float = 1.0,
        start: int | Sequence[int] | None = None,
        logprobs: int = 0,
        sampling_params: SamplingParams | None = None,
        use_tqdm: UseTqdm = None,
        on_error: str = "raise",
    ) -> list[ScoreOutput]:
        """Teacher-forced logprobs of given tokens, with the bits of `generate`.

        Args:
            sequences: What to score, in the forms of `generate`; with `completions` the prompts before them.
            completions: What to score behind the prompts, one each. A text pair is tokenised as one.
            temperature: Divides the logits; > 0.
            start: First position to score (>= 1), one for all or one each; None = 1, or the completion's.
            logprobs: Best alternatives per position.
            sampling_params: Not supported yet.
            use_tqdm, on_error: As in `generate`.

        Returns:
            One ScoreOutput per sequence, in order.
        """
        if sampling_params is not None:
            raise UnsupportedError("score(sampling_params=...) is not supported yet; use temperature")
        from ._scoring import pair, score_params

        params = score_params(temperature, logprobs, self.config.max_logprobs)
        with self._driver.driving():
            if completions is None:
                prompts = self._frontend.prompts(batch(sequences))
                starts = [as_int("start", item) for item in one_each(1 if start is None else start, len(prompts), "start")]
            elif start is not None:
                raise TypeError("start cannot be given with completions")
            else:
                prompts, starts = pair(self._frontend, batch(sequences), batch(completions))
            submissions = _calls.prepare_scores(self._frontend, prompts, starts, params)
            return _calls.score(self._driver, submissions, use_tqdm, on_error)

    def stream(self, prompt: PromptType, sampling_params: SamplingParams | None = None, **sampling: Any) -> Iterator[Chunk]:
        """New text of one prompt as it comes.

        The engine advances only inside `next()`; closing or dropping the iterator aborts.

        Args:
            prompt: One prompt in the forms of `generate`.
            sampling_params: With n = 1.
            sampling: Fields of SamplingParams on top of the model's defaults.

        Returns:
            An iterator of Chunk, a str with `.token_ids`, `.token_logprobs`, `.output`; on the last `.finish_reason`.
        """
        if not is_single(prompt):
            raise TypeError("stream() takes one prompt; use generate() for a batch")
        return self._stream(prompt, True, sampling_params, sampling)

    def stream_chat(
        self,
        messages: str | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """New text of the answer to one conversation as it comes; arguments as in `chat`, result as in `stream`."""
        how = self._template_arguments(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        rendered = self._render(messages, how)
        if len(rendered) != 1:
            raise TypeError("stream_chat() takes one conversation; use chat() for many")
        return self._stream(rendered[0], False, sampling_params, sampling)

    def _stream(
        self, item: object, special_tokens: bool, params: SamplingParams | None, sampling: Mapping[str, Any]
    ) -> Iterator[Chunk]:
        self._driver.check()
        param = self._params(params, sampling)
        _check_params_type(param)
        if param.n != 1:
            raise InvalidRequestError(f"n must be 1 in a stream, got {param.n}.", parameter="n", value=param.n)
        request, core = self._single(item, param, special_tokens)
        return _calls.stream(self._driver, request, core, self)

    def _single(
        self, item: object, params: SamplingParams, special_tokens: bool, priority: int = 0, queued: bool = False
    ) -> _calls.Submission:
        """One checked request."""
        prompt = self._frontend.prompts([item], special_tokens)[0]
        if isinstance(prompt, LlmpyError):
            raise prompt
        self._frontend.check(prompt, params, priority)
        request = _calls.new_request(self._frontend, prompt, params, queued=queued)
        translator = self._frontend.translator
        return request, translator.prompt_params(request, translator.core_params(params), priority)

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: object = None,
        **sampling: Any,
    ) -> str:
        """Queues one request for `step`. May be called from any thread.

        Args:
            prompt: One prompt in the forms of `generate`.
            sampling_params: None = the model's defaults; `output_kind` says what `step` returns.
            request_id: A name; None = a number.
            priority: Lower runs first (scheduling_policy="priority").

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: It cannot run, or the id is in use.
        """
        self._driver.check()
        _refuse_adapters([lora_request])
        if not (request_id is None or isinstance(request_id, str)):
            raise TypeError(f"request_id must be a str, but is of type {type(request_id).__name__}")
        if not is_single(prompt):
            raise TypeError("add_request() takes one prompt; call it once for each")
        if request_id in self._named:
            raise InvalidRequestError(f"request_id {request_id} is already in use", parameter="request_id", value=request_id)
        params = self._params(sampling_params, sampling)
        _check_params_type(params)
        request, core = self._single(prompt, params, True, as_int("priority", priority), queued=True)
        if request_id is not None:
            request.request_id = request_id
        if request.match_stops:
            request.prepare_text()
        self._named[request.request_id] = request
        try:
            self._driver.submit(request, core)
        except BaseException:
            del self._named[request.request_id]
            raise
        return request.request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends queued requests; the next `step` returns them with "abort". Unknown ids are passed over."""
        self._driver.check()
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._driver.abort([self._named[name] for name in ids if name in self._named])

    def step(self) -> list[RequestOutput]:
        """One step of what `add_request` queued.

        Returns:
            The requests with news, each as its `output_kind` wants; a request's last output has `finished`.
        """
        with self._driver.driving():
            news = self._driver.queued_news
            if not self._named:
                return []
            if any(not request.finished for request in self._named.values()):
                self._driver.advance(until_finished=False)
            outputs = []
            while news:
                request = news.pop(next(iter(news)))
                kind = request.params.output_kind
                if request.finished or kind is not RequestOutputKind.FINAL_ONLY:
                    outputs.append(request.output(delta=kind is RequestOutputKind.DELTA))
                if request.finished:
                    self._named.pop(request.request_id, None)
            return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to return."""
        self._driver.check()
        return bool(self._named)

    # ---- parameters, tokenizer, templates ---------------------------------------------------------------------------

    def _params(self, params: Any, sampling: Mapping[str, Any]) -> Any:
        """The given parameters, or the model's defaults with some fields changed."""
        if params is not None:
            if sampling:
                raise TypeError(f"pass sampling_params or fields by name ({', '.join(sampling)}), not both")
            return params
        if sampling:
            known = SamplingParams.__dataclass_fields__
            refuse_names("generate", [name for name in sampling if name not in known], known)
        default = self.get_default_sampling_params()
        return default.replace(**sampling) if sampling else default

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds without `sampling_params`: the model's generation_config.json; 256 tokens unless it says."""
        return default_params(self._frontend.generation_defaults, DEFAULT_MAX_TOKENS)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            UnsupportedError: The engine was made without one.
        """
        if self._frontend.tokenizer is None:
            raise UnsupportedError("there is no tokenizer: skip_tokenizer_init is True")
        return self._frontend.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.tokenizer

    def _template_arguments(
        self,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Tools | None,
        kwargs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        if add_generation_prompt and continue_final_message:
            message = "Cannot set both `add_generation_prompt` and `continue_final_message` to True."
            raise InvalidRequestError(message, parameter="continue_final_message", value=True)
        return {
            **(kwargs or {}),
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }

    def _render(self, messages: Any, how: Mapping[str, Any]) -> list[Prompt | LlmpyError]:
        """The conversations as text, or what is wrong with them."""
        from ._scoring import conversations, render

        rendered: list[Prompt | LlmpyError] = []
        for index, conversation in enumerate(conversations(messages)):
            try:
                rendered.append(render(self.tokenizer, conversation, how))
            except LlmpyError as error:
                if isinstance(error, InvalidRequestError):
                    error.index = index
                rendered.append(error)
        return rendered

    # ---- introspection ----------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Root of the seeds of requests that bring none."""
        return self.config.seed or 0

    @property
    def weight_version(self) -> int | str:
        """Label of the weights."""
        return self._frontend.context.version or 0

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Makes every cached block unfindable, even those in use.

        Args:
            reset_running_requests: Also recompute what running requests have cached.

        Returns:
            True.
        """
        self._driver.check()
        self._driver.engine.reset_prefix_cache(reset_running_requests)
        return True

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        self._driver.check()
        numbers = self._driver.engine.stats()
        known = EngineStats.__dataclass_fields__
        found: dict[str, Any] = {}
        for name, value in numbers.items():
            if name in known:
                found[name] = float(value) if known[name].type == "float" else int(value)
        total = found.get("kv_blocks_total", 0)
        found["finished"] = {
            reason: sum(int(numbers.get(f"finished_{name}", 0)) for name in names)
            for reason, names in _FINISH_NAMES.items()
        }
        found["kv_usage"] = 1 - found.get("kv_blocks_free", 0) / total if total else 0.0
        return EngineStats(**found)

    def step_log(self, n: int = 100) -> list[StepRecord]:
        """The engine's last steps; it remembers 4096.

        Args:
            n: At most so many.

        Returns:
            Records, the oldest first.

        Raises:
            InvalidRequestError: `n` is negative.
        """
        self._driver.check()
        if as_int("n", n) < 0:
            raise InvalidRequestError(f"n must be at least 0, got {n}.", parameter="n", value=n)
        return [StepRecord._make(step) for step in self._driver.engine.step_log(n)]

    def histograms(self) -> dict[str, Histogram]:
        """Distributions over everything that has run so far, counted in fixed buckets.

        Returns:
            By name: seconds in `time_to_first_token_s`, `time_per_output_token_s`, `end_to_end_s`, `queue_s`; tokens in
            `prompt_tokens`, `output_tokens`.
        """
        self._driver.check()
        return {name: Histogram(*parts) for name, parts in self._driver.engine.histograms().items()}

    def memory(self) -> dict[str, int]:
        """Bytes by purpose, and the device's total and free bytes."""
        self._driver.check()
        found = {"weights": 0, "kv": 0, "activations": 0, "graphs": 0, "sampler": 0, "pinned_host": 0}
        found.update(self._driver.model.memory())
        total, free = hardware.memory_bytes(str(self.config.device))
        return {**found, "device_total": total, "device_free": free}

    def ranks(self) -> list[dict[str, Any]]:
        """The devices that the model lies on."""
        memory = self.memory()
        rank = {"rank": 0, "device": self.config.device, "uuid": None, "name": hardware.device_name(str(self.config.device))}
        return [{**rank, "weights_bytes": memory["weights"], "kv_bytes": memory["kv"]}]

    def get_world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks())

    def weight_info(self, pattern: str | None = None) -> list[dict[str, Any]]:
        """The weights under their checkpoint names.

        Args:
            pattern: Shell pattern of names, such as "*.q_proj.*"; None = all.

        Returns:
            Dicts with `name`, `shape`, `dtype`, `stored_in`, `shard`.
        """
        self._driver.check()
        infos = self._driver.model.weight_info()
        return [info for info in infos if pattern is None or fnmatch.fnmatchcase(info["name"], pattern)]

    def program(self) -> list[str]:
        """The operations that run for every batch, one line each."""
        self._driver.check()
        return self._driver.model.program()

    @property
    def num_cache_groups(self) -> int:
        """Blocks of the cache that the tokens of one block take: 1, or more where layers have unlike windows."""
        return int(self._driver.model.describe()["num_groups"])

    def check(self) -> None:
        """Walks the invariants of block manager and scheduler; a RuntimeError names one that is broken."""
        self._driver.check()
        self._driver.engine.check()

    def is_sleeping(self) -> bool:
        """False: this engine cannot sleep yet."""
        self._driver.check()
        return False

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._driver.closed

    def close(self) -> None:
        """Aborts what is queued and frees all memory; twice is fine."""
        self._named.clear()
        self._driver.close()

    def __enter__(self) -> LLM:
        self._driver.check()
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_driver" in self.__dict__:
            self._driver.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("cannot pickle an LLM: pickle llm.config, and make another with LLM.from_config(config)")

    def __repr__(self) -> str:
        from .notebook import llm_line

        return llm_line(self)

    def _repr_html_(self) -> str:
        from .notebook import llm_html

        return llm_html(self)


def _check_params_type(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, but is of type {type(params).__name__}")


def _refuse_adapters(adapters: Iterable[object]) -> None:
    if any(adapter is not None for adapter in adapters):
        raise UnsupportedError("lora_request is not supported yet; merge the adapter into the checkpoint")
