"""Sleep and wake of LLM and AsyncEngine; pauses and aborts of LLM."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from async_help import PARAMS, bits, drain, read, run, wait_until_free

from llmpy import (
    LLM,
    AsyncEngine,
    DeviceMemoryError,
    EngineAsleepError,
    EngineBusyError,
    EngineClosedError,
    InvalidRequestError,
    RequestOutputKind,
    UnsupportedError,
    WeightsMissingError,
    _core,
)

PROMPTS = [[5, 6, 7, 8, 9] * 5, [11, 12, 13], [5, 6, 7, 8, 9] * 5]
QUEUED = PARAMS.replace(max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY)


def all_bits(outputs):
    return [bits(sample) for output in outputs for sample in output.outputs]


def queue(llm, steps, prompts=PROMPTS):
    """Requests that have run for some steps."""
    names = [llm.add_request(prompt, QUEUED) for prompt in prompts]
    done = [output for _ in range(steps) for output in llm.step()]
    assert not done
    return names


@pytest.mark.parametrize("tags", [None, ["weights"], "kv_cache", ["kv_cache", "weights"]])
def test_level_one_changes_no_bit(open_long, tags):
    llm = open_long()
    before, memory = all_bits(llm.generate(PROMPTS, PARAMS)), llm.memory()
    score = llm.score(PROMPTS)[0].token_logprobs.tobytes()
    steps = llm.stats().num_replayed_steps
    for _ in range(3):
        llm.sleep(tags=tags)
        assert llm.is_sleeping() and llm.stats().sleep_level == 1
        for call in (lambda: llm.generate(PROMPTS, PARAMS), lambda: llm.score(PROMPTS)):
            with pytest.raises(EngineAsleepError, match=r"^engine sleeps at level 1; call wake_up\(\)$"):
                call()
        llm.sleep(tags=tags)
        assert (llm.memory()["kv"] == 0) == (tags != ["weights"])
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping() and llm.stats().sleep_level == 0
        assert all_bits(llm.generate(PROMPTS, PARAMS)) == before
        assert llm.score(PROMPTS)[0].token_logprobs.tobytes() == score
    held = llm.memory()
    assert held["weights"] == memory["weights"] and held["kv"] == memory["kv"] and held["graphs"] == memory["graphs"]
    assert llm.stats().allocations_since_warmup == 0
    if llm.config.device != "cpu":
        assert llm.stats().num_replayed_steps > steps


def test_tags_wake_in_any_order(open_long):
    llm = open_long()
    before = all_bits(llm.generate(PROMPTS, PARAMS))
    for first, then in (("weights", ["kv_cache"]), (["kv_cache"], ["weights"]), ("scheduling", None)):
        llm.sleep()
        llm.wake_up(first)
        assert llm.is_sleeping()
        with pytest.raises(EngineAsleepError):
            llm.generate(PROMPTS, PARAMS)
        llm.wake_up(then)
        assert not llm.is_sleeping()
        assert all_bits(llm.generate(PROMPTS, PARAMS)) == before
    llm.sleep(0)
    assert llm.is_sleeping() and llm.memory()["kv"] > 0
    with pytest.raises(EngineAsleepError, match="level 0"):
        llm.generate(PROMPTS, PARAMS)
    llm.wake_up(["weights", "kv_cache"])  # they are awake
    assert llm.is_sleeping()
    llm.wake_up(["scheduling"])
    assert all_bits(llm.generate(PROMPTS, PARAMS)) == before


def test_bad_calls_are_refused(open_long):
    llm = open_long()
    with pytest.raises(InvalidRequestError, match=r"level must be 0, 1 or 2, got 3\.$"):
        llm.sleep(3)
    with pytest.raises(InvalidRequestError, match=r"mode must be 'abort', 'wait' or 'keep', got 'stop'\.$"):
        llm.sleep(1, "stop")
    with pytest.raises(InvalidRequestError, match=r"tags must be among 'weights', 'kv_cache', 'scheduling', got 'kv'\.$"):
        llm.sleep(tags=["kv"])
    with pytest.raises(InvalidRequestError, match="tags must be among"):
        llm.wake_up("all")
    assert not llm.is_sleeping()


def test_level_two_drops_the_weights(open_tiny):
    llm = open_tiny()
    before = llm.memory()
    llm.generate(PROMPTS, PARAMS)
    for _ in range(2):  # the second time from level 1
        llm.sleep(2)
        assert llm.memory()["weights"] == llm.memory()["kv"] == llm.memory()["pinned_host"] - before["pinned_host"] == 0
        with pytest.raises(EngineAsleepError, match=r"^engine sleeps at level 2; call wake_up\(\)$"):
            llm.generate(PROMPTS, PARAMS)
        llm.sleep(1)  # does not bring them back
        llm.wake_up()
        assert llm.memory()["weights"] == before["weights"] and not llm.is_sleeping()
        for call in (lambda: llm.generate(PROMPTS, PARAMS), lambda: llm.score(PROMPTS), lambda: next(llm.stream([5], PARAMS))):
            with pytest.raises(WeightsMissingError, match=r"^weights are incomplete since epoch 0; commit a full update$"):
                call()
        llm.sleep(1)
        if llm.config.device != "cpu":
            assert llm.memory()["pinned_host"] > before["pinned_host"]


def test_an_update_after_level_two(open_tiny, tiny_model):
    """The usual order: wake the weights, write them, wake the cache."""
    llm = open_tiny()
    before = all_bits(llm.generate(PROMPTS, PARAMS))
    for epoch in range(1, 4):
        llm.sleep(2 if epoch < 3 else 1)
        with pytest.raises(EngineAsleepError, match="engine sleeps at level"):
            llm.update_weights(str(tiny_model))
        for call in (llm.begin_update, llm.weight_checksum):
            with pytest.raises(EngineAsleepError):
                call()
        llm.wake_up(["weights"])
        llm.update_weights(str(tiny_model), version=f"step {epoch}")
        assert llm.is_sleeping() and llm.memory()["kv"] == 0
        llm.wake_up(["kv_cache"])
        outputs = llm.generate(PROMPTS, PARAMS)
        assert all_bits(outputs) == before and llm.weight_epoch == epoch
        assert {tuple(span) for output in outputs for span in output.outputs[0].weight_versions} == {
            (0, PARAMS.max_tokens, f"step {epoch}", epoch)
        }
    with llm.begin_update(partial=True) as update:
        llm.sleep(1, tags=["kv_cache"])
        with pytest.raises(EngineBusyError):
            llm.begin_update()
        update.write("model.norm.weight", np.ones(64, np.float32))
        with pytest.raises(EngineBusyError, match="being updated"):
            llm.sleep()
        llm.wake_up()
        with pytest.raises(EngineBusyError, match="being updated"):
            llm.generate(PROMPTS, PARAMS)
    assert all_bits(llm.generate(PROMPTS, PARAMS)) != before


def test_memory_goes_back_to_the_system(open_tiny, write_model, tmp_path, device):
    if device != "cpu":
        pytest.skip("the resident memory of a process is the processor's")
    path = write_model(tmp_path, hidden_size=1024, num_attention_heads=64, intermediate_size=4096, max_position_embeddings=4096)
    llm = open_tiny(path, kv_cache_memory_bytes="64MiB")
    llm.generate([[i % 300 for i in range(2000)]] * 2, PARAMS)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    weights, full = llm.memory()["weights"], resident()
    assert weights > 100 << 20
    llm.sleep(2)
    assert full - resident() > weights + (4 << 20)
    llm.wake_up()
    assert full - resident() > weights  # touched only by the update


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_modes_of_a_sleep(open_long, mode):
    llm = open_long()
    whole = all_bits(llm.generate(PROMPTS, QUEUED))
    names = queue(llm, 9)
    llm.sleep(1, mode)
    if mode == "abort":
        outputs = {output.request_id: output for output in llm.step()}
        parts = [outputs[name].outputs[0] for name in names]
        assert all(part.finish_reason == "abort" and 0 < len(part.token_ids) < 60 for part in parts)
        assert [ids[: len(part.token_ids) * 4] for (ids, *_), part in zip(whole, parts, strict=True)] == [
            part.token_ids_array.tobytes() for part in parts
        ]
        assert not llm.has_unfinished_requests() and llm.step() == []
    elif mode == "wait":
        outputs = {output.request_id: output for output in llm.step()}
        assert all_bits(outputs[name] for name in names) == whole
    else:
        with pytest.raises(EngineAsleepError):
            llm.step()
    late = llm.add_request(PROMPTS[0], QUEUED)
    assert llm.has_unfinished_requests()
    llm.wake_up()
    outputs = drain(llm)
    assert bits(outputs[late].outputs[0]) == whole[0]
    if mode == "keep":
        assert all_bits(outputs[name] for name in names) == whole
        assert outputs[names[0]].metrics.num_preemptions == 1
    llm.check()


def test_a_stream_over_a_sleep(open_long):
    llm = open_long()
    whole = "".join(llm.stream(PROMPTS[0], PARAMS))
    stream = llm.stream(PROMPTS[0], PARAMS)
    text = next(stream)
    llm.sleep(1, "keep")
    with pytest.raises(EngineAsleepError):
        next(stream)
    llm.wake_up()
    stream = llm.stream(PROMPTS[0], PARAMS)
    text = next(stream)
    llm.sleep(1, "abort")
    last = list(stream)
    assert last[-1].finish_reason == "abort" and whole.startswith(text + "".join(last))
    llm.wake_up()
    assert "".join(llm.stream(PROMPTS[0], PARAMS)) == whole


def test_memory_that_is_short_changes_nothing(open_tiny):
    llm = open_tiny(device="cpu")
    before = all_bits(llm.generate(PROMPTS, PARAMS))
    llm.sleep()
    for n in range(3):
        _core.fail_allocation_after(n)
        try:
            with pytest.raises(DeviceMemoryError):
                llm.wake_up()
        finally:
            _core.fail_allocation_after(-1)
        assert llm.is_sleeping()
        with pytest.raises(EngineAsleepError):
            llm.generate(PROMPTS, PARAMS)
    llm.wake_up()
    assert all_bits(llm.generate(PROMPTS, PARAMS)) == before


@pytest.mark.alone
def test_a_device_that_is_full(open_tiny, cuda):
    """Another process took the memory: the engine stays asleep, and can wake when the memory is free again."""
    llm = open_tiny(device=cuda, kv_cache_memory_bytes="4GiB")
    before = all_bits(llm.generate(PROMPTS, PARAMS))
    for tags in (None, ["kv_cache"]):
        llm.sleep(1, tags=tags)
        other = open_tiny(device=cuda, kv_cache_memory_bytes=llm.memory()["device_free"] - (3 << 30))
        with pytest.raises(DeviceMemoryError, match="the KV cache") as caught:
            llm.wake_up()
        assert caught.value.wanted_bytes > 3.9 * (1 << 30) > caught.value.free_bytes
        assert llm.is_sleeping() and llm.memory()["kv"] == 0 and (llm.memory()["weights"] == 0) == (tags is None)
        with pytest.raises(EngineAsleepError):
            llm.generate(PROMPTS, PARAMS)
        other.close()
        llm.wake_up()
        assert all_bits(llm.generate(PROMPTS, PARAMS)) == before


@pytest.mark.alone
def test_others_see_the_memory(open_tiny, cuda):
    """Another process sees the freed memory of the device."""
    code = """
import sys
from llmpy import hardware
for line in sys.stdin:
    print(hardware.memory_bytes(line.strip())[1], flush=True)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def free():
        other.stdin.write(cuda + "\n")
        other.stdin.flush()
        return int(other.stdout.readline())

    with other:
        free()
        llm = open_tiny(device=cuda, kv_cache_memory_bytes="4GiB")
        llm.generate(PROMPTS, PARAMS)
        held, awake = llm.memory(), free()
        llm.sleep(2)
        assert free() - awake == held["weights"] + held["kv"]
        llm.wake_up(["weights"])
        assert free() - awake == held["kv"]
        llm.wake_up()
        assert free() == awake
        other.stdin.close()


def test_pauses_of_an_llm(open_long):
    llm = open_long()
    whole = all_bits(llm.generate(PROMPTS, QUEUED))
    names = queue(llm, 5)
    llm.pause("keep")
    assert llm.is_paused and llm.step() == [] and llm.step() == []
    late = llm.add_request(PROMPTS[1], QUEUED)
    for call in (lambda: llm.generate(PROMPTS), lambda: llm.score(PROMPTS), lambda: next(llm.stream([5]))):
        with pytest.raises(EngineAsleepError, match=r"^engine is paused; call resume\(\)$"):
            call()
    llm.pause("wait")  # changes nothing
    assert llm.step() == []
    llm.resume()
    llm.resume()
    outputs = drain(llm)
    assert all_bits(outputs[name] for name in [*names, late]) == [*whole, whole[1]]
    names = queue(llm, 5)
    with pytest.raises(TimeoutError):
        llm.pause("wait", timeout=0)
    late = llm.add_request(PROMPTS[1], QUEUED)
    llm.pause("wait", clear_cache=True)
    outputs = {output.request_id: output for output in llm.step()}
    assert all_bits(outputs[name] for name in names) == whole and late not in outputs
    llm.pause("abort")
    [output] = llm.step()
    assert output.request_id == late and output.outputs[0].finish_reason == "abort" and not output.outputs[0].token_ids
    llm.resume()
    assert not llm.is_paused and all_bits(llm.generate(PROMPTS, QUEUED)) == whole


def test_abort_of_an_llm(open_long):
    llm = open_long()
    whole = all_bits(llm.generate(PROMPTS, QUEUED))
    names = queue(llm, 7)
    [first] = llm.abort(names[0])
    assert first.request_id == names[0] and first.outputs[0].finish_reason == "abort"
    assert {output.request_id for output in llm.abort()} == set(names[1:])
    assert llm.abort() == [] == llm.abort(["nobody"])
    assert {output.request_id for output in llm.step()} == set(names)
    partial = first.outputs[0]
    rest = llm.generate({"prompt_token_ids": PROMPTS[0], "output_token_ids": partial.token_ids}, QUEUED)[0].outputs[0]
    joined = partial.token_ids_array.tobytes() + rest.token_ids_array.tobytes()
    assert joined == whole[0][0] and partial.sampled.raw.tobytes() + rest.sampled.raw.tobytes() == whole[0][1]


def refusals(llm):
    for call in (llm.sleep, llm.wake_up, llm.pause, llm.resume, llm.abort):
        with pytest.raises(EngineBusyError) as caught:
            call()
        yield str(caught.value)


def test_another_thread_is_refused(open_long):
    llm = open_long()
    with llm._driver.driving():
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(refusals(llm)))
        thread.start()
        thread.join()
    assert seen == ["engine is in use by another thread; use AsyncEngine, which serves several, or a lock"] * 5
    assert not llm.is_sleeping()


# ---- AsyncEngine


def test_requests_wait_while_the_engine_sleeps(open_async):
    engine = open_async()

    async def main():
        whole = [bits((await engine.generate(prompt, PARAMS)).outputs[0]) for prompt in PROMPTS]
        for level, mode, tags in ((1, "abort", None), (0, "keep", None), (1, "wait", ["kv_cache"]), (1, "keep", ["weights"])):
            await engine.sleep(level, mode, tags)
            await engine.sleep(level, mode, tags)
            assert engine.is_sleeping() and not engine.is_paused and engine.stats().sleep_level == level
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            made = engine.stats().generation_tokens
            await asyncio.sleep(0.02)
            assert engine.stats().generation_tokens == made
            assert engine.stats().num_unfinished == 3 and engine.stats().num_running == 0
            gone = await engine.abort(streams[1].request_id)
            assert [output.outputs[0].finish_reason for output in gone] == ["abort"]
            await engine.wake_up()
            assert [bits((await streams[i]).outputs[0]) for i in (0, 2)] == [whole[0], whole[2]]

    run(main())
    wait_until_free(engine)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_modes_of_an_async_sleep(open_async, mode):
    engine = open_async()

    async def main():
        whole = [bits((await engine.generate(prompt, QUEUED)).outputs[0]) for prompt in PROMPTS]
        made = engine.stats().generation_tokens
        streams = [engine.generate(prompt, QUEUED) for prompt in PROMPTS]
        while engine.stats().generation_tokens == made:
            await asyncio.sleep(0)
        await engine.sleep(1, mode)
        late = engine.generate(PROMPTS[0], QUEUED)
        if mode != "keep":
            outputs = [await stream for stream in streams]
            if mode == "wait":
                assert [bits(output.outputs[0]) for output in outputs] == whole
            else:
                for output, (ids, *_) in zip(outputs, whole, strict=True):
                    assert ids.startswith(output.outputs[0].token_ids_array.tobytes())
        await engine.wake_up(["kv_cache"])
        assert engine.is_sleeping()
        await engine.wake_up(["weights"])
        assert not engine.is_sleeping() and bits((await late).outputs[0]) == whole[0]
        if mode == "keep":
            assert [bits((await stream).outputs[0]) for stream in streams] == whole

    run(main())
    wait_until_free(engine)


def test_a_pause_outlives_a_sleep(open_async):
    engine = open_async()

    async def main():
        await engine.pause("keep")
        await engine.sleep()
        await engine.wake_up()
        assert engine.is_paused and not engine.is_sleeping()
        stream = engine.generate(PROMPTS[0], PARAMS)
        await asyncio.sleep(0.02)
        assert engine.stats().num_running == 0
        await engine.sleep(1, "keep")
        await engine.resume()  # lifts no sleep
        await asyncio.sleep(0.02)
        assert engine.is_sleeping() and engine.stats().num_running == 0
        await engine.wake_up()
        assert (await stream).outputs[0].finish_reason == "length"

    run(main())
    wait_until_free(engine)


def test_requests_wait_for_missing_weights(open_async):
    engine = open_async(fresh=True)

    async def main():
        async for _ in engine.generate(PROMPTS[0], PARAMS):
            break
        await engine.sleep(2)
        await engine.wake_up()
        stream = engine.generate(PROMPTS[0], PARAMS)
        await asyncio.sleep(0.03)
        assert engine.stats().num_running == 0 and not engine.is_sleeping()
        await engine.shutdown("drain")
        assert (await stream).outputs[0].finish_reason == "abort"
        with pytest.raises(EngineClosedError):
            await engine.sleep()

    run(main())


def test_an_async_update_after_level_two(open_async, long_model):
    engine = open_async(fresh=True)

    async def main():
        whole = bits((await engine.generate(PROMPTS[0], QUEUED)).outputs[0])
        made = engine.stats().generation_tokens
        stream = engine.generate(PROMPTS[0], QUEUED)
        while engine.stats().generation_tokens < made + 5:
            await asyncio.sleep(0)
        await engine.sleep(2, "keep")
        await engine.wake_up(["weights"])
        late = engine.generate(PROMPTS[0], QUEUED)
        await engine.update_weights(str(long_model), version="again")
        await engine.wake_up(["kv_cache"])
        first, second = (await stream).outputs[0], (await late).outputs[0]
        assert bits(first) == bits(second) == whole
        assert [span.epoch for span in first.weight_versions] in ([0, 1], [0])
        assert [tuple(span) for span in second.weight_versions] == [(0, 60, "again", 1)]

    run(main())


def test_cancelled_sleeps_leave_no_pause(open_async):
    engine = open_async()

    async def main():
        streams = [engine.generate(prompt, QUEUED.replace(max_tokens=2000)) for prompt in PROMPTS]
        sleeping = asyncio.create_task(engine.sleep(1, "wait"))
        await asyncio.sleep(0)  # it has begun to wait
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        late = engine.generate(PROMPTS[1], PARAMS)
        assert len((await late).outputs[0].token_ids) == PARAMS.max_tokens
        for stream in streams:
            assert len((await stream).outputs[0].token_ids) == 2000

    run(main())
    wait_until_free(engine)


def test_deltas_go_on_over_a_sleep(open_async):
    engine = open_async()
    params = PARAMS.replace(max_tokens=200, output_kind=RequestOutputKind.DELTA)

    async def main():
        whole = (await engine.generate(PROMPTS[0], params.replace(output_kind=RequestOutputKind.FINAL_ONLY))).outputs[0]
        reading = asyncio.create_task(read(engine.generate(PROMPTS[0], params)))
        for _ in range(4):
            await asyncio.sleep(0.01)
            await engine.sleep(1, "keep")
            await engine.wake_up()
        parts = [output.outputs[0] for output in await reading]
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        spans = [span for part in parts for span in part.weight_versions]
        assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]] and spans[-1].end == 200

    run(main())


# ---- what a level may be -------------------------------------------------------------------------------------------------

STAYS = r"^sleep\(level=2\) drops the weights, and no update could bring them back: .*; or use level=1$"


def test_weights_that_could_not_come_back_stay(demo_model):
    """A quantised GGUF file of a Llama: its weights cannot be updated, so level 2 could not be undone and is refused."""
    with LLM(demo_model, device="cpu", max_model_len=256, kv_cache_memory_bytes="32MiB") as llm:
        before = llm.generate("The capital of France", max_tokens=4, temperature=0).token_ids
        with pytest.raises(UnsupportedError, match=STAYS):
            llm.sleep(2)
        assert not llm.is_sleeping() and repr(llm).endswith("idle)")
        llm.sleep(2, tags="kv_cache")
        llm.wake_up()
        llm.sleep(1)
        assert repr(llm).endswith("asleep at level 1)")
        with pytest.raises(UnsupportedError, match=STAYS):
            llm.sleep(2)
        llm.wake_up()
        assert llm.generate("The capital of France", max_tokens=4, temperature=0).token_ids == before

    async def main():
        async with AsyncEngine.create(demo_model, device="cpu", max_model_len=256, kv_cache_memory_bytes="32MiB") as engine:
            with pytest.raises(UnsupportedError, match=STAYS):
                await engine.sleep(2)
            assert not engine.is_sleeping() and not engine.is_paused
            engine.check_health()
            assert (await engine.generate("The capital of France", max_tokens=4, temperature=0)).finished

    asyncio.run(main())


def test_the_line_of_an_engine_tells_its_state(open_tiny, tiny_model):
    llm = open_tiny()
    llm.pause()
    assert repr(llm).endswith(", paused)") and ", paused)" in llm._repr_html_() and llm.stats().states == ("paused",)
    llm.resume()
    llm.sleep(2)
    assert repr(llm).endswith(", asleep at level 2, weights missing)") and "weights missing)" in llm._repr_html_()
    llm.wake_up()
    assert repr(llm).endswith(", weights missing)") and llm.stats().states == ("weights missing",)
    llm.update_weights(tiny_model)
    assert repr(llm).endswith(", idle)") and llm.stats().states == ("serving",)
