"""What exact log-probabilities cost in a training step, beside torch's own forward and backward pass.

    python benchmarks/on_policy.py [--shape smollm2] [--device cpu] [--layers N] [--sequences 8] [--prompt 64]
                                   [--completion 64] [--dtype float32] [--rounds 5]

The shape of SmolLM2-135M or Llama-3-8B with random weights; on the CPU one thread for each processor on both sides. Every
round measures torch and two engines one after another: one with its own copy of the weights, and one with the trainer's
(`in_place`). Medians are printed, and each row's ratio to torch's forward and backward pass. Every round also checks that both
engines give the same bits. Needs torch and transformers.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from llmpy import LLM, SamplingParams
from llmpy.rl import OnPolicy
from llmpy.rl.on_policy import reference_logprobs

STEP = "torch: forward and backward"
COMMON = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "num_hidden_layers": 30, "tie_word_embeddings": True, **COMMON,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "tie_word_embeddings": False, **COMMON,
    },
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--completion", type=int, default=64, help="tokens")
    parser.add_argument("--dtype", default="float32", help="of the trainer's weights and of the engines'")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def jobs(args: argparse.Namespace, model: torch.nn.Module, policies: dict[str, OnPolicy]) -> dict[str, Callable[[], object]]:
    """What is measured, by the name of its row."""
    draw = torch.Generator().manual_seed(0)
    size = args.sequences, args.prompt + args.completion
    ids = torch.randint(3, SHAPES[args.shape]["vocab_size"], size, generator=draw).tolist()
    prompts, completions = [row[: args.prompt] for row in ids], [row[args.prompt :] for row in ids]
    params = SamplingParams(max_tokens=args.completion, ignore_eos=True, logprobs=0, detokenize=False, seed=1)

    def step() -> None:
        model.zero_grad()
        torch.cat(reference_logprobs(model, prompts, completions, 1.0)).sum().backward()

    def forward() -> None:
        with torch.no_grad():
            reference_logprobs(model, prompts, completions, 1.0)

    def touch() -> None:  # an optimizer that changes nothing: torch counts the change
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)

    starts = [args.prompt] * args.sequences
    found: dict[str, Callable[[], object]] = {STEP: step, "torch: forward": forward}
    for name, policy in policies.items():
        found[f"{name}: update"] = lambda policy=policy: (touch(), policy.update())
        found[f"{name}: score"] = lambda policy=policy: policy.llm.score(ids, start=starts, use_tqdm=False)
        found[f"{name}: rollout"] = lambda policy=policy: policy.llm.generate(prompts, params, use_tqdm=False)
    found["change of all weights, in both updates"] = touch
    return found


def check(policies: dict[str, OnPolicy]) -> None:
    """Both engines give the same bits."""
    ids = [[3 + 7 * i for i in range(40)]]
    own, borrowed = (policy.llm.score(ids)[0].token_logprobs.tobytes() for policy in policies.values())
    assert own == borrowed


def main() -> None:
    args = arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(dtype=args.dtype, **shape))
    model.to(getattr(torch, args.dtype)).train()
    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
        policies = {
            name: OnPolicy(
                LLM(folder, device=args.device, dtype=args.dtype, load_format="dummy", skip_tokenizer_init=True,
                    max_model_len=512, kv_cache_memory_bytes="512MiB", max_num_seqs=64, enable_prefix_caching=False),
                model, in_place=name == "in place",
            )
            for name in ("own copy", "in place")
        }  # fmt: skip
    for policy in policies.values():
        policy.update()
    work = jobs(args, model, policies)
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(args.rounds + 1):  # the first warms up
        check(policies)
        for name, job in work.items():
            taken = seconds(job)
            if turn:
                times[name].append(taken)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{args.sequences} sequences of {args.prompt} + {args.completion} tokens, {args.shape}, {args.dtype}")
    for name, taken in median.items():
        print(f"{name:40} {1e3 * taken:10.1f} ms {taken / median[STEP]:8.3f} x")
    for name, policy in policies.items():
        print(f"{name + ': weights of the engine':40} {policy.llm.memory()['weights'] / 1e6:10.1f} MB")
        policy.release()
        policy.llm.close()


if __name__ == "__main__":
    main()
