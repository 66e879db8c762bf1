"""AsyncEngine: a model that serves many requests at once, for asyncio, for threads and for trainers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .checks import as_int
from .engine import calls
from .engine.base import Conversation, EngineBase, Tools, check_params_type
from .engine.feeds import DeferredSubmission, Feed, PendingResult, RequestHandle, RequestStream
from .engine.handover import ALONE, Apart, Handover
from .engine.health import STUCK_AFTER_S, check_serving
from .engine.jobs import beside
from .engine.pooling import params_of, request_of, wish
from .engine.requests import Request
from .engine.rpc import AsyncRpcCalls
from .engine.sleep import check_mode
from .engine.sleep_async import SleepingAsyncEngine
from .engine.tap import AsyncTapCalls, Tap
from .engine.thread import CLOSED, HAS_ROOM, IDLE, OVER, PAUSED, ThreadDriver
from .errors import EngineDeadError, InvalidRequestError, LlmpyError, QueueFullError, UnsupportedError
from .hub import DEMO
from .inputs import Prompt, is_single, parse
from .outputs import EngineStats, RequestOutput, ScoreOutput
from .weights.calls import AsyncUpdateCalls, Weights
from .weights.group import AsyncWeightGroups

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self, Unpack

    from .config import EngineConfig
    from .engine.loading import Loaded
    from .inputs import PromptType
    from .keywords import EngineKeywords, PoolingKeywords, SamplingKeywords
    from .pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
    )
    from .pooling_params import PoolingParams
    from .results.beam_search import BeamSearchOutput, BeamSearchParams
    from .sampling_params import SamplingParams

LONG_TEXT_CHARS = 8192
"""Longer text is tokenised on a helper thread."""
IMAGE_CHARS = 128 << 10
"""Decoding and cutting an image counts as tokenising so much text: about 25 ms."""
_open: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The threads end before the interpreter does."""
    for engine in list(_open):
        engine.close()


class AsyncEngine(
    AsyncUpdateCalls, AsyncWeightGroups, SleepingAsyncEngine, AsyncTapCalls, AsyncRpcCalls, Handover, EngineBase
):
    """A model that serves many requests at once. A thread of the core runs it; several event loops may use it.

    Args:
        model: Hub id, local directory or `.gguf` file; a path never touches the network. "demo", the default, is the demo
            model.
        use_tqdm_on_load: A progress bar while weights are read: True, False, or None, the default: if stderr is a terminal or
            a notebook's and the load takes longer than 0.5 s.
        others: See EngineConfig, which documents every option.

    Raises:
        ConfigError: An option has a bad value.
        ModelNotFoundError: No such path, repository or revision.
        CheckpointError: The files are torn or do not fit the architecture.
        UnsupportedError: Something that llmpy does not do; the message names it.

    Example:
        >>> async with AsyncEngine.create("demo") as engine:
        ...     output = await engine.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
        ...     print(output.text)
    """

    _driver: ThreadDriver

    def _check_config(self, config: EngineConfig) -> None:
        pass

    def _start(self, loaded: Loaded) -> None:
        driver = self._driver = ThreadDriver(loaded.model, loaded.engine, self.config.max_queued_requests or 0)
        self._weights = Weights(
            loaded.model, driver.thread, str(self.config.device), self._frontend, driver.alive, loaded.drafter
        )
        self._tap = Tap(loaded.model, driver.thread, loaded.spec, loaded.programs, self._frontend, driver.alive)
        _open.add(self)
        self._offer(loaded.fingerprint)

    @classmethod
    def create(cls, model: str | Path = DEMO, **options: Unpack[EngineKeywords]) -> Creation[Self]:
        """The constructor on a helper thread, so that the event loop goes on.

        Args:
            model, options: As in the constructor.

        Returns:
            What gives the engine: `await` it, or enter it with `async with`, which also shuts the engine down.
        """
        return Creation(beside(lambda: cls(model, **options)))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: object = None,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestStream:
        """Queues one request. Order of calls is order of arrival, but that long text arrives when it is tokenised.

        Args:
            prompt: One prompt in the forms of `LLM.generate`. Text over 8 KiB is tokenised on a helper thread, and its
                errors come when the stream is read. Text that cannot fit by its length alone is refused at once.
            sampling_params: None = the model's defaults; `output_kind` says what the stream gives.
            request_id: A name that no request in flight has; None = a number.
            priority: Lower runs first (scheduling_policy="priority").
            lora_request: A LoRARequest, the name of a loaded adapter, or None.
            cache_salt: Requests with unlike salts share no cached block.
            sampling: Fields of SamplingParams on top of the model's defaults, instead of `sampling_params`.

        Returns:
            A RequestStream: `async for output in stream`, or `await stream` for the last output.

        Raises:
            InvalidRequestError: It cannot run, or the id is in use.
            QueueFullError: `max_queued_requests` are waiting; `.num_waiting`.
            EngineDeadError: A fault has killed the engine.
            EngineClosedError: It was closed.
        """
        return RequestStream(
            self._submit(prompt, True, sampling_params, sampling, request_id, priority, lora_request, cache_salt), self
        )

    def chat(
        self,
        messages: str | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: object = None,
        cache_salt: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestStream:
        """Answers one conversation.

        Args:
            messages: A list of dicts with `role` and `content`, or a str meaning one user message.
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs: See `LLM.chat`.
            sampling_params, request_id, priority, lora_request, cache_salt, sampling: See `generate`.

        Returns:
            As `generate`; `prompt` is the rendered text.

        Raises:
            ChatTemplateError: There is no template, or it refused the messages.
        """
        how = self._template_arguments(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        rendered = self._render(messages, how)
        if len(rendered) != 1:
            raise TypeError("chat() of AsyncEngine takes one conversation; call it once for each")
        if isinstance(rendered[0], LlmpyError):
            raise rendered[0]
        return RequestStream(
            self._submit(rendered[0], False, sampling_params, sampling, request_id, priority, lora_request, cache_salt), self
        )

    def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: object = None,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestHandle:
        """Queues one request without asyncio; arguments and errors as in `generate`.

        Returns:
            A handle with `poll()`, `wait(timeout)` and `abort()`.
        """
        return RequestHandle(
            self._submit(prompt, True, sampling_params, sampling, request_id, priority, lora_request, cache_salt, binds=False),
            self,
        )

    def score(
        self,
        sequence: PromptType,
        completion: PromptType | None = None,
        *,
        temperature: float = 1.0,
        start: int | None = None,
        logprobs: int = 0,
        sampling_params: SamplingParams | None = None,
        lora_request: object = None,
    ) -> PendingResult[ScoreOutput]:
        """Teacher-forced logprobs of given tokens, with the bits of `generate`.

        Args:
            sequence: What to score; with `completion` the prompt before it.
            completion: What to score behind the prompt. A text pair is tokenised as one.
            temperature: Divides the logits; at least 1e-5.
            start: First position to score (>= 1); None = 1, or the completion's.
            logprobs: Best alternatives per position.
            sampling_params: Not supported yet.
            lora_request: As in `generate`.

        Returns:
            An awaitable of a ScoreOutput.

        Raises:
            InvalidRequestError: It cannot be scored.
        """
        if sampling_params is not None:
            raise UnsupportedError("score(sampling_params=...) is not supported yet; use temperature")
        from .engine.scoring import pair, score_params

        self._driver.check_alive()
        self._frontend.pooler.check("generate", "AsyncEngine.score()")
        params = score_params(temperature, logprobs, self.config.max_logprobs)
        if completion is None:
            prompts = self._frontend.prompts([_one(sequence, "score")])
            starts = [1 if start is None else as_int("start", start)]
        elif start is not None:
            raise TypeError("start cannot be given with completion")
        else:
            prompts, starts = pair(self._frontend, [_one(sequence, "score")], [_one(completion, "score")])
        adapters = [self._frontend.adapters.choose(lora_request)]
        request, core = calls.prepare_scores(self._frontend, calls.with_adapters(prompts, adapters), starts, params)[0]
        if request.error is not None:
            raise request.error
        request.request_id = f"score-{self._frontend.next_seed()[0]}"
        feed = Feed(self._driver, request)
        self._register(feed)
        if request.finished:
            feed.release()
        else:
            self._queue(feed, core, True)
        return PendingResult(feed, self)

    def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: object = None,
        cache_salt: str | None = None,
    ) -> PendingResult[BeamSearchOutput]:
        """Finds the most likely texts behind a prompt, as `LLM.beam_search` does.

        Args:
            prompt: One prompt in the forms of `LLM.generate`.
            params: Parameters of the search.
            request_id, priority, lora_request, cache_salt: As in `generate`.

        Returns:
            An awaitable of a BeamSearchOutput.

        Raises:
            InvalidRequestError, QueueFullError, UnsupportedError: As in `generate` and `LLM.beam_search`.
        """
        from .results.beam_search import sampling_of

        feed = self._submit(prompt, True, sampling_of(params), {}, request_id, priority, lora_request, cache_salt)
        return PendingResult(feed, self)

    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: str | None = None,
        lora_request: object = None,
        cache_salt: str | None = None,
        **pooling: Unpack[PoolingKeywords],
    ) -> PendingResult[PoolingRequestOutput[PoolingOutput]]:
        """States of one prompt, as the task wants them: an embedding, classes, or a reward.

        Args:
            prompt: One prompt in the forms of `LLM.generate`.
            pooling_params: None = as the model says.
            request_id: A name that no request in flight has; None = a number.
            pooling_task: As in `LLM.encode`.
            lora_request: As in `generate`.
            cache_salt: Requests with unlike salts share no cached block.
            pooling: Fields of PoolingParams, instead of `pooling_params`.

        Returns:
            An awaitable of a PoolingRequestOutput, the result in `.outputs.data`.

        Raises:
            UnsupportedError: The model does not have the task.
            InvalidRequestError: It cannot run, or the id is in use.
        """
        return self._pool("encode", pooling_task, prompt, pooling_params, pooling, request_id, lora_request, cache_salt)

    def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: object = None,
        cache_salt: str | None = None,
        **pooling: Unpack[PoolingKeywords],
    ) -> PendingResult[EmbeddingRequestOutput]:
        """The embedding of one prompt. Generative models embed, too.

        Args:
            prompt, pooling_params, request_id, lora_request, cache_salt, pooling: As in `encode`.

        Returns:
            An awaitable of an EmbeddingRequestOutput, the result in `.outputs.embedding`.

        Raises:
            UnsupportedError: The model does not embed.
            InvalidRequestError: The prompt cannot run, or the id is in use.
        """
        return self._pool("embed", "embed", prompt, pooling_params, pooling, request_id, lora_request, cache_salt)

    def classify(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: object = None,
        cache_salt: str | None = None,
        **pooling: Unpack[PoolingKeywords],
    ) -> PendingResult[ClassificationRequestOutput]:
        """The classes of one prompt; its reward, with a reward model.

        Args:
            prompt, pooling_params, request_id, lora_request, cache_salt, pooling: As in `encode`.

        Returns:
            An awaitable of a ClassificationRequestOutput, the result in `.outputs.probs`.

        Raises:
            UnsupportedError: The model does not classify.
            InvalidRequestError: The prompt cannot run, or the id is in use.
        """
        return self._pool("classify", "classify", prompt, pooling_params, pooling, request_id, lora_request, cache_salt)

    def _pool(
        self,
        call: str,
        task: str | None,
        prompt: PromptType,
        pooling_params: PoolingParams | None,
        pooling: Mapping[str, Any],
        request_id: str | None,
        lora_request: object,
        cache_salt: str | None,
    ) -> PendingResult[Any]:
        self._driver.check_alive()
        adapter = self._frontend.adapters.choose(lora_request)
        params = params_of(pooling_params, pooling, call)
        wanted = wish(self._frontend.pooler, "AsyncEngine", call, task, params)
        found = self._frontend.prompts([_one(prompt, call)])[0]
        calls.with_adapters([found], [adapter])
        if cache_salt is not None and isinstance(found, Prompt):
            found.salt = cache_salt or None
        request, core = request_of(self._frontend, found, wanted)
        if request.error is not None:
            raise request.error
        request.request_id = f"{call}-{request.request_id}" if request_id is None else request_id
        feed = Feed(self._driver, request)
        self._register(feed)
        self._queue(feed, core, True)
        return PendingResult(feed, self)

    def _open(
        self,
        prompt: Prompt,
        special_tokens: bool,
        sampling: SamplingParams | Mapping[str, Any],
        *,
        request_id: str | None,
        priority: int,
        lora_request: object,
        cache_salt: str | None,
        apart: Apart = ALONE,
    ) -> RequestStream:
        """Queues a prompt that was parsed, or rendered from a conversation; `apart` as in `_submit`."""
        params, fields = (None, sampling) if isinstance(sampling, Mapping) else (sampling, {})
        feed = self._submit(
            prompt, special_tokens, params, fields, request_id, priority, lora_request, cache_salt, apart=apart
        )
        return RequestStream(feed, self)

    def _submit(
        self,
        item: object,
        special_tokens: bool,
        sampling_params: SamplingParams | None,
        sampling: Mapping[str, Any],
        request_id: str | None,
        priority: int,
        lora_request: object,
        cache_salt: str | None,
        binds: bool = True,
        apart: Apart = ALONE,
    ) -> Feed:
        """Checks a request and queues it. `apart`: what another engine has to do with it."""
        driver = self._driver
        driver.check_alive()
        adapter = self._frontend.adapters.choose(lora_request)
        if not (request_id is None or isinstance(request_id, str)):
            raise TypeError(f"request_id must be a str, but is of type {type(request_id).__name__}")
        params = self._params(sampling_params, sampling)
        check_params_type(params)
        prompt = item if isinstance(item, Prompt) else parse(_one(item, "generate"))
        prompt.adapter = adapter
        if cache_salt is not None:
            prompt.salt = cache_salt or None
        priority = as_int("priority", priority)
        text = "" if prompt.ids is not None else prompt.text or ""
        words = sum(map(len, params.bad_words or ()))
        images = 0 if prompt.media is None else len(prompt.media.data) * IMAGE_CHARS
        is_long = len(text) + words + images > LONG_TEXT_CHARS
        self._frontend.check_params(prompt, params, priority)
        if text:
            self._frontend.check_text(text, by_length=True)
        if not is_long:
            self._tokenize(prompt, special_tokens, params)
        request = calls.new_request(self._frontend, prompt, params)
        if request_id is not None:
            request.request_id = request_id
        feed = Feed(driver, request)
        self._register(feed)
        translator = self._frontend.translator
        core = None if is_long and words else translator.core_params(params)

        def prepare() -> dict[str, Any]:
            if is_long:
                self._tokenize(prompt, special_tokens, params)
            if apart.source and prompt.ids is not None:
                self._fetch(apart.source, prompt.ids, prompt.salt)
            base = translator.core_params(params) if core is None else core
            return translator.prompt_params(request, base, priority) | apart.core_params()

        self._queue(feed, prepare, binds, len(text) + words + images if is_long else int(bool(apart.source)))
        return feed

    def _tokenize(self, prompt: Prompt, special_tokens: bool, params: SamplingParams) -> None:
        found = self._frontend.prompts([prompt], special_tokens)[0]
        if isinstance(found, LlmpyError):
            raise found
        self._frontend.check_ids(prompt, params)

    def _register(self, feed: Feed) -> None:
        """Takes the request's id, unless a request in flight has it."""
        named, request = self._driver.named, feed.request
        other = named.setdefault(request.request_id, feed)
        if other is not feed and other.pull():
            other = named.setdefault(request.request_id, feed)
        if other is not feed:
            message = f"request_id {request.request_id} is already in use"
            raise InvalidRequestError(message, parameter="request_id", value=request.request_id)

    def _queue(self, feed: Feed, core: dict[str, Any] | Callable[[], dict[str, Any]], binds: bool, chars: int = 0) -> None:
        """Submits a registered request: at once, or once so many characters have been tokenised. Others pass it meanwhile."""
        driver = self._driver
        loop = _running_loop() if binds else None
        try:
            if loop is not None:
                feed.link = driver.link(loop)
            prepare = core if callable(core) else lambda: core
            if chars:
                self._check_room()
                driver.untokenised.add(feed)
                driver.jobs.of(chars).put(DeferredSubmission(feed, prepare))
            else:
                feed.submit(prepare())
        except BaseException:
            feed.end()
            raise

    def _check_room(self) -> None:
        """Refuses a request whose text would wait where as many wait as may; those that are being tokenised count, too."""
        driver, most = self._driver, self.config.max_queued_requests
        if most is None or driver.thread.state() & CLOSED:
            return
        count = self.stats().num_waiting + len(driver.untokenised)
        if count >= most:
            message = f"queue: wanted fewer than {most} waiting requests, have {count}; raise max_queued_requests"
            raise QueueFullError(message, num_waiting=count)

    async def abort(self, request_ids: str | Iterable[str] | None = None) -> list[RequestOutput]:
        """Ends requests.

        Args:
            request_ids: Their ids; None = all. Unknown and finished ones are passed over.

        Returns:
            What each of them had made, with `finish_reason` "abort"; their streams end with the same.
        """
        self._driver.check_alive()
        feeds = self._driver.find(request_ids)
        for feed in feeds:
            feed.abort()
        await self._finish(feeds)
        return [
            feed.request.output()
            for feed in feeds
            if type(feed.request) is Request and any(_was_aborted(sample) for sample in feed.request.samples)
        ]

    async def _finish(self, feeds: Sequence[Feed]) -> None:
        """Waits until these requests have ended."""
        left = list(feeds)
        while left := [feed for feed in left if not feed.refresh()]:
            await self._driver.settle()

    # ---- pauses -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "abort", clear_cache: bool = False, timeout: float | None = None) -> None:
        """Stops the device; new requests queue until `resume`. All tokens made so far can be read when it returns.

        Args:
            mode: "abort" ends what was submitted, "wait" lets it finish, "keep" freezes it between two steps.
            clear_cache: Also forget the prefix cache; never needed for right results.
            timeout: Seconds; None = no limit.

        Raises:
            TimeoutError: "wait" took longer; new requests still queue.
        """
        number = check_mode(mode)
        self._driver.check_alive()
        self._driver.thread.pause(number)
        await self._driver.until(PAUSED | OVER, timeout=timeout)
        self._driver.check_alive()
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Ends a pause; without one it does nothing."""
        self._driver.check_alive()
        self._driver.thread.pause(0)

    @property
    def is_paused(self) -> bool:
        """Whether a pause was asked for and not ended."""
        self._driver.check()
        return self._driver.is_paused

    pause_generation = pause
    resume_generation = resume

    # ---- waiting, health, statistics --------------------------------------------------------------------------------

    async def wait_for_requests_to_drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing runs or waits.

        Args:
            timeout: Seconds; None = no limit.

        Returns:
            True when idle, False when the time is over.
        """
        self._driver.check_alive()
        try:
            async with asyncio.timeout(timeout):
                await self._until_idle()
        except TimeoutError:
            return False
        self._driver.check_alive()
        return True

    async def _until_idle(self) -> None:
        while self._driver.jobs:
            await asyncio.sleep(0.002)
        await self._driver.until(IDLE | OVER)

    async def wait_for_capacity(self) -> None:
        """Waits until fewer than `max_queued_requests` wait."""
        self._driver.check_alive()
        await self._driver.until(HAS_ROOM | OVER)
        self._driver.check_alive()

    def check_health(self, stuck_after_s: float = STUCK_AFTER_S, alive_only: bool = False) -> None:
        """Raises unless a request would be served now. While weights are updated requests wait for a moment: that is healthy.

        Args:
            stuck_after_s: Seconds that a step, the helper threads or an update may take without progress. A step and an
                update are timed from the first call that finds them, so call this regularly.
            alive_only: Raise only what no call of the engine can end: not for a pause, sleep or missing weights.

        Raises:
            EngineDeadError: A fault has killed the engine; the cause is chained.
            EngineClosedError: It was closed, or shuts down.
            EngineStuckError: Something makes no progress; the message names it.
            EngineAsleepError: It sleeps or is paused.
            WeightsMissingError: Its weights are incomplete, after sleep at level 2 or an update that failed half-way.
        """
        driver = self._driver
        driver.check_alive()
        driver.watch.check(stuck_after_s)
        if not alive_only:
            check_serving(driver.engine, driver.is_paused)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What killed the engine, or None."""
        try:
            self._driver.raise_death()
        except EngineDeadError as error:
            return error
        return None

    @property
    def errored(self) -> bool:
        """Whether a fault has killed the engine."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return not self.closed and not self._driver.refuses and not self.errored

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        prompts, tokens, seconds = self._saved
        own = {"saved_prompts": prompts, "saved_prompt_tokens": tokens, "saved_prompt_s": seconds}
        return replace(super().stats(), paused=self._driver.is_paused, **own)  # type: ignore[arg-type]

    def check(self) -> None:
        """Walks the invariants of block manager and scheduler between two steps; a RuntimeError names a broken one."""
        self._driver.check()
        self._driver.thread.check()

    def _move_adapter(self, before: int, number: int) -> None:
        self._driver.thread.move_adapter(before, number)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:  # type: ignore[override]
        """Makes every cached block unfindable, even those in use.

        Args:
            reset_running_requests: Also recompute what running requests have cached.

        Returns:
            True.
        """
        self._driver.check_alive()
        self._driver.thread.reset_prefix_cache(reset_running_requests)
        await self._driver.settle()
        return True

    # ---- life -------------------------------------------------------------------------------------------------------

    async def shutdown(self, mode: str = "abort", timeout: float | None = None) -> None:
        """Closes the engine while the event loop goes on. Streams end with what they have.

        Args:
            mode: "abort" ends all requests, "drain" lets those submitted finish, if the engine is awake.
            timeout: Seconds that "drain" may take; then the rest is ended. None = no limit.
        """
        if mode not in ("abort", "drain"):
            raise InvalidRequestError(f"mode must be 'abort' or 'drain', got {mode!r}.", parameter="mode", value=mode)
        driver = self._driver
        if driver.closed:
            return
        driver.check()
        with contextlib.suppress(TimeoutError):  # what is left is ended below
            async with asyncio.timeout(timeout):
                while mode == "drain" and driver.jobs:
                    await asyncio.sleep(0.002)
                driver.refuses = True
                if mode == "drain" and not driver.engine.holds():
                    driver.thread.pause(0)
                    await driver.until(IDLE | OVER)
        driver.refuses = True
        driver.thread.stop()
        await driver.until(CLOSED)
        self.close()

    def close(self) -> None:
        """Ends all requests and frees all memory before it returns; twice is fine."""
        self._close_weight_groups()
        if self._lender is not None:
            self._lender.close()
        self._driver.close()

    def __enter__(self) -> Self:
        self._driver.check()
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._driver.check()
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.shutdown()

    def __del__(self) -> None:
        if "_driver" in self.__dict__:
            self._driver.close()


Made = TypeVar("Made", bound=AsyncEngine)


class Creation(Coroutine[Any, Any, Made]):
    """An engine that is being made: a coroutine that gives it, and an asynchronous context manager."""

    def __init__(self, work: Coroutine[Any, Any, Made]) -> None:
        self._work = work
        self._engine: Made | None = None

    def __await__(self) -> Generator[Any, None, Made]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """As of a coroutine."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """As of a coroutine."""
        return self._work.throw(*error)

    def close(self) -> None:
        """As of a coroutine."""
        self._work.close()

    async def __aenter__(self) -> Made:
        self._engine = await self
        return self._engine

    async def __aexit__(self, *unused: object) -> None:
        assert self._engine is not None
        await self._engine.shutdown()


def _one(item: object, name: str) -> object:
    """A single prompt."""
    if not is_single(item):
        raise TypeError(f"{name}() of AsyncEngine takes one prompt; call it once for each")
    return item


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _was_aborted(sample: Any) -> bool:
    return bool(sample.finish == "abort")
