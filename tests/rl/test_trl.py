"""llmpy under TRL's own trainers, from the released package."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmpy import LLM, AsyncEngine, UnsupportedError
from llmpy.rl import LogprobComparison, compare_logprobs

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl")

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402

from llmpy.rl.trl import RolloutWorker, WeightTransfer, adapter_of, rollout  # noqa: E402

TARGET, STEPS = 7, 20
OPTIONS = {"kv_cache_memory_bytes": "4MiB", "max_num_seqs": 64, "max_model_len": 128}


def share_of_target(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of target tokens in a completion."""
    return [ids.count(TARGET) / 8 for ids in completion_ids]


def prompts(kind: str) -> Dataset:
    texts = [f"w{i} w{i + 3} w{i + 9}" for i in range(8)]
    return Dataset.from_dict({"prompt": texts if kind == "text" else [[{"role": "user", "content": text}] for text in texts]})


def trainer_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """The trained model's logprobs of a completion, in its dtype, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion], device=model.device), use_cache=False).logits[0].float()
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return rows.gather(1, torch.tensor(completion, device=rows.device)[:, None])[:, 0]


def assert_equal_weights(llm: LLM, model: torch.nn.Module) -> None:
    """Compares the weights of both bit for bit, by checksums."""
    found = llm.compare_weights(model.named_parameters())
    assert found and not found.missing and found.num_equal == len(llm.weight_info())


def train(
    llm: LLM | AsyncEngine,
    path: Path,
    folder: Path,
    kind: str,
    steps: int,
    watch: Callable[..., None],
    peft_config: Any = None,
    sleep_level: int | None = None,
    **options: Any,
) -> list[float]:
    """Runs GRPOTrainer; returns the mean reward of every step."""
    config = trl.GRPOConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=8,
        learning_rate=0.01, lr_scheduler_type="constant", logging_steps=1, report_to="none", save_strategy="no", seed=3,
        use_cpu=True, bf16=False, gradient_checkpointing=False, **options,
    )  # fmt: skip
    generate = rollout(llm, sleep_level=sleep_level)

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = generate(prompts, trainer)
        watch(made, trainer)
        return made

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=share_of_target, args=config, train_dataset=prompts(kind), rollout_func=watched,
        processing_class=transformers.AutoTokenizer.from_pretrained(path), peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def test_grpo(open_llm: Callable[..., LLM], qwen3: Path, tmp_path: Path) -> None:
    """The reward rises; at every step the engine has the trainer's weights and probabilities."""
    llm = open_llm()
    gaps: list[LogprobComparison] = []
    stale: list[float] = []
    before: list[dict[str, Any]] = []

    def watch(made: dict[str, Any], trainer: Any) -> None:
        assert_equal_weights(llm, trainer.model)
        gaps.append(gap(made, trainer.model))
        if before:
            stale.append(gap(before[-1], trainer.model).mean)
        before.append(made)
        print(f"step {trainer.state.global_step}: mean |logprob difference| {gaps[-1].mean:.1e}, max {gaps[-1].max:.1e}")

    rewards = train(llm, qwen3, tmp_path, "text", STEPS, watch)
    print("rewards:", " ".join(f"{reward:.2f}" for reward in rewards))
    assert len(rewards) == len(gaps) == STEPS
    # A model that does not learn says the target once in 32 tokens: 0.03 of a reward, and never more than 0.1 over 160 samples.
    assert np.mean(rewards[:2]) < 0.1 and np.mean(rewards[-5:]) > 0.5
    # Both sides are float32, and differ in the order of sums of 64 to 128 products, 6e-8 each. One step of the optimizer moves
    # the logprobs by more than a hundred times the bound: an engine one step behind would be seen.
    assert max(found.mean for found in gaps) < 1e-5 and max(found.max for found in gaps) < 1e-4
    assert min(stale[:5]) > 1e-3


def test_conversations(open_llm: Callable[..., LLM], qwen3: Path, tmp_path: Path) -> None:
    """Conversations; a generation for two steps of two batches each."""
    llm = open_llm()
    steps: list[int] = []

    def watch(made: dict[str, Any], trainer: Any) -> None:
        steps.append(trainer.state.global_step)
        assert_equal_weights(llm, trainer.model)
        assert all(len(ids) == 3 for ids in made["prompt_ids"])

    options = {"gradient_accumulation_steps": 2, "num_iterations": 2, "temperature": 0.7}
    assert len(train(llm, qwen3, tmp_path, "conversation", 4, watch, **options)) == 2
    assert steps == [0, 2]


def gap(made: dict[str, Any], model: torch.nn.Module) -> LogprobComparison:
    """Compares the logprobs of rollouts with those of the trained model."""
    pairs = zip(made["prompt_ids"], made["completion_ids"], strict=True)
    return compare_logprobs(made["logprobs"], [trainer_logprobs(model, *pair) for pair in pairs])


def train_adapter(
    llm: LLM | AsyncEngine, path: Path, folder: Path, steps: int, watch: Callable[..., None] | None = None, **options: Any
) -> list[float]:
    """Runs GRPOTrainer with an adapter; at every step the engine's adapter and probabilities are the trainer's."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=options.pop("init", True))
    seen: list[int] = []

    def watched(made: dict[str, Any], trainer: Any) -> None:
        tensors, config = adapter_of(trainer.model)
        assert len(tensors) == 28 and llm.compare_adapter("policy", tensors, config)
        assert gap(made, trainer.model).max < 1e-4
        changed = {name: tensor + 1e-6 * ("lora_B" in name) for name, tensor in tensors.items()}
        assert not llm.compare_adapter("policy", changed, config)
        seen.append(trainer.state.global_step)
        if watch is not None:
            watch(made, trainer)

    rewards = train(llm, path, folder, "text", steps, watched, config, **options)
    assert seen == [*range(steps)]
    print("rewards:", " ".join(f"{reward:.2f}" for reward in rewards))
    return rewards


@pytest.mark.parametrize("options", [{}, {"sleep_level": 1}, {"sleep_level": 2}, {"init": "pissa"}], ids=str)
def test_adapter(open_llm: Callable[..., LLM], qwen3: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    llm = open_llm(enable_lora=True)
    train_adapter(llm, qwen3, tmp_path, 2, **options)
    assert [one.name for one in llm.list_adapters()] == ["policy"]


def test_an_engine_serves_the_adapter_while_it_trains(device: str, qwen3: Path, tmp_path: Path) -> None:
    """Answers with the adapter change with it, those without stay, and requests in flight keep the adapter they began with."""
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    with contextlib.closing(AsyncEngine(qwen3, device=device, enable_lora=True, **OPTIONS)) as engine:
        plain = engine.add_request("w1 w2", **ask).wait().token_ids
        adapted = []

        def watch(made: dict[str, Any], trainer: Any) -> None:
            long = engine.add_request("w1 w2", **{**ask, "max_tokens": 100}, lora_request="policy")
            adapted.append(long)
            assert engine.add_request("w1 w2", **ask).wait().token_ids == plain
            answer = engine.add_request("w1 w2", **ask, lora_request="policy").wait().token_ids
            assert long.wait().token_ids[:24] == answer

        train_adapter(engine, qwen3, tmp_path, 3, watch)
        answers = [handle.wait().token_ids[:24] for handle in adapted]
        assert answers[0] == plain != answers[2]  # B is 0 before the first step
        with pytest.raises(UnsupportedError, match="sleep_level wants an LLM"):
            rollout(engine, sleep_level=1)


@pytest.mark.slow
def test_adapter_learns(open_llm: Callable[..., LLM], save_model: Callable[..., Path], tmp_path: Path) -> None:
    """The head has larger weights than usual: the adapter leaves it alone, and small ones allow no likely token."""
    path = save_model(tmp_path / "model", initializer_range=0.1)
    rewards = train_adapter(open_llm(path, enable_lora=True), path, tmp_path, STEPS)
    assert np.mean(rewards[:2]) < 0.1 and np.mean(rewards[-5:]) > 0.5


def attention(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any) -> torch.Tensor:
    """Plain PyTorch in place of the trainer's CUDA kernel: each segment of the rows sees the keys of its path, causally."""
    made = []
    for i in range(len(starts_q) - 1):
        mine = q[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        keys, values = (x[starts_k[i] : starts_k[i + 1]].transpose(0, 1) for x in (k, v))
        keys, values = (x.repeat_interleave(len(mine) // len(x), 0) for x in (keys, values))
        rows, columns = mine.shape[1], keys.shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        made.append(torch.nn.functional.scaled_dot_product_attention(mine, keys, values, mask, scale=softmax_scale))
    return torch.cat([x.transpose(0, 1) for x in made])


def test_asynchronous(device: str, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncGRPOTrainer with both of its protocol objects, no HTTP server: rollouts go on while it trains."""
    async_grpo = pytest.importorskip("trl.experimental.async_grpo")
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    # Only the trainer needs a GPU: for the attention of its forward pass, and for its name in the figures.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    config = async_grpo.AsyncGRPOConfig(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=32, num_generations=8, max_completion_length=8,
        learning_rate=0.01, token_budget=256, max_staleness=2, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=0.1, seed=3,
    )  # fmt: skip
    sent: list[int] = []

    class Checked(WeightTransfer):
        """Compares after every update, while the requests in flight stand still."""

        def send_weights(self, iterator: Any) -> None:
            super().send_weights(iterator)
            found = asyncio.run(self.engine.compare_weights(trainer.model.named_parameters()))
            assert found and not found.missing
            sent.append(self.last_update.epoch)

    with contextlib.closing(AsyncEngine(qwen3, device=device, **OPTIONS)) as engine:
        tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3)
        dataset = prompts("conversation")
        worker, transfer = RolloutWorker(engine, dataset, share_of_target, tokenizer, config), Checked(engine)
        trainer = async_grpo.AsyncGRPOTrainer(
            model=str(qwen3), args=config, train_dataset=dataset, processing_class=tokenizer, rollout_worker=worker,
            weight_transfer=transfer, reward_funcs=share_of_target,
        )  # fmt: skip
        trainer.train()
        assert sent == list(range(1, STEPS + 2))
        assert asyncio.run(engine.wait_for_requests_to_drain(60))
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    print("rewards:", " ".join(f"{reward:.2f}" for reward in rewards))
    print("staleness:", " ".join(f"{entry['sample/staleness_mean']:.1f}" for entry in logs))
    # What was generated with the weights of the first step has the trainer's probabilities: the ratio is 1.
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-4) and abs(logs[0]["kl"]) < 1e-6
    # It learns from samples two steps old, slower than the trainer that waits; a model that does not learn stays at 0.03.
    assert np.mean(rewards[:2]) < 0.1 and np.mean(rewards[-5:]) > 0.2
