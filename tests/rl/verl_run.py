"""Runs the released verl's own manager, client and registries over llmpy, in a local Ray; test_verl.py starts it.

Usage: python verl_run.py MODEL DEVICE FOLDER. Prints one line of JSON per thing seen. The trainer is a stand-in: it does what
verl's `ActorRolloutRefWorker.update_weights` does in mode "naive" (verl/workers/engine_workers.py), with a separate model.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transformers
import verl
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

PROMPT = [5, 9, 3]
SAMPLING = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "logprobs": True, "ignore_eos": True}
OWN = {
    "name": "llmpy", "tensor_model_parallel_size": 1, "n_gpus_per_node": 1, "prompt_length": 16, "response_length": 4000,
    "dtype": "float32", "max_num_seqs": 16, "load_format": "dummy", "free_cache_engine": True,
}  # fmt: skip


def configuration(model: str, device: str) -> Any:
    """verl's defaults of a rollout with the changes of this run."""
    defaults = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/rollout/rollout.yaml")
    own = {**OWN, "engine_kwargs": {"llmpy": {"kv_cache_memory_bytes": "16MiB", "device": device}}}
    paths = {"path": model, "local_path": model, "tokenizer_path": None, "local_tokenizer_path": None}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": OmegaConf.merge(defaults, own), "model": paths}})


class Trainer:
    """A worker with a model and the adapter that verl's registry names."""

    def __init__(self, config: Any) -> None:
        os.environ["RANK"] = "0"
        torch.set_num_threads(1)
        self.config, paths = config.actor_rollout_ref, config.actor_rollout_ref.model
        self.model = transformers.AutoModelForCausalLM.from_pretrained(paths.path, dtype=torch.float32)
        self.rollout = get_rollout_class("llmpy", "async")(
            config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout),
            model_config=SimpleNamespace(**paths),
            device_mesh=None,
        )

    async def update(self, step: int) -> bool:
        """Runs a step, then updates the weights; returns whether the engine has them."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        await self.rollout.resume(tags=["weights"])
        weights = ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        await self.rollout.update_weights(weights, peft_config=None, base_sync_done=True, global_steps=step)
        await self.rollout.resume(tags=["kv_cache"])
        return bool(await self.rollout.host.engine.compare_weights(self.model.named_parameters()))

    async def adapter(self) -> list[Any]:
        """A second engine, for an adapter that is not merged: the weights by the names of PEFT, then the adapter."""
        rollout = get_rollout_class("llmpy", "async")(
            config=omega_conf_to_dataclass(self.config.rollout),
            model_config=SimpleNamespace(**self.config.model, lora_rank=2, lora={}), device_mesh=None, replica_rank=1,
        )  # fmt: skip
        rollout.launch("hybrid")
        linear = self.model.get_submodule("model.layers.1.self_attn.q_proj").weight
        tensors = {
            f"base_model.model.model.layers.1.self_attn.q_proj.lora_{name}.weight": torch.randn(shape)
            for name, shape in (("A", (2, linear.shape[1])), ("B", (linear.shape[0], 2)))
        }
        peft_config = {"r": 2, "lora_alpha": 4, "peft_type": "LORA", "target_modules": {"q_proj"}}
        named = ((name.replace("q_proj.", "q_proj.base_layer."), x.detach()) for name, x in self.model.named_parameters())
        await rollout.update_weights(named, peft_config=peft_config, base_sync_done=False, global_steps=7)
        await rollout.update_weights(tensors.items(), peft_config=peft_config, base_sync_done=True, global_steps=7)
        engine = rollout.host.engine
        answer = await rollout.host.generate(PROMPT, {**SAMPLING, "max_tokens": 4}, "r")
        steps = answer["extra_fields"]["max_global_steps"]
        same = bool(await engine.compare_weights(self.model.named_parameters()))
        return [rollout.sleep_level, same, engine.compare_adapter("verl", tensors, peft_config), steps]

    async def facts(self) -> list[Any]:
        """Facts about the adapter for verl."""
        rollout = self.rollout
        return [rollout.replica_rank, rollout.is_leader_rank, rollout.sleep_level, rollout.host.engine.is_sleeping()]

    async def num_running(self) -> int:
        """Number of running requests."""
        return self.rollout.host.engine.stats().num_running

    async def logprobs(self, completion: list[int]) -> list[float]:
        """Logprobs by the trainer's model."""
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def main(model: str, device: str) -> None:
    config = configuration(model, device)
    worker = ray.remote(Trainer).options(num_cpus=1).remote(config)
    show(replica=RolloutReplicaRegistry.get("llmpy").__name__)
    manager = await LLMServerManager.create(config, worker_group=SimpleNamespace(workers=[worker], world_size=1))
    (replica,) = manager.get_replicas()
    show(mode=replica.rollout_mode.value, addresses=manager.get_addresses(), adapter=await worker.facts.remote())

    # A step of synchronous training: the engine sleeps while the trainer trains, and wakes with its weights.
    await replica.sleep()
    asleep = (await worker.facts.remote())[-1]
    equal = await worker.update.remote(1)
    show(asleep=asleep, awake=not (await worker.facts.remote())[-1], equal=equal)
    client = manager.get_client()
    outputs = await asyncio.gather(
        *[client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params={**SAMPLING, "max_tokens": 24}) for i in range(4)]
    )
    gaps = []
    for output in outputs:
        theirs = await worker.logprobs.remote(output.token_ids)
        gaps += [abs(a - b) for a, b in zip(theirs, output.log_probs, strict=True)]
    show(
        kinds=sorted({type(output) is TokenOutput for output in outputs}), lengths=[len(o.token_ids) for o in outputs],
        reasons=[o.stop_reason for o in outputs], steps=[o.extra_fields["global_steps"] for o in outputs], gap=max(gaps),
    )  # fmt: skip

    # Asynchronous training: verl's client goes on by itself from what an update has cut off.
    patient = manager.get_client(client_cls=FullyAsyncLLMServerClient)
    params = {**SAMPLING, "max_tokens": 4000}
    running = asyncio.create_task(patient.generate("long", prompt_ids=PROMPT, sampling_params=params))
    while not await worker.num_running.remote():
        assert not running.done(), "it has ended before it was seen"
    await replica.abort_all_requests()
    await replica.release_kv_cache()
    await worker.update.remote(2)
    await replica.resume_kv_cache()
    await replica.clear_kv_cache()
    await replica.resume_generation()
    output = await running
    steps = [output.extra_fields[name] for name in ("min_global_steps", "max_global_steps")]
    show(with_adapter=await worker.adapter.remote())
    show(long=len(output.token_ids), logprobs=len(output.log_probs), long_steps=steps)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[3])
    asyncio.run(main(sys.argv[1], sys.argv[2]))
    ray.shutdown()
