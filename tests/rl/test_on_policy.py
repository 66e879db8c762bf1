"""OnPolicy: the values of the engine, the gradients of torch; on each device."""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmpy import LLM, EngineBusyError, InvalidRequestError, SamplingParams, UnsupportedError
from llmpy.rl import OnPolicy, compare_logprobs
from llmpy.rl.on_policy import reference_logprobs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 4, 5], [6], [7, 8]]
TEMPERATURE = 0.7


def rollout(llm: LLM, n: int = 4) -> tuple[list[list[int]], list[list[int]], list[Any]]:
    """Prompts, completions and their log-probabilities when they were drawn."""
    params = SamplingParams(n=n, temperature=TEMPERATURE, max_tokens=9, logprobs=0, detokenize=False, seed=1)
    found = [(output.prompt_token_ids, sample) for output in llm.generate(PROMPTS, params) for sample in output.outputs]
    return [p for p, _ in found], [s.token_ids for _, s in found], [torch.tensor(s.sampled.full) for _, s in found]


@pytest.fixture
def model(device: str, qwen3: Path) -> Any:
    """The trainer's model on the engine's device."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    return loaded.to(device.partition(":avx")[0])


@pytest.mark.parametrize("in_place", [False, True])
def test_ratio_is_one_at_every_step(open_llm: Callable[..., LLM], model: Any, in_place: bool) -> None:
    """The ratio is exactly 1 while training moves the weights; the trainer's own forward pass differs."""
    llm = open_llm()
    policy = OnPolicy(llm, model, in_place=in_place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    own_gap = 0.0
    for step in range(3):
        assert policy.update(step) and not policy.update(step) and llm.weight_version == step
        prompts, completions, old = rollout(llm)
        new = policy.logprobs(prompts, completions, temperature=TEMPERATURE)
        own = reference_logprobs(model, prompts, completions, TEMPERATURE)
        for mine, drawn, theirs in zip(new, old, own, strict=True):
            assert torch.equal(mine.detach().cpu(), drawn)
            torch.testing.assert_close(theirs.detach().cpu(), drawn, atol=1e-4, rtol=0)
            own_gap = max(own_gap, float((theirs.detach().cpu() - drawn).abs().max()))
        optimizer.zero_grad()
        torch.cat(new).mean().backward()
        optimizer.step()
    assert own_gap > 0
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    if str(llm.config.device).startswith("cpu"):
        vectors = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
        assert (llm.memory()["weights"] == vectors) == in_place
    elif in_place:
        shared = {matrix.address for matrix in llm.share_weights().values()}
        assert {parameter.data_ptr() for parameter in matrices} == shared
        for what, call in {"sleep(level=1)": llm.sleep, "close()": llm.close}.items():
            with pytest.raises(EngineBusyError, match=re.escape(f"{what} would free the memory of {len(matrices)} weights")):
                call()
        llm.sleep(tags="kv_cache")
        llm.wake_up()
        before = [parameter.clone() for parameter in matrices]
        del new, own, mine, theirs  # autograd's graphs hold the weights
        policy.release()
        llm.sleep(level=1)
        assert all(map(torch.equal, before, matrices))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grpo_in_place(open_llm: Callable[..., LLM], model: Any, dtype: str) -> None:
    """GRPO with AdamW on one copy of the weights: on the first of two updates of a batch every importance ratio is exactly 1
    and KL exactly 0, on the second they are not."""
    llm = open_llm(dtype=dtype)
    model.to(getattr(torch, dtype))
    policy = OnPolicy(llm, model, in_place=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        policy.update(step)
        prompts, completions, old = rollout(llm)
        rewards = torch.tensor([float(ids.count(7) + 0.1 * len(set(ids))) for ids in completions]).view(len(PROMPTS), -1)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        old = [row.to(next(model.parameters()).device) for row in old]
        for update in range(2):
            new = policy.logprobs(prompts, completions, temperature=TEMPERATURE)
            ratios = [torch.exp(mine - drawn) for mine, drawn in zip(new, old, strict=True)]
            gap = compare_logprobs([row.cpu() for row in old], [row.detach().cpu() for row in new])
            assert (update == 0) == all(bool((ratio == 1).all()) for ratio in ratios) == (gap.max == 0 == gap.k3)
            losses = [
                -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                for ratio, advantage in zip(ratios, advantages, strict=True)
            ]
            optimizer.zero_grad()
            torch.cat(losses).mean().backward()
            optimizer.step()
    policy.release()


def test_shared_weights(open_llm: Callable[..., LLM], model: Any) -> None:
    """A matrix of the engine is the trainer's tensor: a change is a change of the engine's weights, after an update."""
    llm = open_llm()
    if str(llm.config.device).startswith("cpu"):
        with pytest.raises(UnsupportedError, match="the backend cpu shares no weights; use borrow=True of update_weights"):
            llm.share_weights()
        return
    names, prompt = dict(model.named_parameters()), [[3, 4, 5, 6]]
    llm.update_weights(names)
    before = llm.weight_checksum()
    for name, matrix in llm.share_weights().items():
        tensor = torch.as_tensor(matrix, device=names[name].device)
        assert torch.equal(tensor, names[name])
        tensor.mul_(0.5)
        names[name] = tensor
    changed = llm.update_weights(names)
    assert changed.num_tensors == len(names) and llm.weight_checksum() != before
    fresh = open_llm()
    fresh.update_weights({name: value.clone() for name, value in names.items()})
    assert fresh.weight_checksum() == llm.weight_checksum()
    mine, theirs = (engine.score(prompt)[0].token_logprobs for engine in (llm, fresh))
    assert mine[1:].tobytes() == theirs[1:].tobytes()
    del tensor, names, matrix
    gc.collect()
    llm.close()


def test_gradient_is_torchs(open_llm: Callable[..., LLM], model: Any) -> None:
    """The gradient of any weighted sum equals that of the trainer's log-probabilities, bit for bit."""
    policy = OnPolicy(open_llm(), model)
    policy.update()
    prompts, completions, _ = rollout(policy.llm)
    weights = torch.linspace(-1, 1, sum(map(len, completions)), device=next(model.parameters()).device)

    def gradients(logprobs: list[Any]) -> list[Any]:
        model.zero_grad()
        (torch.cat(logprobs) * weights).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    theirs = gradients(reference_logprobs(model, prompts, completions, TEMPERATURE))
    assert any(bool(grad.any()) for grad in theirs)
    given = reference_logprobs(model, prompts, completions, TEMPERATURE)
    for reference in (None, given):
        ours = gradients(policy.logprobs(prompts, completions, temperature=TEMPERATURE, reference=reference))
        assert all(map(torch.equal, ours, theirs))


def test_changed_weights_are_seen(open_llm: Callable[..., LLM], model: Any) -> None:
    """`logprobs` updates the engine itself, for weights changed in place and for replaced ones."""
    policy = OnPolicy(open_llm(), model)
    before = policy.logprobs([[3]], [[4, 5]])[0]
    with torch.no_grad():
        model.lm_head.weight[4] += 1
    after = policy.logprobs([[3]], [[4, 5]])[0]
    assert float(after[0].detach()) != float(before[0].detach())
    torch.testing.assert_close(after, reference_logprobs(model, [[3]], [[4, 5]], 1.0)[0], atol=1e-4, rtol=0)
    model.lm_head.weight.data = model.lm_head.weight.data * 2
    assert policy.update() and not policy.update()


@pytest.mark.parametrize(
    ("prompts", "completions", "reference", "message"),
    [
        ([[3]], [], None, "completions: wanted 1, one for each of prompts, have 0"),
        ([[3]], [[4]], [], "reference: wanted 1, one for each of completions, have 0"),
        ([[3]], [[4, 5]], [[0.0]], r"reference\[0\]: wanted 2, one for each of completions\[0\], have 1"),
    ],
)
def test_refusals(
    open_llm: Callable[..., LLM], model: Any, prompts: Any, completions: Any, reference: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        OnPolicy(open_llm(), model).logprobs(prompts, completions, reference=reference)
