"""The threads of the soak: they read in event loops, read with handles, pause and abort, and train."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from soak_requests import Catalogue, Job, Received, label

from llmpy import AsyncEngine, QueueFullError, RequestFailedError, RequestOutputKind, WeightUpdateError
from llmpy.engine.feeds import RequestHandle, RequestStream

KINDS = list(RequestOutputKind)
PATIENCE = 90.0


class Stage:
    """The shared state of a round's threads.

    Args:
        engine: The engine.
        catalogue: The requests.
        end: End of the round, in monotonic time.
    """

    def __init__(self, engine: AsyncEngine, catalogue: Catalogue, end: float) -> None:
        self.engine = engine
        self.catalogue = catalogue
        self.end = end
        self.done: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.acting = 0
        """Number of threads that may still submit."""

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end or bool(self.failures)

    def act(self, part: Callable[[Stage, random.Random], None], rng: random.Random) -> None:
        """Runs a thread's function; the first failure ends the round."""
        try:
            part(self, rng)
        except BaseException as error:
            self.failures.append(error)

    def begin(self, job: Job, kind: RequestOutputKind) -> Received:
        return Received(self.catalogue, job, kind, self.engine.weight_epoch)

    def close(self, received: Received, ended_early: bool) -> None:
        """Checks the result of a request."""
        received.check(self.engine.weight_epoch, ended_early)
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
    """Queues a request; if the queue is full, waits for room."""
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
    first = stage.engine.weight_epoch
    try:
        pending = stage.engine.score(job.prompt, start=job.start, temperature=0.9, logprobs=2)
    except QueueFullError:
        stage.done["refused"] += 1
        return await stage.engine.wait_for_capacity()
    stage.done["samples"] += 1
    with contextlib.suppress(RequestFailedError):  # another thread aborted it
        found = await pending
        stage.catalogue.check_score(job, found, (first, stage.engine.weight_epoch))
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
    """Polls a handle; returns whether it is finished."""
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
    asyncio.run(trainer(stage, rng))


async def trainer(stage: Stage, rng: random.Random) -> None:
    """Changes weights and sleeps. Only this thread does so, so the epoch determines the current weights."""
    engine = stage.engine
    deeds = [update] * 6 + [update_in_pieces, tear, refuse, sleep, sleep, sleep_and_update, doze]
    while not stage.is_over:
        await asyncio.sleep(rng.random() * 0.3)
        await rng.choice(deeds)(stage, rng)
    weights = stage.catalogue.weights[engine.weight_epoch % 2]
    assert await engine.compare_weights(weights)
    assert not engine.is_sleeping() and engine.weight_version == label(engine.weight_epoch)


def next_weights(stage: Stage, rng: random.Random) -> tuple[list[tuple[str, np.ndarray]], dict[str, Any], int]:
    """The other weights in random order, the kind of commit, and their epoch."""
    epoch = stage.engine.weight_epoch + 1
    pairs = list(stage.catalogue.weights[epoch % 2].items())
    rng.shuffle(pairs)
    how = rng.choice(["keep", "recompute"])
    stage.catalogue.recomputed.discard(epoch)  # the update was aborted
    if how == "recompute":
        stage.catalogue.recomputed.add(epoch)
    return pairs, {"version": label(epoch), "on_running": how}, epoch


async def update(stage: Stage, rng: random.Random) -> None:
    pairs, how, epoch = next_weights(stage, rng)
    report = await stage.engine.update_weights(pairs, **how)
    assert (report.epoch, report.version) == (epoch, how["version"]) and not report.missing and not report.repeated
    stage.done[f"update, {how['on_running']}"] += 1


async def update_in_pieces(stage: Stage, rng: random.Random) -> None:
    """Updates with some tensors written twice, and with pauses between tensors."""
    pairs, how, epoch = next_weights(stage, rng)
    async with stage.engine.begin_update(**how) as writing:
        for name, tensor in pairs:
            if rng.random() < 0.2:
                await writing.write(name, np.zeros_like(tensor))
            await writing.write(name, tensor)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.01)
    assert stage.engine.weight_epoch == epoch
    stage.done["update in pieces"] += 1


async def tear(stage: Stage, rng: random.Random) -> None:
    """Aborts an update after its first write: no request runs until a whole update."""
    pairs, how, _ = next_weights(stage, rng)
    writing = stage.engine.begin_update(**how)
    await writing.write(*pairs[0])
    await writing.abort()
    await asyncio.sleep(rng.random() * 0.02)
    before = stage.engine.stats().generation_tokens
    await asyncio.sleep(0.02)
    assert stage.engine.stats().generation_tokens == before
    await update(stage, rng)
    stage.done["torn"] += 1


async def refuse(stage: Stage, rng: random.Random) -> None:
    """A wrong tensor is refused before anything is written."""
    writing = stage.engine.begin_update()
    try:
        await writing.write(rng.choice(["model.norm.weight", "nobody"]), np.zeros(3, np.float32))
    except WeightUpdateError:
        stage.done["update refused"] += 1
    await writing.abort()


async def sleep(stage: Stage, rng: random.Random) -> None:
    """Sleeps and wakes with the same weights, all at once or in pieces."""
    level = rng.choice([0, 1, 1])
    await stage.engine.sleep(level, mode=rng.choice(["keep", "keep", "abort"]))
    assert stage.engine.is_sleeping()
    await asyncio.sleep(rng.random() * 0.02)
    parts: list[list[str] | None] = [["weights"], ["kv_cache"], ["scheduling"]]
    rng.shuffle(parts)
    for part in parts if rng.random() < 0.5 else [None]:
        await stage.engine.wake_up(part)
    stage.done[f"sleep {level}"] += 1


async def sleep_and_update(stage: Stage, rng: random.Random) -> None:
    """Sleeps and updates, like trainers that need all of the device's memory."""
    await stage.engine.sleep(2, mode=rng.choice(["keep", "abort"]))
    await asyncio.sleep(rng.random() * 0.02)
    await stage.engine.wake_up(["weights"])
    await update(stage, rng)
    await stage.engine.wake_up(["kv_cache"])
    await stage.engine.wake_up()
    stage.done["sleep 2"] += 1


async def doze(stage: Stage, rng: random.Random) -> None:
    """Frees only the pool while the weights are replaced."""
    await stage.engine.sleep(1, mode="keep", tags="kv_cache")
    await update(stage, rng)
    await stage.engine.wake_up()
    stage.done["sleep of the pool"] += 1
