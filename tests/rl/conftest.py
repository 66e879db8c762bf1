"""A tiny random Qwen3 with a tokenizer of whole words, saved by transformers for trainers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpy import LLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(29))]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
OPTIONS = {"kv_cache_memory_bytes": "4MiB", "max_num_seqs": 64, "max_model_len": 128}
CONFIG = {
    "vocab_size": len(WORDS), "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 8192,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def save_model(directory: Path, **changes: Any) -> Path:
    """The model, its tokenizer and its generation config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(7)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**CONFIG, **changes}))
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Sets torch to one thread, because for such small models threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", name="save_model")
def model_maker() -> Callable[..., Path]:
    """`save_model` for tests."""
    return save_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the model."""
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def open_llm(device: str, qwen3: Path) -> Iterator[Callable[..., LLM]]:
    """Opens the model with a small cache, on each device."""
    made: list[LLM] = []

    def make(path: Path = qwen3, **options: Any) -> LLM:
        made.append(LLM(path, **{"device": device, **OPTIONS, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
