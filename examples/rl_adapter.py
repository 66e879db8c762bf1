"""TRL's GRPO trains an adapter (LoRA); the engine makes its rollouts and serves the adapter over HTTP while it trains.

Usage: python examples/rl_adapter.py [--model DIRECTORY --word WORD] [--steps 20] [--device cuda]

Without --model it makes a tiny random Qwen3. Needs torch, transformers, trl, peft and the extra `server`.
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import peft
import torch
import transformers
import trl
import uvicorn
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from llmpy import AsyncEngine
from llmpy.rl.trl import rollout
from llmpy.server import build_app

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(61))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a directory as transformers saves it; left out: a tiny random one")
    parser.add_argument("--word", default="w7", help="what the model learns to say")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, help="learning rate; 0.01 for the tiny model, else 1e-4")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def save_tiny_model(folder: str) -> str:
    """A random Qwen3 whose tokens are words. The adapter leaves its head alone, so the head must be able to say a word."""
    torch.set_num_threads(1)  # in so small a model, threads would only wait for each other
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.1,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{folder}/tokenizer.json")
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    return folder


class Client(threading.Thread):
    """Asks the server again and again, as anybody could, for the model and for its adapter."""

    def __init__(self, port: int, word: str) -> None:
        super().__init__(daemon=True)
        self.url, self.word, self.is_over = f"http://127.0.0.1:{port}/v1/completions", word, threading.Event()
        self.shares: dict[str, list[float]] = {"base": [], "policy": []}

    def run(self) -> None:
        while not self.is_over.wait(0.2):
            for model, shares in self.shares.items():
                body = {"model": model, "prompt": "w1 w2 w3", "n": 8, "max_tokens": 8, "seed": 5, "temperature": 1}
                request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request) as response:
                        texts = [choice["text"] for choice in json.load(response)["choices"]]
                except urllib.error.HTTPError as error:
                    assert error.code == 404, error.read()  # the adapter comes with the first step
                    continue
                shares.append(sum(text.count(self.word) for text in texts) / (8 * 8))


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or save_tiny_model(folder)
        engine = AsyncEngine(path, device=args.device, enable_lora=True, kv_cache_memory_bytes="256MiB", max_model_len=256)
        app = build_app(engine, served_model_name=("base",))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        client = Client(server.servers[0].sockets[0].getsockname()[1], args.word)
        client.start()

        def reward(completions: list[str], **_: object) -> list[float]:
            return [text.count(args.word) / 8 for text in completions]

        config = trl.GRPOConfig(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=8, learning_rate=args.lr or (1e-4 if args.model else 0.01), lr_scheduler_type="constant",
            logging_steps=1, report_to="none", save_strategy="no", use_cpu=args.device == "cpu", bf16=False,
            gradient_checkpointing=False, disable_tqdm=True, log_completions=False,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), args=config,
            processing_class=transformers.AutoTokenizer.from_pretrained(path), reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 3} w{i + 9}" for i in range(8)]}),
            peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), rollout_func=rollout(engine),
        )  # fmt: skip
        trainer.train()
        client.is_over.set()
        client.join()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"reward: {rewards[0]:.3f} -> {rewards[-1]:.3f}")
        for model, shares in client.shares.items():
            print(f"{model}: {len(shares)} answers, share of {args.word!r} {shares[0]:.3f} -> {shares[-1]:.3f}")
        server.should_exit = True
        engine.close()


if __name__ == "__main__":
    main()
