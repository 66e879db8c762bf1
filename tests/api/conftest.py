"""An LLM over a stand-in for the core, to test the Python part alone; and tiny models on the real core."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from llmpy import LLM, AsyncEngine
from llmpy.engine import loading
from llmpy.engine.pooling import Pooler


def _load(name):
    """A module beside this file, which importlib mode does not put on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(name + ".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake_core = sys.modules.get("fake_core") or _load("fake_core")
for helper in ("async_help", "memory_help"):
    if helper not in sys.modules:
        _load(helper)


@pytest.fixture
def fake_llm(monkeypatch):
    """Makes an LLM over the stand-in; `.fake` is its engine."""
    made = []

    def make(tokenizer=True, texts=True, template=fake_core.TEMPLATE, step_s=0.0, defaults=None, **options):
        def load(config, on_progress=None):
            loaded = loading.Loaded()
            loaded.tokenizer = fake_core.make_tokenizer(texts, template) if tokenizer else None
            loaded.token_bytes = loaded.tokenizer.token_bytes() if tokenizer else None
            loaded.name, loaded.weight_type, loaded.vocab_size = "Fake", "float32", fake_core.VOCAB
            loaded.eos_token_ids = [fake_core.VOCAB - 1]
            loaded.spec = {"ops": [], "weights": [], "values": [], "moved": {}, "vocab_size": fake_core.VOCAB}
            loaded.programs = [loaded.spec]
            loaded.images = None
            loaded.pooler = Pooler(("embed", "token_embed"))
            loaded.generation_defaults = {**(defaults or {}), **config.override_generation_config}
            loaded.model, loaded.engine = fake_core.FakeModel(), fake_core.FakeEngine(loaded.token_bytes, step_s)
            loaded.drafter = None
            length = config.max_model_len or 64
            loaded.config = config.replace(device="cpu", max_model_len=length, max_num_seqs=8)
            return loaded

        monkeypatch.setattr(loading, "load", load)
        llm = LLM("fake", **options)
        llm.fake = llm._driver.engine
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 304, "hidden_size": 64,
    "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def make_model(path, scale=1.0, **changes):
    """A tiny Llama with random weights, a tokenizer with a chat template, and a generation config."""
    from safetensors.numpy import save_file

    config, rng = CONFIG | changes, np.random.default_rng(7)
    hidden, ffn, kv = config["hidden_size"], config["intermediate_size"], 2 * config["head_dim"]
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}.items():
            shapes[f"{prefix}self_attn.{name}_proj"] = shape
        for name, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
            shapes[f"{prefix}mlp.{name}_proj"] = shape
        shapes |= {f"{prefix}{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm"] = (hidden,)
    weights = {name + ".weight": rng.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in shapes.items()}
    for name in weights:
        if "norm" in name:
            weights[name] = (1 + weights[name]).astype(np.float32)
    weights["model.embed_tokens.weight"] *= scale
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": 2}))
    fake_core.make_backend().save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": fake_core.TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a tiny model."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def write_model():
    """Writes a tiny model into a directory."""
    return make_model


@pytest.fixture
def open_tiny(device, tiny_model):
    """Opens the tiny model with a small cache, on each device."""
    made = []

    def make(path=tiny_model, **options):
        made.append(LLM(path, **({"device": device, "kv_cache_memory_bytes": "16MiB"} | options)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def long_model(tmp_path_factory, write_model):
    """Directory of a tiny model with room for long requests."""
    return write_model(tmp_path_factory.mktemp("long"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def shared_engines():
    """Shared engines by class and device, because making an engine takes longer than most tests."""
    engines = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def open_async(device, long_model, shared_engines):
    """Opens an AsyncEngine over that model: a shared one, or a new one with options or fresh=True."""
    made = []

    def make(fresh=False, **options):
        if not fresh and not options:
            key = AsyncEngine, device
            if key not in shared_engines:
                shared_engines[key] = AsyncEngine(long_model, device=device, kv_cache_memory_bytes="32MiB")
            return shared_engines[key]
        made.append(AsyncEngine(long_model, **({"device": device, "kv_cache_memory_bytes": "32MiB"} | options)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def open_long(device, long_model, shared_engines):
    """The same model as a shared LLM."""

    def make():
        key = LLM, device
        if key not in shared_engines:
            shared_engines[key] = LLM(long_model, device=device, kv_cache_memory_bytes="16MiB")
        return shared_engines[key]

    return make
