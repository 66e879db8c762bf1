"""The conversion of a model at load: once, in a child process; and the errors of classes that cannot be converted."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from modules import load

from llmpy import LLM, CheckpointError, UnsupportedError, export
from llmpy.export.convert import convert

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
    with pytest.raises(UnsupportedError, match="`pip install torch transformers` converts it, once"):
        export.find({"architectures": ["HeliumForCausalLM"], "a": 1}, "config.json")
