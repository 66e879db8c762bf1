"""GET /metrics: Prometheus text, under vLLM's names where they mean the same and under our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..outputs import EngineStats, Histogram
from .service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("llmpy:", "vllm:")
# Names of the engine's histograms as they are exported, and what they count.
HISTOGRAMS = {
    "time_to_first_token_s": ("time_to_first_token_seconds", "From queueing to the first token."),
    "time_per_output_token_s": ("request_time_per_output_token_seconds", "Mean time per token after the first."),
    "end_to_end_s": ("e2e_request_latency_seconds", "From queueing to the last token."),
    "queue_s": ("request_queue_time_seconds", "From queueing to the first step."),
    "prompt_tokens": ("request_prompt_tokens", "Tokens of a prompt."),
    "output_tokens": ("request_generation_tokens", "Tokens of an answer."),
}

Sample = tuple[str, Mapping[str, object], float]


def _gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return {
        "num_requests_running": ("Samples that run.", stats.num_running),
        "num_requests_waiting": ("Samples that wait.", stats.num_waiting),
        "kv_cache_usage_perc": ("Share of the cache in use, 0 to 1.", stats.kv_usage),
    }


def _counters(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return {
        "prompt_tokens": ("Prompt tokens of requests.", stats.prompt_tokens),
        "prompt_tokens_cached": ("Prompt tokens taken from the cache.", stats.prefix_cache_hits),
        "generation_tokens": ("Tokens generated.", stats.generation_tokens),
        "num_preemptions": ("Samples that had to start over for lack of memory.", stats.num_preemptions),
        "prefix_cache_queries": ("Tokens looked up in the cache.", stats.prefix_cache_queries),
        "prefix_cache_hits": ("Tokens found in the cache.", stats.prefix_cache_hits),
    }


def families(service: Service) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Name, type, help and samples of everything that is exported."""
    engine = service.engine
    stats = engine.stats()
    for name, (text, value) in _gauges(stats).items():
        yield name, "gauge", text, [("", {}, value)]
    cache = {"block_size": engine.config.block_size, "num_gpu_blocks": stats.kv_blocks_total}
    yield "cache_config_info", "gauge", "The cache; 1.", [("", cache, 1)]
    yield "engine_sleep_state", "gauge", "1 for the level at which the engine sleeps; 0: awake.", [
        ("", {"state": level}, int(stats.sleep_level == level)) for level in (0, 1, 2)
    ]
    yield "weight_version_info", "gauge", "The label of the weights; 1.", [("", {"version": engine.weight_version}, 1)]
    for name, (text, value) in _counters(stats).items():
        yield name, "counter", text, [("_total", {}, value)]
    yield "request_success", "counter", "Samples that ended, by reason.", [
        ("_total", {"finished_reason": reason}, count) for reason, count in stats.finished.items() if reason != "error"
    ]
    yield "request_errors", "counter", "Samples that failed.", [("_total", {}, stats.finished.get("error", 0))]
    histograms = engine.histograms()
    for ours, (name, text) in HISTOGRAMS.items():
        if ours in histograms:
            yield name, "histogram", text, list(_buckets(histograms[ours]))


def _buckets(histogram: Histogram) -> Iterator[Sample]:
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        yield "_bucket", {"le": "+Inf" if bound == float("inf") else repr(float(bound))}, total
    yield "_sum", {}, histogram.sum
    yield "_count", {}, total


def text(service: Service) -> str:
    """All families in Prometheus' text format."""
    common = {"model_name": service.names[0], "engine": "0"}
    lines: list[str] = []
    found = list(families(service))
    for prefix in PREFIXES:
        for name, kind, about, samples in found:
            shown = prefix + name + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {shown} {about}", f"# TYPE {shown} {kind}"]
            lines += [_line(prefix + name + suffix, {**common, **labels}, value) for suffix, labels, value in samples]
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Mapping[str, object], value: float) -> str:
    return f"{name}{{{','.join(_labels(labels.items()))}}} {value}"


def _labels(items: Iterable[tuple[str, object]]) -> Iterator[str]:
    for name, value in items:
        clean = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        yield f'{name}="{clean}"'


async def metrics(service: Service, request: Request) -> ASGIApp:
    """Everything that is counted."""
    return Response(text(service), media_type=CONTENT_TYPE)
