"""One model over two actors of a local Ray."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from llmpy import LLM, DeviceError
from llmpy.distributed import RayExecutor

PROMPTS = [[3, 4, 5, 6, 7] * 14, [9, 8, 7], [100, 101] * 20]
HOW: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, "detokenize": False}
SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "32MiB"}
TWO: dict[str, Any] = {**SMALL, "nnodes": 2, "tensor_parallel_size": 2, "strategy": "SPREAD"}


def bits(output: Any) -> tuple[Any, ...]:
    one = output.outputs[0]
    return one.token_ids, one.sampled.raw.tobytes(), one.logprobs.values.tobytes()


def test_two_actors_give_the_bits_of_one_rank(local_ray: None, served_model: str) -> None:
    with LLM(served_model, **SMALL) as llm:
        wanted = [bits(output) for output in llm.generate(PROMPTS, **HOW)]
    with RayExecutor(served_model, timeout_s=60, **TWO) as executor:
        found = ray.get(executor.engine.generate_all.remote(PROMPTS, **HOW))
        assert [bits(output) for output in found] == wanted
        executor.check()
        following = executor._following
    ray.get(following, timeout=10)  # ended without an error
    executor.shutdown()


def test_an_actor_that_dies_ends_the_engine(local_ray: None, served_model: str) -> None:
    with RayExecutor(served_model, timeout_s=60, step_timeout_s=5.0, **TWO) as executor:
        ray.kill(executor._actors[1])
        with pytest.raises(ray.exceptions.RayTaskError, match="host 1"):
            for _ in range(100):
                ray.get(executor.engine.generate.remote([1, 2], **HOW), timeout=30)
        with pytest.raises(DeviceError, match="host 1 has gone"):
            executor.check()


def test_no_room(local_ray: None, served_model: str) -> None:
    with pytest.raises(TimeoutError, match=r"no room for 2 hosts of 50 CPUs within 0.5 s"):
        RayExecutor(served_model, timeout_s=0.5, num_cpus=50, **TWO)
    with pytest.raises(TimeoutError, match=r"no room for 2 hosts of 1 CPUs and 9 GPUs within 0.5 s"):
        RayExecutor(served_model, timeout_s=0.5, num_gpus=9, **TWO)


def test_what_fails_on_an_actor_is_told(local_ray: None, served_model: str) -> None:
    begun = time.monotonic()
    with pytest.raises(DeviceError, match=r"(?s)host \d failed: .*tensor_parallel_size=7"):
        RayExecutor(served_model, timeout_s=60, **{**TWO, "tensor_parallel_size": 7})
    assert time.monotonic() - begun < 40
