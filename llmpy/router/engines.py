"""The engines behind the router: their health, their load, their roles, and the events of their caches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import ConfigError
from .policy import Load
from .upstream import Broken, Headers, Upstream

ROLES = ("prefill", "decode", "both")
POLL_TIMEOUT_S = 10.0
MOST_SILENT = 2
"""Polls without an answer, one behind the other, after which an engine counts as dead: its requests are taken from it."""
RETRY_S = 1.0
"""Seconds until events are followed again behind an error."""

log = logging.getLogger("llmpy.router")


@dataclass(eq=False, kw_only=True)
class Engine(Load):
    """One engine.

    Args:
        upstream: Its connections.
        role: "prefill", "decode" or "both"; None = as it tells.
        events: Addresses of its KV events, and of their replay; None = as it tells.
    """

    upstream: Upstream
    role: str | None = None
    events: tuple[str, str | None] | None = None
    problem: str | None = "not asked yet"
    """Why it gets no requests; None: it does."""
    told_role: str = "both"
    told_events: tuple[str, str | None] | None = None
    requests: int = 0
    failures: int = 0
    waiting: int = 0
    """Requests without a first token."""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it serves by name, as its /v1/models tells; empty: it does not tell."""
    silent_polls: int = 0
    follower: Any = None
    _is_told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Its address, by which metrics and logs name it."""
        return self.upstream.url

    @property
    def kind(self) -> str:
        """Its role."""
        return self.role or self.told_role

    def serves(self, kind: str, model: str | None = None) -> bool:
        """Whether it takes requests of a kind, "prefill" or "decode", for a model now; None: for any model."""
        return self.problem is None and self.kind in (kind, "both") and (model is None or model in self.models)

    def fail(self, reason: str, is_gone: bool = True) -> None:
        """Notes that it gets no requests.

        Args:
            reason: Why.
            is_gone: Whether it may have ended, and its cache with it. Events tell more.
        """
        if self.problem is None:
            log.warning("%s gets no more requests: %s", self.url, reason)
            self.failures += 1
        self.problem = reason
        if is_gone and not self.blocks.has_events:
            self.blocks.clear()

    def sent(self, tokens: int) -> AbstractContextManager[Callable[[], None]]:
        """Counts a request while it runs; call what it gives at the first token.

        Args:
            tokens: Tokens to compute before the first one.
        """
        return _sent(self, tokens)

    # ---- what it tells ----------------------------------------------------------------------------------------------

    async def poll(self, headers: Headers) -> None:
        """Asks for health, load, role and events."""
        own = self.running
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                status, _ = await self.get("/health", headers)
                if status != 200:
                    self.fail(f"/health: status {status}", is_gone=False)
                    return
                status, body = await self.get("/load", headers)
                self._learn_models(await self.get("/v1/models", headers))
        except TimeoutError:
            self.silent_polls += 1
            self.fail(f"no answer within {POLL_TIMEOUT_S:g} s", is_gone=False)
            if self.silent_polls >= MOST_SILENT:
                self.upstream.end()
            return
        except Broken as error:
            self.fail(str(error))
            return
        self.silent_polls = 0
        if status == 200:
            self._learn(body, own)
        if self.problem is not None:
            log.info("%s serves, as %s", self.url, self.kind)
        self.problem = None
        self._is_told.set()

    async def get(self, path: str, headers: Headers) -> tuple[int, bytes]:
        """Status and body at a path."""
        answer = await self.upstream.ask("GET", path, headers)
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()

    def _learn_models(self, answer: tuple[int, bytes]) -> None:
        try:
            found = msgspec.json.decode(answer[1])["data"] if answer[0] == 200 else []
            self.models = {one["id"]: one for one in found}
        except (msgspec.DecodeError, KeyError, TypeError):
            self.models = {}

    def _learn(self, body: bytes, own: int) -> None:
        try:
            told = msgspec.json.decode(body)
            self.others = max(int(told.get("running", 0)) + int(told.get("waiting", 0)) - max(own, self.running), 0)
            self.told_role = told["role"] if told.get("role") in ROLES else "both"
            if events := told.get("kv_events"):
                self.told_events = (self._here(events["endpoint"]), self._here(events.get("replay_endpoint")))  # type: ignore[assignment]
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError):
            self.others = 0

    def _here(self, address: str | None) -> str | None:
        """An address where the engine publishes, as one to connect to."""
        if address is None or not address.startswith("tcp://"):
            return address
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return f"tcp://{self.upstream.host if host in ('*', 'lo', '0.0.0.0', '[::]') else host}:{port}"

    async def follow(self) -> None:
        """Follows its KV events for ever, once their address is known."""
        await self._is_told.wait()
        while (addresses := self.events or self.told_events) is None:
            await asyncio.sleep(RETRY_S)
        try:
            from .events import Follower
        except ImportError as error:
            log.warning("%s: its KV events need the package %s; pip install 'llmpy[kvevents]'", self.url, error.name)
            return
        self.follower = Follower(self.blocks, *addresses)
        while True:
            try:
                await self.follower.run()
            except Exception:
                log.exception("%s: its KV events begin again", self.url)
                self.follower.forget()
            await asyncio.sleep(RETRY_S)


@contextlib.contextmanager
def _sent(engine: Engine, tokens: int) -> Any:
    engine.requests += 1
    engine.running += 1
    engine.waiting += 1
    engine.pending += tokens
    is_first = True

    def first() -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            engine.waiting -= 1
            engine.pending -= tokens

    try:
        yield first
    finally:
        first()
        engine.running -= 1


def parsed(given: str, role: str | None = None) -> Engine:
    """An engine from the command line: URL, or URL,EVENTS or URL,EVENTS,REPLAY with addresses of ZeroMQ.

    Raises:
        ConfigError: It has another form.
    """
    url, *addresses = given.split(",")
    if len(addresses) > 2 or not all("://" in one for one in addresses):
        message = f"wanted URL, or URL,tcp://HOST:PORT of its KV events and of their replay, have {given!r}"
        raise ConfigError(message, option="urls", value=given)
    events = (addresses[0], addresses[1] if len(addresses) > 1 else None) if addresses else None
    return Engine(upstream=Upstream(url), role=role, events=events)


async def poll(engine: Engine, headers: Headers) -> None:
    """Polls one engine; an error that nobody expected is logged."""
    try:
        await engine.poll(headers)
    except Exception:
        log.exception("%s: a poll failed", engine.url)


async def watch(engines: Sequence[Engine], headers: Headers, interval: float) -> None:
    """Polls all engines, and follows their events, until it is cancelled.

    Args:
        engines: The engines.
        headers: Headers of all polls.
        interval: Seconds between two polls.
    """

    async def look(engine: Engine) -> None:
        while True:
            await asyncio.sleep(interval)
            await poll(engine, headers)

    await asyncio.gather(*map(look, engines), *(engine.follow() for engine in engines))
