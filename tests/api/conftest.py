"""An LLM over a stand-in for the core, for what Python alone does; and a tiny real model."""

import importlib.util
import sys
from pathlib import Path

import pytest

from llmpy import LLM, _loading


def _load_fake():
    spec = importlib.util.spec_from_file_location("fake_core", Path(__file__).with_name("fake_core.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_core"] = module
    spec.loader.exec_module(module)
    return module


fake_core = sys.modules.get("fake_core") or _load_fake()


@pytest.fixture
def fake_llm(monkeypatch):
    """Makes an LLM over the stand-in; `.fake` is its engine."""
    made = []

    def make(tokenizer=True, texts=True, template=fake_core.TEMPLATE, step_s=0.0, defaults=None, **options):
        def load(config, on_progress=None):
            loaded = _loading.Loaded()
            loaded.tokenizer = fake_core.make_tokenizer(texts, template) if tokenizer else None
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
