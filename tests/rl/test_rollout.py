"""The `rollout_func` under a stand-in for TRL's trainer, on each device; needs no TRL."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpy import LLM
from llmpy.rl import compare_logprobs
from llmpy.rl.trl import rollout

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ARGS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "max_completion_length": 12,
    "generation_kwargs": None,
}  # fmt: skip


def stand_in(path: Path, device: str, **args: Any) -> SimpleNamespace:
    """A stand-in for a trainer with the attributes that the function reads; its model is on the engine's device."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device.partition(":avx")[0])
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(**{**ARGS, **args}),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
        eos_token_ids=[2],
        tools=None,
        chat_template=None,
        chat_template_kwargs={},
    )


def train(trainer: SimpleNamespace) -> None:
    """A step that moves every weight."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.device))
    trainer.state.global_step += 1


def test_weights_follow_the_steps(open_llm: Callable[..., LLM], device: str, qwen3: Path) -> None:
    """The engine is updated after a step, and only then; its probabilities equal the trainer's."""
    llm, trainer = open_llm(), stand_in(qwen3, device)
    generate = rollout(llm)
    epochs = []
    for _ in range(3):
        for _ in range(2):
            made = generate(["w1 w2 w3", "w1 w2 w3", "w9"], trainer)
            epochs.append(generate.last_update.epoch)
            assert generate.last_update.version == trainer.state.global_step == llm.weight_version
            assert llm.compare_weights(trainer.model.named_parameters())
        assert [len(ids) for ids in made["prompt_ids"]] == [3, 3, 1]
        theirs = []
        for prompt, completion in zip(made["prompt_ids"], made["completion_ids"], strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + completion], device=trainer.model.device)).logits[0]
            rows = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
            theirs.append(rows.gather(1, torch.tensor(completion, device=rows.device)[:, None])[:, 0])
        # float32 on both sides: what is left is the order of sums of 64 to 128 products
        assert compare_logprobs(made["logprobs"], theirs).max < 1e-4
        train(trainer)
    assert epochs == [1, 1, 2, 2, 3, 3]
    other = stand_in(qwen3, device)
    other.state.global_step = 2
    generate(["w1"], other)  # another trainer that happens to be at the same step
    assert llm.compare_weights(other.model.named_parameters())


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_between_rollouts(open_llm: Callable[..., LLM], device: str, qwen3: Path, level: int) -> None:
    """The same tokens as without sleep; an update restores the weights that level 2 drops, also within a step."""
    trainer = stand_in(qwen3, device)
    sleeper, other = open_llm(), open_llm()
    generate, plain = rollout(sleeper, sleep_level=level), rollout(other)
    updates = []
    for _ in range(2):
        for _ in range(2):
            assert generate(["w1 w2", "w5"], trainer) == plain(["w1 w2", "w5"], trainer)
            assert sleeper.is_sleeping()
            updates.append(generate.last_update.epoch)
        train(trainer)
    assert updates == ([1, 1, 2, 2] if level == 1 else [1, 2, 3, 4])


def test_arguments_reach_the_sampler(open_llm: Callable[..., LLM], device: str, qwen3: Path) -> None:
    """`logprobs` are those of the sampling distribution; conversations use the trainer's template."""
    llm = open_llm()
    trainer = stand_in(qwen3, device, top_k=1, max_completion_length=5, generation_kwargs={"ignore_eos": True})
    made = rollout(llm)([[{"role": "user", "content": "w1 w2"}]] * 2, trainer)
    assert made["prompt_ids"] == [[4, 5]] * 2
    count = len(made["completion_ids"][0])
    assert made["completion_ids"][0] == made["completion_ids"][1] and 0 < count <= 5
    assert made["logprobs"] == [[0.0] * count] * 2  # only one token was left
    assert len(rollout(llm, max_tokens=1)(["w1"], trainer)["completion_ids"][0]) == 1
