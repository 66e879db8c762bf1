"""An LLM over a stand-in for the core, for what Python alone does; and a tiny real model."""

import importlib.util
import sys
from pathlib import Path

import pytest

from llmpy import LLM, _loading
from llmpy.token_texts import of_backend
from llmpy.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _load_fake():
    spec = importlib.util.spec_from_file_location("fake_core", Path(__file__).with_name("fake_core.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_core"] = module
    spec.loader.exec_module(module)
    return module


fake_core = sys.modules.get("fake_core") or _load_fake()


def make_backend(vocab_size=fake_core.VOCAB):
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


@pytest.fixture
def fake_llm(monkeypatch):
    """Makes an LLM over the stand-in; `.fake` is its engine."""
    made = []

    def make(tokenizer=True, texts=True, template=TEMPLATE, step_s=0.0, defaults=None, **options):
        def load(config, on_progress=None):
            loaded = _loading.Loaded()
            loaded.tokenizer = make_tokenizer(texts, template) if tokenizer else None
            loaded.token_bytes = loaded.tokenizer.token_bytes() if tokenizer else None
            loaded.name, loaded.weight_type, loaded.vocab_size = "Fake", "float32", fake_core.VOCAB
            loaded.eos_token_ids = [fake_core.VOCAB - 1]
            loaded.generation_defaults = {**(defaults or {}), **config.override_generation_config}
            loaded.model, loaded.engine = fake_core.FakeModel(), fake_core.FakeEngine(loaded.token_bytes, step_s)
            length = config.max_model_len or 64
            loaded.config = config.replace(device="cpu", max_model_len=length, max_num_seqs=8)
            return loaded

        monkeypatch.setattr(_loading, "load", load)
        llm = LLM("fake", **options)
        llm.fake = llm._driver.engine
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()
