"""The metrics of an engine under vLLM's names: the table of them, and `get_metrics()`, which gives them as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from . import outputs
from .engine.health import STATES
from .outputs import EngineStats

if TYPE_CHECKING:
    from .engine.base import EngineBase

PREFIX = "vllm:"
"""Prefix of the names that `get_metrics()` gives."""


@dataclass(frozen=True)
class Metric:
    """A metric at one moment.

    Args:
        name: Its name, as in vLLM: without `_total`.
        labels: Its labels by name.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows.

    Args:
        value: The number; seconds are a float.
    """

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Numbers that only grow, one for each position.

    Args:
        values: The numbers.
    """

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that grows and falls.

    Args:
        value: The number.
    """

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """A distribution.

    Args:
        count: How many values there were.
        sum: Their sum.
        buckets: Upper bound -> number of values up to it, as in Prometheus; the last bound is "+Inf".
    """

    count: int
    sum: float
    buckets: dict[str, int]


GAUGES = (
    ("num_requests_running", "Samples that run.", "num_running"),
    ("num_requests_waiting", "Samples that wait.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", "kv_usage"),
    ("host_cache_blocks", "Blocks of the cache that host memory has.", "host_blocks_cached"),
    ("disk_cache_blocks", "Blocks of the cache on disk.", "disk_blocks_cached"),
    ("disk_cache_bytes", "Bytes of the cache's files.", "disk_bytes"),
    ("host_cache_queued_bytes", "Bytes of copies to and from host memory that have not ended.", "host_queued_bytes"),
    ("disk_cache_queued_blocks", "Blocks that are being read or written.", "disk_queued_blocks"),
    ("host_swapped_blocks", "Blocks of waiting samples in host memory.", "host_blocks_swapped"),
    ("num_dead_replicas", "Replicas that a fault has killed.", "num_dead_replicas"),
)
COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests.", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens taken from the cache.", "prefix_cache_hits"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("num_preemptions", "Samples that had to give their cache up for lack of memory.", "num_preemptions"),
    ("num_swaps", "Of these, samples whose cache went to host memory.", "num_swaps"),
    ("prefix_cache_queries", "Tokens looked up in the cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the cache.", "prefix_cache_hits"),
    ("host_cache_hits", "Tokens found in host memory.", "host_cache_hits"),
    ("skipped_load_tokens", "Tokens computed because their load takes longer.", "skipped_load_tokens"),
    ("host_cache_stored_bytes", "Bytes copied to host memory.", "host_stored_bytes"),
    ("host_cache_loaded_bytes", "Bytes copied from host memory.", "host_loaded_bytes"),
    ("external_prefix_cache_queries", "Tokens looked up on disk.", "disk_cache_queries"),
    ("external_prefix_cache_hits", "Tokens found on disk.", "disk_cache_hits"),
    ("disk_cache_stored_bytes", "Bytes written to disk.", "disk_stored_bytes"),
    ("disk_cache_loaded_bytes", "Bytes read from disk.", "disk_loaded_bytes"),
    ("disk_cache_misses", "Reads that brought no block.", "disk_misses"),
    ("disk_cache_bad_files", "Damaged files, now removed.", "disk_bad_files"),
    ("disk_cache_errors", "Calls of the system that failed.", "disk_errors"),
    ("disk_cache_evictions", "Files removed to make room.", "disk_evictions"),
    ("fetched_prompt_tokens", "Prompt tokens whose blocks came from the pools of other engines.", "fetched_tokens"),
    ("fetched_bytes", "Bytes copied from the pools of other engines.", "fetched_bytes"),
    ("fetch_seconds", "Seconds of these copies.", "fetch_s"),
    ("blocks_swapped_out", "Blocks of samples copied to host memory.", "blocks_swapped_out"),
    ("blocks_swapped_in", "Blocks of samples copied back.", "blocks_swapped_in"),
    ("saved_prompts", "Prompts saved for other engines.", "saved_prompts"),
    ("saved_prompt_tokens", "Tokens of these that other engines can find.", "saved_prompt_tokens"),
    ("saved_prompt_seconds", "Seconds for which steps stopped to save them.", "saved_prompt_s"),
    ("mm_cache_queries", "Images of prompts looked up among those with features.", "image_cache_queries"),
    ("mm_cache_hits", "Images of prompts whose features were there.", "image_cache_hits"),
    ("mm_cache_evictions", "Images whose features made room for others.", "image_cache_evictions"),
    ("images_encoded", "Images that the tower has computed.", "images_encoded"),
    ("images_reencoded", "Of these, images computed once more for a request.", "images_reencoded"),
    ("image_rows", "Rows of patches that the tower has computed.", "image_rows"),
    ("spec_decode_num_draft_tokens", "Drafts computed.", "draft_rows"),
    ("spec_decode_num_accepted_tokens", "Drafts accepted.", "accepted_rows"),
    ("corrupted_requests", "Samples whose logits were not finite.", "nonfinite_rows"),
)
# Counters with a label -> its name, and the value of the label and of the counter for each series. The names are vLLM's.
LABELLED = (
    ("kv_offload_total_bytes", "Bytes copied between the pool and host memory.", "transfer_type",
     {"GPU_to_CPU": "host_stored_bytes", "CPU_to_GPU": "host_loaded_bytes"}),
    ("kv_offload_total_time", "Seconds of these copies.", "transfer_type",
     {"GPU_to_CPU": "host_store_s", "CPU_to_GPU": "host_load_s"}),
    ("kv_offload_tiering_write_bytes", "Bytes written behind host memory.", "tier", {"outer": "disk_stored_bytes"}),
    ("kv_offload_tiering_write_time", "Seconds of these writes.", "tier", {"outer": "disk_store_s"}),
    ("kv_offload_tiering_read_bytes", "Bytes read from behind host memory.", "tier", {"outer": "disk_loaded_bytes"}),
    ("kv_offload_tiering_read_time", "Seconds of these reads.", "tier", {"outer": "disk_load_s"}),
)  # fmt: skip
REASONS = ("stop", "length", "abort")
# The engine's histograms -> exported name and help text.
HISTOGRAMS = {
    "time_to_first_token_s": ("time_to_first_token_seconds", "From queueing to the first token."),
    "time_per_output_token_s": ("request_time_per_output_token_seconds", "Mean time per token after the first."),
    "end_to_end_s": ("e2e_request_latency_seconds", "From queueing to the last token."),
    "inter_token_s": ("inter_token_latency_seconds", "From a token to the next."),
    "queue_s": ("request_queue_time_seconds", "From queueing to the first step."),
    "prefill_s": ("request_prefill_time_seconds", "From the first step to the first token."),
    "decode_s": ("request_decode_time_seconds", "From the first token to the last."),
    "inference_s": ("request_inference_time_seconds", "From the first step to the end."),
    "prompt_tokens": ("request_prompt_tokens", "Tokens of a prompt."),
    "output_tokens": ("request_generation_tokens", "Tokens of an answer."),
    "step_rows": ("iteration_tokens_total", "Tokens of a step."),
    "samples": ("request_params_n", "Samples that a request asks for."),
    "max_tokens": ("request_params_max_tokens", "Most tokens that a request asks for."),
}

Histograms = Mapping[str, outputs.Histogram]
Bounds = tuple[tuple[str, tuple[float, ...]], ...]


class Family(NamedTuple):
    """The series of one name: kind, help, suffix and labels of every series, and a function that gives their values."""

    name: str
    kind: str
    help: str
    series: list[tuple[str, dict[str, object]]]
    values: Callable[[EngineStats, Histograms], Iterable[float]]


def _waiting(stats: EngineStats, _: Histograms) -> tuple[float, ...]:
    outside = stats.num_compiling + stats.num_held
    return max(stats.num_waiting - outside, 0), stats.num_compiling, stats.num_held


def _histogram(name: str, help: str, ours: str, bounds: Iterable[float]) -> Family:
    les = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    series: list[tuple[str, dict[str, object]]] = [("_bucket", {"le": le}) for le in les]

    def values(_: EngineStats, histograms: Histograms) -> Iterator[float]:
        totals = list(accumulate(histograms[ours].counts))
        return chain(totals, (histograms[ours].sum, totals[-1]))

    return Family(name, "histogram", help, [*series, ("_sum", {}), ("_count", {})], values)


def _labelled(name: str, help: str, label: str, ours: Mapping[str, str]) -> Family:
    series: list[tuple[str, dict[str, object]]] = [("_total", {label: value}) for value in ours]
    return Family(name, "counter", help, series, lambda stats, _: [getattr(stats, one) for one in ours.values()])


def _host_usage(stats: EngineStats, _: Histograms) -> tuple[float]:
    used = stats.host_blocks_cached + stats.host_blocks_swapped
    return (used / stats.host_blocks_total if stats.host_blocks_total else 0.0,)


def _one(name: str, kind: str, help: str, ours: str) -> Family:
    value = attrgetter(ours)
    return Family(name, kind, help, [("_total" if kind == "counter" else "", {})], lambda stats, _: (value(stats),))


def _info(name: str, help: str, **labels: object) -> Family:
    return Family(name, "gauge", help, [("", labels)], lambda *_: (1,))


@lru_cache(maxsize=8)
def families(version: object, block_size: int, num_blocks: int, num_places: int, bounds: Bounds) -> list[Family]:
    """All metrics of an engine.

    Args:
        version: Label of the weights.
        block_size: Tokens of a block of the cache.
        num_blocks: Blocks of the cache.
        num_places: Number of places of drafts that `EngineStats.drafts` tells apart.
        bounds: Name and bounds of every histogram.
    """
    levels, known = (0, 1, 2), dict(bounds)
    by_place = Family(
        "spec_decode_num_accepted_tokens_per_pos", "counter", "Drafts accepted, by place.",
        [("_total", {"position": place}) for place in range(num_places)], lambda stats, _: stats.accepted_drafts,
    )  # fmt: skip
    return [
        *(_one(name, "gauge", help, ours) for name, help, ours in GAUGES),
        Family(
            "num_requests_waiting_by_reason", "gauge", "Samples that wait, by what for.",
            [("", {"reason": reason}) for reason in ("capacity", "grammar", "paused")], _waiting,
        ),
        Family("kv_offload_cpu_cache_usage_perc", "gauge", "Share of host memory in use, 0 to 1.", [("", {})], _host_usage),
        _info("cache_config_info", "The cache; 1.", block_size=block_size, num_gpu_blocks=num_blocks),
        Family(
            "engine_sleep_state", "gauge", "1 for the level at which the engine sleeps; 0: awake.",
            [("", {"state": level}) for level in levels],
            lambda stats, _: (int(stats.sleep_level == level) for level in levels),
        ),
        Family(
            "engine_state", "gauge", "1 for each state that the engine is in; serving: a request would be served.",
            [("", {"state": state.replace(" ", "_")}) for state in STATES],
            lambda stats, _: (int(state in stats.states) for state in STATES),
        ),
        _info("weight_version_info", "The label of the weights; 1.", version=version),
        *(_one(name, "counter", help, ours) for name, help, ours in COUNTERS),
        *(_labelled(*row) for row in LABELLED),
        *([by_place] if num_places else []),
        Family(
            "request_success", "counter", "Samples that ended, by reason.",
            [("_total", {"finished_reason": reason}) for reason in REASONS],
            lambda stats, _: (stats.finished[reason] for reason in REASONS),
        ),
        Family(
            "request_errors", "counter", "Samples that failed.", [("_total", {})], lambda stats, _: (stats.finished["error"],)
        ),
        *(_histogram(name, help, ours, known[ours]) for ours, (name, help) in HISTOGRAMS.items()),
    ]  # fmt: skip


def layout_of(engine: EngineBase, stats: EngineStats, histograms: Histograms) -> tuple[object, int, int, int, Bounds]:
    """The arguments of `families` for an engine."""
    block_size = engine.config.block_size
    assert block_size is not None
    bounds = tuple((name, histogram.bounds) for name, histogram in histograms.items())
    return engine.weight_version, block_size, stats.kv_blocks_total, len(stats.accepted_drafts), bounds


def read(engine: EngineBase) -> list[Metric]:
    """The metrics of an engine now, in the order of /metrics."""
    stats, histograms = engine.stats(), engine.histograms()
    common, found = {"model_name": engine.name, "engine": "0"}, list[Metric]()
    for family in families(*layout_of(engine, stats, histograms)):
        name, values = PREFIX + family.name, list(family.values(stats, histograms))
        labels = [{**common, **{key: str(value) for key, value in own.items()}} for _, own in family.series]
        if family.kind == "histogram":
            buckets = {own["le"]: int(value) for own, value in zip(labels[:-2], values[:-2], strict=True)}
            found.append(Histogram(name, common, int(values[-1]), float(values[-2]), buckets))
        elif family.name.endswith("_per_pos"):
            found.append(Vector(name, common, [int(value) for value in values]))
        elif family.kind == "counter":
            found += [Counter(name, own, value) for own, value in zip(labels, values, strict=True)]
        else:
            found += [Gauge(name, own, float(value)) for own, value in zip(labels, values, strict=True)]
    return found
