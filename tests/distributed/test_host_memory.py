"""What host 0 sends to and takes from the other hosts between steps: weights, and values inside a model."""

from __future__ import annotations

import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_pairs import PROMPTS, bits, params, two_hosts
from safetensors.numpy import save_file

from llmpy import LLM, DeviceError, EngineDeadError, WeightsMissingError, WeightUpdateError
from llmpy.rl import IpcBucket, WeightSender, ipc_bucket

pytestmark = pytest.mark.usefixtures("cut_all")


def other_weights(llm: LLM, folder: Path) -> dict[str, np.ndarray]:
    """Random weights for a model, in two files."""
    rng = np.random.default_rng(9)
    made = {
        info["name"]: (0.1 * rng.standard_normal(info["shape"]) + ("norm" in info["name"])).astype(np.float32)
        for info in llm.weight_info()
    }
    names = sorted(made)
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({name: made[name] for name in some}, folder / f"{number}.safetensors")
    return made


@pytest.mark.parametrize(("name", "n_ranks", "experts"), [("dense", 4, "auto"), ("mixture", 3, "rank"), ("hybrid", 2, "auto")])
def test_weights_of_two_hosts(models: dict[str, dict[str, Any]], tmp_path: Path, name: str, n_ranks: int, experts: str) -> None:
    """Sums, comparisons, updates from a directory and deep sleep are those of one rank."""

    def answers(llm: LLM) -> list[Any]:
        llm.reset_prefix_cache()
        return [bits(output) for output in llm.generate(PROMPTS[:4], [params(i) for i in range(4)])]

    with LLM(**models[name]) as llm:
        made, first, before = other_weights(llm, tmp_path), llm.weight_checksum(), answers(llm)
        llm.update_weights(tmp_path)
        second, after = llm.weight_checksum(), answers(llm)
    part, bad = tmp_path / "part", tmp_path / "bad"
    wrong = {**made, "model.norm.weight": np.ones(7, np.float32)}
    for folder, weights in ((part, dict(list(made.items())[3:9])), (bad, wrong)):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
    with two_hosts({**models[name], "experts": experts}, n_ranks) as (llm, follower):
        assert llm.weight_checksum() == first and answers(llm) == before and not llm.compare_weights(tmp_path)
        with pytest.raises(WeightUpdateError):
            llm.update_weights(bad, partial=True)
        assert llm.weight_checksum() == first and answers(llm) == before
        report = llm.update_weights(tmp_path)
        assert report.num_tensors == len(made) and llm.weight_checksum() == second and answers(llm) == after
        assert llm.compare_weights(tmp_path)
        assert llm.update_weights(part, partial=True).num_tensors == 6 and answers(llm) == after
        llm.sleep(2)
        llm.wake_up(["weights"])
        with pytest.raises(WeightUpdateError):
            llm.update_weights(part, partial=True)
        llm.update_weights(tmp_path)
        llm.wake_up()
        assert llm.weight_checksum() == second and answers(llm) == after
        with pytest.raises(KeyError), llm.begin_update() as update:
            update.read_dir(part)
            raise KeyError
        with pytest.raises(WeightsMissingError):
            llm.generate([[1, 2]])
        llm.update_weights(tmp_path)
        assert answers(llm) == after
    assert follower.returncode == 0


def strided(array: np.ndarray) -> np.ndarray:
    """The same values with gaps between all items, the last row first in memory."""
    wide = np.zeros([2 * n for n in array.shape], array.dtype)
    view = wide[(slice(None, None, -2), *[slice(None, None, 2)] * (array.ndim - 1))]
    view[:] = array
    return view


@pytest.mark.parametrize(("name", "n_ranks", "experts"), [("mixture", 3, "rank"), ("hybrid", 4, "auto")])
def test_tensors_in_memory_for_two_hosts(
    models: dict[str, dict[str, Any]], tmp_path: Path, name: str, n_ranks: int, experts: str
) -> None:
    """Only host 0 has them: arrays of any strides, shards, and buckets of shared memory."""

    def answers(llm: LLM) -> list[Any]:
        llm.reset_prefix_cache()
        return [bits(output) for output in llm.generate(PROMPTS[:4], [params(i) for i in range(4)])]

    with LLM(**models[name]) as llm:
        made = other_weights(llm, tmp_path)
        before, first = answers(llm), llm.weight_checksum()
        llm.update_weights(made)
        after, second = answers(llm), llm.weight_checksum()
    matrix = next(key for key, array in made.items() if array.shape == (64, 64) or "q_proj" in key)
    nan = made[matrix].copy()
    nan[-1, -1] = np.nan  # of the last rank
    with two_hosts({**models[name], "experts": experts}, n_ranks) as (llm, follower):
        for wrong in ({"model.norm.weight": np.ones(7, np.float32)}, {matrix: nan}):
            with pytest.raises(WeightUpdateError, match="weight '"):
                llm.update_weights(wrong, partial=True, check_finite=True)
        assert not llm.compare_weights(made) and answers(llm) == before and llm.weight_checksum() == first
        assert llm.update_weights(made, check_finite=True).num_tensors == len(made)
        assert llm.compare_weights({key: strided(array) for key, array in made.items()})
        assert llm.weight_checksum() == second and answers(llm) == after
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights({key: strided(array) for key, array in made.items()})
        assert llm.weight_checksum() == second and answers(llm) == after
        with llm.begin_update(partial=True) as update:
            half = made[matrix].shape[0] // 2
            update.write(matrix, np.zeros_like(made[matrix]))
            update.write(matrix, made[matrix][half:], shard=(0, 1, 2))
            update.write(matrix, made[matrix][:half], shard=(0, 0, 2))
        assert llm.weight_checksum() == second and answers(llm) == after
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(ipc_bucket(made))
        assert llm.weight_checksum() == second and answers(llm) == after
    assert follower.returncode == 0


def test_a_bucket_that_ends_early_tears_the_weights(models: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Another host reads it through host 0, and gets the error of the read."""
    with two_hosts(models["dense"], 2) as (llm, follower):
        made = other_weights(llm, tmp_path)
        bucket = ipc_bucket({"lm_head.weight": made["lm_head.weight"]})
        path = tmp_path / "bucket"
        path.write_bytes(Path(bucket.handle).read_bytes())
        short = IpcBucket(str(path), bucket.nbytes, bucket.items, "")
        with pytest.raises(DeviceError, match="do not change the bucket"), llm.begin_update(partial=True) as update:
            update.write_bucket(short)
            descriptor = os.open(path, os.O_RDONLY)
            item = short.items[0]
            os.truncate(path, 100)
            update.write_shared([(item.name, descriptor, item.offset, item.dtype, item.shape, None)])
        with pytest.raises(WeightsMissingError):
            llm.generate([[1, 2]])
        llm.update_weights(made)
        assert llm.generate([[1, 2]])[0].outputs[0].token_ids
    assert follower.returncode == 0


@pytest.mark.parametrize(("name", "n_ranks", "experts"), [("mixture", 3, "rank"), ("hybrid", 4, "auto")])
def test_tap_of_two_hosts(models: dict[str, dict[str, Any]], name: str, n_ranks: int, experts: str) -> None:
    """Every value inside the model has the bits of one rank, in several chunks, and the engine goes on."""
    prompts = [PROMPTS[1], PROMPTS[2]]
    with LLM(**models[name]) as llm:
        names = llm.tap_names()
        wanted, ids = llm.tap(prompts, names), llm.generate([PROMPTS[3]], [params(1)])
    with two_hosts({**models[name], "experts": experts}, n_ranks) as (llm, follower):
        assert llm.tap_names() == names
        for _ in range(2):
            for found, right in zip(llm.tap(prompts, names), wanted, strict=True):
                assert all(found[key].tobytes() == right[key].tobytes() for key in names)
            assert bits(llm.generate([PROMPTS[3]], [params(1)])[0]) == bits(ids[0])
        limit = resource.prlimit(follower.pid, resource.RLIMIT_DATA)
        resource.prlimit(follower.pid, resource.RLIMIT_DATA, (1 << 20, limit[1]))
        with pytest.raises(MemoryError):
            llm.tap([PROMPTS[1]], names)
        resource.prlimit(follower.pid, resource.RLIMIT_DATA, limit)
        assert llm.tap(prompts[1:], names[-1])[0][names[-1]].tobytes() == wanted[1][names[-1]].tobytes()
    assert follower.returncode == 0


def test_a_weight_group_of_two_hosts(models: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The trainer sends to host 0, which is one member of its group."""
    with LLM(**models["dense"]) as llm:
        made = other_weights(llm, tmp_path)
        llm.update_weights(made)
        wanted = llm.weight_checksum()
    with two_hosts(models["dense"], 2) as (llm, follower), WeightSender("127.0.0.1", 0, world_size=2, device="cpu") as sender:
        group = llm.init_weight_group("127.0.0.1", sender.master_port, rank_offset=1, world_size=2)
        with ThreadPoolExecutor(1) as trainer:
            sent = trainer.submit(sender.send, list(made.items()))
            llm.update_weights(group)
            sent.result()
        assert llm.weight_checksum() == wanted
    assert follower.returncode == 0


@pytest.mark.parametrize("call", ["update", "tap"])
def test_a_follower_that_is_killed_ends_the_call(models: dict[str, dict[str, Any]], tmp_path: Path, call: str) -> None:
    """At any moment of it; the error names the host, and `close` returns."""
    with two_hosts({**models["dense"], "step_timeout_s": 5.0}, 4) as (llm, follower):
        made, names = other_weights(llm, tmp_path), llm.tap_names()
        killer = threading.Timer(0.3, follower.kill)
        killer.start()
        with pytest.raises((DeviceError, EngineDeadError), match=r"host 1 \(127.0.0.1:\d+\)"):
            for _ in range(10_000):
                llm.update_weights(made) if call == "update" else llm.tap([PROMPTS[1]], names)
        with pytest.raises((DeviceError, EngineDeadError, WeightsMissingError)):
            llm.generate([[1, 2]])
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
