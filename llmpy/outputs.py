"""Results of calls: outputs of requests, of samples and of scoring; metrics and statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
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
    from .lora import LoRARequest
    from .pooling_outputs import ClassificationOutput as ClassificationOutput
    from .pooling_outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from .pooling_outputs import EmbeddingOutput as EmbeddingOutput
    from .pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .pooling_outputs import PoolingOutput as PoolingOutput
    from .pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
    from .sampling_params import SamplingParams


class VersionSpan(NamedTuple):
    """The weights that computed tokens `start` to `end` (exclusive)."""

    start: int
    end: int
    version: int | str
    epoch: int


class SampleMetrics(NamedTuple):
    """Counts of a finished sample.

    Args:
        drafts: Number of its drafts by place, the first right behind the known tokens; () without any.
        accepted_drafts: Number of these drafts that were accepted.
    """

    drafts: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times of a request in seconds. `_ts` values are of the monotonic clock; None = not reached.

    Args:
        arrival_time: Wall clock time of submission.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: Times when the request was queued, first ran, and produced its
            first and last token.
        num_preemptions: Number of times that a sample had to give its cache up for lack of memory.
        num_generation_tokens: Number of tokens of all samples.
        drafts: Number of drafts of all finished samples by place, the first right behind the known tokens; () without any.
        accepted_drafts: Number of these drafts that were accepted.
    """

    arrival_time: float
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    drafts: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from queueing to the first token."""
        return _difference(self.first_token_ts, self.queued_ts)

    @property
    def queue_time(self) -> float | None:
        """Seconds from queueing to the first step."""
        return _difference(self.scheduled_ts, self.queued_ts)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first step to the first token."""
        return _difference(self.first_token_ts, self.scheduled_ts)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first to the last token."""
        return _difference(self.last_token_ts, self.first_token_ts)

    @property
    def time_per_output_token(self) -> float | None:
        """Decode time divided by the number of tokens after the first, in seconds."""
        time = self.decode_time
        return None if time is None else time / max(self.num_generation_tokens - 1, 1)

    @property
    def e2e_time(self) -> float | None:
        """Seconds from queueing to the last token."""
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
        index: Number of the sample, 0 .. n - 1.
        text: Text, cut by the stop rule; "" without detokenisation.
        token_ids_array: int32 [T], including the end-of-sequence or stop token that ended the sample.
        logprobs: One dict per token, or None if not requested; `logprobs.to_list()` is a plain list of dicts.
        token_logprobs: Logprobs of the sampled tokens in the request's mode, float32 [T], or None.
        cumulative_logprob: Float64 sum of `token_logprobs` in order, or None.
        sampled: All logprobs of the sampled tokens, or None.
        finish_reason: "stop", "length", "abort", "error"; None while running.
        stop_reason: The stop token id or stop string; None for end of sequence and everything else.
        weight_versions: The weights that computed the tokens; the spans cover 0 .. T.
        num_prior_tokens: Length of the `output_token_ids` that the sample continues.
        routed_experts: Always None.
        metrics: Counts of its drafts; None while running.

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
    metrics: SampleMetrics | None = None
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
        """The parsed text: content, reasoning, tool calls. Outside `chat`, and in deltas, all text is content."""
        return Reply(content=self.text) if self._reply is None else self._reply.get()

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.reply.content

    @property
    def reasoning(self) -> str | None:
        """The model's reasoning before the answer, as marked by its chat template; None: no reasoning."""
        return self.reply.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls in the answer, in order."""
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
    """All samples of one prompt. P is the number of prompt tokens.

    Args:
        request_id: Id of the request.
        index: Index of the prompt in the call's input.
        prompt: Text of the prompt; None for token ids.
        prompt_token_ids_array: int32 [P].
        outputs: One CompletionOutput per sample, in order.
        prompt_logprobs: Logprobs of the prompt, length P, element 0 is None; None if not requested, or if the request ended
            within its prompt.
        prompt_token_logprobs: Logprobs of the prompt's tokens, float32 [P], NaN at 0; None if `prompt_logprobs` is None.
        finished: Whether the request has ended.
        num_cached_tokens: Number of prompt tokens found in the prefix cache at first admission.
        num_image_tokens: Number of prompt tokens that stand for features of images.
        num_cached_images: Number of images of the prompt that the tower did not have to compute for this request.
        weight_version: Version of the weights for the last token.
        seed: The seed used; it reproduces the request.
        metrics: Times.
        error: Why the request failed, or None.
        sampling_params: The parameters used.
        lora_request: The adapter, as the caller gave it; None without one.

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
    num_image_tokens: int = 0
    num_cached_images: int = 0
    weight_version: int | str = 0
    seed: int = 0
    metrics: RequestMetrics | None = None
    error: LlmpyError | None = None
    sampling_params: SamplingParams | None = None
    lora_request: LoRARequest | None = None
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
        """The first sample's parsed text: content, reasoning, tool calls."""
        return self.outputs[0].reply if self.outputs else Reply(content="")

    @property
    def content(self) -> str:
        """The first sample's text without reasoning and tool calls."""
        return self.reply.content

    @property
    def reasoning(self) -> str | None:
        """The first sample's reasoning, or None."""
        return self.reply.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The first sample's tool calls."""
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
        elapsed: Duration of the call in seconds.

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
        """Number of tokens of all prompts."""
        return sum(len(output.prompt_token_ids_array) for output in self)

    @property
    def num_generation_tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(sample.token_ids_array) for output in self for sample in output.outputs)

    def _repr_html_(self) -> str:
        from .notebook.view import table_html

        return table_html(self)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class ScoreOutput:
    """Teacher-forced logprobs of given tokens. N is the length of the sequence.

    Args:
        index: Index of the sequence in the call's input.
        token_ids_array: The whole sequence, int32 [N].
        start: First scored position.
        token_logprobs: float32 [N - start].
        ranks: int32 [N - start].
        top: The best alternatives, or None if not requested.
        num_cached_tokens: Number of tokens found in the prefix cache.
        weight_version: Version of the weights.
        error: Why the request failed, or None.
        sampled: Always None.

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
    _logprobs: Logprobs | None = None  # logprobs of the scored tokens, including `top` if requested

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
        """exp(-mean logprob); NaN without tokens."""
        return math.exp(-self.sum_logprob / len(self.token_logprobs)) if len(self.token_logprobs) else math.nan

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name[0] != "_"}
        values["token_ids"] = values.pop("token_ids_array")
        values |= {"sum_logprob": self.sum_logprob, "perplexity": self.perplexity}
        return {name: to_plain(value) for name, value in values.items()}

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """The pickled state. Token texts are included only with `top`, because they are larger than all other data."""
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
        text: The new text; "" if the new tokens give no text yet.
        token_ids: The new tokens.
        token_logprobs: Logprobs of the new tokens, float32, or None.
        output: The whole output so far.
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
        """The finish reason on the last chunk; None before."""
        return self.output.finish_reason

    def __getnewargs__(self) -> tuple[str, list[int], Floats | None, RequestOutput]:  # type: ignore[override]
        return str(self), self.token_ids, self.token_logprobs, self.output


class StepRecord(NamedTuple):
    """The record of one step of an engine.

    Args:
        number: Number of the step, from 1.
        start: Start time, in seconds of the monotonic clock.
        host_us: Microseconds on the host: scheduling, enqueuing, and processing the results.
        device_us: Microseconds until the results, from the later of the step's start and the end of the previous step.
        rows: Number of computed positions: the sum of `prompt_rows` (uncached prompt and given output), `decode_rows` (for
            sampled tokens), `redone_rows` (recomputed after a preemption), `wasted_rows` (results dropped) and `draft_rows`
            (for drafts of speculation).
        tokens: Number of sampled tokens.
        accepted_drafts: Number of drafts that were accepted, each a sampled token.
        admitted, preempted: Number of samples admitted, and of samples that lost their blocks.
        running, waiting: Number of samples in the step, and of waiting samples.
        blocks_used, blocks_cached: Number of blocks held by samples, and of free blocks in the prefix cache.
        in_flight: Number of steps in flight after the start, including this one; 2 if host and device overlap.
        replayed: 1 if a captured graph was replayed, else 0.
        tower_pieces, tower_rows: Pieces of images whose features the step began, and their rows of patches. A large
            image goes on in the next steps, which count none.
        replica: Number of the replica, whose steps `number` counts; 0 with data_parallel_size=1.
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
    draft_rows: int
    tokens: int
    accepted_drafts: int
    admitted: int
    preempted: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    in_flight: int
    replayed: int
    tower_pieces: int
    tower_rows: int
    replica: int = 0


class KvEvent(NamedTuple):
    """A change of the prefix cache.

    Args:
        number: Number of the event, from 0.
        kind: 0: a block was added; 1: a block was removed; 2: all blocks were removed, also from host memory; 3: a copy of a
            block was added in host memory; 4: such a copy was removed.
        hash, parent: Opaque hashes of the block and of the block before it; parent None: the first block of a prompt.
        group: Number of the cache group (layers with equal caches).
        token_ids: Token ids of the block as int32 bytes, for kind 0.
        salt: `cache_salt` of the first block.
        images: Keys of the content of the first four images that the block has tokens of, 16 bytes each.
        lora_request: The adapter of the block's request; None: it has none.
        replica: Number of the cache that has the block: the replica's, or with enable_dp_attention the rank's, behind those of
            the replicas before; 0 if there is one cache.
    """

    number: int
    kind: int
    hash: int
    parent: int | None
    group: int
    token_ids: bytes
    salt: bytes
    images: bytes = b""
    lora_request: LoRARequest | None = None
    replica: int = 0


class Histogram(NamedTuple):
    """Counts of values between fixed bounds.

    Args:
        bounds: Bounds in ascending order.
        counts: `counts[i]` is the number of values above `bounds[i - 1]` and up to `bounds[i]`; the last counts larger values.
        sum: Sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine's counters and gauges. Counters only grow.

    With data_parallel_size above 1 counters and gauges are sums over the replicas. Of `weight_epoch`, `sleep_level`,
    `max_steps_in_flight`, `last_step_ms` and `uptime_s` it is the greatest; `kv_usage` is that of all caches together.

    - `finished`: samples by finish reason.
    - `redone_rows`: positions recomputed after a preemption.
    - `wasted_rows`: positions computed for a sample that had already ended.
    - `draft_rows`, `accepted_rows`: positions computed for drafts of speculation, and how many of these drafts were accepted.
    - `drafts`, `accepted_drafts`: the same by place; the first is the place right behind the known tokens.
    - `num_draft_waits`: steps that the host began only after the previous step's end, because they might have drafts.
    - `max_steps_in_flight`: 2 if host and device overlap.
    - `num_replayed_steps`: steps that replayed a captured graph.
    - `num_mixed_preemptions`: preemptions (of `num_preemptions`) that rebuilt a sample's cache under newer weights.
    - `num_swaps`, `blocks_swapped_out`, `blocks_swapped_in`: preemptions (of `num_preemptions`) that copied a
      sample's cache to host memory, and blocks copied so each way. `host_blocks_swapped`: blocks that wait there now.
    - `state_snapshots`, `state_snapshot_bytes`: recurrent states in the pool's prefix cache; running samples evict them.
    - `images_encoded`, `image_pieces`, `image_rows`: images that the tower has computed, their pieces (such as tiles) and their
      rows of patches. `image_cache_hits`: images of prompts whose features were there at the first look. `images_reencoded`:
      images (of `images_encoded`) computed once more for a request. `image_cache_evictions`: features that made room.
    - `host_blocks_total`, `host_blocks_cached`: blocks that the host cache has room for, and those of findable prefixes in it.
    - `host_cache_hits`: tokens that samples took from the host cache, also after a preemption.
    - `skipped_loads`, `skipped_load_tokens`: hits outside the pool that were not loaded, because computing them takes less
      time, and their tokens (`cache_loads`).
    - `host_stored_bytes`, `host_loaded_bytes`, `host_store_s`, `host_load_s`: bytes copied to and from the host cache, and
      the seconds of these copies.
    - `disk_blocks_cached`, `disk_bytes`: files of the disk cache and their bytes.
    - `disk_cache_queries`, `disk_cache_hits`: tokens of samples that looked for blocks on disk, and tokens found there.
    - `disk_stored_bytes`, `disk_loaded_bytes`, `disk_store_s`, `disk_load_s`: bytes written and read, and the seconds for it.
    - `disk_misses`: reads that brought no block. `disk_bad_files`: damaged files, now removed.
    - `disk_errors`, `disk_evictions`: calls of the system that failed, and files removed to make room.
    - `host_queued_bytes`, `disk_queued_blocks`: copies to and from the host cache, and reads and writes, that had not ended
      when the last step began.
    - `fetched_tokens`, `fetched_bytes`, `fetch_s`: tokens of prompts whose blocks came from the pools of other engines, the
      bytes of these copies, and their seconds.
    - `saved_prompts`, `saved_prompt_tokens`, `saved_prompt_s`: prompts that other engines can find (`prefill`, `save_prompt`,
      servers of the role "prefill"), their tokens, and the seconds for which steps stopped.
    - `states`: what stops steps: "paused", "updating", "weights missing", "asleep", "dead"; or ("serving",).
    - `comm`: how ranks exchange values: "none" (one rank), "threads" (the CPU), "peer memory" (GPUs), and between hosts "hosts"
      (TCP) or "nccl".
    - `num_masks`, `mask_us`: masks filled for grammars, and the threads' time for them in microseconds.
    - `num_held`, `num_compiling`: of `num_waiting`: samples that wait for the end of a pause, and for their grammar.
    - `nonfinite_rows`: positions without a sampled token, because their logits were not finite.
    - `num_dead_replicas`: replicas that a fault has killed while others go on.
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
    comm: str = "none"
    allocations_since_warmup: int = 0
    last_step_ms: float = 0.0
    uptime_s: float = 0.0
    finished: Mapping[str, int] = field(default_factory=dict, hash=False)
    redone_rows: int = 0
    wasted_rows: int = 0
    num_replayed_steps: int = 0
    max_steps_in_flight: int = 1
    num_mixed_preemptions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    host_blocks_total: int = 0
    host_blocks_cached: int = 0
    host_blocks_swapped: int = 0
    host_cache_hits: int = 0
    skipped_loads: int = 0
    skipped_load_tokens: int = 0
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    host_store_s: float = 0.0
    host_load_s: float = 0.0
    disk_blocks_cached: int = 0
    disk_bytes: int = 0
    disk_cache_queries: int = 0
    disk_cache_hits: int = 0
    disk_stored_bytes: int = 0
    disk_loaded_bytes: int = 0
    disk_store_s: float = 0.0
    disk_load_s: float = 0.0
    disk_misses: int = 0
    disk_bad_files: int = 0
    disk_errors: int = 0
    disk_evictions: int = 0
    host_queued_bytes: int = 0
    disk_queued_blocks: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    saved_prompts: int = 0
    saved_prompt_tokens: int = 0
    saved_prompt_s: float = 0.0
    state_snapshots: int = 0
    state_snapshot_bytes: int = 0
    state_snapshots_taken: int = 0
    images_encoded: int = 0
    image_pieces: int = 0
    image_rows: int = 0
    image_cache_hits: int = 0
    image_cache_evictions: int = 0
    images_reencoded: int = 0
    num_masks: int = 0
    mask_us: int = 0
    num_held: int = 0
    num_compiling: int = 0
    nonfinite_rows: int = 0
    num_dead_replicas: int = 0
    draft_rows: int = 0
    accepted_rows: int = 0
    num_draft_waits: int = 0
    drafts: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()

    @property
    def image_cache_queries(self) -> int:
        """Images of prompts that were looked up among those with features."""
        return self.image_cache_hits + self.images_encoded - self.images_reencoded

    def to_dict(self) -> dict[str, Any]:
        """All numbers by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


Places = tuple[int, ...]
"""Counts by place."""


def used_places(drafts: Sequence[int], accepted: Sequence[int]) -> tuple[Places, Places]:
    """Both counts without the places that had no draft."""
    n = sum(map(bool, drafts))
    return tuple(drafts[:n]), tuple(accepted[:n])


def add_places(first: Places, second: Places) -> Places:
    """The sums of counts by place."""
    return tuple(map(sum, zip_longest(first, second, fillvalue=0)))


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
    """A value for JSON; numbers that are not finite become None."""
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
        *("PoolingOutput", "PoolingOutputs", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    ),
    "pooling_outputs",
)

if not TYPE_CHECKING:  # code written for vLLM imports pooling outputs from here

    def __getattr__(name: str) -> object:
        from .advice import lazy

        return lazy(__name__, _MOVED, name)
