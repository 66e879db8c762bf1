"""Every error in a JSON file or a template of a checkpoint is a CheckpointError or ChatTemplateError with the file's name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmpy.config import EngineConfig
from llmpy.engine.loading import _generation_defaults, open_tokenizer
from llmpy.errors import ChatTemplateError, CheckpointError, ConfigError
from llmpy.hub import resolve
from llmpy.json_files import read_json
from llmpy.sampling_params import SamplingParams
from llmpy.text.tokenizer import Tokenizer

CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}
NESTED = '{"a":' * 100_000


def write(directory: Path, **files: Any) -> Path:
    """A directory with a small tokenizer; text is written as it stands, the rest as JSON."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}, [("a", "b")]))
    backend.decoder = decoders.ByteLevel()
    given = {"config": {}, "tokenizer_config": CONFIG, "tokenizer": json.loads(backend.to_str()), **files}
    for name, content in given.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def open_with(directory: Path, **files: Any) -> Tokenizer:
    return open_tokenizer(str(write(directory, **files)))


@pytest.mark.parametrize(
    "name", ["config", "generation_config", "tokenizer_config", "special_tokens_map", "chat_template", "tokenizer"]
)
@pytest.mark.parametrize(
    "content", ["", "[1", NESTED, "[1, 2]", '{"eos_token": "\\ud800", "chat_template": "\\ud800"}', "5", "é\udcff"]
)
def test_no_file_is_read_as_another_error(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError) as caught:
        open_tokenizer(str(tmp_path))
    assert caught.value.file == str(tmp_path / f"{name}.json")
    assert str(caught.value).startswith(f"{caught.value.file}: ") and len(str(caught.value)) < 600


SETTINGS = [
    ("added_tokens_decoder", [1]),
    ("added_tokens_decoder", {"x": {"content": "a"}}),
    ("added_tokens_decoder", {"-1": {"content": "a"}}),
    ("added_tokens_decoder", {"99999999999": {"content": "a"}}),
    ("added_tokens_decoder", {"7": "a"}),
    ("added_tokens_decoder", {"7": {"special": True}}),
    ("added_tokens_decoder", {"7": {"content": 5}}),
    ("bos_token", {"special": True}),
    ("bos_token", 5),
    ("unk_token", ["a"]),
    ("additional_special_tokens", {"a": 1}),
    ("additional_special_tokens", [None]),
    ("chat_template", [{"name": "default"}]),
    ("chat_template", ["a"]),
    ("chat_template", [{"name": 1, "template": "a"}]),
    ("chat_template", {"default": "a"}),
    ("chat_template", 7),
]


@pytest.mark.parametrize(("key", "value"), SETTINGS)
def test_settings_of_another_form(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {key}: wanted .*, have .*; correct it"):
        open_with(tmp_path, tokenizer_config={**CONFIG, key: value})
    if not key.endswith("template"):
        with pytest.raises(CheckpointError, match=rf"special_tokens_map\.json: {key}: wanted"):
            open_with(tmp_path, tokenizer_config={}, special_tokens_map={key: value})


def test_templates_name_their_file(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "x"}]
    for files, name in (
        ({"tokenizer_config": {**CONFIG, "chat_template": "{% break %}"}}, "tokenizer_config.json"),
        ({"chat_template": {"chat_template": "{% for %}"}}, "chat_template.json"),
    ):
        with pytest.raises(ChatTemplateError, match=rf"{tmp_path}/{name}: chat template: "):
            open_with(tmp_path, **files).apply_chat_template(hello)
    (tmp_path / "chat_template.jinja").write_text("{{ 'a' * 10 ** 9 }}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: chat template: makes a value of more than"):
        open_with(tmp_path).apply_chat_template(hello)
    with pytest.raises(ChatTemplateError, match=r"^chat template: 'a' is undefined"):
        open_with(tmp_path).apply_chat_template(hello, chat_template="{{ a.b }}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read as text"):
        open_with(tmp_path)


GENERATION = [
    {"eos_token_id": value} for value in ("x", {}, [None], float("-inf"), [[1]], True)
] + [
    {"top_k": 50.0}, {"top_k": -2}, {"temperature": "0.7"}, {"temperature": -1}, {"top_p": 2}, {"min_p": []},
    {"repetition_penalty": 0}, {"max_new_tokens": "9"}, {"min_new_tokens": -1}, {"temperature": float("nan")},
]  # fmt: skip


@pytest.mark.parametrize("content", GENERATION, ids=str)
def test_generation_config_is_checked_at_load(tmp_path: Path, content: dict[str, Any]) -> None:
    path = write(tmp_path, generation_config=content) / "generation_config.json"
    files, name = resolve(tmp_path, weights=False), next(iter(content))
    for config in (EngineConfig(model="m"), EngineConfig(model="m", generation_config=str(tmp_path))):
        with pytest.raises(CheckpointError, match=rf"{path}: .*generation_config='none'") as caught:
            _generation_defaults(config, files)
        assert caught.value.file == str(path)
    assert _generation_defaults(EngineConfig(model="m", generation_config="none"), files) == {}
    right = {"eos_token_id": [2], name: 2 if name == "eos_token_id" else 1}
    assert _generation_defaults(EngineConfig(model="m", override_generation_config=right), files) == right
    good = resolve(write(tmp_path, generation_config={"eos_token_id": [2, 3], "min_new_tokens": 300}), weights=False)
    with pytest.raises(ConfigError, match=r"^override_generation_config: "):
        _generation_defaults(EngineConfig(model="m", override_generation_config=content), good)


def test_large_ids_take_no_memory(tmp_path: Path) -> None:
    """A token with the id 10**9 in a file of some hundred bytes."""
    directory = write(tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["b"] = 10**9
    (directory / "tokenizer.json").write_text(json.dumps(content))
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from llmpy.engine.loading import open_tokenizer\nopen_tokenizer(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(directory)], capture_output=True, text=True)
    assert "tokenizer.json: token 'b': wanted an id below 1048576, have 1000000000" in done.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: Is a directory"):
        read_json(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_json(tmp_path / "gone.json")
    assert read_json(tmp_path / "gone.json", absent=dict) == {}


def test_bad_words_are_unicode() -> None:
    with pytest.raises(ValueError, match="bad_words must be Unicode text"):
        SamplingParams(bad_words=["a", "\ud800"])
