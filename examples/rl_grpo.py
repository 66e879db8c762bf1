"""GRPO in one process: a PyTorch model learns to say one word; llmpy generates rollouts with the weights of each step.

Usage: python examples/rl_grpo.py [--model DIRECTORY | --model demo] [--word WORD] [--steps 20] [--device cuda] [--exact]
                                  [--in-place]

Without --model it makes a tiny random Qwen3. Needs torch and transformers, for the demo model also gguf and accelerate.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers

from llmpy import LLM, SamplingParams
from llmpy.rl import OnPolicy, compare_logprobs

PROMPTS, GROUP, TOKENS, CLIP = 4, 16, 8, 0.2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a directory as transformers saves it, or 'demo'; left out: a tiny random one")
    parser.add_argument("--word", default=" the", help="the word that a named model learns to say")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, help="learning rate; 0.005 for the tiny model, else 1e-4")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="of the engine's weights; the trainer's are float32")
    parser.add_argument("--in-place", action="store_true", help="the engine reads the trainer's weights, without a copy (CPU)")
    parser.add_argument("--exact", action="store_true", help="give the trainer's log-probabilities the engine's values")
    return parser.parse_args()


def open_model(name: str | None, folder: str) -> tuple[torch.nn.Module, str]:
    """The model to train, in float32, and the directory from which the engine loads it."""
    if name is None:
        torch.set_num_threads(1)  # in so small a model, threads would only wait for each other
        config = transformers.Qwen3Config(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config)
    elif name == "demo":
        from llmpy.demo import fetch_model

        file = Path(fetch_model())
        stored = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        del stored.config.quantization_config
        model = type(stored)(stored.config)
        model.load_state_dict(stored.state_dict())
        transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    else:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), name
    model.save_pretrained(folder)
    return model, folder


def trainer_logprobs(model: torch.nn.Module, prompts: list, completions: list, t: float) -> list[torch.Tensor]:
    """log_softmax(logits / t) of the completions' tokens, one row per completion; all prompts have one length."""
    longest = max(map(len, completions))
    rows = [p + c + [0] * (longest - len(c)) for p, c in zip(prompts, completions, strict=True)]
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    start = len(prompts[0])
    table = torch.log_softmax(model(ids, use_cache=False).logits[:, start - 1 : -1].float() / t, -1)
    chosen = table.gather(2, ids[:, start:, None])[..., 0]
    return [row[: len(completion)] for row, completion in zip(chosen, completions, strict=True)]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model, path = open_model(args.model, folder)
        model = model.to(args.device).train()
        llm = LLM(
            path, device=args.device, dtype=args.dtype, skip_tokenizer_init=args.model is None, max_model_len=256,
            kv_cache_memory_bytes="256MiB", max_num_seqs=PROMPTS * GROUP,
        )  # fmt: skip
    if args.model is None:
        prompts, target = [[3 + i, 20 + i, 40 + i] for i in range(PROMPTS)], 7
    else:
        texts = ["Once upon a time", "I went to school", "We like the sea", "It was a cold night"][:PROMPTS]
        encoded = [llm.tokenizer.encode(text) for text in texts]
        prompts = [ids[: min(map(len, encoded))] for ids in encoded]
        target = llm.tokenizer.encode(args.word)[-1]
    params = SamplingParams(
        n=GROUP, temperature=args.temperature, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False
    )
    policy = OnPolicy(llm, model, in_place=args.in_place)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr or (0.005 if args.model is None else 1e-4))
    first = last = 0.0
    for step in range(args.steps):
        # Copies the trainer's weights over the engine's, on the same device, if they have changed; in place it only tells.
        policy.update(version=step)

        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        samples = [(output.prompt_token_ids, sample) for output in outputs for sample in output.outputs]
        assert all(span.version == step for _, sample in samples for span in sample.weight_versions)

        rewards = torch.tensor([sample.token_ids.count(target) / TOKENS for _, sample in samples])
        groups = rewards.view(len(prompts), GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        asked, answers = [p for p, _ in samples], [s.token_ids for _, s in samples]
        new = trainer_logprobs(model, asked, answers, args.temperature)
        if args.exact:
            new = policy.logprobs(asked, answers, temperature=args.temperature, reference=new)
        old = [torch.tensor(sample.sampled.full, device=args.device) for _, sample in samples]
        gap = compare_logprobs([row.cpu() for row in old], new)
        losses = []
        for mine, theirs, advantage in zip(new, old, advantages.tolist(), strict=True):
            ratio = torch.exp(mine - theirs)
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()

        last = float(rewards.mean())
        first = last if step == 0 else first
        print(
            f"step {step:3}: reward {last:.3f}, mean |logprob difference| {gap.mean:.1e}, "
            f"update {1e3 * policy.last_update.seconds:.2f} ms, {outputs.num_generation_tokens / elapsed:,.0f} tokens/s"
        )
    print(f"reward: {first:.3f} -> {last:.3f}")
    llm.close()


if __name__ == "__main__":
    main()
