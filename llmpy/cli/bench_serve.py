"""`llmpy bench serve` and `bench sweep`: a server under load, measured by its clients."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..errors import ConfigError
from .bench_datasets import Ask, asks_of
from .http_client import HttpClient, HttpFailure

METRICS = ("ttft", "tpot", "itl", "e2el")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass
class Answer:
    """The client's measurement of one request. Times are seconds.

    Args:
        input_tokens: Tokens of the prompt; the server's count replaces it.
    """

    input_tokens: int
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    _rest: bytes = b""
    _chunks: int = 0

    def take(self, piece: bytes) -> None:
        """Reads the frames in a piece of the answer."""
        now = time.perf_counter()
        *frames, self._rest = (self._rest + piece).split(b"\n\n")
        for frame in frames:
            if frame.startswith(b"data: ") and frame != b"data: [DONE]":
                self._frame(json.loads(frame[6:]), now)

    def _frame(self, frame: dict[str, Any], now: float) -> None:
        if "error" in frame:
            self.error = str(frame["error"].get("message"))
        usage = frame.get("usage")
        if usage:
            self.input_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not frame.get("choices"):
            return
        if not self.first:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self._chunks += 1

    def end(self, status: int) -> None:
        """Ends the answer with its HTTP status."""
        if status != 200:
            self.error = f"status {status}: {self._rest[:200].decode(errors='replace')}"
        elif not self.first and self.error is None:
            self.error = "the answer had no token"
        self.output_tokens = self.output_tokens or self._chunks

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None if there is only one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def summary(answers: Sequence[Answer], goals: dict[str, float]) -> dict[str, Any]:
    """The figures of a run.

    Args:
        answers: All requests of the run.
        goals: Limits in milliseconds by metric (ttft, tpot, e2el) for good requests; {} = no goodput.
    """
    good = [answer for answer in answers if answer.error is None]
    seconds = max((a.last for a in good), default=0.0) - min((a.sent for a in good), default=0.0)
    inputs, outputs = sum(a.input_tokens for a in good), sum(a.output_tokens for a in good)
    values: dict[str, list[float]] = {
        "ttft": [a.ttft for a in good],
        "tpot": [a.tpot for a in good if a.tpot is not None],
        "itl": [gap for a in good for gap in a.gaps],
        "e2el": [a.e2el for a in good],
    }

    def per_second(count: int) -> float:
        return count / seconds if seconds else 0.0

    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": per_second(len(good)),
        "output_throughput": per_second(outputs),
        "total_token_throughput": per_second(inputs + outputs),
    }
    if goals:
        met = [all(1e3 * (getattr(a, name) or 0.0) <= goal for name, goal in goals.items()) for a in good]
        figures["request_goodput"] = per_second(sum(met))
    for name in METRICS:
        figures |= {f"{what}_{name}_ms": 1e3 * value for what, value in _spread(values[name]).items()}
    figures["prefix_cache_hit_rate"] = sum(a.cached_tokens for a in good) / inputs if inputs else 0.0
    return figures


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return dict.fromkeys(("mean", "median", "std", "p99"), 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    middle = statistics.median(values)
    return {"mean": statistics.fmean(values), "median": middle, "std": statistics.pstdev(values), "p99": cuts[98]}


def arrival_gaps(count: int, chosen: Namespace, seed: int) -> Iterator[float]:
    """Seconds before each request, drawn from a gamma distribution; with burstiness 1 requests form a Poisson process."""
    rng = random.Random(seed)
    for i in range(count):
        rate = chosen.request_rate
        if chosen.ramp_up_strategy is not None:
            rate = _ramp(chosen.ramp_up_strategy, chosen.ramp_up_start_rps, chosen.ramp_up_end_rps, i / max(1, count - 1))
        paced = i > 0 and rate != float("inf")
        yield rng.gammavariate(chosen.burstiness, 1 / (rate * chosen.burstiness)) if paced else 0.0


def _ramp(strategy: str, start: float, end: float, share: float) -> float:
    return start + (end - start) * share if strategy == "linear" else float(start * (end / start) ** share)


def _body(ask: Ask, model: str, chosen: Namespace) -> bytes:
    fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if chosen.endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        fields["prompt"] = ask.prompt
    fields |= {"max_tokens": ask.output_tokens, "temperature": chosen.temperature}
    if chosen.ignore_eos:
        fields["ignore_eos"] = True
    return json.dumps(fields).encode()


async def measure(client: HttpClient, model: str, asks: Sequence[Ask], chosen: Namespace, seed: int) -> list[Answer]:
    """Sends all requests and reads their answers."""
    limit = asyncio.Semaphore(chosen.max_concurrency or len(asks))

    names = chosen.lora_modules or [model]

    async def one(ask: Ask, name: str) -> Answer:
        body, answer = _body(ask, name, chosen), Answer(ask.input_tokens)
        async with limit:
            answer.sent = time.perf_counter()
            try:
                answer.end(await client.post(PATHS[chosen.endpoint], body, answer.take))
            except HttpFailure as error:
                answer.error = str(error)
        return answer

    tasks, due = [], time.perf_counter()
    for i, (ask, gap) in enumerate(zip(asks, arrival_gaps(len(asks), chosen, seed), strict=True)):
        due += gap
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(ask, names[i % len(names)])))
    return await asyncio.gather(*tasks)


async def _server(client: HttpClient, model: str | None) -> tuple[str, dict[str, Any]]:
    """The model's name, and the server's information about itself."""
    about: dict[str, Any] = {}
    for path in ("/version", "/server_info"):
        try:
            about |= await client.get(path)
        except HttpFailure as error:
            if error.status == 0:
                raise
    if model is None:
        model = (await client.get("/v1/models"))["data"][0]["id"]
    return model, about


def _goals(words: Sequence[str]) -> dict[str, float]:
    goals = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput: wanted ttft:MS, tpot:MS or e2el:MS, have {word!r}", option="goodput")
    return goals


def _client(chosen: Namespace) -> HttpClient:
    try:
        return HttpClient(chosen.base_url.rstrip("/").removesuffix("/v1"), os.environ.get("OPENAI_API_KEY"))
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}", option="base_url") from None


async def _run(chosen: Namespace, concurrency: int | None, rate: float) -> dict[str, Any]:
    """Runs one measurement with a new seed, so that it does not find cached blocks of an earlier run."""
    chosen = Namespace(**{**vars(chosen), "max_concurrency": concurrency, "request_rate": rate})
    seed = int.from_bytes(os.urandom(6), "big") if chosen.seed is None else hash((chosen.seed, concurrency, rate))
    client = _client(chosen)
    try:
        model, about = await _server(client, chosen.model)
        asks = await asks_of(chosen, client, seed)
        answers = await measure(client, model, asks, chosen, seed)
    except HttpFailure as error:
        raise ConfigError(f"{chosen.base_url}: {error}", option="base_url") from None
    finally:
        client.close()
    failures = [answer.error for answer in answers if answer.error is not None]
    if failures:
        print(f"llmpy: {len(failures)} requests failed, the first with: {failures[0]}", file=sys.stderr)
    known = {"model": model, "server": about, "client": f"llmpy {__version__}", "endpoint": chosen.endpoint}
    load = {"request_rate": "inf" if rate == float("inf") else rate, "max_concurrency": concurrency}
    sampling = {"temperature": chosen.temperature, "ignore_eos": chosen.ignore_eos, "dataset": chosen.dataset, "seed": seed}
    return {**known, **load, **sampling, **summary(answers, _goals(chosen.goodput))}


def serve(chosen: Namespace) -> dict[str, Any]:
    """Measures a running server; returns the figures and the command."""
    figures = asyncio.run(_run(chosen, chosen.max_concurrency, chosen.request_rate))
    return {**figures, "command": shlex.join(["llmpy", *sys.argv[1:]])}


def sweep(chosen: Namespace) -> list[dict[str, Any]]:
    """Measures each rate, or else each concurrency, until a goal is missed.

    Returns:
        The figures of each measurement; the last one is the first with more than 1 % of requests missing a goal.
    """
    rows: list[dict[str, Any]] = []
    loads = [(chosen.max_concurrency, rate) for rate in chosen.rates] or [(n, float("inf")) for n in chosen.concurrencies]
    for concurrency, rate in loads:
        rows.append(asyncio.run(_run(chosen, concurrency, rate)))
        if rows[-1].get("request_goodput", float("inf")) < 0.99 * rows[-1]["request_throughput"] or rows[-1]["failed"]:
            break
    return rows
