"""A type checker on code that uses the package: it finds typos of keywords, and no error in correct code."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmpy
from llmpy import LLM, EngineConfig, PoolingParams, SamplingParams, keywords, options

GOOD = '''
import json
from collections.abc import Iterator

import llmpy
from llmpy import LLM, AsyncEngine, PromptType, RequestOutputs, SamplingParams, StructuredOutputsParams


def generate(llm: LLM, text: str, schema: dict[str, object]) -> RequestOutputs:
    prompt = {"prompt": text}
    params = SamplingParams(structured_outputs={"regex": "a"}, temperature=0.5)
    first = llm.generate(prompt, params.replace(n=2))
    second = llm.generate([prompt, {"prompt": text}], temperature=0, structured_outputs={"json": schema})
    third = llm.generate((word for word in text.split()), structured_outputs=StructuredOutputsParams(regex="a"))
    return first + second[1:] + third


def look(outputs: RequestOutputs) -> float:
    sample = outputs[0].outputs[0]
    assert sample.logprobs is not None
    json.dumps(sample.logprobs.to_list())
    print(outputs.to_pandas(), outputs[0].to_pandas())
    for entry in sample.logprobs:
        print(entry[1].logprob)
    return sample.logprobs[0][sample.token_ids[0]].logprob


def others(llm: LLM) -> Iterator[str]:
    print(llm.score("a", ["b", "c"])[0].sum_logprob, llm.embed(["a"], normalize=False).numpy().shape)
    talk = [{"role": "user", "content": "a"}]
    text: str = llm.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = llm.tokenizer.apply_chat_template(talk)
    ids: list[PromptType] = [text, tokens, [1, 2], {"prompt_token_ids": [1]}]
    llm.generate(ids, on_error="return")
    yield from llm.stream("a", max_tokens=3)


async def serve() -> None:
    engine = await AsyncEngine.create("m", max_model_len=64, trust_remote_code=True)
    print(engine.config, llmpy.__version__)


LLM(dtype="float32", trust_remote_code=True, max_model_len=128)
'''

BAD = [
    ('llm.generate("a", temprature=0)', "temprature"),
    ('llm.chat("a", max_token=3)', "max_token"),
    ('llm.stream("a", temperature="hot")', "incompatible type"),
    ('llm.stream_chat("a", top_P=1.0)', "top_P"),
    ('llm.as_completed(["a"], max_new_tokens=3)', "max_new_tokens"),
    ('llm.add_request("a", seeed=3)', "seeed"),
    ('llm.embed("a", normalise=True)', "normalise"),
    ('llm.score("a", temprature=1.0)', "temprature"),
    ('llm.generate()', "prompts"),
    ('llm.generrate("a")', "generrate"),
    ('LLM("m", max_model_length=3)', "max_model_length"),
    ('LLM("m", max_num_seqs="many")', "incompatible type"),
    ('SamplingParams(temprature=0)', "temprature"),
    ('SamplingParams().replace(temprature=0)', "temprature"),
    ('EngineConfig(model="m").replace(dtyp="auto")', "dtyp"),
    ('llmpy.AsynEngine', "AsynEngine"),
    ('llm.tokenizer.apply_chat_template([{"role": "user"}]).upper()', "upper"),
    ('AsyncEngine("m", swap_space=3)', "swap_space"),
]  # fmt: skip

SETTINGS = """[mypy]
strict = True
[mypy-pandas.*,pyarrow.*,tqdm.*]
ignore_missing_imports = True
[mypy-torch.*,transformers.*,trl.*,ray.*,lm_eval.*]
follow_imports = skip
"""
"""The last ones take long to read, and no call of the files has a type of theirs."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """mypy's messages about the two files, by file and line."""
    folder = tmp_path_factory.mktemp("typed")
    lines = ["import llmpy", "from llmpy import LLM, AsyncEngine, EngineConfig, SamplingParams", "llm = LLM()"]
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text("\n".join([*lines, *(line for line, _ in BAD)]) + "\n")
    (folder / "mypy.ini").write_text(SETTINGS)
    root = Path(llmpy.__file__).parents[1]
    environment = {**os.environ, **({} if root.name == "site-packages" else {"MYPYPATH": str(root)})}
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "good.py", "bad.py"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert not result.stderr, result.stderr
    errors = re.findall(r"^(\w+)\.py:(\d+): error: (.*)$", result.stdout, re.MULTILINE)
    return {(file, int(line)): text for file, line, text in errors}


def test_right_code_has_no_errors(found):
    assert not {place: text for place, text in found.items() if place[0] == "good"}


@pytest.mark.parametrize(("line", "name"), BAD)
def test_a_typo_is_an_error(found, line, name):
    place = ("bad", 4 + [code for code, _ in BAD].index(line))
    assert name in found.get(place, ""), found


def plain(annotation):
    return re.sub(r"\s", "", getattr(annotation, "__forward_arg__", annotation))


@pytest.mark.parametrize(("typed", "known"), [("SamplingKeywords", SamplingParams), ("PoolingKeywords", PoolingParams)])
def test_keywords_are_the_fields(typed, known):
    given = {name: plain(kind) for name, kind in getattr(keywords, typed).__annotations__.items()}
    assert given == {field.name: plain(field.type) for field in dataclasses.fields(known)}


@pytest.mark.parametrize(("typed", "call"), [("UpdateOptions", LLM.update_weights), ("BeginOptions", LLM.begin_update)])
def test_keywords_are_the_options_of_an_update(typed, call):
    parameters = inspect.signature(call).parameters.values()
    known = {one.name: plain(one.annotation) for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert {name: plain(kind) for name, kind in getattr(keywords, typed).__annotations__.items()} == known


def test_keywords_are_the_options():
    parameters = inspect.signature(LLM.__init__).parameters
    signature = {name: plain(one.annotation) for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    always = keywords.AlwaysSo.__annotations__.keys()
    assert keywords.EngineKeywords.__annotations__.keys() == signature.keys() | always
    assert always == options.ALWAYS_SO.keys()
    assert [*signature] == [*(name for name in EngineConfig.__dataclass_fields__ if name != "model"), "use_tqdm_on_load"]
    others = {"use_tqdm_on_load", "override_generation_config"}
    defaults = {name: parameters[name].default for name in signature.keys() - others}
    config = EngineConfig.__dataclass_fields__
    assert defaults == {name: config[name].default for name in defaults}
    wider = {"|Path": "", "Sequence[int]": "tuple[int,...]", "Mapping[str,Any]|None": "Mapping[str,Any]"}
    for name in signature.keys() - {"use_tqdm_on_load"}:
        kinds = {signature[name], *(signature[name].replace(wide, own) for wide, own in wider.items())}
        assert plain(config[name].type) in kinds, name
