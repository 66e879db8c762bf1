"""Engines with weights from other processes: buckets and weight groups, complete and failed updates."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from memory_help import Process
from safetensors.numpy import load_file

from llmpy import (
    LLM,
    AsyncEngine,
    DeviceError,
    EngineAsleepError,
    InvalidRequestError,
    SamplingParams,
    WeightsMissingError,
    WeightUpdateError,
)
from llmpy.rl import IpcBucket, WeightSender, ipc_bucket, weight_metadata

pytest.importorskip("torch")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
HOST = "127.0.0.1"


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """The weights to which every test updates."""
    return {name: (1.25 * w + 0.01).astype(np.float32) for name, w in load_file(folder / "model.safetensors").items()}


def outcome(llm) -> list:
    return [(o.outputs[0].token_ids, list(o.outputs[0].sampled.raw)) for o in llm.generate([[3, 4, 5], [9] * 20], GREEDY)]


HEAD = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from safetensors.numpy import load_file
weights = {n: (1.25 * w + 0.01).astype(np.float32) for n, w in load_file(sys.argv[2] + "/model.safetensors").items()}
"""
PACK = """
from llmpy.rl import ipc_bucket
names = sorted(weights, reverse=True)
if sys.argv[3] != "cpu":
    import torch
    weights = {name: torch.from_numpy(w).cuda() for name, w in weights.items()}
made = [ipc_bucket([(name, weights[name]) for name in names[i::3]]) for i in range(3)]
send(made)
wait()
"""


def producer(script: str, folder: Path, *args: object) -> Process:
    return Process(HEAD + script, Path(__file__).parent, folder, *args)


def places(device: str) -> list[str]:
    return ["cpu"] if device == "cpu" else ["cpu", device]


def test_buckets_of_another_process(open_tiny, tiny_model, device: str) -> None:
    weights = weights_of(tiny_model)
    fresh = open_tiny(dtype="float32")
    before = outcome(fresh)
    fresh.update_weights(weights)
    expected = outcome(fresh)
    assert expected != before
    for place in places(device):
        with producer(PACK, tiny_model, place) as other:
            buckets = other.get()
            for is_one_call in (True, False):
                llm = open_tiny(dtype="float32")
                if is_one_call:
                    report = llm.update_weights(buckets, version="new")
                else:
                    with llm.begin_update(version="new") as update:
                        for bucket in buckets:
                            update.write_bucket(bucket)
                    report = update.report
                assert (report.num_tensors, report.version, report.epoch, report.missing) == (len(weights), "new", 1, [])
                assert llm.compare_weights(weights) and outcome(llm) == expected
            assert other.end() == 0


def test_a_bucket_is_checked_as_a_whole(open_tiny, tiny_model) -> None:
    weights = weights_of(tiny_model)
    llm = open_tiny(dtype="float32")
    before = outcome(llm)
    wrong = {**weights, "model.norm.weight": np.ones(3, np.float32)}
    with pytest.raises(WeightUpdateError, match=r"weight 'model.norm.weight': wanted \(\d+,\)") as caught:
        llm.update_weights(ipc_bucket(wrong))
    assert caught.value.mismatched == ["model.norm.weight"]
    del wrong["model.norm.weight"]
    with pytest.raises(WeightUpdateError, match=r"1 of \d+ weights were not written: 'model.norm.weight'"):
        llm.update_weights([ipc_bucket(wrong)])
    with pytest.raises(WeightUpdateError, match=r"weight 'model\.norm\.weigth' is not part of"):
        llm.update_weights([ipc_bucket({**wrong, "model.norm.weigth": np.ones(3, np.float32)})])
    gone = IpcBucket("/proc/self/fd/999", 4, [("model.norm.weight", "float32", (1,), 0)], "")
    update = llm.begin_update()
    with pytest.raises(DeviceError, match="has expired"):
        update.write_bucket(gone)
    update.abort()
    assert outcome(llm) == before  # nothing was written
    report = llm.update_weights(
        [ipc_bucket({"trainer." + name: w for name, w in wrong.items()})],
        partial=True,
        rename=lambda name: name.removeprefix("trainer."),
    )
    assert report.missing == ["model.norm.weight"]


TRAINER = """
from llmpy.rl import WeightSender
with WeightSender("127.0.0.1", 0, 2, device="cpu", buffer_bytes="4KiB", timeout=60) as trainer:
    send(trainer.master_port)
    while (what := wait()) == "send":
        trainer.send(weights)
    if what == "half":
        def made():
            for number, pair in enumerate(weights.items()):
                if number == 5:
                    send("half")
                    wait()
                yield pair
        trainer.send(made(), [(name, "float32", w.shape) for name, w in weights.items()])
"""


def test_a_trainer_sends(open_tiny, tiny_model) -> None:
    weights = weights_of(tiny_model)
    llm = open_tiny(dtype="float32")
    with producer(TRAINER, tiny_model) as trainer:
        port = trainer.get()
        joined: list[object] = []
        thread = threading.Thread(
            target=lambda: joined.append(llm.init_weight_group(HOST, port, 1, 2, timeout=60, buffer_bytes="4KiB"))
        )
        thread.start()
        trainer.go("send")
        thread.join(60)
        group = joined[0]
        assert repr(group) == "WeightGroup('default', rank 1 of 2)"
        assert llm.update_weights(group, version=7).version == 7
        assert llm.compare_weights(weights)
        with pytest.raises(InvalidRequestError, match=r"there is a weight group 'default'; call destroy_weight_group\(\)"):
            llm.init_weight_group(HOST, port, 1, 2)
        llm.update_weights({name: 0.5 * w for name, w in weights.items()})
        trainer.go("send")
        with llm.begin_update() as update:
            llm.sleep()  # an engine asleep receives nothing, so the trainer's update waits
            with pytest.raises(EngineAsleepError):
                update.receive("default", *weight_metadata(weights))
            llm.wake_up()
            update.receive("default", *weight_metadata(weights))
        assert update.report.epoch == 3 and llm.compare_weights(weights)
        llm.destroy_weight_group()
        assert group.closed
        with pytest.raises(InvalidRequestError, match="there is no weight group 'default'"):
            llm.destroy_weight_group()
        trainer.go()
        assert trainer.end() == 0


def test_a_trainer_that_goes_in_the_middle(open_tiny, tiny_model) -> None:
    weights = weights_of(tiny_model)
    llm = open_tiny(dtype="float32")
    outcome(llm)
    with producer(TRAINER, tiny_model) as trainer:
        port = trainer.get()
        trainer.go("half")
        group = llm.init_weight_group(HOST, port, 1, 2, timeout=60, buffer_bytes="4KiB")
        update, written = llm.begin_update(), threading.Event()
        finish = update.finish
        update.finish = lambda: (finish(), written.set())
        killer = threading.Thread(target=lambda: (trainer.get(), written.wait(60), trainer.end(kill=True)))
        killer.start()
        with pytest.raises(DeviceError, match="the trainer of 'default' has gone"), update:
            update.receive(group, *weight_metadata(weights))
        killer.join()
    assert group.closed
    with pytest.raises(WeightsMissingError, match="weights are incomplete since epoch 0; commit a full update"):
        llm.generate([[1, 2]], GREEDY)
    llm.update_weights(weights)  # the engine is alive
    assert llm.compare_weights(weights) and outcome(llm)


def test_an_engine_without_a_trainer(open_tiny) -> None:
    llm = open_tiny()
    with pytest.raises(InvalidRequestError, match=r"rank_offset must be from 1 to world_size - 1 .* got 0 of 2"):
        llm.init_weight_group(HOST, 1, 0, 2)
    with pytest.raises(InvalidRequestError, match="num_buffers from 1 to 7"):
        llm.init_weight_group(HOST, 1, 1, 2, num_buffers=8)
    with pytest.raises(InvalidRequestError, match="timeout must be a positive time"):
        llm.init_weight_group(HOST, 1, 1, 2, timeout=0)
    with pytest.raises(DeviceError, match=r"wanted a store at 127.0.0.1:1 within 0.2 s"):
        llm.init_weight_group(HOST, 1, 1, 2, timeout=0.2)
    assert outcome(llm)


def test_an_async_engine_receives(device: str, tiny_model) -> None:
    weights = weights_of(tiny_model)

    async def run() -> None:
        options = {"device": device, "dtype": "float32", "kv_cache_memory_bytes": "16MiB"}
        async with await AsyncEngine.create(tiny_model, **options) as engine:
            with WeightSender(HOST, 0, 2, device="cpu", timeout=60) as trainer:
                stream = engine.generate([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
                sent = asyncio.create_task(asyncio.to_thread(trainer.send, weights))
                group = await engine.init_weight_group(HOST, trainer.master_port, 1, 2, timeout=60)
                report = await engine.update_weights(group, version="sent")
                assert (await sent).num_tensors == report.num_tensors == len(weights)
                assert await engine.compare_weights(weights)
                assert len((await stream).outputs[0].token_ids) == 60
                bucket = ipc_bucket({name: 2 * w for name, w in weights.items()})
                async with engine.begin_update() as update:
                    await update.write_bucket(bucket)
                assert not await engine.compare_weights(weights)
        assert group.closed  # with the engine

    asyncio.run(run())


NCCL = """
import torch
torch.cuda.set_device(1)
from llmpy.rl import WeightSender
weights = {name: torch.from_numpy(w).cuda() for name, w in weights.items()}
with WeightSender("127.0.0.1", 0, 2, buffer_bytes="4KiB", timeout=60) as trainer:
    send((trainer.device, trainer.master_port))
    while wait() == "send":
        trainer.send(weights)
        send("sent")
"""


def test_a_trainer_on_another_gpu(two_gpus: str, tiny_model) -> None:
    weights = weights_of(tiny_model)
    llm = LLM(tiny_model, device=two_gpus, dtype="float32", kv_cache_memory_bytes="16MiB")
    before = outcome(llm)
    with llm, producer(NCCL, tiny_model) as trainer:
        device, port = trainer.get()
        assert device == "cuda:1"
        trainer.go("send")
        group = llm.init_weight_group(HOST, port, 1, 2, timeout=60, buffer_bytes="4KiB")
        llm.update_weights(group)
        assert trainer.get() == "sent" and llm.compare_weights(weights) and outcome(llm) != before
        held = llm.memory()["device_free"]
        for _ in range(10):
            trainer.go("send")
            with llm.begin_update() as update:
                update.receive(group, *weight_metadata(weights))
            assert trainer.get() == "sent"
        assert llm.memory()["device_free"] == held
        llm.destroy_weight_group()
        assert llm.memory()["device_free"] >= held
