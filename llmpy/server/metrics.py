"""GET /metrics: Prometheus text with our names, and with vLLM's names for the metrics that mean the same.

Routers poll often, so all text but the numbers is built once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..engine.health import STATES
from ..outputs import EngineStats, Histogram
from .service import METRICS, Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = (
    ("num_requests_running", "Samples that run.", "num_running"),
    ("num_requests_waiting", "Samples that wait.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", "kv_usage"),
    ("host_cache_blocks", "Blocks of the cache that host memory has.", "host_blocks_cached"),
    ("num_dead_replicas", "Replicas that a fault has killed.", "num_dead_replicas"),
)
COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests.", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens taken from the cache.", "prefix_cache_hits"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("num_preemptions", "Samples that had to start over for lack of memory.", "num_preemptions"),
    ("prefix_cache_queries", "Tokens looked up in the cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the cache.", "prefix_cache_hits"),
    ("host_cache_hits", "Tokens found in host memory.", "host_cache_hits"),
    ("host_cache_stored_bytes", "Bytes copied to host memory.", "host_stored_bytes"),
    ("host_cache_loaded_bytes", "Bytes copied from host memory.", "host_loaded_bytes"),
    ("spec_decode_num_draft_tokens", "Drafts computed.", "draft_rows"),
    ("spec_decode_num_accepted_tokens", "Drafts accepted.", "accepted_rows"),
    ("corrupted_requests", "Samples whose logits were not finite.", "nonfinite_rows"),
)
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


Histograms = Mapping[str, Histogram]
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


def _one(name: str, kind: str, help: str, ours: str) -> Family:
    value = attrgetter(ours)
    return Family(name, kind, help, [("_total" if kind == "counter" else "", {})], lambda stats, _: (value(stats),))


def _info(name: str, help: str, **labels: object) -> Family:
    return Family(name, "gauge", help, [("", labels)], lambda *_: (1,))


@lru_cache(maxsize=8)
def _families(version: object, block_size: int, num_blocks: int, bounds: Bounds) -> list[Family]:
    levels, known = (0, 1, 2), dict(bounds)
    return [
        *(_one(name, "gauge", help, ours) for name, help, ours in GAUGES),
        Family(
            "num_requests_waiting_by_reason", "gauge", "Samples that wait, by what for.",
            [("", {"reason": reason}) for reason in ("capacity", "grammar", "paused")], _waiting,
        ),
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


@lru_cache(maxsize=8)
def _template(prefixes: tuple[str, ...], model: str, *layout: Any) -> str:
    """The Prometheus text with %s for each value."""
    common = {"model_name": model, "engine": "0"}
    lines: list[str] = []
    for prefix in prefixes:
        for family in _families(*layout):
            shown = prefix + family.name
            titled = shown + ("_total" if family.kind == "counter" else "")
            lines += [f"# HELP {titled} {family.help}", f"# TYPE {titled} {family.kind}"]
            lines += [f"{shown}{suffix}{{{','.join(_labels({**common, **labels}))}}} %s" for suffix, labels in family.series]
    return "\n".join(lines) + "\n"


def _adapters(service: Service) -> str:
    """The gauge by which routers find adapters; "" if the engine serves none. Its value is the time."""
    engine = service.engine
    if not engine.config.enable_lora:
        return ""
    names: dict[str, bool] = {}
    running = engine._frontend.adapters.running()
    for feed in engine._driver.find(None):
        if (adapter := feed.request.prompt.adapter) is not None:
            names[adapter.request.name] = names.get(adapter.request.name, False) or adapter.number in running
    found = {is_running: ",".join(sorted(name for name, runs in names.items() if runs == is_running)) for is_running in (0, 1)}
    labels = {
        "model_name": service.names[0],
        "engine": "0",
        "max_lora": engine.config.max_loras,
        "running_lora_adapters": found[1],
        "waiting_lora_adapters": found[0],
    }
    lines = []
    for prefix in METRICS[service.options.metrics_compat]:
        name = f"{prefix}lora_requests_info"
        lines += [f"# HELP {name} Adapters whose requests run or only wait; the time.", f"# TYPE {name} gauge"]
        lines.append(f"{name}{{{','.join(_labels(labels))}}} {time.time():.3f}".replace("%%", "%"))
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, object]) -> Iterator[str]:
    for name, value in labels.items():
        clean = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").replace("%", "%%")
        yield f'{name}="{clean}"'


def text(service: Service) -> str:
    """All metrics in Prometheus' text format."""
    engine, prefixes = service.engine, METRICS[service.options.metrics_compat]
    stats, histograms = replace(engine.stats(), states=service.states()), engine.histograms()
    bounds = tuple((name, histogram.bounds) for name, histogram in histograms.items())
    layout = engine.weight_version, engine.config.block_size, stats.kv_blocks_total, bounds
    values = list(chain.from_iterable(family.values(stats, histograms) for family in _families(*layout)))
    return _template(prefixes, service.names[0], *layout) % tuple(values * len(prefixes)) + _adapters(service)


async def metrics(service: Service, request: Request) -> ASGIApp:
    """Answers with all metrics."""
    return Response(text(service), media_type=CONTENT_TYPE)
