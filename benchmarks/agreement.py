"""The demo model in float32 through llmpy, llama.cpp and transformers: the same scores on the same text and tasks.

    python benchmarks/agreement.py [--engines llama.cpp,transformers] [--limit 10] [--folder DIRECTORY]

The demo model is SmolLM2-135M-Instruct with linears in Q4_1. All engines compute with the exact values of these in float32, and
with a cache of float32. The table has the perplexity of the text of benchmarks/loss.py, the largest and the mean difference of
a token's logprob from llmpy's, and the score of each built-in task (docs/use/evaluation.md). An engine whose package is not
installed is left out. The file in float32 takes 540 MB of a temporary directory, or of --folder, which keeps it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import loss
import numpy as np

from llmpy import LLM
from llmpy.demo import fetch_model
from llmpy.evaluation import EngineModel, evaluate

EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "activation_dtype": "float", "max_model_len": 1024}
MOST_TOKENS = 1024


class Engine(Protocol):
    """An engine that knows ids alone."""

    def logits(self, ids: Sequence[int]) -> np.ndarray: ...
    def greedy(self, ids: Sequence[int], is_over: Callable[[list[int]], bool]) -> list[int]: ...


class Transformers:
    """The demo model in transformers, float32, from the file with linears in Q4_1."""

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        demo = Path(fetch_model())
        self.torch = torch
        options = {"gguf_file": demo.name, "dtype": torch.float32}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(demo.parent, **options).eval()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        with self.torch.no_grad():
            found: np.ndarray = self.model(self.torch.tensor([ids])).logits[0].numpy()
        return found

    def greedy(self, ids: Sequence[int], is_over: Callable[[list[int]], bool]) -> list[int]:
        given, cache = self.torch.tensor([ids]), None
        found: list[int] = []
        while not is_over(found):
            with self.torch.no_grad():
                made = self.model(given, past_key_values=cache, use_cache=True)
            cache, given = made.past_key_values, made.logits[:, -1:].argmax(-1)
            found.append(int(given))
        return found


class LlamaCpp:
    """The demo model in llama.cpp, float32."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(
            str(path), n_ctx=MOST_TOKENS, n_batch=512, logits_all=True, verbose=False, type_k=0, type_v=0  # 0: float32
        )

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        self.llama.reset()
        self.llama.eval(list(ids))
        found: np.ndarray = np.array(self.llama.scores[: len(ids)])
        return found

    def greedy(self, ids: Sequence[int], is_over: Callable[[list[int]], bool]) -> list[int]:
        self.llama.reset()
        given, found = list(ids), list[int]()
        while not is_over(found):
            self.llama.eval(given)
            given = [int(np.argmax(self.llama.scores[self.llama.n_tokens - 1]))]
            found += given
        return found


PEERS: dict[str, tuple[str, Callable[[Path], Engine]]] = {
    "llama.cpp": ("llama_cpp", LlamaCpp),
    "transformers": ("transformers", Transformers),
}
"""Engine -> its package and its class."""


class Peer:
    """An engine as the model of a task, with llmpy's tokenizer.

    Args:
        engine: The engine.
        tokenizer: A tokenizer of llmpy.
    """

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    def logprobs(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        found = []
        for prompt, text in pairs:
            start, ids = len(self.tokenizer.encode(prompt)), self.tokenizer.encode(prompt + text)
            rows = log_softmax(self.engine.logits(ids))
            found.append(float(sum(rows[place - 1, ids[place]] for place in range(start, len(ids)))))
        return found

    def complete(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        ends = set(self.tokenizer.eos_token_ids)

        def is_over(ids: list[int]) -> bool:
            return len(ids) == max_tokens or "\n" in self._text(ids) or bool(ends & set(ids[-1:]))

        return [self._text(self.engine.greedy(self.tokenizer.encode(prompt), is_over)) for prompt in prompts]

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="llama.cpp,transformers", help="beside llmpy")
    parser.add_argument("--limit", type=int, default=10, help="items of each task")
    parser.add_argument("--folder", type=Path, help="keeps the file of float32 here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = loss.exact(chosen.folder or Path(scratch))
        with LLM(path, **EXACT, kv_cache_memory_bytes="128MiB") as llm:
            ids = llm.tokenizer.encode(loss.TEXT)
            places = np.arange(len(ids) - 1), ids[1:]
            ours = log_softmax(llm.tap([ids], ["logits"])[0]["logits"])[places]
            wanted = evaluate(EngineModel(llm), limit=chosen.limit)
            names = " | ".join(one.task for one in wanted)
            print(f"| engine | perplexity | largest difference | mean | {names} | other answers |")
            print(f"| llmpy | {np.exp(-ours.mean()):.5f} | | |", " | ".join(f"{one.score:.2f}" for one in wanted), "| |")
            for name in chosen.engines.split(","):
                package, kind = PEERS[name]
                if find_spec(package) is None:
                    continue
                peer = Peer(kind(path), llm.tokenizer)
                logprobs = log_softmax(peer.engine.logits(ids))[places]
                found, gap = evaluate(peer, limit=chosen.limit), np.abs(logprobs - ours)
                pairs = zip(found, wanted, strict=True)
                others = sum(a != b for one, two in pairs for a, b in zip(one.answers, two.answers, strict=True))
                print(
                    f"| {name} | {np.exp(-logprobs.mean()):.5f} | {gap.max():.1e} | {gap.mean():.1e} |",
                    " | ".join(f"{one.score:.2f}" for one in found), f"| {others} |",
                )  # fmt: skip


if __name__ == "__main__":
    main()
