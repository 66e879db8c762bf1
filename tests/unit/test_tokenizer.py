"""Tokenizers of Hugging Face directories, against transformers where it is the yardstick."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpy.errors import CheckpointError, InvalidRequestError, UnsupportedError
from llmpy.hub import resolve
from llmpy.text import token_texts
from llmpy.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["Hello world", "  naïve 😀 中文\n\n", "he said: 'a a'", "<s>he</s> <|im_end|>x", "", "100%"]
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}


def write_backend(directory: Path, adds_bos: bool = False) -> Path:
    """A directory with a small byte-level tokenizer.json that knows <s> and </s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {char: place for place, char in enumerate(token_texts.byte_characters())}
    backend = Tokenizer(models.BPE({**vocabulary, "Ġa": 256, "he": 257}, [("Ġ", "a"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    backend.enable_truncation(3)
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return directory


def load(directory: Path, settings: dict[str, Any] | None = None, **files: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a directory after some more files were written into it."""
    for name, content in {"config": {}, "tokenizer_config": settings or CONFIG, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(resolve(directory, weights=False))


def theirs(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False, "add_eos_token": True},
    {"pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    {
        "added_tokens_decoder": {
            "261": {
                "content": "<tool>",
                "special": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            },
            "260": {
                "content": "<|im_end|>",
                "special": True,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            },
        },
        "eos_token": "<|im_end|>",
    },
]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_equals_transformers(settings: dict[str, Any], adds_bos: bool, tmp_path: Path) -> None:
    directory = write_backend(tmp_path, adds_bos)
    ours, reference = load(directory, {**CONFIG, **settings}), theirs(directory)
    assert set(ours.special_tokens) >= {*reference.all_special_tokens}
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"):
        assert getattr(ours, name) == getattr(reference, name), name
    assert len(ours) == len(reference)
    assert ours.get_vocab() == reference.get_vocab()
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == reference.encode(text, add_special_tokens=add, truncation=False)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


def test_forms(tmp_path: Path) -> None:
    tokenizer = load(write_backend(tmp_path))
    ids = tokenizer.encode("he said a")
    assert tokenizer("he said a") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer(["he", "a"])["input_ids"] == tokenizer.encode_batch(["he", "a"])
    assert tokenizer.decode(np.array(ids, np.int32)) == tokenizer.decode(tuple(ids)) == "he said a"
    assert tokenizer.decode(257) == "he"
    assert tokenizer.batch_decode([ids, [257]]) == ["he said a", "he"]
    assert tokenizer.convert_ids_to_tokens(256) == "Ġa"
    assert tokenizer.convert_ids_to_tokens([256, 9999, -1]) == ["Ġa", None, None]
    assert tokenizer.convert_tokens_to_ids("Ġa") == 256
    assert tokenizer.convert_tokens_to_ids(["Ġa", "nothing"]) == [256, None]
    assert tokenizer.max_token_id == 259
    assert tokenizer.decode([9999, 257, -3]) == "he"
    assert tokenizer.encode("x" * 10, add_special_tokens=False) == [tokenizer.encode("x")[0]] * 10  # not truncated


def test_half_a_surrogate_pair_is_told(tmp_path: Path) -> None:
    tokenizer = load(write_backend(tmp_path))
    wrong = "ab\ud800"
    calls: list[Callable[[], object]] = [
        lambda: tokenizer.encode(wrong),
        lambda: tokenizer.encode_batch(["ab", wrong]),
        lambda: tokenizer.encode_pair("ab", wrong),
        lambda: tokenizer.encode_with_ends(wrong),
        lambda: tokenizer.count(wrong),
        lambda: tokenizer(wrong),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match="text: wanted Unicode text, have a lone surrogate at 2"):
            call()
    with pytest.raises(TypeError):
        tokenizer.encode_batch([5])  # type: ignore[list-item]


def test_ends_are_characters(tmp_path: Path) -> None:
    tokenizer = load(write_backend(tmp_path, adds_bos=True))
    ids, ends = tokenizer.encode_with_ends("a€he")
    assert tokenizer.decode(ids) == "<s>a€he"
    assert ends == [0, 1, 2, 2, 2, 4]


def test_eos_ids_of_all_sources(tmp_path: Path) -> None:
    directory = write_backend(tmp_path)
    tokenizer = load(directory, config={"eos_token_id": 7}, generation_config={"eos_token_id": [5, 7]})
    assert tokenizer.eos_token_ids == [5, 7, 259]
    assert load(directory, config={"eos_token_id": None}, generation_config={}).eos_token_ids == [259]


def test_template_sources(tmp_path: Path) -> None:
    directory = write_backend(tmp_path)
    assert load(directory).chat_template is None
    assert load(directory, {**CONFIG, "chat_template": "one"}).chat_template == "one"
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert load(directory, {**CONFIG, "chat_template": several}).chat_templates == {"default": "d", "tool_use": "t"}
    (directory / "chat_template.jinja").write_text("file\n")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("r")
    tokenizer = load(directory, {**CONFIG, "chat_template": "one"})
    assert tokenizer.chat_templates == {"default": "file\n", "rag": "r"}
    assert load_tokenizer(resolve(directory, weights=False), None, "mine").chat_template == "mine"


def test_special_tokens_map_file(tmp_path: Path) -> None:
    directory = write_backend(tmp_path)
    tokenizer = load(directory, {"model_max_length": 9}, special_tokens_map={"bos_token": {"content": "<s>"}})
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.special_tokens) == ("<s>", None, ["<s>", "</s>"])


def test_missing_and_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"wanted tokenizer\.json, have tokenizer\.model"):
        load_tokenizer(resolve(tmp_path, weights=False))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match="not a tokenizer") as caught:
        load_tokenizer(resolve(tmp_path, weights=False))
    assert pickle.loads(pickle.dumps(caught.value)).file == str(tmp_path / "tokenizer.json")


def test_library_is_imported_late() -> None:
    script = "import sys, llmpy.text.tokenizer; print({'tokenizers', 'jinja2', 'huggingface_hub'} & set(sys.modules))"
    command = [sys.executable, "-P", "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert run.stdout.strip() == "set()", run.stderr
