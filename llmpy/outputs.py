"""What comes back from a call: outputs of requests, of samples, of scoring; metrics and statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import LlmpyError
from .results.output_lists import OutputList
from .results.replies import LazyReply, Reply, ToolCall

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas
    import pyarrow

    from .logprobs import Floats, Ints, Logprobs, PromptLogprobs, SampledLogprobs
    from .pooling_outputs import ClassificationOutput as ClassificationOutput
    from .pooling_outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from .pooling_outputs import EmbeddingOutput as EmbeddingOutput
    from .pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .pooling_outputs import PoolingOutput as PoolingOutput
    from .pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
    from .sampling_params import SamplingParams


class VersionSpan(NamedTuple):
    """Tokens `start` to `end` were made by these weights."""

    start: int
    end: int
    version: int | str
    epoch: int


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request in seconds. `_ts` are of the monotonic clock; None = never got there.

    Args:
        arrival_time: Wall clock at submission.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: When it was queued, first ran, gave its first and its
            last token.
        num_preemptions: How often it had to start over for lack of memory.
        num_generation_tokens: Tokens of all samples.
    """

    arrival_time: float
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float | None:
        """From queueing to the first token."""
        return _difference(self.first_token_ts, self.queued_ts)

    @property
    def queue_time(self) -> float | None:
        """From queueing to the first step."""
        return _difference(self.scheduled_ts, self.queued_ts)

    @property
    def prefill_time(self) -> float | None:
        """From the first step to the first token."""
        return _difference(self.first_token_ts, self.scheduled_ts)

    @property
    def decode_time(self) -> float | None:
        """From the first to the last token."""
        return _difference(self.last_token_ts, self.first_token_ts)

    @property
    def time_per_output_token(self) -> float | None:
        """Decode time over the tokens after the first."""
        time = self.decode_time
        return None if time is None else time / max(self.num_generation_tokens - 1, 1)

    @property
    def e2e_time(self) -> float | None:
        """From queueing to the last token."""
        return _difference(self.last_token_ts, self.queued_ts)

    def to_dict(self) -> dict[str, Any]:
        """All numbers by name."""
        names = [item.name for item in fields(self)]
        names += [
            "first_token_latency",
            "queue_time",
            "prefill_time",
            "decode_time",
            "time_per_output_token",
            "e2e_time",
        ]
        return {name: getattr(self, name) for name in names}


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class CompletionOutput:
    """One sample of a request. T is its number of tokens.

    Args:
        index: Sample 0 .. n - 1.
        text: Its text, cut by the stop rule; "" without detokenisation.
        token_ids_array: int32 [T], with the end-of-sequence or stop token that ended it.
        logprobs: One dict per token, or None if not asked for; `logprobs.to_list()` is a plain list of them.
        token_logprobs: Of the sampled tokens in the request's mode, float32 [T], or None.
        cumulative_logprob: Their float64 sum in order, or None.
        sampled: All logprobs of the sampled tokens, or None.
        finish_reason: "stop", "length", "abort", "error"; None while running.
        stop_reason: The stop token id or stop string; None for end of sequence and everything else.
        weight_versions: Which weights made which tokens; covers 0 .. T.
        num_prior_tokens: Length of the `output_token_ids` that it continues.
        routed_experts: None.

    Example:
        >>> sample = llm.generate("2 + 2 =", logprobs=0)[0].outputs[0]
        >>> sample.text, sample.finish_reason, sample.token_logprobs.mean()
    """

    index: int
    text: str
    token_ids_array: Ints
    logprobs: Logprobs | None = None
    token_logprobs: Floats | None = None
    cumulative_logprob: float | None = None
    sampled: SampledLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] = field(default_factory=list)
    num_prior_tokens: int = 0
    routed_experts: None = None
    _token_ids: list[int] | None = None
    _reply: LazyReply | None = None

    @property
    def token_ids(self) -> list[int]:
        """`token_ids_array` as a list."""
        if self._token_ids is None:
            self._token_ids = self.token_ids_array.tolist()
        return self._token_ids

    @property
    def reply(self) -> Reply:
        """The text taken apart: content, reasoning, tool calls. Outside `chat`, and in deltas, all of it is content."""
        return Reply(content=self.text) if self._reply is None else self._reply.get()

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.reply.content

    @property
    def reasoning(self) -> str | None:
        """What the model thought before it answered; None: nothing that its chat template marks."""
        return self.reply.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of functions that the answer holds, in order."""
        return self.reply.tool_calls

    def finished(self) -> bool:
        """Whether `finish_reason` is set."""
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name[0] != "_"}
        values["token_ids"] = values.pop("token_ids_array")
        return {name: to_plain(value) for name, value in values.items()}

    def __repr__(self) -> str:
        from .notebook.lines import completion_line

        return completion_line(self)

    def _repr_html_(self) -> str:
        from .notebook.view import completion_html

        return completion_html(self)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class RequestOutput:
    """All samples of one prompt. P is the number of its tokens.

    Args:
        request_id: The request's name.
        index: Place in the call's input.
        prompt: Its text; None for bare ids.
        prompt_token_ids_array: int32 [P].
        outputs: One CompletionOutput per sample, in order.
        prompt_logprobs: Length P, element 0 is None; None if not asked for, or if the request ended within its prompt.
        prompt_token_logprobs: float32 [P], NaN at 0; else None as before.
        finished: Whether nothing follows for this request.
        num_cached_tokens: Prompt tokens taken from the cache at first admission.
        weight_version: Of the last token.
        seed: The seed used; with it the request can be replayed.
        metrics: Times.
        error: Why it failed, or None.
        sampling_params: As used.
        lora_request: None.

    Example:
        >>> output = llm.generate("The capital of France is", max_tokens=8)[0]
        >>> output.text, len(output.prompt_token_ids), output.metrics.first_token_latency
    """

    request_id: str
    index: int
    prompt: str | None
    prompt_token_ids_array: Ints
    outputs: list[CompletionOutput]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_logprobs: Floats | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    weight_version: int | str = 0
    seed: int = 0
    metrics: RequestMetrics | None = None
    error: LlmpyError | None = None
    sampling_params: SamplingParams | None = None
    lora_request: None = None
    _prompt_token_ids: list[int] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """`prompt_token_ids_array` as a list."""
        if self._prompt_token_ids is None:
            self._prompt_token_ids = self.prompt_token_ids_array.tolist()
        return self._prompt_token_ids

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def reply(self) -> Reply:
        """The first sample's text taken apart: content, reasoning, tool calls."""
        return self.outputs[0].reply if self.outputs else Reply(content="")

    @property
    def content(self) -> str:
        """The first sample's text without reasoning and tool calls."""
        return self.reply.content

    @property
    def reasoning(self) -> str | None:
        """What the model thought in the first sample."""
        return self.reply.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of functions in the first sample."""
        return self.reply.tool_calls

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sample."""
        return self.outputs[0].token_ids if self.outputs else []

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first sample."""
        return self.outputs[0].finish_reason if self.outputs else None

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name[0] != "_"}
        values["prompt_token_ids"] = values.pop("prompt_token_ids_array")
        return {name: to_plain(value) for name, value in values.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """A table with one row per sample."""
        return RequestOutputs([self]).to_pandas()

    def to_arrow(self) -> pyarrow.Table:
        """A table with one row per sample."""
        return RequestOutputs([self]).to_arrow()

    def __repr__(self) -> str:
        from .notebook.lines import request_line

        return request_line(self)

    def _repr_html_(self) -> str:
        from .notebook.view import request_html

        return request_html(self)


class RequestOutputs(OutputList[RequestOutput]):
    """The outputs of `generate` or `chat`, in the order of the prompts.

    It is a list; slices and sums are of the same class: `(first + second).to_pandas()`.

    Args:
        outputs: The outputs.
        elapsed: Seconds that the call took.

    Example:
        >>> outputs = llm.generate(["2 + 2 =", "3 + 3 ="], temperature=0, max_tokens=4)
        >>> outputs.texts, outputs.num_generation_tokens / outputs.elapsed
    """

    @property
    def texts(self) -> list[str]:
        """Text of each request's first sample."""
        return [output.text for output in self]

    @property
    def token_ids(self) -> list[list[int]]:
        """Token ids of each request's first sample."""
        return [output.token_ids for output in self]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(output.prompt_token_ids_array) for output in self)

    @property
    def num_generation_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.token_ids_array) for output in self for sample in output.outputs)

    def _repr_html_(self) -> str:
        from .notebook.view import table_html

        return table_html(self)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class ScoreOutput:
    """Teacher-forced logprobs of given tokens. N is the length of the sequence.

    Args:
        index: Place in the call's input.
        token_ids_array: The whole sequence, int32 [N].
        start: First position that was scored.
        token_logprobs: float32 [N - start].
        ranks: int32 [N - start].
        top: The best alternatives, or None if not asked for.
        num_cached_tokens: Tokens taken from the cache.
        weight_version: Of the weights.
        error: Why it failed, or None.
        sampled: None.

    Example:
        >>> score = llm.score("The sky is blue")[0]
        >>> score.sum_logprob, score.perplexity
    """

    index: int
    token_ids_array: Ints
    start: int
    token_logprobs: Floats
    ranks: Ints
    top: Logprobs | None = None
    num_cached_tokens: int = 0
    weight_version: int | str = 0
    error: LlmpyError | None = None
    sampled: None = None
    _logprobs: Logprobs | None = None  # of the scored tokens, with `top` if that was asked for

    @property
    def token_ids(self) -> list[int]:
        """The whole sequence as a list."""
        ids: list[int] = self.token_ids_array.tolist()
        return ids

    @property
    def sum_logprob(self) -> float:
        """Sum of `token_logprobs` in float64, in order."""
        return sum_in_order(self.token_logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logprob; NaN without tokens."""
        return math.exp(-self.sum_logprob / len(self.token_logprobs)) if len(self.token_logprobs) else math.nan

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name[0] != "_"}
        values["token_ids"] = values.pop("token_ids_array")
        values |= {"sum_logprob": self.sum_logprob, "perplexity": self.perplexity}
        return {name: to_plain(value) for name, value in values.items()}

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """What is pickled: texts of tokens with `top` alone, since they are more than all the rest."""
        return None, {item.name: getattr(self, item.name) for item in fields(self)} | {"_logprobs": self.top}

    def __repr__(self) -> str:
        from .notebook.lines import score_line

        return score_line(self)

    def _repr_html_(self) -> str:
        from .notebook.view import score_html

        return score_html(self)


class ScoreOutputs(OutputList[ScoreOutput]):
    """The outputs of `score`, in the order of the sequences. It is a list; `.to_pandas()` has one row per sequence.

    Args:
        outputs: The outputs.
        elapsed: 0.
    """


class Chunk(str):
    """New text of a stream, with the tokens that came with it.

    Args:
        text: New text only; may be "" when a token gave none yet.
        token_ids: The new tokens.
        token_logprobs: Their logprobs, float32, or None.
        output: Everything so far.
    """

    __slots__ = ("output", "token_ids", "token_logprobs")

    token_ids: list[int]
    token_logprobs: Floats | None
    output: RequestOutput

    def __new__(cls, text: str, token_ids: list[int], token_logprobs: Floats | None, output: RequestOutput) -> Chunk:
        chunk = super().__new__(cls, text)
        chunk.token_ids = token_ids
        chunk.token_logprobs = token_logprobs
        chunk.output = output
        return chunk

    @property
    def finish_reason(self) -> str | None:
        """Set on the last chunk."""
        return self.output.finish_reason

    def __getnewargs__(self) -> tuple[str, list[int], Floats | None, RequestOutput]:  # type: ignore[override]
        return str(self), self.token_ids, self.token_logprobs, self.output


class StepRecord(NamedTuple):
    """One step of an engine, as it was scheduled.

    Args:
        number: Counts from 1.
        start: Seconds of the monotonic clock.
        host_us: Microseconds of the host: scheduling, enqueuing, taking the results in.
        device_us: Microseconds from the step's start, or from the end of the step before if that came later, to its
            results.
        rows: Positions computed: the sum of `prompt_rows` (prompts and given output, uncached), `decode_rows` (of
            tokens drawn), `redone_rows` (computed again after a preemption) and `wasted_rows` (their results dropped).
        tokens: Drawn.
        admitted, preempted: Samples that came in, and that lost their blocks.
        running, waiting: Samples in the step, and behind it.
        blocks_used, blocks_cached: Blocks held by samples; free blocks that the prefix cache can still find.
        in_flight: Steps in flight once it had started, itself included: 2 where host and device overlap.
        replayed: 1 if a captured graph was replayed, else 0.
    """

    number: int
    start: float
    host_us: float
    device_us: float
    rows: int
    prompt_rows: int
    decode_rows: int
    redone_rows: int
    wasted_rows: int
    tokens: int
    admitted: int
    preempted: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    in_flight: int
    replayed: int


class KvEvent(NamedTuple):
    """A change of what the prefix cache holds.

    Args:
        number: Counts from 0.
        kind: 0: a block can be found from now on, 1: it cannot any more, 2: none can.
        hash, parent: Of the block and of the one before it, opaque; parent None: it is a prompt's first.
        group: Of layers with caches alike.
        token_ids: Of the block as int32 bytes, of kind 0.
        salt: `cache_salt` of the first block.
    """

    number: int
    kind: int
    hash: int
    parent: int | None
    group: int
    token_ids: bytes
    salt: bytes


class Histogram(NamedTuple):
    """How often values fell between fixed bounds.

    Args:
        bounds: Ascending.
        counts: `counts[i]` values lay above `bounds[i - 1]`, up to `bounds[i]`; the last one counts those above all.
        sum: Of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine's counters and gauges. Counters only grow.

    `finished` counts samples by finish reason; `redone_rows` are positions computed again after a preemption, `wasted_rows`
    those computed for a sample that had ended meanwhile. `max_steps_in_flight` is 2 where host and device overlap;
    `num_replayed_steps` counts steps that replayed a captured graph, `num_mixed_preemptions` those preemptions (they are among
    `num_preemptions`) that rebuilt the cache of a sample under newer weights than it began with. `state_snapshots` of recurrent
    states lie in the pool and can be found, in `state_snapshot_bytes` of it; they give way to what runs, as cached blocks do.
    `states` says what keeps steps from running: "paused", "updating", "weights missing", "asleep", "dead", or is ("serving",).
    `num_masks` were filled for grammars, which took threads `mask_us` microseconds. Of `num_waiting`, `num_held` wait for a
    pause to end and `num_compiling` for their grammar. `nonfinite_rows` drew nothing, since their logits were not finite.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_unfinished: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_usage: float = 0.0
    weight_epoch: int = 0
    sleep_level: int = 0
    paused: bool = False
    states: tuple[str, ...] = ("serving",)
    allocations_since_warmup: int = 0
    last_step_ms: float = 0.0
    uptime_s: float = 0.0
    finished: Mapping[str, int] = field(default_factory=dict, hash=False)
    redone_rows: int = 0
    wasted_rows: int = 0
    num_replayed_steps: int = 0
    max_steps_in_flight: int = 1
    num_mixed_preemptions: int = 0
    state_snapshots: int = 0
    state_snapshot_bytes: int = 0
    state_snapshots_taken: int = 0
    num_masks: int = 0
    mask_us: int = 0
    num_held: int = 0
    num_compiling: int = 0
    nonfinite_rows: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All numbers by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def sum_in_order(values: npt.NDArray[np.float32], start: float = 0.0) -> float:
    """Float64 sum, one value after another."""
    if len(values) < 16:
        for value in values.tolist():
            start += value
        return start
    exact = values.astype("float64")
    exact[0] += start
    return float(exact.cumsum()[-1])


def to_plain(value: Any) -> Any:
    """A value as JSON knows it: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, LlmpyError):
        return {"type": type(value).__name__, "message": str(value)}
    if hasattr(value, "to_dict"):
        return to_plain(value.to_dict())
    if hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if hasattr(value, "items"):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [to_plain(item) for item in value]
    return str(value)


_MOVED = dict.fromkeys(
    (
        *("ClassificationOutput", "ClassificationRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"),
        *("PoolingOutput", "PoolingOutputs", "PoolingRequestOutput"),
    ),
    "pooling_outputs",
)

if not TYPE_CHECKING:  # code written for vLLM looks for outputs of pooling here

    def __getattr__(name: str) -> object:
        from .advice import lazy

        return lazy(__name__, _MOVED, name)
