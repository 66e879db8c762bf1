"""Replicas: for any number of them results have the same bits, and every call acts on all."""

import asyncio
import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

import llmpy
from llmpy import (
    LLM,
    AsyncEngine,
    EngineAsleepError,
    EngineDeadError,
    QueueFullError,
    RequestFailedError,
    SamplingParams,
    UnsupportedError,
    WeightUpdateError,
    _core,
    hardware,
)
from llmpy.engine import backends, cores
from llmpy.engine.replicas.update import ReplicaUpdate

COUNTS = (1, 2, 3)
SHARED = "All of these prompts begin with one long text, so that blocks of the prefix cache can be shared by requests. " * 3


def options_of(device, count):
    """Options of an engine with replicas; on a GPU all of them share it."""
    ids = None if hardware.kind_of(device) == "cpu" else (0,) * count
    return {"device": device, "data_parallel_size": count, "device_ids": ids, "kv_cache_memory_bytes": "16MiB"}


@pytest.fixture
def open_replicas(device, long_model):
    """Opens an LLM or AsyncEngine with so many replicas."""
    made = []

    def make(count, kind=LLM, **options):
        made.append(kind(long_model, **{**options_of(device, count), **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


EXTRA = [{}, {"n": 3}, {"temperature": 0.0}, {"stop": ["e", "a"]}, {"top_p": 0.7, "prompt_logprobs": 1}]


def bits(output):
    """Everything in an output that could differ: ids, logprobs and alternatives, as bytes."""
    prompt = None if output.prompt_token_logprobs is None else output.prompt_token_logprobs.tobytes()
    return prompt, [
        (sample.token_ids, sample.finish_reason, sample.text, sample.token_logprobs.tobytes(), str(sample.logprobs))
        for sample in output.outputs
    ]


def requests():
    """Prompts and parameters: seeds given and not, several samples, alternatives, stops, grammars, shared beginnings."""
    base = {"max_tokens": 12, "logprobs": 2, "temperature": 1.0}
    found = []
    for index in range(24):
        prompt = SHARED + f"number {index}" if index % 3 else f"short {index}"
        found.append((prompt, base | EXTRA[index % len(EXTRA)] | ({"seed": index} if index % 2 else {})))
    found.append(("pick", base | {"structured_outputs": {"choice": ["yes", "no"]}}))
    return found


def test_results_do_not_depend_on_the_number(open_replicas):
    pytest.importorskip("llguidance")
    found = []
    for count in COUNTS:
        llm = open_replicas(count)
        prompts, params = zip(*requests(), strict=True)
        first, second = (llm.generate(list(prompts), [SamplingParams(**one) for one in params]) for _ in range(2))
        streamed = "".join(llm.stream(SHARED, temperature=1.0, max_tokens=9))
        scores = [score.token_logprobs.tobytes() for score in llm.score(list(prompts))]
        vectors = llm.embed(list(prompts)).numpy().tobytes()
        completed = {one.index: bits(one) for one in llm.as_completed(["a", "b", "c"], max_tokens=5, logprobs=1)}
        found.append(([*map(bits, first)], [*map(bits, second)], streamed, scores, vectors, completed))
        assert [output.seed for output in first] != [output.seed for output in second]
        shares = [stats.generation_tokens for stats in llm.replica_stats()]
        assert len(shares) == count and min(shares) > 0 and sum(shares) == llm.stats().generation_tokens
        assert llm.stats().prefix_cache_hits > 0
        llm.check()
    assert found[0] == found[1] == found[2]


def test_replicas_of_several_ranks(long_model):
    """Two replicas of two ranks: four parts of the machine."""
    prompts, found = [SHARED + str(number) for number in range(5)], []
    for ranks, count in ((1, 1), (2, 2)):
        options = {"device": "cpu", "data_parallel_size": count, "tensor_parallel_size": ranks, "kv_cache_memory_bytes": "8MiB"}
        with LLM(long_model, **options) as llm:
            found.append([*map(bits, llm.generate(prompts, max_tokens=6, logprobs=1))])
            devices = [(rank["rank"], rank.get("replica", 0)) for rank in llm.ranks()]
    assert found[0] == found[1] and devices == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_streams_do_not_depend_on_the_number(open_replicas):
    async def run(engine):
        async def read(stream):
            return [output.outputs[0].token_ids for output in [one async for one in stream]][-1], stream.request_id

        streams = [
            engine.generate(prompt, request_id=str(number), **how, detokenize=number % 2 == 0)
            for number, (prompt, how) in enumerate(requests()[:24])
            if "n" not in how and "stop" not in how
        ]
        score, vector = engine.score(SHARED), engine.embed(SHARED)
        streamed = await asyncio.gather(*map(read, streams))
        return streamed, (await score).token_logprobs.tobytes(), (await vector).outputs.embedding

    found = [asyncio.run(run(open_replicas(count, AsyncEngine))) for count in COUNTS]
    assert found[0][:2] == found[1][:2] == found[2][:2]
    assert np.array_equal(found[0][2], found[1][2]) and np.array_equal(found[0][2], found[2][2])


def test_a_prompt_goes_where_its_beginning_is_cached(open_replicas):
    llm = open_replicas(2)
    llm.generate(["something else", SHARED + "1"], max_tokens=1)
    assert [stats.prompt_tokens > 100 for stats in llm.replica_stats()] == [False, True]
    llm.generate(SHARED + "2", max_tokens=1)
    hits = [stats.prefix_cache_hits for stats in llm.replica_stats()]
    assert hits[0] == 0 and hits[1] > 100


def test_aborts_reach_every_replica(open_replicas):
    async def main(engine):
        await engine.pause("keep")
        streams = [engine.generate(f"prompt {number}", max_tokens=1000, ignore_eos=True) for number in range(6)]
        await engine.abort(streams[0].request_id)
        assert (await streams[0]).outputs[0].finish_reason == "abort"
        assert len(await engine.abort()) == 5
        assert {(await stream).outputs[0].finish_reason for stream in streams[1:]} == {"abort"}
        await engine.resume()
        assert await engine.wait_for_requests_to_drain(10)

    engine = open_replicas(3, AsyncEngine)
    asyncio.run(main(engine))
    llm = open_replicas(2)
    names = [llm.add_request(f"prompt {number}", max_tokens=1000, ignore_eos=True) for number in range(4)]
    llm.step()
    assert {output.request_id for output in llm.abort()} == set(names)
    dropped = llm.stream("again", max_tokens=1000, ignore_eos=True)
    next(dropped)
    dropped.close()
    assert llm.generate("x", max_tokens=2)[0].finished and llm.stats().num_unfinished == 0


def test_steps_of_queued_requests(open_replicas):
    outputs = []
    for count in COUNTS:
        llm, done = open_replicas(count), {}
        for number in range(5):
            llm.add_request(f"prompt {number}", request_id=str(number), max_tokens=7, logprobs=0)
        while llm.has_unfinished_requests():
            done |= {one.request_id: bits(one) for one in llm.step() if one.finished}
        outputs.append(done)
        assert {step.replica for step in llm.step_log()} == set(range(count))
    assert len(outputs[0]) == 5 and outputs[0] == outputs[1] == outputs[2]


def noise(llm, seed):
    """New weights for every name."""
    rng = np.random.default_rng(seed)
    return {info["name"]: rng.normal(0, 0.05, info["shape"]).astype(np.float32) for info in llm.weight_info()}


def test_updates_reach_every_replica(open_replicas):
    one, two = open_replicas(1), open_replicas(2)
    weights = noise(one, 1)
    reports = [llm.update_weights(weights, version="new") for llm in (one, two)]
    assert reports[0].num_tensors == reports[1].num_tensors and reports[0].epoch == reports[1].epoch == two.weight_epoch == 1
    assert one.weight_checksum() == two.weight_checksum() and two.compare_weights(weights)
    prompts = [f"prompt {number}" for number in range(6)]
    first, second = (llm.generate(prompts, max_tokens=6, logprobs=0) for llm in (one, two))
    assert [*map(bits, first)] == [*map(bits, second)] and second[5].weight_version == "new"
    with pytest.raises(WeightUpdateError), two.begin_update(partial=True) as update:
        update.write("model.norm.weight", np.zeros(3, np.float32))
    assert two.weight_checksum() == one.weight_checksum() and two.stats().states == ("serving",)
    with two.begin_update(partial=True) as update:
        update.write("model.norm.weight", np.ones_like(weights["model.norm.weight"]))
        assert {stats.states for stats in two.replica_stats()} == {("updating",)}
    assert two.weight_epoch == 2 and one.weight_checksum() != two.weight_checksum()


def test_updates_of_a_running_engine(open_replicas):
    async def main(engine):
        await engine.pause("keep")
        streams = [engine.generate(f"prompt {number}", max_tokens=60, ignore_eos=True) for number in range(4)]
        await engine.update_weights(noise(engine, 2), version="second")
        sums = await engine.weight_checksum()
        await engine.resume()
        outputs = [await stream for stream in streams]
        assert {output.outputs[0].weight_versions[-1].version for output in outputs} == {"second"}
        return sums

    first, second = (asyncio.run(main(open_replicas(count, AsyncEngine))) for count in (1, 2))
    assert first == second


def test_replicas_that_differ_are_found(open_replicas):
    llm = open_replicas(2)
    model, engine, name = llm._driver.model, llm._driver.engine, "model.norm.weight"
    update = cores.update_of(model.models[1], engine.engines[1], hardware.ordinal(str(llm.config.device)))
    update.write([(name, np.full(64, 2, np.float32))])
    update.commit(False)
    with pytest.raises(WeightUpdateError, match="the replicas hold different values"):
        llm.weight_checksum()
    assert llm.weight_checksum("model.embed_tokens.weight")


def test_weights_in_device_memory_need_one_device(open_replicas, monkeypatch):
    class OnDevice:
        def __dlpack_device__(self):
            return 2, 1

    llm = open_replicas(2)
    monkeypatch.setattr(llm._driver.model, "devices", (["cuda:0"], ["cuda:1"]))
    monkeypatch.setattr("llmpy.engine.replicas.update.ordinal", lambda device: -1)
    update = ReplicaUpdate(llm._driver.model, llm._driver.engine)
    for call in (
        lambda: update.write([("a", OnDevice())]),
        lambda: update.write_memory([], True),
        lambda: llm.init_weight_group("localhost", 1, 1, 2),
    ):
        with pytest.raises(UnsupportedError, match="data_parallel_size"):
            call()


def test_sleep_and_pause_of_all_replicas(open_replicas):
    llm = open_replicas(2)
    prompts = [f"prompt {number}" for number in range(4)]
    before = [*map(bits, llm.generate(prompts, max_tokens=4, temperature=0.0, logprobs=0))]
    llm.sleep()
    assert llm.is_sleeping() and {stats.sleep_level for stats in llm.replica_stats()} == {1}
    with pytest.raises(EngineAsleepError):
        llm.generate("x")
    llm.wake_up(["weights"])
    assert {stats.states for stats in llm.replica_stats()} == {("asleep",)}
    llm.wake_up()
    assert [*map(bits, llm.generate(prompts, max_tokens=4, temperature=0.0, logprobs=0))] == before
    names = [llm.add_request(prompt, max_tokens=5, ignore_eos=True) for prompt in prompts]
    llm.step()
    llm.pause("keep")
    late = llm.add_request("late", max_tokens=2, ignore_eos=True)
    assert llm.is_paused and llm.stats().num_unfinished == 5
    llm.resume()
    done = set()
    while llm.has_unfinished_requests():
        done |= {output.request_id for output in llm.step() if output.finished}
    assert done == {*names, late}


def test_a_sleep_that_fails_in_one_replica_wakes_the_others(open_replicas, monkeypatch):
    llm = open_replicas(2)

    class Full:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def sleep(self, level, parts):
            raise MemoryError("no room")

    engine = llm._driver.engine
    monkeypatch.setattr(engine, "engines", (engine.engines[0], Full(engine.engines[1])))
    with pytest.raises(MemoryError, match="no room"):
        llm.sleep()
    assert not llm.is_sleeping() and llm.stats().states == ("serving",)


def test_pauses_and_sleep_of_a_running_engine(open_replicas):
    async def main(engine):
        await engine.pause("keep")
        streams = [engine.generate(f"prompt {number}", max_tokens=50, ignore_eos=True) for number in range(4)]
        assert engine.is_paused and all(stats.num_unfinished for stats in engine.replica_stats())
        with pytest.raises(TimeoutError):
            await engine._driver.until(1, timeout=0.05)  # idle
        await engine.resume()
        await engine.pause("wait")
        assert all([(await stream).finished for stream in streams])
        await engine.resume()
        await engine.sleep(mode="wait")
        assert engine.is_sleeping()
        late = engine.generate("late", max_tokens=2)
        await engine.wake_up()
        assert (await late).finished and await engine.reset_prefix_cache()
        await engine.wait_for_capacity()
        engine.check_health()
        engine.check()
        assert await engine.wait_for_requests_to_drain(10)
        await engine.shutdown("drain")
        assert engine.closed

    asyncio.run(main(open_replicas(3, AsyncEngine)))


def test_the_queue_is_shared_out(open_replicas):
    async def main(engine):
        await engine.pause("keep")
        streams = [engine.generate(f"prompt {number}", max_tokens=2) for number in range(5)]
        with pytest.raises(QueueFullError, match="wanted fewer than 5 waiting requests, have 5; raise max_queued_requests"):
            engine.generate("one more")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.wait_for_capacity(), 0.05)
        waiter = asyncio.ensure_future(engine.wait_for_capacity())
        await engine.resume()
        await waiter
        assert all([(await stream).finished for stream in streams])

    asyncio.run(main(open_replicas(2, AsyncEngine, max_queued_requests=5)))


def test_handles_of_threads_without_a_loop(open_replicas):
    engine = open_replicas(3, AsyncEngine)
    engine._driver.thread.pause(_core.PAUSE_KEEP)  # requests that end at once would all go to replica 0
    handles = [engine.add_request(f"prompt {number}", max_tokens=3, ignore_eos=True) for number in range(6)]
    engine._driver.thread.pause(0)
    assert [len(handle.wait(60).outputs[0].token_ids) for handle in handles] == [3] * 6
    assert all(stats.finished["length"] == 2 for stats in engine.replica_stats()) and engine._driver.thread.wait(1, 0, 10)


def test_statistics_of_all_replicas(open_replicas):
    llm = open_replicas(2, kv_event_capacity=256)
    llm.generate([SHARED + "1", "x" + SHARED], max_tokens=3, ignore_eos=True)
    stats, each = llm.stats(), llm.replica_stats()
    assert stats.finished["length"] == 2 and stats.num_steps == sum(one.num_steps for one in each)
    assert stats.kv_blocks_total == sum(one.kv_blocks_total for one in each) and stats.num_dead_replicas == 0
    assert sum(llm.histograms()["output_tokens"].counts) == 2
    steps = llm.step_log()
    assert {step.replica for step in steps} == {0, 1} and len(steps) == stats.num_steps
    assert [step.start for step in steps] == sorted(step.start for step in steps) and len(llm.step_log(1)) == 1
    behind, events = llm.kv_events()
    assert {event.replica for event in events} == {0, 1} and [event.number for event in events] == list(range(behind))
    assert llm.kv_events(behind) == (behind, [])
    llm.reset_prefix_cache()
    llm.generate("y", max_tokens=1)
    llm._driver.engine.settle()
    assert {event.replica for event in llm.kv_events(behind)[1] if event.kind == 2} >= {0}
    ranks = llm.ranks()
    assert [rank["replica"] for rank in ranks] == [0, 1] and llm.get_world_size() == 1
    assert llm.memory()["weights"] == sum(rank["weights_bytes"] for rank in ranks)
    assert llm.tap("abc", llm.tap_names()[0])[0] and llm.program() and ", 2 replicas, weights" in repr(llm)
    engine, value = open_replicas(2, AsyncEngine), llm.tap_names()[0]
    assert asyncio.run(engine.tap("abc", value))[0][value].tobytes() == llm.tap("abc", value)[0][value].tobytes()
    with LLM.from_config(llm.config) as again:
        assert again.config == llm.config and len(again.replica_stats()) == 2


# ---- a replica that dies ---------------------------------------------------------------------------------------------

FAULTY = """
#define llmpy_backend plain_entry
#include "%s"
#undef llmpy_backend

static void *contexts[16];
static int n_contexts, dead = -1;
static struct backend faulty;

__attribute__((visibility("default"))) void kill_context(int index) { dead = index; }

static enum rc count_open(const struct backend_options *options, void **ctx, struct err *err)
{
    enum rc rc = plain_open(options, ctx, err);
    if (!rc)
        contexts[n_contexts++ %% 16] = *ctx;
    return rc;
}

static enum rc faulty_embed(void *ctx, const struct embed_args *args, struct err *err)
{
    if (dead >= 0 && ctx == contexts[dead])
        return host->err_set(err, RC_DEVICE, "launch failed");
    return embed(ctx, args, err);
}

__attribute__((visibility("default"))) const struct backend *llmpy_backend(const struct backend_host *given)
{
    const struct backend *table = plain_entry(given);
    if (!table)
        return NULL;
    faulty = *table;
    faulty.open = count_open;
    faulty.embed = faulty_embed;
    return &faulty;
}
"""
PLAIN = Path(__file__).parents[2] / "examples/backend/plain.c"


@pytest.fixture
def kill(tmp_path, monkeypatch):
    """A device "plain" of which a replica can be killed: `kill(index)`."""
    source, library = tmp_path / "faulty.c", tmp_path / "faulty.so"
    source.write_text(FAULTY % PLAIN)
    flags = ["-std=c11", "-O2", "-fPIC", "-shared", "-ffp-contract=off", f"-I{llmpy.get_include()}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    monkeypatch.setattr(backends, "library", lambda kind: str(library))
    monkeypatch.setattr(backends, "found", lambda: {"plain": []})
    return lambda index: ctypes.CDLL(str(library)).kill_context(index)


def open_plain(kind, tiny_model, count=2):
    return kind(tiny_model, device="plain:0", device_ids=(0,) * count, data_parallel_size=count, dtype="float32",
                kv_cache_memory_bytes="4MiB")  # fmt: skip


def test_a_dead_replica_of_an_llm(kill, tiny_model, caplog):
    with open_plain(LLM, tiny_model) as llm:
        prompts = [f"prompt {number}" for number in range(6)]
        want = [*map(bits, llm.generate(prompts, max_tokens=4, temperature=0.0, logprobs=0))]
        kill(1)
        outputs = llm.generate(prompts, max_tokens=4, temperature=0.0, logprobs=0, on_error="return")
        failed = [output for output in outputs if output.error is not None]
        assert len(failed) == 3 and all(isinstance(output.error, EngineDeadError) for output in failed)
        assert "replica 1 is dead" in str(failed[0].error) and "launch failed" in str(failed[0].error)
        assert [bits(output) for output in outputs if output.error is None] == want[::2]
        assert "replica 1 is dead" in caplog.text and "1 of 2 replicas go on" in caplog.text
        assert [*map(bits, llm.generate(prompts, max_tokens=4, temperature=0.0, logprobs=0))] == want
        assert llm.stats().num_dead_replicas == 1 and llm.replica_stats()[1].states == ("dead",)
        assert llm.stats().states == ("serving",) and llm.weight_epoch == 0
        llm.sleep(0)
        llm.wake_up()
        llm.check()
        assert llm.reset_prefix_cache()
        kill(0)
        with pytest.raises(RequestFailedError, match="replica 0 is dead"):
            llm.generate("x")
        with pytest.raises(EngineDeadError):
            llm.generate("x")


def test_a_dead_replica_of_an_async_engine(kill, tiny_model):
    async def main(engine):
        long = {"max_tokens": 150, "ignore_eos": True}
        await engine.pause("keep")
        streams = [engine.generate(f"prompt {number}", **long) for number in range(4)]
        kill(0)
        await engine.resume()
        results = await asyncio.gather(*[_await(stream) for stream in streams], return_exceptions=True)
        dead = [result for result in results if isinstance(result, EngineDeadError)]
        assert len(dead) == 2 and all("replica 0 is dead" in str(error) for error in dead)
        assert all(result.finished for result in results if not isinstance(result, Exception))
        assert engine.is_running and not engine.errored and engine.dead_error is None
        engine.check_health()
        assert engine.stats().num_dead_replicas == 1 and engine.replica_stats()[0].states == ("dead",)
        assert all([(await engine.generate(f"p {number}", max_tokens=2)).finished for number in range(3)])
        await engine.pause("wait")
        await engine.resume()
        await engine.sleep(0)
        await engine.wake_up()
        engine.check()
        assert await engine.reset_prefix_cache() and (await engine.generate("again", max_tokens=2)).finished
        kill(1)
        with pytest.raises(EngineDeadError):
            await engine.generate("x")
        assert engine.errored and engine.stats().states == ("dead",)
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            engine.generate("x")
        await engine.shutdown()

    asyncio.run(main(open_plain(AsyncEngine, tiny_model)))


async def _await(stream):
    return await stream


def test_devices_that_are_not_there_are_an_error(kill, tiny_model):
    with pytest.raises(llmpy.ConfigError, match=r"data_parallel_size=2: wanted so many devices like plain:0 .*, have 1"):
        LLM(tiny_model, device="plain:0", data_parallel_size=2)
