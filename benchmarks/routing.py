"""How much a prefix-aware router is worth: replicas on paper, with the policy and the tables of `llmpy route`.

    python benchmarks/routing.py                             # 32 replicas, chats and documents
    python benchmarks/routing.py --replicas 1000 --requests 60000
    python benchmarks/routing.py --trace conversation_trace.jsonl --replicas 16 --rate 2

A replica is a model of Llama-3-8B on one H200: a step takes 3.5 ms, 27 us for each row of a prompt (220 ms for 8,192) and 50 us
for each running sequence; prompts are computed first come, first served, 2,048 rows a step; the cache has 400,000 tokens and
forgets the least recently used blocks. Traces, all times and lengths random from a seed:

    chat       conversations of 2.0 turns, 69.5 tokens a question and 214.5 an answer (means of LMSYS-Chat-1M, arXiv
               2309.11998), each behind one of 200 instructions of 1,000 tokens on average that are chosen by Zipf's law
    agent      conversations of 12 turns, 600 tokens a question (results of tools), 120 an answer, 2,000 an instruction
    documents  one of 2,000 documents of 8,000 tokens by Zipf's law, a question of 50 tokens, an answer of 100

`--trace FILE` takes lines of {"timestamp" (ms), "input_length", "output_length", "hash_ids"} with blocks of 512 tokens, as
Mooncake publishes them. Columns: share of prompt tokens found in caches; time to the first token; rows of the busiest replica
over the mean.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmpy.router import policy
from llmpy.router.policy import Chooser, Load, Prompt

BLOCK = 64
STEP_S, ROW_S, SEQUENCE_S = 3.5e-3, 220e-3 / 8192, 50e-6
CHUNK = 2048
CACHE_TOKENS = 400_000
INSTRUCTIONS, DOCUMENTS = 200, 2000


@dataclass
class Ask(Prompt):
    """A request of a trace.

    Args:
        at: Seconds when it comes.
        blocks: Its blocks by number; equal numbers mean equal beginnings.
        size: Tokens of the prompt.
        answer: Tokens of the answer.
        made: Blocks of prompt and answer that a later request may begin with.
        block: Tokens of a block.
    """

    at: float = 0.0
    blocks: Sequence[int] = ()
    size: int = 0
    answer: int = 0
    made: Sequence[int] = ()
    block: int = BLOCK

    @property
    def tokens(self) -> int:
        return self.size

    def keys(self, size: int) -> list[int]:
        return self.blocks  # type: ignore[return-value]


# ---- traces ----------------------------------------------------------------------------------------------------------


def zipf(rng: random.Random, n: int) -> Iterator[int]:
    """Numbers below n, the i-th with a probability of 1 / (i + 1)."""
    weights = list(itertools.accumulate(1 / (i + 1) for i in range(n)))
    while True:
        yield rng.choices(range(n), cum_weights=weights)[0]


def length(rng: random.Random, mean: float) -> int:
    """A length with a lognormal distribution (sigma 1)."""
    return 1 + int(rng.lognormvariate(0, 1) * mean / 1.6487)


class Text:
    """Blocks of texts that grow.

    Args:
        numbers: Gives new blocks.
    """

    def __init__(self, numbers: Iterator[int], blocks: Sequence[int] = (), size: int = 0) -> None:
        self._numbers, self.blocks, self.size = numbers, list(blocks), size

    def grown(self, tokens: int) -> Text:
        """The text with more behind it."""
        made = Text(self._numbers, self.blocks, self.size + tokens)
        made.blocks += itertools.islice(self._numbers, made.size // BLOCK - len(made.blocks))
        return made


def conversations(
    rng: random.Random, n: int, rate: float, turns: float, question: float, answer: float, instruction: float
) -> list[Ask]:
    """Chats that begin at random times; the next question comes 20 seconds on average behind an answer."""
    numbers = itertools.count()
    openings = [Text(numbers).grown(length(rng, instruction)) for _ in range(INSTRUCTIONS)]
    chosen, asks, begin = zipf(rng, INSTRUCTIONS), [], 0.0
    while len(asks) < n:
        begin += rng.expovariate(rate / turns)
        text, at = openings[next(chosen)], begin
        while True:
            text, out = text.grown(length(rng, question)), min(length(rng, answer), 2000)
            prompt, text = text, text.grown(out)
            asks.append(Ask(at=at, blocks=prompt.blocks, size=prompt.size, answer=out, made=text.blocks))
            if rng.random() < 1 / turns or text.size > 30_000:
                break
            at += out * 0.01 + rng.expovariate(1 / 20)
    return sorted(asks, key=lambda ask: ask.at)[:n]


def documents(rng: random.Random, n: int, rate: float) -> list[Ask]:
    """Single questions about documents."""
    numbers = itertools.count()
    texts, chosen = [Text(numbers).grown(length(rng, 8000)) for _ in range(DOCUMENTS)], zipf(rng, DOCUMENTS)
    asks, at = [], 0.0
    for _ in range(n):
        at += rng.expovariate(rate)
        prompt, out = texts[next(chosen)].grown(length(rng, 50)), min(length(rng, 100), 1000)
        asks.append(Ask(at=at, blocks=prompt.blocks, size=prompt.size, answer=out, made=prompt.blocks))
    return asks


def trace(name: str, n: int, rate: float, seed: int) -> list[Ask]:
    """A trace by its name: n requests, `rate` a second on average."""
    rng = random.Random(seed)
    if name == "chat":
        return conversations(rng, n, rate, 2.0, 69.5, 214.5, 1000)
    return conversations(rng, n, rate, 12.0, 600, 120, 2000) if name == "agent" else documents(rng, n, rate)


def read_trace(path: Path, n: int, rate: float) -> list[Ask]:
    """A trace of a file, its times stretched to `rate` requests a second."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[:n]]
    scale = len(lines) / rate / max(lines[-1]["timestamp"], 1)
    return [
        Ask(at=one["timestamp"] * scale, blocks=one["hash_ids"], size=one["input_length"], answer=one["output_length"],
            made=one["hash_ids"], block=512)
        for one in lines
    ]  # fmt: skip


# ---- replicas --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A request in a replica.

    Args:
        ask: The request.
        left: Rows of its prompt that are not computed.
        counted: Tokens that the router counts as pending.
    """

    ask: Ask
    left: int
    counted: int


@dataclass(eq=False)
class Replica(Load):
    """An engine on paper.

    Args:
        block: Tokens of a block.
    """

    block: int = BLOCK
    waiting: deque[Job] = field(default_factory=deque)
    decoding: list[tuple[int, int, Job]] = field(default_factory=list)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    events: deque[tuple[float, bool, int]] = field(default_factory=deque)
    clock: float = 0.0
    steps: int = 0
    version: int = 0
    rows: int = 0
    hits: int = 0

    def submit(self, ask: Ask, now: float, counted: int) -> None:
        """Takes a request; the part of its prompt that the cache holds need not be computed."""
        self._decode_until(now)
        found = 0
        for key in ask.blocks:
            if key not in self.cache:
                break
            self.cache.move_to_end(key)
            found += 1
        found = min(found * self.block, (ask.size - 1) // self.block * self.block)
        self.hits += found
        self.waiting.append(Job(ask, ask.size - found, counted))
        self.running += 1
        self.pending += counted
        self.version += 1

    def _decode_until(self, now: float) -> None:
        """Steps of running sequences up to a time that lies before their next end."""
        if not self.decoding and not self.waiting:
            self.clock = max(self.clock, now)
        elif not self.waiting and now > self.clock:
            n = int((now - self.clock) / self._step()) + 1
            n = min(n, self.decoding[0][0] - self.steps)
            self.steps += n
            self.clock += n * self._step()

    def _step(self) -> float:
        return STEP_S + SEQUENCE_S * len(self.decoding)

    def next_event(self) -> float | None:
        """When the next prompt's chunk, or the next sequence, ends; None: never."""
        if self.waiting:
            return self.clock + self._step() + ROW_S * min(CHUNK, self.waiting[0].left)
        return self.clock + (self.decoding[0][0] - self.steps) * self._step() if self.decoding else None

    def run(self, end: float) -> float | None:
        """Runs to the next event, at `end`; returns the seconds to the first token of a request that has got it."""
        first = None
        if self.waiting:
            job = self.waiting[0]
            rows = min(CHUNK, job.left)
            job.left -= rows
            self.rows += rows
            self.steps += 1
            if job.left == 0:
                self.waiting.popleft()
                self._keep(job.ask.blocks, end)
                self.pending -= job.counted
                first = end - job.ask.at
                heapq.heappush(self.decoding, (self.steps + job.ask.answer - 1, self.version, job))
        else:
            self.steps = self.decoding[0][0]
        self.clock = end
        while self.decoding and self.decoding[0][0] <= self.steps:
            self._keep(heapq.heappop(self.decoding)[2].ask.made, end)
            self.running -= 1
        self.version += 1
        return first

    def _keep(self, keys: Sequence[int], now: float) -> None:
        """Stores blocks; the least recently used ones go."""
        for key in keys:
            if key in self.cache:
                self.cache.move_to_end(key)
            else:
                self.cache[key] = None
                self.events.append((now, True, key))
        while len(self.cache) * self.block > CACHE_TOKENS:
            self.events.append((now, False, self.cache.popitem(last=False)[0]))

    def tell(self, now: float, lag: float) -> None:
        """The router learns the events that are older than the lag."""
        while self.events and self.events[0][0] + lag <= now:
            _, is_stored, key = self.events.popleft()
            (self.blocks.hold if is_stored else self.blocks.release)(key)


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to route.

    Args:
        name: Its name in the table.
        policy: Of `llmpy route`.
        lag: Seconds until events reach the router; None = it gets none.
        guesses: Whether sent prompts count as held.
    """

    name: str
    policy: str
    lag: float | None = None
    guesses: bool = True


WAYS = (
    Way("round-robin", "round-robin"),
    Way("load", "load"),
    Way("prefix, what was sent alone", "prefix"),
    Way("prefix, events alone, 1 s", "prefix", 1.0, guesses=False),
    Way("prefix, events alone, 100 ms", "prefix", 0.1, guesses=False),
    Way("prefix, both, 1 s", "prefix", 1.0),
    Way("prefix, both, 100 ms", "prefix", 0.1),
)


@dataclass(frozen=True)
class Result:
    """What a way gave.

    Args:
        hit_rate: Share of prompt tokens that caches held.
        firsts: Sorted seconds to the first token.
        spread: Rows of the busiest replica over the mean.
    """

    hit_rate: float
    firsts: list[float]
    spread: float

    def at(self, share: float) -> float:
        """A quantile of the times, in ms."""
        return 1e3 * self.firsts[min(int(share * len(self.firsts)), len(self.firsts) - 1)]

    def row(self, name: str) -> str:
        """A row of the table."""
        times = f"{1e3 * statistics.fmean(self.firsts):.0f} | {self.at(0.5):.0f} | {self.at(0.99):.0f}"
        return f"| {name} | {self.hit_rate:.1%} | {times} | {self.spread:.2f} |"


def simulate(asks: Sequence[Ask], num_replicas: int, way: Way) -> Result:
    """Routes a trace."""
    block = asks[0].block
    replicas = [Replica(block=block) for _ in range(num_replicas)]
    for one in replicas:
        one.blocks.size, one.blocks.has_events = block, way.lag is not None
    chooser, firsts, queue = Chooser(way.policy), [], []
    place = {id(one): i for i, one in enumerate(replicas)}

    def plan(i: int) -> None:
        if (at := replicas[i].next_event()) is not None:
            heapq.heappush(queue, (at, i, replicas[i].version))

    def catch_up(until: float) -> None:
        while queue and queue[0][0] <= until:
            at, i, version = heapq.heappop(queue)
            if replicas[i].version == version:
                first = replicas[i].run(at)
                firsts.extend([] if first is None else [first])
                plan(i)

    for ask in asks:
        catch_up(ask.at)
        if way.lag is not None:
            for one in replicas:
                if one.events:
                    one.tell(ask.at, way.lag)
        chosen = chooser.choose(replicas, ask, ask.at)
        assert chosen is not None
        counted = ask.size - chosen.cached(ask, ask.at)
        if way.policy == "prefix" and way.guesses:
            chosen.sends(ask, ask.at)
        chosen.submit(ask, ask.at, counted)
        plan(place[id(chosen)])
    catch_up(float("inf"))
    rows = [one.rows for one in replicas]
    hits = sum(one.hits for one in replicas)
    return Result(hits / sum(ask.size for ask in asks), sorted(firsts), max(rows) / statistics.fmean(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, help="requests a second for each replica (chat 20, agent 6, documents 4)")
    parser.add_argument("--traces", default="chat,agent,documents")
    parser.add_argument("--trace", type=Path, help="a file instead")
    parser.add_argument("--ways", default="", help="names begin with this")
    parser.add_argument("--running-tokens", type=int, default=policy.RUNNING_TOKENS, help="what a running request counts for")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    policy.RUNNING_TOKENS = given.running_tokens
    rates = {"chat": 20.0, "agent": 6.0, "documents": 4.0}
    for name in [str(given.trace)] if given.trace else given.traces.split(","):
        rate = (given.rate or rates.get(name, 1.0)) * given.replicas
        if given.trace:
            asks = read_trace(given.trace, given.requests, rate)
        else:
            asks = trace(name, given.requests, rate, given.seed)
        mean = statistics.fmean(ask.size for ask in asks)
        print(f"\n{name}: {len(asks)} requests of {mean:.0f} tokens on average, {rate:g} a second, {given.replicas} replicas\n")
        print("| policy | cached | mean ms | median ms | p99 ms | busiest |\n| --- | --- | --- | --- | --- | --- |")
        for way in WAYS:
            if way.name.startswith(given.ways):
                begun = time.perf_counter()
                result = simulate(asks, given.replicas, way)
                print(result.row(way.name), flush=True)
                print(f"{way.name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
