"""The state that all paths of a server share: the engine, its names, its options."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request

from .. import demo
from ..async_engine import AsyncEngine
from ..engine.feeds import RequestStream
from ..engine.frontend import check_text
from ..engine.health import STUCK_AFTER_S, TORN
from ..engine.jobs import Lanes
from ..engine.scoring import render
from ..errors import ConfigError, EngineStuckError, WeightsMissingError
from ..hub import DEMO, REPOSITORY
from ..inputs import Prompt
from ..lora import LoRARequest
from ..outputs import RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..text.bounds import surely_exceeds
from ..text.chat import choose, within
from ..text.sandbox import Limits as TemplateLimits
from ..text.tokenizer import Tokenizer
from . import beams
from .dialect import Dialect, check_parser_names
from .errors import HttpError, ending, log
from .handover import check_role, hand_over, is_prefill, part_of
from .images import Source, expanded, inserted, placeholder_of
from .limits import RANGES, Sizes, most, option_problem, seconds
from .logprobs import LogprobWriter, num_logprobs
from .protocol import Sampling
from .responses_store import ResponseStore
from .transfer import Transfer

if TYPE_CHECKING:
    from .render import Renderer

Result = TypeVar("Result")
Turns = list[dict[str, Any]]

METRICS = {"vllm": ("llmpy:", "vllm:"), "none": ("llmpy:",)}
"""Prefixes of every series of /metrics, by `metrics_compat`."""
ROLES = ("prefill", "decode", "both")
DROPPED = "x-llmpy-dropped-messages"
"""Header with the number of messages left out of a truncated conversation."""
TEMPLATE_LIMITS = TemplateLimits(seconds("template_s"), most("template_steps"), most("template_chars"), most("template_memory"))
"""Limits of a chat template in a request."""
UNTOLD = {"system_fingerprint": None, "service_tier": None}
"""Fields of OpenAI's answers that are always null here."""
THREAD_SIZE = 8192  # longer conversations and texts are rendered and tokenised on a thread
LOGPROB_SIZE = 16  # one logprob costs as much time as rendering this many characters, about 3 us


@dataclass(kw_only=True)
class Options:
    """Options of a server.

    Args:
        served_model_name: Names of the model in requests; () = its short name and the name by which it was loaded.
        api_keys: Accepted API keys; () = no key is needed.
        tool_call_parser: Name of the model's tool call format, "none", or "auto" (found from the chat template).
        reasoning_parser: Name of the model's reasoning markers, "none", or "auto" (found from the chat template).
        allow_request_template: Whether a request may contain a chat template.
        allow_image_urls: Whether images of requests may be http(s) URLs, which the server fetches.
        image_domains: Names from which it fetches images, with all below them; () = every public one.
        max_body_bytes: Longest body, in bytes.
        stream_timeout: Seconds that a client may leave a frame unread.
        shutdown_timeout: Seconds for running requests to finish at shutdown.
        stuck_timeout: Seconds without progress of a step, a helper thread or an update, after which /health fails.
        log_prompts: Whether to log prompts.
        cors_origins: Origins that browsers may call from; () = none.
        keep_responses: Number of kept responses of /v1/responses.
        salt_by_key: Whether requests with different keys use separate cached blocks.
        control: Whether the control paths exist, which pause, put to sleep and update the engine.
        control_keys: Accepted keys of the control paths; () = only clients of this machine may use them.
        metrics_compat: "vllm" also exports every series under vLLM's prefix, "none" does not.
        reject_when_asleep: Whether to refuse requests while the engine sleeps; otherwise they wait.
        on_drain: Called by /drain to end the server.
        role: "prefill" computes prompts for other servers, "decode" goes on behind them, "both" does what requests ask for.
        kv_events: Where KV events are published, and asked for again, as /load tells routers; None = nowhere.
    """

    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allow_request_template: bool = False
    allow_image_urls: bool = False
    image_domains: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    stream_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    stuck_timeout: float = STUCK_AFTER_S
    log_prompts: bool = False
    cors_origins: tuple[str, ...] = ()
    keep_responses: int = 0
    salt_by_key: bool = False
    control: bool = False
    control_keys: tuple[str, ...] = ()
    metrics_compat: str = "vllm"
    reject_when_asleep: bool = False
    on_drain: Callable[[], None] | None = None
    role: str = "both"
    kv_events: Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role: wanted one of {', '.join(ROLES)}, have {self.role!r}", option="role", value=self.role)
        check_parser_names(self.tool_call_parser, self.reasoning_parser)
        if self.metrics_compat not in METRICS:
            message = f"metrics_compat: wanted one of {', '.join(METRICS)}, have {self.metrics_compat!r}"
            raise ConfigError(message, option="metrics_compat", value=self.metrics_compat)
        for option in RANGES.keys() & vars(self).keys():
            problem = option_problem(option, getattr(self, option))
            if problem is not None:
                raise ConfigError(problem, option=option, value=getattr(self, option))


@dataclass
class _Speed:
    """The rate at which requests end."""

    since: float = 0.0
    ended: int = 0
    per_second: float = 0.0

    def seconds(self, waiting: int, ended: int, now: float) -> float:
        """Estimates the seconds until waiting requests have started, between 1 and 60.

        Args:
            waiting: Number of waiting requests.
            ended: Number of all requests that have ended.
            now: Monotonic time, in seconds.
        """
        if now - self.since >= 1:
            self.per_second = (ended - self.ended) / (now - self.since)
            self.since, self.ended = now, ended
        return min(60.0, max(1.0, waiting / self.per_second)) if self.per_second else 1.0


@dataclass(kw_only=True)
class Service:
    """An engine with a server's options and state.

    Args:
        engine: The engine.
        options: The server's options.
    """

    engine: AsyncEngine
    options: Options
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    is_over: bool = False
    """Whether the server is ending the requests that still run."""
    running: int = 0
    """Number of requests being answered."""
    body_bytes: int = 0
    """Bytes of all long bodies being read or answered."""
    _speed: _Speed = field(default_factory=lambda: _Speed())

    @cached_property
    def max_running(self) -> float:
        """Most requests that can run or wait in the engine; further requests are refused unread."""
        config = self.engine.config
        running = (config.max_num_seqs or 0) * config.data_parallel_size
        return float("inf") if config.max_queued_requests is None else config.max_queued_requests + running

    def queue_seconds(self) -> float:
        """Estimated seconds until the waiting requests have started, by the recent rate of ended requests."""
        stats = self.engine.stats()
        return self._speed.seconds(stats.num_waiting, sum(stats.finished.values()), time.monotonic())

    def check_health(self, alive_only: bool = False) -> None:
        """Raises unless a request would be served; see AsyncEngine.check_health.

        Raises:
            HttpError: 503, the server is shutting down.
        """
        self.engine.check_health(self.options.stuck_timeout, alive_only)
        if self.is_draining and not alive_only:
            raise ending()

    def check_weights(self) -> None:
        """Raises if a request would wait for weights although no update is running.

        Raises:
            HttpError: 503, an update has failed half-way, or the engine has slept at level 2 without an update since.
        """
        if not isinstance(self.engine, AsyncEngine):
            return
        core = self.engine._driver.engine
        try:
            if core.holds() == TORN:
                core.raise_refusal()
        except WeightsMissingError as error:
            raise HttpError(503, str(error), retry_after=5) from None

    def states(self) -> tuple[str, ...]:
        """The engine's states, and the server's states "draining" and "stuck"."""
        found = self.engine.stats().states
        try:
            self.check_health()
        except EngineStuckError:
            found = *found, "stuck"
        except Exception:  # the engine's states already show it
            pass
        if self.is_draining:
            found = *found, "draining"
        return tuple(state for state in found if state != "serving") or found

    def end_requests(self) -> None:
        """Ends the requests that still run, each with the error of its protocol."""
        self.is_over = True
        if isinstance(self.engine, AsyncEngine):
            self.engine._driver.fail_all("the server is shutting down")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the model in answers."""
        return self.options.served_model_name or model_names(self.engine)[:1]

    @cached_property
    def known_names(self) -> tuple[str, ...]:
        """Names of the model that requests may use."""
        return self.options.served_model_name or model_names(self.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens."""
        length = self.engine.config.max_model_len
        assert isinstance(length, int)
        return length

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the model for limits."""
        ids = self.engine._frontend.vocab_size if isinstance(self.engine, AsyncEngine) else self.tokenizer.max_token_id + 1
        return Sizes(ids, self.max_model_len)

    @cached_property
    def transfer(self) -> Transfer:
        """The weight transfer of a trainer."""
        return Transfer(self.engine)

    @cached_property
    def responses(self) -> ResponseStore:
        """The kept responses."""
        return ResponseStore(self.options.keep_responses, most("kept_bytes"))

    @cached_property
    def dialect(self) -> Dialect:
        """The parsers of the model's answers."""
        options = self.options
        found = Dialect(self.tokenizer, options.tool_call_parser, options.reasoning_parser)
        for option, name in found.names.items():
            if getattr(options, option) == "auto":
                log.info("%s: %s, as the chat template tells", option, name or "none")
        return found

    def model_name(self, wanted: str | None) -> str:
        """The model's name in the answer; an adapter's name is one, too.

        Raises:
            HttpError: 404, the request names another model.
        """
        if wanted is None:
            return self.names[0]
        if wanted not in self.known_names:
            if self.adapter(wanted) is not None:
                return wanted
            known = [*self.names, *(one.name for one in self.adapters)][:8]
            message = f"The model `{wanted[:200]}` does not exist; use {' or '.join(known)}, or --served-model-name."
            raise HttpError(404, message, "model", code="model_not_found")
        return wanted if wanted in self.names else self.names[0]

    @property
    def adapters(self) -> list[LoRARequest]:
        """The loaded adapters."""
        return self.engine.list_adapters() if isinstance(self.engine, AsyncEngine) else []

    def adapter(self, model: str | None) -> str | None:
        """The adapter that a request's `model` names; None: the model itself."""
        if model is None or model in self.known_names or not isinstance(self.engine, AsyncEngine):
            return None
        return model if self.engine._frontend.adapters.knows(model) else None

    def salt(self, request: Request, given: str | None) -> str | None:
        """The cache salt of a request: requests with different salts share no cached blocks."""
        if self.options.salt_by_key and request.state.key is not None:
            return f"{request.state.key}/{given or ''}"
        return given

    def engine_arguments(self, request: Request, body: Any) -> dict[str, Any]:
        """Id, priority, adapter and salt of a request. An id in the header may come twice, so the engine's id gets a suffix."""
        given, header = body.request_id, request.headers.get("x-request-id")
        request.state.request_id = given or header or secrets.token_hex(12)
        request_id = f"{header}-{secrets.token_hex(4)}" if header and not given else request.state.request_id
        return {
            "request_id": request_id,
            "priority": body.priority or 0,
            "lora_request": self.adapter(body.model),
            "cache_salt": self.salt(request, body.cache_salt),
        }

    def prompt_ids(self, messages: Turns, arguments: Mapping[str, Any], images: Sequence[Source] = ()) -> list[int]:
        """Token ids of a conversation, as `AsyncEngine.chat` would run it."""
        return expanded(self, self.prompt(messages, arguments, images))[0]

    def prompt_length(self, messages: Turns, arguments: Mapping[str, Any]) -> int:
        """Number of token ids of a conversation; max_model_len + 1 if the text is certainly too long."""
        text = self.prompt_text(messages, arguments)
        is_longer = surely_exceeds(self.tokenizer, text, self.max_model_len)
        return self.max_model_len + 1 if is_longer else len(self.tokenizer.encode(text, False))

    def prompt_text(self, messages: Turns, arguments: Mapping[str, Any]) -> str:
        """The text of a rendered conversation."""
        return str(self.prompt(messages, arguments, None).text)

    def template(self, given: str | None, has_tools: bool) -> str:
        """The chat template of a request; "" if the model has none."""
        templates = self.tokenizer.chat_templates
        return choose(templates, given, has_tools) if templates or given else ""

    def prompt(self, messages: Turns, arguments: Mapping[str, Any], images: Sequence[Source] | None) -> Prompt:
        """Renders a conversation, including special tokens. A template from the request runs within TEMPLATE_LIMITS. An image
        among the messages is its number in `images`; None: they are left out."""
        with within(TEMPLATE_LIMITS) if arguments.get("chat_template") is not None else nullcontext():
            prompt = render(self.tokenizer, messages, _spread(arguments), placeholder_of(self))
        prompt.media = None if images is None else inserted(prompt.media, images)
        return prompt

    def run(
        self, prompt: Prompt, special_tokens: bool, how: Mapping[str, Any], params: Mapping[str, Any] | SamplingParams
    ) -> RequestStream:
        """Queues a prompt.

        Args:
            prompt: The prompt.
            special_tokens: Whether the tokenizer adds special tokens around text.
            how: Result of `engine_arguments`.
            params: Result of `Answering.params`.
        """
        check_role(self.options.role, params.get("max_tokens") if isinstance(params, Mapping) else None)
        return self.engine._open(prompt, special_tokens, params, **how)

    @cached_property
    def jobs(self) -> Lanes:
        """Threads for long work; they are the engine's tokenizer threads."""
        return self.engine._driver.jobs if isinstance(self.engine, AsyncEngine) else Lanes("llmpy-tokenizer")

    beside_size = THREAD_SIZE + 1

    async def beside(self, size: int, call: Callable[[], Result]) -> Result:
        """Runs a call that parses, renders or tokenises; on a thread if `size` is above THREAD_SIZE."""
        return call() if size <= THREAD_SIZE else await self.jobs.of(size).call(call)

    async def write(self, outputs: Iterable[RequestOutput], call: Callable[[], Result]) -> Result:
        """Runs a call that writes outputs into an answer; on a thread if they have many logprobs."""
        return await self.beside(LOGPROB_SIZE * sum(map(num_logprobs, outputs)), call)

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Tokenises a text.

        Raises:
            InvalidRequestError: The text is certainly too long; checked before tokenising.
        """
        check_text(self.tokenizer, text, self.max_model_len)
        return self.tokenizer.encode(text, special_tokens)

    async def encoded(self, prompts: Sequence[Any]) -> list[Any]:
        """Prompts as ids, without added special tokens."""
        return await self.beside(
            text_size(prompts), lambda: [self.encode(item) if isinstance(item, str) else item for item in prompts]
        )

    def answer_headers(self, request: Request) -> dict[str, str]:
        """Headers of every answer to this request."""
        headers = {"x-request-id": getattr(request.state, "request_id", "") or request.headers.get("x-request-id", "")}
        ignored = getattr(request.state, "ignored", None)
        if ignored:
            headers["x-llmpy-ignored"] = ", ".join(name[:64] for name in ignored[:32])
        if dropped := getattr(request.state, "dropped", 0):
            headers[DROPPED] = str(dropped)
        return {name: clean for name, value in headers.items() if (clean := _header(value))}


def check_serves(service: Service) -> None:
    """Raises for a request that the server could not run now.

    Raises:
        HttpError: 429, too many requests; 503, the server shuts down, the engine sleeps, or weights are missing.
    """
    if service.running >= service.max_running:
        message = f"queue: wanted fewer than {service.max_running} requests at once; raise max_queued_requests"
        raise HttpError(429, message, retry_after=service.queue_seconds())
    if service.is_draining:
        raise ending()
    service.check_weights()
    if service.options.reject_when_asleep and service.engine.is_sleeping():
        raise HttpError(503, "the engine sleeps; /wake_up", retry_after=5)


def model_names(engine: AsyncEngine | Renderer) -> tuple[str, ...]:
    """Default names of an engine's model; the first is its id on the hub, or its short name."""
    given = str(engine.config.model)
    is_path = Path(given).expanduser().exists() or not REPOSITORY.fullmatch(given)
    names = (engine.name, given) if is_path else (given, engine.name)
    return tuple(dict.fromkeys((*names, DEMO) if Path(given).name == demo.NAME else names))


def _spread(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Converts arguments of `AsyncEngine.chat` to arguments of the tokenizer."""
    given = {"chat_template": None, **arguments, **arguments["chat_template_kwargs"]}
    del given["chat_template_kwargs"]
    return given


def _header(value: str) -> str:
    """A value for a header: printable ASCII only."""
    return "".join(c for c in value if " " <= c <= "~")[:2048]


def size_of(*parts: Any) -> int:
    """Bytes of parts of a request as JSON."""
    return sum(len(msgspec.json.encode(part)) for part in parts)


def text_size(prompts: Iterable[Any]) -> int:
    """Number of characters of the texts among prompts."""
    return sum(len(item) for item in prompts if isinstance(item, str))


def usage_of(outputs: list[RequestOutput], tokens: int, reasoning: int = 0) -> dict[str, Any]:
    """The usage of an answer: each prompt counts once, and all samples."""
    prompt = sum(len(output.prompt_token_ids_array) for output in outputs)
    details = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    if images := sum(output.num_image_tokens for output in outputs):
        details["image_tokens"] = images
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def raise_failure(output: RequestOutput) -> None:
    """Raises the failure of a sample even if others still run; a final output raises by itself."""
    if output.error is not None:
        raise output.error


def with_ids(choice: dict[str, Any], sample: Any) -> None:
    """Adds a sample's token ids, and the versions of the weights that computed them."""
    choice["token_ids"] = sample.token_ids
    choice["weight_versions"] = [list(span) for span in sample.weight_versions]


class Answering:
    """One text request in progress.

    Args:
        service: The server.
        request: The HTTP request.
        body: The body of the request.
        prefix: Prefix of the answer's id.
        top: Number of alternatives in logprobs.
    """

    def __init__(self, service: Service, request: Request, body: Sampling, prefix: str, top: int | None) -> None:
        self.service = service
        self.model = service.model_name(body.model)
        self.created = int(time.time())
        self.how = service.engine_arguments(request, body)
        self.shown_id: str = request.state.request_id
        self.size: int = request.state.size
        self.id = f"{prefix}-{self.shown_id}"
        self.kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        self._top, self._names_ids = top or 0, bool(body.return_tokens_as_token_ids)
        self._body = body
        self.is_prefill = is_prefill(service.engine, body.kv_transfer_params, bool(body.stream), service.options.role)
        self.how["apart"] = part_of(service.engine, body.kv_transfer_params, self.is_asked)

    async def handed(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The field of the answer for the server that goes on with the request, if one does."""
        return await hand_over(self.service.engine, outputs, self.how["cache_salt"]) if self.is_asked else {}

    @property
    def is_asked(self) -> bool:
        """Whether the prompt is saved for another server."""
        return self.is_prefill or self.service.options.role == "prefill"

    def params(self, fields: Mapping[str, Any]) -> Mapping[str, Any] | SamplingParams:
        """What to run: the request's sampling fields, or its beam search."""
        return beams.search_of(self._body, fields, self.service.max_model_len) if self._body.use_beam_search else fields

    def writer(self) -> LogprobWriter:
        """A writer for the logprobs of a sample."""
        return LogprobWriter(self.service.tokenizer, self._top, self._names_ids)
