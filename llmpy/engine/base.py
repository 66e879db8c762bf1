"""The base class of LLM and AsyncEngine: options, parameters, tokenizer, templates, introspection."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from .. import hardware
from ..advice import METHODS, missing
from ..checks import as_int, check_label, refuse_names
from ..config import RULES, EngineConfig, constructor_signature
from ..errors import InvalidRequestError, LlmpyError, UnsupportedError
from ..hub import DEMO
from ..inputs import Prompt, batch
from ..options import check_keywords, take_expert_parallel
from ..outputs import EngineStats, Histogram, KvEvent, StepRecord, used_places
from ..sampling_params import SamplingParams, default_params
from .adapters import AdapterCalls
from .calls import new_request
from .cores import engines_of
from .frontend import Frontend, special_tokens_wanted
from .health import states_of
from .sleep import parts_asleep

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self, Unpack

    from .._core import Engine, Model
    from ..inputs import Prompts
    from ..keywords import EngineKeywords
    from ..metrics import Metric
    from ..results.rendered import RenderedPrompt
    from ..results.replies import Reply, ReplyReader
    from ..server.dialect import Dialect
    from ..text.tokenizer import Tokenizer
    from ..weights.calls import Weights
    from .adapters import Chosen
    from .calls import Submission
    from .loading import Loaded

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Messages: TypeAlias = str | Conversation | Iterable[str | Conversation]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

DEFAULT_MAX_TOKENS = 256
_FINISH_NAMES = {
    "stop": ("eos", "stop_id", "stop_string", "grammar"),
    "length": ("length",),
    "abort": ("abort",),
    "error": ("error",),
}


class AnyDriver(Protocol):
    """The driver methods that this file uses."""

    model: Model
    engine: Engine
    closed: bool

    @property
    def is_paused(self) -> bool:
        """True from `pause` until `resume`."""

    def check(self) -> None:
        """Raises unless the engine can be used."""


class EngineBase(AdapterCalls, ABC):
    """The part of an engine that does not run requests."""

    _driver: AnyDriver
    _weights: Weights

    def __init__(self, model: str | Path = DEMO, **given: Unpack[EngineKeywords]) -> None:
        options: dict[str, Any] = {"model": model, **given}
        use_tqdm_on_load = options.pop("use_tqdm_on_load", None)
        take_expert_parallel(options)
        others = {name: options.pop(name) for name in [*options] if name not in RULES}
        check_keywords(others, [*RULES, "use_tqdm_on_load"], type(self).__name__)
        options["override_generation_config"] = options.get("override_generation_config") or {}
        config = EngineConfig(**options)
        self._check_config(config)
        from .loading import load
        from .progress import LoadBar

        with LoadBar(use_tqdm_on_load) as on_progress:
            loaded = load(config, on_progress)
        self._frontend = Frontend(loaded)
        self._dialects: dict[str, Dialect] = {}
        self.config: EngineConfig = loaded.config
        """The resolved options."""
        self.name: str = loaded.name
        """Short name of the model."""
        self.weight_type: str = loaded.weight_type
        """How the weights are stored: "float32", "float16", "bfloat16" or "quantized"."""
        self._start(loaded)

    if not TYPE_CHECKING:
        __init__.__signature__ = constructor_signature()

        # With __getattr__ a type checker would accept every attribute.
        def __getattr__(self, name: str) -> object:
            raise missing(f"{type(self).__name__!r} object", name, METHODS)

    @abstractmethod
    def _check_config(self, config: EngineConfig) -> None:
        """Refuses options that this class does not support."""

    @abstractmethod
    def _start(self, loaded: Loaded) -> None:
        """Makes an engine of the loaded parts and sets `_driver`."""

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Makes an engine with the options of another engine's `config`.

        Args:
            config: The other engine's `config`.

        Returns:
            The new engine.
        """
        return cls(**{name: getattr(config, name) for name in EngineConfig.__dataclass_fields__})

    # ---- parameters, tokenizer, templates ---------------------------------------------------------------------------

    def _params(self, params: Any, sampling: Mapping[str, Any]) -> Any:
        """The given parameters, or the model's defaults with some fields changed."""
        self._frontend.pooler.check("generate", f"{type(self).__name__}.generate()")
        known = SamplingParams.__dataclass_fields__
        refuse_names("generate", [name for name in sampling if name not in known], known)
        if params is not None:
            if sampling:
                raise TypeError(f"pass sampling_params or fields by name ({', '.join(sampling)}), not both")
            return params
        default = self.get_default_sampling_params()
        return default.replace(**sampling) if sampling else default

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults without `sampling_params`: generation_config.json, and max_tokens 256 if the file sets none."""
        return self._default_params

    @cached_property
    def _default_params(self) -> SamplingParams:
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
        """The conversations as text; a bad conversation gives its error instead."""
        from .scoring import conversations, render

        rendered: list[Prompt | LlmpyError] = []
        for index, conversation in enumerate(conversations(messages)):
            try:
                prompt = render(self.tokenizer, conversation, how, self._frontend.image_placeholder)
                prompt.reader = self._reader(how["chat_template"], how["tools"])
                rendered.append(prompt)
            except LlmpyError as error:
                if isinstance(error, InvalidRequestError):
                    error.index = index
                rendered.append(error)
        return rendered

    def render(self, prompts: Prompts, *, tokenization_kwargs: Mapping[str, object] | None = None) -> list[RenderedPrompt]:
        """What prompts would run, without running it: their ids, and the places and keys of their images.

        Args:
            prompts: As in `LLM.generate`.
            tokenization_kwargs: {"add_special_tokens": False} leaves out the tokens that the tokenizer adds.

        Returns:
            One RenderedPrompt per prompt, in order.

        Raises:
            InvalidRequestError: A prompt cannot run, or is too long.

        Example:
            >>> llm.render("Hello")[0].prompt_token_ids
        """
        return self._told(batch(prompts), special_tokens_wanted(tokenization_kwargs, True))

    def render_chat(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RenderedPrompt]:
        """What conversations would run, without running it.

        Args:
            messages, chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs: As in
                `LLM.chat`.

        Returns:
            One RenderedPrompt per conversation, in order.

        Raises:
            ChatTemplateError: There is no template, or it refused the messages.
            InvalidRequestError: A conversation cannot run, or is too long.

        Example:
            >>> llm.render_chat([{"role": "user", "content": "Hello"}])[0].prompt
        """
        how = self._template_arguments(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        return self._told(self._render(messages, how), False)

    def _told(self, items: list[Any], special_tokens: bool) -> list[RenderedPrompt]:
        from ..results.rendered import RenderedPrompt, rendered_images

        made = []
        for prompt in self._frontend.prompts(items, special_tokens):
            if isinstance(prompt, LlmpyError):
                raise prompt
            self._frontend.check_length(prompt, 0)
            assert prompt.ids is not None
            made.append(RenderedPrompt(prompt.text, list(map(int, prompt.ids)), rendered_images(prompt.images)))
        return made

    def _reader(self, template: str | None, tools: Tools | None) -> ReplyReader:
        """The reader that splits answers into content, reasoning and tool calls."""
        from ..results.replies import ReplyReader
        from ..server.dialect import Dialect
        from ..text import chat

        text = chat.choose(self.tokenizer.chat_templates, template, tools is not None)
        if text not in self._dialects:
            self._dialects = {text: Dialect(self.tokenizer, template=text)}
        return ReplyReader(self._dialects[text], self.tokenizer, tools)

    def parse_reply(
        self,
        text: str,
        tools: Tools | None = None,
        *,
        prompt: str = "",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> Reply:
        """Splits an answer's text into content, reasoning and tool calls, with the parsers that the server uses.

        The outputs of `chat` are split already: `output.tool_calls`, `output.reasoning`, `output.content`. Use this method for
        text from elsewhere, and for models whose chat template does not show their formats of calls and reasoning.

        Args:
            text: The whole answer, with the special tokens that mark calls and reasoning.
            tools: The tools that the answer may call, in OpenAI's form.
            prompt: The rendered conversation; needed if the prompt itself opens the reasoning.
            tool_call_parser: How calls are written: "hermes", "llama3", "mistral", "pythonic", ... (docs/use/server.md lists
                them), "none", or "auto", the default: found from the chat template.
            reasoning_parser: How reasoning is marked: "think", "mistral", ..., "none", or "auto", the default.

        Returns:
            Content, reasoning and tool calls.

        Raises:
            ConfigError: There is no parser of that name.

        Example:
            >>> reply = llm.parse_reply("<think>2 + 2</think>4", reasoning_parser="think")
            >>> reply.reasoning, reply.content
        """
        from ..results.replies import parse_reply
        from ..server.dialect import Dialect

        return parse_reply(Dialect(self.tokenizer, tool_call_parser, reasoning_parser), text, prompt, tools)

    def _single(
        self, item: object, params: SamplingParams, special_tokens: bool, priority: int = 0, queued: bool = False,
        adapter: Chosen | None = None,
    ) -> Submission:  # fmt: skip
        """One checked request, ready to submit."""
        prompt = self._frontend.prompts([item], special_tokens)[0]
        if isinstance(prompt, LlmpyError):
            raise prompt
        prompt.adapter = adapter
        self._frontend.check(prompt, params, priority)
        request = new_request(self._frontend, prompt, params, queued=queued)
        translator = self._frontend.translator
        return request, translator.prompt_params(request, translator.core_params(params), priority)

    # ---- introspection ----------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """The engine's seed; requests without a seed derive theirs from it."""
        return self.config.seed or 0

    @property
    def weight_epoch(self) -> int:
        """Number of weight updates committed since the load."""
        self._driver.check()
        return self._driver.engine.weight_epoch()

    @property
    def weight_version(self) -> int | str:
        """Label of the weights: the label that the caller set, or else their epoch."""
        return self._frontend.context.version(self.weight_epoch)

    def set_weight_version(self, label: int | str) -> None:
        """Labels the current weights. Tokens that these weights have already produced get the label, too.

        Args:
            label: Any int or str; labels may repeat and need not increase.

        Raises:
            TypeError: The label is neither int nor str.
        """
        self._frontend.context.versions[self.weight_epoch] = check_label(label)

    def _move_adapter(self, before: int, number: int) -> None:
        self._driver.engine.move_adapter(before, number)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Removes every cached block from the prefix cache's index, even blocks in use.

        Args:
            reset_running_requests: Also recompute the cached tokens of running requests.

        Returns:
            True.
        """
        self._driver.check()
        self._driver.engine.reset_prefix_cache(reset_running_requests)
        return True

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges, of all replicas together."""
        self._driver.check()
        return self._stats_of(self._driver.engine)

    def replica_stats(self) -> list[EngineStats]:
        """`stats` of each replica."""
        self._driver.check()
        return [self._stats_of(engine) for engine in engines_of(self._driver.engine)]

    def _stats_of(self, engine: Engine) -> EngineStats:
        numbers = engine.stats()
        known = EngineStats.__dataclass_fields__
        found: dict[str, Any] = {}
        for name, value in numbers.items():
            if name in known:
                found[name] = float(value) if known[name].type == "float" else int(value)
        places = [[int(numbers[key]) for key in numbers if key.startswith(kind)] for kind in ("drafts_", "accepted_drafts_")]
        found["drafts"], found["accepted_drafts"] = used_places(*places)
        found["comm"] = comm_of(self.config)
        found["states"] = states_of(engine, self._driver.is_paused)
        total = found.get("kv_blocks_total", 0)
        found["finished"] = {
            reason: sum(int(numbers.get(f"finished_{name}", 0)) for name in names) for reason, names in _FINISH_NAMES.items()
        }
        found["kv_usage"] = 1 - found.get("kv_blocks_free", 0) / total if total else 0.0
        return EngineStats(**found)

    def kv_events(self, start: int = 0) -> tuple[int, list[KvEvent]]:
        """Blocks that the prefix cache has stored and removed, up to the last step with results.

        Args:
            start: Number of the first event wanted; 0 is the first event of the engine.

        Returns:
            The `start` of the next call, and at most 64 events in order. A gap in the numbers means lost events: the ring of
            `kv_event_capacity` events was overwritten before it was read.
        """
        self._driver.check()
        number, events = self._driver.engine.kv_events(start)
        named, config = self._frontend.adapters.named, self.config
        n_caches = config.tensor_parallel_size if config.enable_dp_attention else 1

        def cache(pool: int, replica: int = 0) -> int:
            return pool + n_caches * replica

        return number, [KvEvent(*event[:8], named(event[8]), cache(*event[9:])) for event in events]

    def step_log(self, n: int = 100) -> list[StepRecord]:
        """Records of the engine's last steps; it keeps 4096, or so many of each replica.

        Args:
            n: Most records to return.

        Returns:
            Records, the oldest first.

        Raises:
            InvalidRequestError: `n` is negative.
        """
        self._driver.check()
        if as_int("n", n) < 0:
            raise InvalidRequestError(f"n must be at least 0, got {n}.", parameter="n", value=n)
        return [StepRecord(*step) for step in self._driver.engine.step_log(n)]

    def histograms(self) -> dict[str, Histogram]:
        """Distributions over all requests and steps so far, counted in fixed buckets.

        Returns:
            By name: seconds in `time_to_first_token_s`, `time_per_output_token_s`, `end_to_end_s`, `queue_s`, `prefill_s`,
            `decode_s`, `inference_s` (from the first step to the end), `inter_token_s`; numbers in `prompt_tokens`,
            `output_tokens`, `step_rows`, `samples` (n of a request), `max_tokens`.
        """
        self._driver.check()
        return {name: Histogram(*parts) for name, parts in self._driver.engine.histograms().items()}

    def get_metrics(self) -> list[Metric]:
        """The metrics of `/metrics` under vLLM's names.

        Returns:
            Objects of `llmpy.metrics`: Counter, Gauge, Histogram, Vector, each with `name` and `labels`.
        """
        from ..metrics import read

        return read(self)

    def memory(self) -> dict[str, int]:
        """Bytes by purpose, and the total and free bytes of the devices; all are sums over the ranks.

        `tower_weights` are part of `weights`, `tower` is part of `activations`, and `image_features`, the pool of features, of
        `tower`.
        """
        self._driver.check()
        ranks = self._driver.model.memory()
        found = {"weights": 0, "kv": 0, "activations": 0, "graphs": 0, "sampler": 0, "pinned_host": 0}
        found.update({key: sum(rank[key] for rank in ranks) for key in ranks[0]})
        if not found.get("device_total"):  # device memory is host memory
            found["device_total"], found["device_free"] = hardware.memory_bytes(str(self.config.device))
        return found

    def ranks(self) -> list[dict[str, Any]]:
        """The devices of this host that hold the model, with their bytes of weights and of the cache.

        There is one entry a rank of each replica.
        """
        self._driver.check()
        devices, found = hardware.devices_of(self.config), []
        for rank, memory in enumerate(self._driver.model.memory()):
            device = devices[rank]
            name, uuid = hardware.name_and_uuid(device)
            place = {"rank": rank, "device": device, "uuid": uuid, "name": name}
            if self.config.data_parallel_size > 1:
                place["replica"] = rank // self.config.tensor_parallel_size
            found.append({**place, "weights_bytes": memory["weights"], "kv_bytes": memory["kv"]})
        return found

    def get_world_size(self) -> int:
        """Number of members of a trainer's weight group that this engine is: 1 for any number of ranks and replicas.

        `len(ranks())` is the number of devices.
        """
        self._driver.check()
        return 1

    def weight_info(self, pattern: str | None = None, *, drafter: bool = False) -> list[dict[str, Any]]:
        """The weights under their checkpoint names.

        Args:
            pattern: Shell pattern of names, such as "*.q_proj.*"; None = all.
            drafter: Whether to list the second model or the head that drafts instead, under the names of its checkpoint.

        Returns:
            Dicts with `name`, `shape`, `dtype`, `stored_in`, `shard`; with `drafter` also `version`, the label of its weights.
        """
        self._driver.check()
        infos = self._weights.drafter_info() if drafter else self._driver.model.weight_info()
        return [info for info in infos if pattern is None or fnmatch.fnmatchcase(info["name"], pattern)]

    def program(self) -> list[str]:
        """The operations that run for every batch, one line each."""
        self._driver.check()
        return self._driver.model.program()

    @property
    def on_host(self) -> str:
        """Operations that the host computes because the device's backend has none, such as "rope_table, sample"."""
        return str(self._driver.model.describe().get("on_host", ""))

    @property
    def num_cache_groups(self) -> int:
        """Cache blocks for one block of tokens: 1, more if layers have different windows, 0 without attention."""
        return int(self._driver.model.describe()["num_groups"])

    @property
    def num_state_blocks(self) -> int:
        """Cache blocks for the recurrent state of one sample; 0 if the model has no recurrent state."""
        return int(self._driver.model.describe().get("state_pages", 0))

    def check(self) -> None:
        """Checks the invariants of block manager and scheduler; a RuntimeError names a broken one."""
        self._driver.check()
        self._driver.engine.check()

    def is_sleeping(self) -> bool:
        """Whether weights, cache or scheduling sleep."""
        self._driver.check()
        return parts_asleep(self._driver.engine) != 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._driver.closed

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name, what = type(self).__name__, "llm" if type(self).__name__ == "LLM" else "engine"
        raise TypeError(f"cannot pickle an {name}: pickle {what}.config, and make another with {name}.from_config(config)")

    def __repr__(self) -> str:
        from ..notebook.lines import llm_line

        return llm_line(self)

    def _repr_html_(self) -> str:
        from ..notebook.view import llm_html

        return llm_html(self)


def comm_of(config: EngineConfig) -> str:
    """How the ranks of a config exchange values, as in `EngineStats.comm`."""
    if config.tensor_parallel_size == 1:
        return "none"
    on_cpu = str(config.device).partition(":")[0] == "cpu"
    if config.nnodes > 1:
        return "hosts" if on_cpu else "nccl"
    return "threads" if on_cpu else "peer memory"


def check_params_type(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, but is of type {type(params).__name__}")
