"""Prefill and decode apart: one engine computes a prompt, another generates behind it with the same bits."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from ..errors import ConfigError, LlmpyError, UnsupportedError
from . import lending, outer_tier
from .feeds import RequestStream

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from ..async_engine import AsyncEngine
    from ..config import EngineConfig
    from ..inputs import PromptType
    from ..keywords import SamplingKeywords
    from ..outputs import RequestOutput
    from ..sampling_params import SamplingParams
    from .thread import ThreadDriver

logger = logging.getLogger("llmpy")


@dataclass(frozen=True)
class Handle:
    """A computed prompt, for `AsyncEngine.decode`. `to_dict` and `from_dict` take it through JSON to another process.

    Args:
        prompt_token_ids: The prompt.
        cache_salt: As in `generate`.
        seed: Root of the request's random numbers.
        saved_tokens: Leading tokens whose blocks the decode engine can find.
        first_token_id: The first token of the output, which the decode engine draws again.
        engine_id: The engine whose pool has the blocks, with `kv_connector={"name": "device"}`; "" = a store has them.
        is_whole: Whether the prompt has been computed; else `decode` awaits its blocks.
    """

    prompt_token_ids: tuple[int, ...]
    cache_salt: str | None
    seed: int
    saved_tokens: int
    first_token_id: int | None
    engine_id: str = ""
    is_whole: bool = True

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON has them."""
        return {**self.__dict__, "prompt_token_ids": list(self.prompt_token_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Handle:
        """The handle that `to_dict` gave."""
        return cls(**{**values, "prompt_token_ids": tuple(values["prompt_token_ids"])})


@dataclass(frozen=True)
class Apart:
    """What another engine has to do with a request.

    Args:
        source: The engine out of whose pool a helper thread copies the prompt first; "" = none.
        saves_early: Whether blocks of the prompt go to the store while later ones are computed.
        awaits_s: Seconds without a new block in the store behind which the rest is computed; 0 = no block is awaited.
    """

    source: str = ""
    saves_early: bool = False
    awaits_s: float = 0.0

    def core_params(self) -> dict[str, Any]:
        """What the core has to know."""
        given = {"saves_early": self.saves_early, "awaits_s": self.awaits_s}
        return {name: value for name, value in given.items() if value}


ALONE = Apart()


class Prefill:
    """A prompt that is being computed for another engine, from `AsyncEngine.begin_prefill`.

    `await` it for the whole handle. `AsyncEngine.decode` takes it at once, or its `handle` in another process.

    Args:
        handle: The handle so far: `is_whole` is False, and it has no first token.
        task: Gives the whole handle.
    """

    def __init__(self, handle: Handle, task: asyncio.Task[Handle]) -> None:
        self.handle, self._task = handle, task

    def __await__(self) -> Generator[Any, None, Handle]:
        return self._task.__await__()

    def abort(self) -> None:
        """Ends the request; `await` raises CancelledError then, and `decode` goes on with what has come."""
        self._task.cancel()

    def add_done_callback(self, function: Callable[[], object]) -> None:
        """Calls a function in the event loop once the prompt has been computed, or its request has failed."""
        self._task.add_done_callback(lambda _: function())


_lenders: weakref.WeakValueDictionary[str, Handover] = weakref.WeakValueDictionary()
"""Engines of this process whose pools others copy from, by their ids."""


def check(config: EngineConfig, what: str) -> None:
    """Refuses an engine whose blocks no other engine can find."""
    if config.data_parallel_size > 1:
        raise UnsupportedError(f"{what} is not supported yet with data_parallel_size above 1; open one engine for each replica")
    if config.disk_cache is None and config.kv_connector is None:
        raise ConfigError(f"{what} needs disk_cache or kv_connector, where both engines find blocks.", option="disk_cache")
    if config.prefix_cache_seed is None:
        raise ConfigError(f"{what} needs prefix_cache_seed, the same in both engines.", option="prefix_cache_seed")


class Saved(NamedTuple):
    """Prompts that were saved for other engines: their number, their tokens, and the seconds for it."""

    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Handover:
    """Calls of AsyncEngine for prefill and decode on different engines."""

    config: EngineConfig
    name: str
    _saved = Saved()
    _prefills: frozenset[asyncio.Task[Handle]] = frozenset()
    _engine_id = ""
    _fingerprint = b""
    _lender: lending.Lender | None = None
    _driver: ThreadDriver

    if TYPE_CHECKING:

        def _params(self, given: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams: ...

    def _offer(self, fingerprint: bytes) -> None:
        """Lets other engines copy from this one's pool, if there is a fingerprint."""
        if not fingerprint:
            return
        self._fingerprint, self._engine_id = fingerprint, uuid.uuid4().hex
        _lenders[self._engine_id] = self
        self._lender = lending.Lender(self._driver.thread, self._engine_id, fingerprint)

    def _fetch(self, engine_id: str, ids: lending.Ids, salt: str | None) -> None:
        """Copies a prompt's blocks from the pool that has computed them; what cannot be copied is computed."""
        source, thread = _lenders.get(engine_id), self._driver.thread
        if source is self or (source is not None and source._fingerprint != self._fingerprint):
            return
        try:
            if source is not None:
                thread.fetch_prompt(source._driver.thread, lending.as_bytes(ids), lending.core_params(salt))
            else:
                lending.borrow(thread, engine_id, self._fingerprint, ids, salt)
        except (LlmpyError, OSError) as error:
            logger.warning("%s: a prompt is computed again, because its blocks cannot be copied: %s", self.name, error)

    async def save_prompt(self, prompt_token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Saves the full blocks of a prompt that the cache has where other engines find them. Steps stop meanwhile.

        Args:
            prompt_token_ids: A prompt that was computed.
            cache_salt: That of its request.

        Returns:
            Number of its leading tokens that other engines can find.

        Raises:
            ConfigError: An option that both engines need is missing.
            UnsupportedError: `data_parallel_size` is above 1.
        """
        check(self.config, "save_prompt()")
        if outer_tier.is_device(self.config):
            return len(prompt_token_ids) // (self.config.block_size or 1) * (self.config.block_size or 1)
        begun = time.perf_counter()
        ids, params = lending.as_bytes(prompt_token_ids), lending.core_params(cache_salt)
        saved = await asyncio.to_thread(self._driver.thread.save_prompt, ids, params)
        before = self._saved
        self._saved = Saved(before.prompts + 1, before.tokens + saved, before.seconds + time.perf_counter() - begun)
        return saved

    async def prefill(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Handle:
        """Computes a prompt and its first token, and saves its full blocks where other engines find them.

        Blocks are saved while later ones are computed; steps stop while the last ones are saved. Both engines need
        the same model, `prefix_cache_seed`, and `disk_cache` (a folder in memory is one, /dev/shm) or `kv_connector`.

        Args:
            prompt, sampling_params, priority, cache_salt, sampling: As in `generate`.

        Returns:
            What `decode` of the other engine takes.

        Raises:
            ConfigError: An option that both engines need is missing.
            UnsupportedError: `data_parallel_size` is above 1.
            RequestFailedError: The request failed.
        """
        stream = self._compute(prompt, sampling_params, priority, cache_salt, sampling)
        return await self._hand_over(stream, cache_salt)

    async def begin_prefill(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Prefill:
        """Queues what `prefill` computes; the other engine can load blocks while later ones are computed.

        Args:
            prompt, sampling_params, priority, cache_salt, sampling: As in `generate`.

        Returns:
            What `decode` of the other engine takes; `await` it for the handle that `prefill` gives.

        Raises:
            ConfigError, UnsupportedError: As `prefill`.
            InvalidRequestError: The prompt cannot run.
        """
        stream = self._compute(prompt, sampling_params, priority, cache_salt, sampling)
        feed = stream._feed
        request = feed.request
        while request.prompt.ids is None and feed.error is None and not request.finished:  # a helper thread tokenises long text
            await asyncio.sleep(0.001)
        if feed.error is not None:
            raise feed.error
        ids = request.prompt.ids
        known = () if ids is None else tuple(ids.tolist())
        early = Handle(known, cache_salt, request.seed, 0, None, self._engine_id, is_whole=False)
        task = asyncio.ensure_future(self._hand_over(stream, cache_salt))
        self._prefills |= {task}
        task.add_done_callback(self._end_prefill)
        return Prefill(early, task)

    def _end_prefill(self, task: asyncio.Task[Handle]) -> None:
        self._prefills -= {task}
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("%s: a prompt was not handed over: %s", self.name, error)

    def _compute(
        self,
        prompt: PromptType,
        given: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        sampling: Mapping[str, Any],
    ) -> RequestStream:
        """Queues the prompt and one token."""
        check(self.config, "prefill()")
        params = self._params(given, sampling)
        first = params.replace(max_tokens=1, min_tokens=min(params.min_tokens, 1), n=1)
        engine, apart = cast("AsyncEngine", self), Apart(saves_early=not outer_tier.is_device(self.config))
        return RequestStream(engine._submit(prompt, True, first, {}, None, priority, None, cache_salt, apart=apart), engine)

    async def _hand_over(self, stream: RequestStream, cache_salt: str | None) -> Handle:
        """Waits for the token, and saves what is left of the prompt."""
        output: RequestOutput = await stream
        ids, sample = tuple(output.prompt_token_ids or ()), output.outputs[0]
        saved = await self.save_prompt(ids, cache_salt)
        first_id = sample.token_ids[0] if sample.token_ids else None
        return Handle(ids, cache_salt, output.seed, saved, first_id, self._engine_id)

    def decode(
        self,
        handle: Handle | Prefill,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        patience_s: float = 10.0,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestStream:
        """Generates behind a prompt that another engine has computed, with the bits that one engine would give.

        Blocks that cannot be found, and the rows behind the last full block, are computed here.

        A prompt that the other engine still computes is loaded block by block, and goes on once the last one is there. What the
        other engine does not bring is computed here.

        Args:
            handle: What `prefill` or `begin_prefill` of the other engine gave.
            sampling_params, priority, sampling: As in `generate`; those of `prefill`.
            patience_s: Most seconds without a new block of a prompt that is still computed.

        Raises:
            ConfigError, UnsupportedError: As `prefill`.
        """
        check(self.config, "decode()")
        params = self._params(sampling_params, sampling)
        known = handle.handle if isinstance(handle, Prefill) else handle
        params = params.replace(seed=known.seed) if params.seed is None else params
        is_device = outer_tier.is_device(self.config)
        if is_device and not known.is_whole:
            raise UnsupportedError(
                "decode() of a prompt that is still computed is not supported with kv_connector={'name': 'device'}; "
                "await the handle first"
            )
        apart = Apart(known.engine_id if is_device else "", awaits_s=0.0 if known.is_whole else patience_s)
        engine, ids = cast("AsyncEngine", self), list(known.prompt_token_ids)
        feed = engine._submit(ids, True, params, {}, None, priority, None, known.cache_salt, apart=apart)
        if isinstance(handle, Prefill):
            handle.add_done_callback(feed.end_wait)
        return RequestStream(feed, engine)
