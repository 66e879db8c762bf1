"""GET /metrics of the router, under the names of vLLM's router where it has them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .proxy import Router


BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Bounds of the histograms, in seconds."""


@dataclass
class Times:
    """A histogram of seconds.

    Args:
        counts: Values up to each of BOUNDS and above the one before; the last: above all.
        sum: Their sum.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, told: str) -> Iterator[str]:
        """Its series."""
        yield from _head(name, told, "histogram")
        for bound, number in zip((*map(repr, BOUNDS), "+Inf"), accumulate(self.counts), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {number}'
        yield f"{name}_sum {self.sum!r}"
        yield f"{name}_count {sum(self.counts)}"


@dataclass
class Counts:
    """What the router has done.

    Args:
        requests: Requests that generate.
        retries: Requests that another engine got because one failed before the first token.
        broken: Streams that ended because an engine failed behind the first token.
        aborts: Requests whose client has gone.
        errors: Requests that no engine served.
        prefills: Prompts that an engine of the role "prefill" has computed.
        prompt_tokens, cached_tokens: Tokens of prompts, and those that the chosen engine was known to hold.
        firsts: Seconds to the first token of streams.
        ends: Seconds to the end of answers.
        decisions: Number of choices by policy, and by whether the engine held a part of the prompt.
    """

    requests: int = 0
    retries: int = 0
    broken: int = 0
    aborts: int = 0
    errors: int = 0
    prefills: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    firsts: Times = field(default_factory=lambda: Times())
    ends: Times = field(default_factory=lambda: Times())
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)

    def chosen(self, policy: str, kind: str, tokens: int, cached: int) -> None:
        """Counts a choice."""
        self.decisions[policy, kind] += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached


COUNTERS = (
    ("vllm:num_incoming_requests", "Requests that generate.", "requests"),
    ("llmpy:router_retries", "Requests that another engine got because one failed before the first token.", "retries"),
    ("llmpy:router_broken_streams", "Streams that an engine's failure has ended.", "broken"),
    ("llmpy:router_aborts", "Requests whose client has gone.", "aborts"),
    ("llmpy:router_errors", "Requests that no engine served.", "errors"),
    ("llmpy:router_prefills", "Prompts that an engine of the role prefill has computed.", "prefills"),
    ("llmpy:router_prompt_tokens", "Tokens of the prompts of known length.", "prompt_tokens"),
    ("llmpy:router_prompt_tokens_held", "Of these, tokens that the chosen engine was known to hold.", "cached_tokens"),
)
GAUGES = (
    ("vllm:num_requests_running", "Requests of the router that an engine has.", lambda one: one.running),
    ("vllm:num_prefill_requests", "Of these, requests without a first token.", lambda one: one.waiting),
    ("vllm:num_decoding_requests", "Of these, requests with a first token.", lambda one: one.running - one.waiting),
    ("vllm:healthy_pods_total", "1 if the engine gets requests.", lambda one: int(one.problem is None)),
    ("llmpy:router_other_requests", "Requests of other clients that the engine told of.", lambda one: one.others),
    ("llmpy:router_held_blocks", "Blocks of the engine's cache, as its events tell.", lambda one: len(one.blocks)),
)


def text(router: Router) -> str:
    """All series in Prometheus' text format."""
    return "\n".join(_lines(router)) + "\n"


def _lines(router: Router) -> Iterator[str]:
    for name, told, attribute in COUNTERS:
        yield from _head(f"{name}_total", told, "counter")
        yield f"{name}_total {getattr(router.counts, attribute)}"
    yield from _head("vllm:routing_decisions_total", "Choices, by whether the engine held a part of the prompt.", "counter")
    for (policy, kind), number in sorted(router.counts.decisions.items()):
        yield f'vllm:routing_decisions_total{{algorithm="{policy}",decision="{kind}"}} {number}'
    yield from router.counts.firsts.lines("llmpy:router_time_to_first_token_seconds", "Seconds to the first token of streams.")
    yield from router.counts.ends.lines("vllm:request_latency_seconds", "Seconds to the end of answers.")
    for name, told, value in GAUGES:
        yield from _head(name, told, "gauge")
        for engine in router.engines:
            yield f'{name}{{server="{engine.url}",role="{engine.kind}"}} {value(engine)}'
    yield from _head("vllm:request_errors_total", "Failures of an engine.", "counter")
    for engine in router.engines:
        yield f'vllm:request_errors_total{{server="{engine.url}",role="{engine.kind}"}} {engine.failures}'


def _head(name: str, told: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"
