"""What the threads of the soak do: read in event loops, read with handles, pause and abort, train."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable

from soak_requests import Catalogue, Job, Received

from llmpy import AsyncEngine, QueueFullError, RequestFailedError, RequestOutputKind
from llmpy._feeds import RequestHandle, RequestStream

KINDS = list(RequestOutputKind)
PATIENCE = 90.0


class Stage:
    """What the threads of a round share.

    Args:
        engine: The engine.
        catalogue: What to ask for.
        end: When to stop, of the monotonic clock.
    """

    def __init__(self, engine: AsyncEngine, catalogue: Catalogue, end: float) -> None:
        self.engine = engine
        self.catalogue = catalogue
        self.end = end
        self.done: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.acting = 0
        """Threads that may still submit."""

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end or bool(self.failures)

    def act(self, part: Callable[[Stage, random.Random], None], rng: random.Random) -> None:
        """Runs a thread's part; the first failure ends the round."""
        try:
            part(self, rng)
        except BaseException as error:
            self.failures.append(error)

    def begin(self, job: Job, kind: RequestOutputKind) -> Received:
        return Received(self.catalogue, job, kind, self.engine.stats().weight_epoch)

    def close(self, received: Received, ended_early: bool) -> None:
        """Checks what a request gave."""
        received.check(self.engine.stats().weight_epoch, ended_early)
        self.done["tokens"] += received.n_tokens
        self.done["whole" if received.finished else "left"] += 1


# ---- threads with event loops ------------------------------------------------------------------------------------------


def read_in_loops(stage: Stage, rng: random.Random) -> None:
    """One event loop after another."""
    while not stage.is_over:
        asyncio.run(read_for_a_while(stage, rng, min(stage.end, time.monotonic() + rng.uniform(0.5, 4))))


async def read_for_a_while(stage: Stage, rng: random.Random, end: float) -> None:
    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.timeout(end - time.monotonic() + PATIENCE):
        while time.monotonic() < end and not stage.failures:
            while len(tasks) > 10:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.ensure_future(score(stage, rng) if rng.random() < 0.1 else read(stage, rng))
            tasks.add(task)
            task.add_done_callback(lambda task: finished(stage, tasks, task))
            await asyncio.sleep(rng.choice([0, 0, 0.002, 0.02]))
            if tasks and rng.random() < 0.08:
                rng.choice(list(tasks)).cancel()
                stage.done["cancelled"] += 1
        if tasks:
            await asyncio.wait(tasks)


def finished(stage: Stage, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        stage.failures.append(error)


async def submit(stage: Stage, rng: random.Random, job: Job, kind: RequestOutputKind) -> RequestStream:
    """Queues a request, behind a full queue when there is room."""
    salt = rng.choice([None, None, None, "salt"])
    while True:
        try:
            params = job.params.replace(output_kind=kind)
            stream = stage.engine.generate(job.prompt, params, priority=rng.randrange(3), cache_salt=salt)
        except QueueFullError:
            stage.done["refused"] += 1
            await stage.engine.wait_for_capacity()
        else:
            stage.done["samples"] += params.n
            return stream


async def read(stage: Stage, rng: random.Random) -> None:
    """Reads one stream in one of many ways."""
    job = rng.choice([job for job in stage.catalogue.jobs if not job.start])
    kind, how = rng.choice(KINDS), rng.choice(["await", "read", "read", "slow", "leave", "abort", "close", "drop", "hurry"])
    received = stage.begin(job, kind)
    stream = await submit(stage, rng, job, kind)
    stage.done[how] += 1
    limit = rng.randrange(1, 12)
    if how == "drop":
        return
    if how == "await":
        received.kind = RequestOutputKind.FINAL_ONLY
        received.add(await stream)
        return stage.close(received, True)
    if how == "hurry":
        with contextlib.suppress(TimeoutError):
            received.add(await asyncio.wait_for(anext(stream), rng.random() * 0.05))
        return stage.close(received, True)
    n = 0
    async for output in stream:
        received.add(output)
        n += 1
        if n == limit and how == "leave":
            break
        if n == limit and how == "abort":
            stream.abort()
        if n == limit and how == "close":
            stream.close()
        if how == "slow":
            await asyncio.sleep(rng.random() * 0.03)
    assert received.finished or how in ("leave", "close"), how
    stage.close(received, True)


async def score(stage: Stage, rng: random.Random) -> None:
    job = rng.choice([job for job in stage.catalogue.jobs if job.start])
    first = stage.engine.stats().weight_epoch
    try:
        pending = stage.engine.score(job.prompt, start=job.start, temperature=0.9, logprobs=2)
    except QueueFullError:
        stage.done["refused"] += 1
        return await stage.engine.wait_for_capacity()
    stage.done["samples"] += 1
    with contextlib.suppress(RequestFailedError):  # somebody aborted it
        found = await pending
        stage.catalogue.check_score(job, found, (first, stage.engine.stats().weight_epoch))
        stage.done["scores"] += 1


# ---- threads without -------------------------------------------------------------------------------------------------------


def use_handles(stage: Stage, rng: random.Random) -> None:
    """Requests without asyncio, a few at a time."""
    open_handles = []
    while not stage.is_over or open_handles:
        if not stage.is_over and len(open_handles) < 6:
            job, kind = rng.choice([job for job in stage.catalogue.jobs if not job.start]), rng.choice(KINDS)
            received = stage.begin(job, kind)
            try:
                params = job.params.replace(output_kind=kind)
                handle = stage.engine.add_request(job.prompt, params, priority=rng.randrange(3))
            except QueueFullError:
                stage.done["refused"] += 1
            else:
                stage.done["samples"] += job.params.n
                open_handles.append((handle, received, time.monotonic() + PATIENCE))
        if not open_handles:
            time.sleep(0.01)
            continue
        item = rng.choice(open_handles)
        if use_handle(stage, rng, *item):
            open_handles.remove(item)
        del item


def use_handle(stage: Stage, rng: random.Random, handle: RequestHandle, received: Received, patience: float) -> bool:
    """Looks at a handle; whether it is done with."""
    assert time.monotonic() < patience, f"{handle} hangs: {stage.engine.stats()}"
    how = rng.randrange(20)
    if how == 0:
        handle.abort()
    elif how == 1:
        handle.close()
        stage.done["closed handles"] += 1
        return True
    elif how < 4:
        output = None
        with contextlib.suppress(TimeoutError):
            output = handle.wait(rng.random() * 0.1)
        if output is not None:
            received.add(output)
            stage.close(received, True)
            return True
    else:
        output = handle.poll()
        if output is not None:
            received.add(output)
        if received.finished:
            stage.close(received, True)
            return True
        time.sleep(0.001)
    return False


# ---- one that disturbs -----------------------------------------------------------------------------------------------------


def pause_and_abort(stage: Stage, rng: random.Random) -> None:
    asyncio.run(disturb(stage, rng))


async def disturb(stage: Stage, rng: random.Random) -> None:
    engine = stage.engine
    while not stage.is_over:
        await asyncio.sleep(rng.random() * 0.3)
        what = rng.choice(["keep", "keep", "wait", "abort", "reset", "abort some", "abort all", "look"])
        stage.done[what] += 1
        if what in ("keep", "wait", "abort"):
            with contextlib.suppress(TimeoutError):
                await engine.pause(what, clear_cache=rng.random() < 0.3, timeout=5)
            if rng.random() < 0.2:
                await engine.pause("abort")
            await asyncio.sleep(rng.random() * 0.05)
            await engine.resume()
        elif what == "reset":
            await engine.reset_prefix_cache(rng.random() < 0.5)
        elif what == "abort some":
            names = list(engine._driver.named)
            await engine.abort(rng.sample(names, min(len(names), 3)))
        elif what == "abort all" and rng.random() < 0.3:
            for output in await engine.abort():
                assert output.finished and any(sample.finish_reason == "abort" for sample in output.outputs)
        else:
            engine.check()
            stats = engine.stats()
            assert stats.num_running <= 12 and stats.num_unfinished >= stats.num_waiting
            await engine.wait_for_requests_to_drain(timeout=rng.random() * 0.1)


# ---- one that trains -------------------------------------------------------------------------------------------------------


def train(stage: Stage, rng: random.Random) -> None:
    """New weights, sleeps and wakes."""
