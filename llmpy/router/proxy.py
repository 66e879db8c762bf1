"""The router: an ASGI application that passes requests on to engines, and their answers back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from ..server.errors import HttpError, answer, ending, log, refusal, unknown_path
from ..server.frames import DONE, ClientGone, attended
from ..server.limits import seconds
from ..server.middleware import guard, guarded_service
from .engines import Engine, poll, watch
from .handover import PREFILLED, prefill_body
from .metrics import Counts, text
from .policy import Chooser, Prompt
from .prompts import prompt_of
from .upstream import Answer, Broken, Headers

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")
PASSED: tuple[str, ...] = (*GENERATING, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
PASSED += ("/v1/completions/render", "/v1/chat/completions/render")
PASSED += ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
"""POST paths that any engine can answer."""
ASKED = ("/v1/models/{name:path}", "/tokenizer_info")
"""GET paths that any engine answers alike."""
KEPT = {"/v1/responses/{id}": ["GET", "DELETE"], "/v1/responses/{id}/cancel": ["POST"]}
"""Paths of what one engine keeps."""
BUSY = (429, 503)
"""Statuses behind which another engine may serve the request."""
NOT_TO_ENGINES = frozenset(
    b"host content-length transfer-encoding connection keep-alive te trailer upgrade expect origin accept-encoding "
    b"proxy-connection proxy-authorization".split()
)
NOT_TO_CLIENTS = frozenset(b"content-length transfer-encoding connection keep-alive date server".split())
FRAME_ENDS = (b"\n\n", b"\r\n\r\n")
COMMENTS = re.compile(rb"(:[^\n]*\n|\r?\n)*")
"""Lines of events that hold nothing."""
MOST_BROKEN = 2
"""Engines that may fail with a request: it may be what makes them fail."""
BODY_S = seconds("body_s")
ENGINE_HEADER = b"x-llmpy-engine"
"""Header of an answer: the engine that gave it."""


@dataclass(kw_only=True)
class Options:
    """Options of a router.

    Args:
        policy: "prefix", "load" or "round-robin".
        api_keys: Accepted API keys; () = the engines check them alone. The first one is for the router's own requests.
        cors_origins: Origins that browsers may call from.
        max_body_bytes: Longest body.
        poll_s: Seconds between two polls of an engine.
        control_keys: None are needed: there are no control paths.
    """

    policy: str = "prefix"
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    poll_s: float = 1.0
    control_keys: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Router:
    """The router's state.

    Args:
        engines: The engines.
        options: Its options.
    """

    engines: Sequence[Engine]
    options: Options
    is_draining: bool = False
    is_over: bool = False
    running: int = 0
    body_bytes: int = 0
    counts: Counts = field(default_factory=Counts)
    chooser: Chooser = field(init=False)

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.options.policy)

    @property
    def headers(self) -> Headers:
        """Headers of the router's own requests."""
        keys = self.options.api_keys
        return [(b"authorization", b"Bearer " + keys[0].encode())] if keys else []

    def check_serves(self) -> None:
        """Refuses a request while the router shuts down."""
        if self.is_draining:
            raise ending()

    def end_requests(self) -> None:
        """Ends the requests that still run."""
        self.is_over = True
        for engine in self.engines:
            engine.upstream.end()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Polls the engines before the first request, and while the application runs."""
        await asyncio.gather(*(poll(engine, self.headers) for engine in self.engines))
        watching = asyncio.ensure_future(watch(self.engines, self.headers, self.options.poll_s))
        try:
            yield
        finally:
            watching.cancel()
            for engine in self.engines:
                engine.upstream.end()

    def able(self, kind: str, but: Iterable[Engine] = (), model: str | None = None) -> list[Engine]:
        """The engines that take requests of a kind for a model now; None: for any model."""
        left_out = set(but)
        return [engine for engine in self.engines if engine.serves(kind, model) and engine not in left_out]

    def known_model(self, name: object) -> str | None:
        """The name if an engine tells that it serves it; others may know it by another name, so None is any engine."""
        return name if isinstance(name, str) and any(name in engine.models for engine in self.engines) else None

    def is_adapter(self, name: str | None) -> bool:
        """Whether a name is that of an adapter, whose blocks are not those of its model."""
        return name is not None and any(one.models.get(name, {}).get("parent") for one in self.engines)

    def check_health(self) -> None:
        """Raises unless some engine would serve a request.

        Raises:
            HttpError: 503, with what is wrong with each engine.
        """
        self.check_serves()
        if not self.able("decode"):
            raise self.nobody("decode")

    def nobody(self, kind: str, model: str | None = None) -> HttpError:
        """The error if no engine takes a request."""
        those = [one for one in self.engines if one.kind in (kind, "both") and (model is None or model in one.models)]
        found = [f"{one.url}: {one.problem}" for one in those if one.problem]
        message = "; ".join(found) or ("none takes it" if those else f"no engine has the role {kind} or both")
        return HttpError(503, f"no engine serves the request: {message}", retry_after=5)


class Passing:
    """One request on its way.

    Args:
        router: The router.
        request: The request.
        body: Its body.
    """

    def __init__(self, router: Router, request: Request, body: bytes) -> None:
        self.router, self.path, self.body = router, request.url.path, body
        self.method = request.method
        query = request.scope["query_string"].decode("latin-1")
        self.target = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        self.headers = [(name, value) for name, value in request.scope["headers"] if name not in NOT_TO_ENGINES]
        self.fields = _fields(body)
        self.model = router.known_model((self.fields or {}).get("model", request.path_params.get("name")))
        self.prompt = Prompt()
        self.handed: dict[str, Any] | None = None
        """The fields that the decode engine gets from the prefill engine."""
        self.begun = time.monotonic()
        self.kept = request.path_params.get("id")
        self.keeper: Engine | None = None
        """The only engine that can serve the request: it keeps what the request is about."""
        self.num_broken = 0
        self.has_begun = False
        self.has_tokens = False

    async def run(self, send: Send) -> None:
        """Finds an engine, and passes its answer on. Another engine gets the request if one fails before the first token."""
        router = self.router
        if self.path.startswith("/v1/responses"):
            await self._find_keeper()
        if self.path in GENERATING and router.options.policy == "prefix" and len(router.engines) > 1:
            self.prompt = await prompt_of(self, self.ask_any)
        if self.path in GENERATING:
            await self._prefill()
        tried: list[Engine] = []
        while engine := router.chooser.choose(self._able(tried), self.prompt, time.monotonic()):
            tried.append(engine)
            try:
                if await self._serve(engine, send, is_last=not self._able(tried)):
                    return
                continue
            except Broken as error:
                failure = self._broken(engine, error)
            if failure is not None:
                await self._fail(send, failure)
                return
        await self._fail(send, router.nobody("decode", self.model))

    def _able(self, tried: Sequence[Engine]) -> list[Engine]:
        """The engines that may serve the request, but those that have been tried."""
        able = self.router.able("decode", tried, self.model)
        return able if self.keeper is None else [engine for engine in able if engine is self.keeper]

    async def _find_keeper(self) -> None:
        """Finds the engine that keeps the response which a request is about; every engine is asked."""
        name = self.kept or (self.fields or {}).get("previous_response_id")
        if not isinstance(name, str):
            return
        for engine in self.router.able("decode"):
            with contextlib.suppress(Broken):
                if (await engine.get(f"/v1/responses/{quote(name, safe='')}", self.headers))[0] == 200:
                    self.keeper = engine
                    return

    def _broken(self, engine: Engine, error: Broken) -> HttpError | None:
        """Notes that an engine has failed; returns what the client gets if no other engine may get the request."""
        if self.router.is_over:
            return ending()
        engine.fail(str(error))
        if self.has_tokens:
            return HttpError(502, f"the engine {engine.url} failed behind the first token: {error}")
        self.num_broken += 1
        if self.num_broken == MOST_BROKEN:
            message = f"{self.num_broken} engines failed with this request, so no other gets it; {engine.url}: {error}"
            return HttpError(502, message)
        self.router.counts.retries += 1
        return None

    async def ask_any(self, path: str, body: bytes) -> bytes | None:
        """The answer of the least loaded engine to a question about the request; None: there is none."""
        engines = [one for kind in ("decode", "prefill") for one in self.router.able(kind, model=self.model)]
        engine = min(engines, key=lambda one: one.running + one.others, default=None)
        if engine is None:
            return None
        try:
            answer = await engine.upstream.ask("POST", path, self.headers, body)
            try:
                found = await answer.read()
                return found if answer.status == 200 else None
            finally:
                answer.close()
        except Broken as error:
            engine.fail(str(error))
            return None

    # ---- prefill ----------------------------------------------------------------------------------------------------

    async def _prefill(self) -> None:
        """Lets an engine of the role "prefill" compute the prompt, if the decode engines leave that to it."""
        router, now = self.router, time.monotonic()
        able = [one for one in router.able("prefill", model=self.model) if one.kind == "prefill"]
        made = prefill_body(self.path, self.fields, self.prompt) if able else None
        if made is None or any(self._is_cached(one, now) for one in router.able("decode", model=self.model)):
            return
        path, body = made
        tried: list[Engine] = []
        while engine := router.chooser.choose([e for e in able if e not in tried], self.prompt, now):
            tried.append(engine)
            try:
                with engine.sent(self.prompt.tokens - engine.cached(self.prompt, now)):
                    answer = await engine.upstream.ask("POST", path, self._json_headers(), body)
                    try:
                        found = await answer.read()
                    finally:
                        answer.close()
            except Broken as error:
                if failure := self._broken(engine, error):
                    raise failure from None
                continue
            if answer.status == 200:
                engine.sends(self.prompt, now)
                router.counts.prefills += 1
                self.handed = (_fields(found) or {}).get(PREFILLED) if path == self.path else None
            if answer.status not in BUSY:  # a request that is wrong is refused by the decode engine, too
                return

    def _is_cached(self, engine: Engine, now: float) -> bool:
        """Whether an engine has nothing to compute but what is left of the last block."""
        tokens = self.prompt.tokens
        return tokens > 0 and tokens - engine.cached(self.prompt, now) <= engine.blocks.size

    def _json_headers(self) -> Headers:
        return [*((n, v) for n, v in self.headers if n != b"content-type"), (b"content-type", b"application/json")]

    # ---- the answer -------------------------------------------------------------------------------------------------

    async def _serve(self, engine: Engine, send: Send, is_last: bool) -> bool:
        """Passes an engine's answer on; returns False if the engine is busy, and others are left."""
        router, now, prompt = self.router, time.monotonic(), self.prompt
        cached = engine.cached(prompt, now)
        body = self.body
        if self.handed is not None and self.fields is not None:
            body = msgspec.json.encode({**self.fields, PREFILLED: self.handed})
        with engine.sent(prompt.tokens - cached) as first:
            engine.sends(prompt, now)
            answer = await engine.upstream.ask(self.method, self.target, self.headers, body)
            try:
                if answer.status in BUSY and not is_last:
                    return False
                router.counts.chosen(router.chooser.policy, "hit" if cached else "miss", prompt.tokens, cached)
                if answer.header(b"content-type").startswith("text/event-stream"):
                    await self._stream(engine, answer, send, first)
                else:
                    whole = await answer.read()
                    await self._begin(engine, answer, send, [(b"content-length", b"%d" % len(whole))])
                    await send({"type": "http.response.body", "body": whole})
            finally:
                answer.close()
        return True

    async def _begin(self, engine: Engine, answer: Answer, send: Send, more: Headers) -> None:
        if not self.has_begun:
            headers = [(name, value) for name, value in answer.headers if name not in NOT_TO_CLIENTS]
            headers += [*more, (ENGINE_HEADER, engine.url.encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            self.has_begun = True

    async def _stream(self, engine: Engine, answer: Answer, send: Send, first: Callable[[], None]) -> None:
        """Passes whole frames on as they arrive, so that an error can follow them."""
        rest = b""
        async for piece in answer.pieces():
            rest += piece
            end = max(rest.rfind(mark) + len(mark) for mark in FRAME_ENDS)
            if not rest.endswith(FRAME_ENDS, 0, end):
                continue
            frames, rest = rest[:end], rest[end:]
            if not self.has_tokens and not COMMENTS.fullmatch(frames):
                first()
                self.has_tokens = True
                self.router.counts.firsts.add(time.monotonic() - self.begun)
            await self._begin(engine, answer, send, [])
            await send({"type": "http.response.body", "body": frames, "more_body": True})
        await self._begin(engine, answer, send, [])
        await send({"type": "http.response.body", "body": rest})

    async def _fail(self, send: Send, error: HttpError) -> None:
        """Answers with an error; a stream that has begun ends with it."""
        if not self.has_begun:
            raise error
        self.router.counts.broken += 1
        log.error("%s: %s", self.path, error.message)
        if self.path.startswith("/v1/messages"):
            frame = b"event: error\ndata: " + msgspec.json.encode(error.anthropic()) + b"\n\n"
        elif self.path == "/v1/responses":
            told = {"type": "error", "code": "server_error", "message": error.message, "param": None}
            frame = b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
        else:
            frame = b"data: " + msgspec.json.encode(error.body()) + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": frame})


def _fields(body: bytes) -> dict[str, Any] | None:
    """A body's fields; None if it is no object of JSON, which the engine refuses."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_S:g} s") from None


class _Passer:
    """The paths that engines answer.

    Args:
        router: The router.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, request = self._router, Request(scope, receive)
        router.running += 1
        passing: Passing | None = None
        try:
            passing = Passing(router, request, await _body(request))
            router.counts.requests += passing.path in GENERATING
            await attended(receive, passing.run(send))
            if passing.path in GENERATING:
                router.counts.ends.add(time.monotonic() - passing.begun)
        except (ClientGone, ClientDisconnect):
            router.counts.aborts += 1
            if passing is None or not passing.has_begun:
                await Response(status_code=499)(scope, receive, send)
        except Exception as error:
            router.counts.errors += 1
            if passing is not None and passing.has_begun:
                raise
            await refusal(error, scope["path"])(scope, receive, send)
        finally:
            router.running -= 1


def build_router(engines: Sequence[Engine], **options: Any) -> ASGIApp:
    """An ASGI application that routes to engines.

    Args:
        engines: From `llmpy.router.engines.parsed`.
        options: Fields of `Options`.

    Returns:
        The application.
    """
    router = Router(engines=engines, options=Options(**options))

    async def health(request: Request) -> Response:
        try:
            router.check_health()
        except HttpError as error:
            return refusal(error, "/health")
        return answer({})

    async def ping(request: Request) -> Response:
        return answer({})

    async def version(request: Request) -> Response:
        return answer({"version": __version__})

    async def load(request: Request) -> Response:
        shown = [
            {
                "url": one.url, "role": one.kind, "problem": one.problem, "running": one.running, "others": one.others,
                "blocks": len(one.blocks), "kv_events": one.follower.num_events if one.follower else None,
            }
            for one in router.engines
        ]  # fmt: skip
        return answer({"server_load": router.running, "engines": shown})

    async def models(request: Request) -> Response:
        found = {name: told for one in router.engines for name, told in one.models.items()}
        return answer({"object": "list", "data": list(found.values())})

    async def metrics(request: Request) -> Response:
        return Response(text(router), media_type="text/plain; version=0.0.4; charset=utf-8")

    passer = _Passer(router)
    own = {"/health": health, "/ping": ping, "/version": version, "/load": load, "/metrics": metrics, "/v1/models": models}
    routes = [Route(path, handler, methods=["GET"]) for path, handler in own.items()]
    routes += [Route(path, passer, methods=["POST"]) for path in PASSED]
    routes += [Route(path, passer, methods=["GET"]) for path in ASKED]
    routes += [Route(path, passer, methods=methods) for path, methods in KEPT.items()]
    app = Starlette(routes=routes, lifespan=router.lifespan, exception_handlers={HTTPException: unknown_path})
    app.router.redirect_slashes = False
    return guard(app, router, (), router.check_serves)


def find_router(app: ASGIApp) -> Router:
    """The Router of an application from `build_router`."""
    router = guarded_service(app)
    assert isinstance(router, Router)
    return router
