"""The conversion of a model at load: once, in a child process; and the errors of classes that cannot be converted."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from modules import load

from llmpy import LLM, CheckpointError, ConfigError, EngineConfig, UnsupportedError, cli, export
from llmpy.cli import engine_options
from llmpy.export.conversion import convert

helpers = load(Path(__file__).with_name("conftest.py"))
torch = pytest.importorskip("torch")

ALONE = """
import sys
from llmpy import LLM, SamplingParams
with LLM(sys.argv[1], skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes="16MiB") as llm:
    print(llm.generate([[3, 5, 9]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_a_class_is_converted_once_in_a_child_process(made, cache_dir, caplog, monkeypatch) -> None:
    found = made("helium")
    caplog.set_level(logging.INFO, "llmpy")
    run = subprocess.run([sys.executable, "-c", ALONE, str(found.path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    ids = torch.tensor([[3, 5, 9]])
    ones = torch.ones_like(ids)
    wanted = found.model.generate(ids, attention_mask=ones, do_sample=False, max_new_tokens=8, eos_token_id=None)
    tokens = wanted[0, 3:].tolist()
    assert tokens == json.loads(run.stdout.replace("(", "[").replace(")", "]"))
    monkeypatch.setattr(export, "converted", lambda raw: pytest.fail("it is converted twice"))
    with LLM(found.path, **helpers.OPTIONS) as llm:
        assert helpers.generated(llm, [[3, 5, 9]])[0][0] == tokens
    assert "HeliumForCausalLM: the program of transformers' class, from " in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 0}'])
def test_a_damaged_file_is_made_again(text, converted, monkeypatch, caplog) -> None:
    found = converted("mellum")
    good = found.program.read_text()
    monkeypatch.setattr(export, "converted", lambda raw: json.loads(good))
    found.program.write_text(text)
    with pytest.raises((CheckpointError, UnsupportedError), match=str(found.program)):
        export.stored.read(found.program)
    with LLM(found.path, **helpers.OPTIONS) as llm:
        assert llm.generate([[1, 2]], max_tokens=1, temperature=0)
    assert json.loads(found.program.read_text()) == json.loads(good)
    assert "converted again" in caplog.text


def test_the_key_has_what_the_program_depends_on(made, cache_dir, monkeypatch) -> None:
    raw = {"architectures": ["X"], "hidden_size": 64, "dtype": "float32"}
    one = export.place(raw, "X")
    assert one == export.place({**raw, "dtype": "bfloat16", "transformers_version": "1"}, "X")
    assert one != export.place({**raw, "hidden_size": 65}, "X")
    monkeypatch.setattr(export, "version", lambda name: "9.9")
    assert one != export.place(raw, "X")


def test_a_program_of_a_file(converted, made, tmp_path, monkeypatch, caplog) -> None:
    """By its path, and by itself in the model's folder, where nothing can convert; programs of other models are refused."""
    found = converted("helium")
    monkeypatch.setattr(export, "missing_for", lambda name: "torch is missing.")
    with LLM(found.path, **helpers.OPTIONS) as llm:
        wanted = helpers.generated(llm, [helpers.IDS])
    file = tmp_path / "program.json"
    shutil.copy(found.program, file)
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(tmp_path / "empty"))
    with LLM(found.path, program=file, **helpers.OPTIONS) as llm:
        assert helpers.generated(llm, [helpers.IDS]) == wanted
    with pytest.raises(UnsupportedError, match=r"torch is missing\. .*A function with @llmpy.architecture adds one"):
        LLM(found.path, **helpers.OPTIONS)
    folder = shutil.copytree(found.path, tmp_path / "model")
    shutil.copy(file, folder / export.FILE)
    caplog.set_level(logging.INFO, "llmpy")
    with LLM(folder, **helpers.OPTIONS) as llm:
        assert helpers.generated(llm, [helpers.IDS]) == wanted
    assert f"HeliumForCausalLM: the program of {folder / export.FILE}" in caplog.text
    with pytest.raises(UnsupportedError, match="model_impl='llmpy' leaves transformers' classes aside"):
        LLM(folder, model_impl="llmpy", **helpers.OPTIONS)
    other = json.loads(file.read_text())
    other.pop("digest")
    for field, value, words in (("config_key", "0", "of another config.json"), ("architecture", "X", "have that of X")):
        file.write_text(json.dumps({**other, field: value}))
        with pytest.raises(CheckpointError, match=words):
            LLM(found.path, program=file, **helpers.OPTIONS)
    with pytest.raises(ConfigError, match=r"program: .* does not exist"):
        LLM(found.path, program="nothing.json", **helpers.OPTIONS)
    with pytest.raises(ConfigError, match="model_impl must be 'auto' or 'transformers' with program"):
        EngineConfig(program="a.json", model_impl="llmpy")


def test_the_server_has_the_options() -> None:
    chosen = cli._parser("serve").parse_args(["serve", "--program", "a.json", "--model-impl", "transformers", "m"])
    options = engine_options.engine_options(chosen)
    assert options["program"] == "a.json" and options["model_impl"] == "transformers"


def test_a_class_that_has_a_function(converted, caplog, monkeypatch) -> None:
    """model_impl="transformers" takes the converted program, with the bits of the function."""
    found = converted("llama", tie_word_embeddings=True)
    caplog.set_level(logging.INFO, "llmpy")
    answers = []
    for kind in ("auto", "llmpy", "transformers"):
        with LLM(found.path, model_impl=kind, **helpers.OPTIONS) as llm:
            answers.append(helpers.generated(llm, [helpers.IDS]))
    assert answers[0] == answers[1] == answers[2]
    assert "LlamaForCausalLM: the function of llmpy.models.llama" in caplog.text
    assert "LlamaForCausalLM: the program of transformers' class, from " in caplog.text
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    found.program.rename(found.program.with_suffix(".away"))
    try:
        with pytest.raises(UnsupportedError, match="model_impl='transformers': If transformers has the class, `pip install"):
            LLM(found.path, model_impl="transformers", **helpers.OPTIONS)
    finally:
        found.program.with_suffix(".away").rename(found.program)


def test_an_own_class_is_converted_in_its_process(made, tmp_path) -> None:
    """`export.convert` takes a class that transformers does not have, by its fields or its configuration object."""
    found = made("helium")

    class OwnForCausalLM(type(found.model)):
        pass

    raw = {**found.raw, "architectures": ["OwnForCausalLM"]}
    programs = [export.convert(OwnForCausalLM, config) for config in (found.raw, found.model.config)]
    assert programs[0]["config_key"] == export.stored.config_key(raw) and programs[1]["config_key"] is None
    same = ("config_key", "digest")
    assert programs[0] == {**programs[1], **{name: programs[0][name] for name in same}}
    folder = shutil.copytree(found.path, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(raw))
    for program in programs:
        (tmp_path / "own.json").write_text(json.dumps(program))
        with LLM(folder, program=tmp_path / "own.json", **helpers.OPTIONS) as llm:
            logits = llm.tap([helpers.IDS], ["logits"])[0]["logits"]
    wanted = helpers.expected(found.model, helpers.IDS)
    assert (logits.argmax(-1) == wanted.argmax(-1)).all()


REFUSED = {
    "youtu": (r"model.layers.0.self_attn \(YoutuAttention\)", "new_empty", "the vocabulary has no such operation"),
    "laguna": (r"model.layers.0.self_attn \(LagunaAttention\)", "softplus", "the vocabulary has no such operation"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_error_names_module_and_node(kind) -> None:
    module, node, reason = REFUSED[kind]
    config = helpers.config_of(kind)
    name = helpers.transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    message = rf"cannot convert {name}: {module}: node {node}.*{reason}; .* at modeling_"
    with pytest.raises(UnsupportedError, match=message) as caught:
        convert({**config.to_dict(), "architectures": [name]})
    assert caught.value.node.startswith(node) and caught.value.module in str(caught.value)


def test_names_that_nobody_has_are_refused_without_a_child(monkeypatch) -> None:
    monkeypatch.setattr(export, "converted", lambda raw: pytest.fail("a child was started"))
    with pytest.raises(UnsupportedError, match=r"'LamaForCausalLM' is not supported; similar: .*does not have it either"):
        export.find({"architectures": ["LamaForCausalLM"]}, "config.json")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"`pip install torch transformers` converts it, once.*program='FILE.json'"):
        export.find({"architectures": ["HeliumForCausalLM"], "a": 1}, "config.json")
