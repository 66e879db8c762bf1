"""A stand-in for the core: one greedy token per sequence and step, by a rule simple enough to predict."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

from llmpy.text.token_texts import of_backend
from llmpy.text.tokenizer import Tokenizer

VOCAB = 300
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_backend(vocab_size=VOCAB):
    """A byte-level tokenizer of single bytes, some letters' pairs, and special tokens at the end."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    merges = []
    for first in "abcdefghijklmnopqrstuvwxyz":
        for second in "eaoi":
            if len(vocabulary) < vocab_size - 3:
                vocabulary[first + second] = len(vocabulary)
                merges.append((first, second))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    return backend


def make_tokenizer(texts=True, template=TEMPLATE):
    """A Tokenizer over `make_backend`; without `texts` the core cannot match stop strings."""
    backend = make_backend()
    special = [place for place, token in backend.get_added_tokens_decoder().items() if token.special]
    named = {"eos_token": "<|end|>"}
    templates = {"default": template} if template else {}
    end = backend.token_to_id("<|end|>")
    return Tokenizer(backend, of_backend(backend) if texts else None, special, named, [end], templates)


def next_token(ids):
    """The fake model: depends on the last three ids."""
    return int((31 * ids[-1] + 17 * (ids[-2] if len(ids) > 1 else 3) + 7 * len(ids)) % (VOCAB - 2))


class InterruptingBar:
    """A progress bar that sends Ctrl-C as soon as the requests have made some tokens.

    Args:
        llm: The engine that runs the requests.
        tokens: Number of tokens, besides those made before.
    """

    def __init__(self, llm, tokens):
        self.llm, self.tokens = llm, tokens

    def __call__(self, **options):
        self.tokens += self.llm.stats().generation_tokens
        self.thread = threading.Thread(target=self.interrupt)
        self.thread.start()
        return self

    def interrupt(self):
        while self.llm.stats().generation_tokens < self.tokens:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def update(self, n):
        pass

    def close(self):
        self.thread.join()


class FakeModel:
    def memory(self):
        return [{"weights": 98_000_000, "kv": 1 << 20}]

    def weight_info(self):
        return [
            {
                "name": "model.a.weight",
                "shape": (2, 3),
                "dtype": "float32",
                "stored_in": "model.a.weight",
                "shard": None,
            }
        ]

    def describe(self):
        return {"num_groups": 1}

    def program(self):
        return ["embed", "logits"]

    def close(self):
        pass


class FakeSequence:
    def __init__(self, number, sample, prompt, params):
        self.number, self.sample, self.prompt, self.params = number, sample, prompt, params
        self.prior = list(np.frombuffer(params.get("prior", b""), np.int32))
        self.new, self.taken, self.finish, self.stop, self.status = [], 0, None, 0, 0
        self.done = False


class FakeEngine:
    """Supports max_tokens, stop ids, end of sequence (VOCAB - 1), stop strings over `token_bytes`, logprobs, aborts."""

    def __init__(self, token_bytes=None, step_s=0.0):
        self.token_bytes, self.step_s = token_bytes, step_s
        self.sequences, self.submitted, self.next, self.fail_at, self.closed = [], [], 0, {}, False
        self.steps = self.prompt_tokens = self.generation_tokens = 0

    def submit(self, prompt, params):
        number, self.next = self.next, self.next + 1
        self.submitted.append((prompt, params))
        ids = list(np.frombuffer(prompt, np.int32))
        self.prompt_tokens += len(ids)
        self.sequences += [FakeSequence(number, i, ids, params) for i in range(params.get("n", 1))]
        return number

    def abort(self, numbers):
        for seq in self.sequences:
            if (numbers is None or seq.number in numbers) and seq.finish is None:
                seq.finish = "abort"

    def step(self):
        self.steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        live = [seq for seq in self.sequences if seq.finish is None]
        for seq in live:
            self.advance(seq)
        return bool(live)

    def advance(self, seq):
        if "score_start" in seq.params:
            seq.finish = "length"
            return
        if seq.number in self.fail_at and len(seq.new) == self.fail_at[seq.number][0]:
            seq.finish, seq.status = "error", self.fail_at[seq.number][1]
            return
        token = next_token([*seq.prompt, *seq.prior, *seq.new, seq.sample])
        seq.new.append(token)
        self.generation_tokens += 1
        count, p = len(seq.new) + len(seq.prior), seq.params
        text = b"".join(self.token_bytes[t] for t in [*seq.prior, *seq.new]) if self.token_bytes else b""
        if token == VOCAB - 1 and not p["ignore_eos"]:
            seq.finish = "eos"
        elif token in p.get("stop_token_ids", ()):
            seq.finish, seq.stop = "stop_id", token
        elif p.get("stop") and any(stop in text for stop in p["stop"]):
            seq.finish, seq.stop = "stop_string", next(i for i, stop in enumerate(p["stop"]) if stop in text)
        elif p["max_tokens"] is not None and count >= p["max_tokens"]:
            seq.finish = "length"

    def run(self, timeout_ms):
        end = time.monotonic() + timeout_ms / 1000
        finished = sum(seq.finish is not None for seq in self.sequences)
        while self.step() and time.monotonic() < end:
            if sum(seq.finish is not None for seq in self.sequences) > finished:
                break
        return True

    def step_log(self, n):
        return []

    def take(self, finished_only):
        output = []
        for seq in list(self.sequences):
            if seq.finish is None and (finished_only or seq.taken == len(seq.new)):
                continue
            if seq.finish is not None:
                self.sequences.remove(seq)
            output.append(self.output(seq))
            seq.taken = len(seq.new)
        return output

    def output(self, seq):
        ids = np.array(seq.new[seq.taken :], np.int32)
        k, p = len(ids), seq.params
        values = np.array([-0.5 * (t % 7) - 0.25 for t in ids], np.float32)
        logprobs = top = prompt = prompt_top = None
        is_score = "score_start" in p
        if p.get("logprobs") is not None and not is_score:
            shown = [(values - i).tobytes() for i in range(3)]
            logprobs = (*shown, np.full(k, 0.5, np.float32).tobytes(), np.full(k, 2, np.int32).tobytes())
            top = self.top(ids, p["logprobs"])
        start = p.get("score_start", 1)
        count = p.get("logprobs") if is_score else p.get("prompt_logprobs")
        if count is not None and (seq.taken == 0 or is_score):
            rest = np.array(seq.prompt[start:], np.int32)
            prompt = (-rest.astype(np.float32) / 100).tobytes(), np.full(len(rest), 3, np.int32).tobytes()
            prompt_top = self.top(rest, count)
        return {
            "request": seq.number,
            "sample": seq.sample,
            "finish": seq.finish,
            "stop": seq.stop,
            "status": seq.status,
            "error": None,
            "error_position": len(seq.prompt) + len(seq.new),
            "first": seq.taken,
            "ids": ids.tobytes(),
            "logprobs": logprobs,
            "top": top,
            "prompt_logprobs": prompt,
            "prompt_top": prompt_top,
            "num_cached_tokens": 1,
            "num_cached_images": 0,
            "num_preemptions": 0,
            "drafts": None,
            "epoch": 0,
            "epochs": ((k, 0),) if k else (),
            "times": (1.0, 1.5, 2.0, 3.0),
            "is_last": seq.finish is not None and all(s.number != seq.number for s in self.sequences),
        }

    def top(self, ids, count):
        if not count:
            return None
        best = np.stack([np.arange(count, dtype=np.int32) + 1] * len(ids)) if len(ids) else np.zeros((0, count), np.int32)
        values = -0.1 * (best.astype(np.float32) + 1)
        return best.tobytes(), values.astype(np.float32).tobytes(), best.tobytes()

    def raise_refusal(self):
        pass

    def is_dead(self):
        return False

    def holds(self):
        return 0

    def hold_new(self, holds):
        self.is_gated = holds

    def settle(self):
        pass

    def weight_epoch(self):
        return 0

    def has_unfinished(self):
        return bool(self.sequences)

    def reset_prefix_cache(self, recompute):
        self.was_reset = recompute

    def stats(self):
        running = sum(seq.finish is None for seq in self.sequences)
        return {
            "num_running": running,
            "num_waiting": 0,
            "num_unfinished": len(self.sequences),
            "num_steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "kv_blocks_total": 100,
            "kv_blocks_free": 75,
            "uptime_s": 1.0,
        }

    def check(self):
        assert not self.closed

    def close(self):
        self.closed = True
