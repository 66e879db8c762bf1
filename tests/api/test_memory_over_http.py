"""A trainer that reaches the engine over HTTP: weights in memory of another process, and from another GPU."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from memory_help import Process
from safetensors.numpy import load_file

from llmpy import AsyncEngine
from llmpy.rl import IpcBucket, weight_metadata
from llmpy.server import build_app

pytest.importorskip("torch")
HOST = "127.0.0.1"
Post = Callable[..., Awaitable[dict[str, Any]]]
HEAD = """
import sys, torch
from safetensors.torch import load_file
sys.path.insert(0, sys.argv[1])
weights = {name: 1.25 * w.float() + 0.01 for name, w in load_file(sys.argv[2] + "/model.safetensors").items()}
"""
BUCKET = """
from llmpy.rl import ipc_bucket
made = ipc_bucket({name: w.to(sys.argv[3]) for name, w in weights.items()})
send(made)
wait()
"""
NCCL = """
from llmpy.rl import WeightSender
torch.cuda.set_device(1)
weights = {name: w.cuda() for name, w in weights.items()}
with WeightSender("127.0.0.1", 0, 2, timeout=60) as trainer:
    send(trainer.master_port)
    trainer.send(weights)
    send("sent")
    wait()
"""


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """The weights of the other process."""
    found = load_file(folder / "model.safetensors")
    return {name: np.float32(1.25) * w.astype(np.float32) + np.float32(0.01) for name, w in found.items()}


def served(model: Path, device: str, use: Callable[[AsyncEngine, Post], Awaitable[None]]) -> None:
    """Runs a function with an engine and with a function that posts to its server."""

    async def run() -> None:
        options: dict[str, Any] = {"device": device, "dtype": "float32", "kv_cache_memory_bytes": "16MiB"}
        async with await AsyncEngine.create(model, **options) as engine:
            transport = httpx.ASGITransport(build_app(engine, control=True))
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", timeout=60) as client:

                async def post(path: str, **body: Any) -> dict[str, Any]:
                    response = await client.post(path, json=body)
                    assert response.status_code == 200, response.text
                    return dict(response.json())

                await use(engine, post)

    asyncio.run(run())


def described(bucket: IpcBucket) -> dict[str, Any]:
    handle = bucket.handle if isinstance(bucket.handle, str) else base64.b64encode(bucket.handle).decode()
    return {"handle": handle, "nbytes": bucket.nbytes, "items": bucket.items, "device_uuid": bucket.device_uuid}


def test_memory_of_another_process(tiny_model: Path, device: str) -> None:
    weights = weights_of(tiny_model)

    async def use(engine: AsyncEngine, post: Post) -> None:
        for place in sorted({"cpu", device}):
            with Process(HEAD + BUCKET, Path(__file__).parent, tiny_model, place) as other:
                bucket = await asyncio.to_thread(other.get)
                await post("/start_weight_update")
                await post("/update_weights", update_info={"buckets": [described(bucket)]})
                await post("/finish_weight_update", weight_version=place)
            assert await engine.compare_weights(weights)
            await engine.update_weights({name: 0.5 * w for name, w in weights.items()})
            assert not await engine.compare_weights(weights)

    served(tiny_model, device, use)


def test_another_gpu(tiny_model: Path, two_gpus: str) -> None:
    weights = weights_of(tiny_model)
    names, dtypes, shapes = weight_metadata(weights)

    async def use(engine: AsyncEngine, post: Post) -> None:
        with Process(HEAD + NCCL, Path(__file__).parent, tiny_model) as trainer:
            address = {"master_address": HOST, "master_port": await asyncio.to_thread(trainer.get), "rank_offset": 1}
            await post("/init_weight_transfer_engine", init_info={**address, "world_size": 2, "packed": True})
            await post("/start_weight_update")
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes, "packed": True}
            await post("/update_weights", update_info=info)
            await post("/finish_weight_update", weight_version="sent")
            assert await asyncio.to_thread(trainer.get) == "sent"
            assert await engine.compare_weights(weights)
            trainer.go()

    served(tiny_model, two_gpus, use)
