"""StructuredOutputsParams: its checks, and the engine's errors without llguidance or with another version."""

import asyncio
import functools
import json
import re
import subprocess

import pytest

from llmpy import LLM, AsyncEngine, InvalidRequestError, SamplingParams, UnsupportedError
from llmpy import StructuredOutputsParams as Structured
from llmpy.structured import lark

pytest.importorskip("llguidance")

VERSION = 'const char *llg_get_version(void) { return "llguidance@%s"; }'


@pytest.fixture(scope="module")
def llm(tmp_path_factory, write_model):
    with LLM(write_model(tmp_path_factory.mktemp("structured")), device="cpu", kv_cache_memory_bytes="16MiB") as made:
        yield made


class Color:
    """A class with the method of pydantic classes."""

    @staticmethod
    def model_json_schema():
        return {"enum": ["red", "green"]}


def test_a_dead_end_is_told_in_words(llm):
    """A property that is required and forbidden: the error must not be the library's dump of its state."""
    schema = {
        "type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
    }  # fmt: skip
    params = SamplingParams(structured_outputs={"json": schema}, max_tokens=200)
    errors = [llm.generate("x", params.replace(seed=seed), on_error="return")[0].error for seed in range(8)]
    told = {str(error) for error in errors if error is not None}
    text = "the grammar has a dead end: no token may follow, and the text may not end here; change the grammar"
    assert told == {f"structured_outputs: {text}"}


def test_exactly_one_constraint():
    with pytest.raises(InvalidRequestError, match="You must use one kind of structured outputs constraint but none are"):
        Structured()
    with pytest.raises(InvalidRequestError, match=r"You can only use one kind of structured outputs .* multiple are specified"):
        Structured(regex="a", choice=["b"])
    with pytest.raises(InvalidRequestError, match="none are specified"):
        Structured(json_object=False)
    for wrong in ({"regex": 1}, {"choice": "abc"}, {"choice": [1]}, {"json": 3}, {"json_object": "yes"}, {"grammar": b""}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            Structured(**wrong)
    for bad in ({"json": "{"}, {"choice": []}, {"structural_tag": "x"}, {"regex": "a\0"}, {"grammar": 'root ::= "'}):
        with pytest.raises(InvalidRequestError) as caught:
            Structured(**bad)
        assert caught.value.parameter == "structured_outputs"
    with pytest.raises(UnsupportedError, match="structural_tag"):
        Structured(structural_tag={"format": {}})


def test_parameters_come_back():
    params = SamplingParams(structured_outputs={"choice": ("a", "b")})
    assert params.structured_outputs == Structured(choice=("a", "b"))
    again = json.loads(json.dumps(params.to_dict()))
    assert again["structured_outputs"] == {"choice": ["a", "b"]}
    assert SamplingParams(**again).structured_outputs.language == params.structured_outputs.language
    with pytest.raises(TypeError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"json": Color}, '"(red|green)"'),
        ({"json": '{"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}'}, r"\[\s*7\s*,\s*7\s*\]"),
        ({"choice": ['a "quoted" \\ text', "größe"]}, r'a "quoted" \\ text|größe'),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
    ],
    ids=str,
)
def test_kinds(llm, given, pattern):
    [output] = llm.generate("x", SamplingParams(structured_outputs=given, max_tokens=120))
    assert output.finish_reason == "stop" and re.fullmatch(pattern, output.text)


def test_json_object(llm):
    bias = {llm.tokenizer.encode(mark)[0]: 50 for mark in ("}", '"', ":", "1")}
    [output] = llm.generate("x", SamplingParams(structured_outputs={"json_object": True}, max_tokens=60, logit_bias=bias))
    assert isinstance(json.loads(output.text), dict)


def test_a_token_that_ends_is_no_text(llm):
    """The tiny model's EOS is "#", which a tokenizer may well have as text: within a grammar it would end the sample early."""
    assert llm.tokenizer.encode("#")[0] in llm.tokenizer.eos_token_ids
    bias = {llm.tokenizer.encode("#")[0]: 50}
    [output] = llm.generate("x", SamplingParams(structured_outputs={"regex": "[#a]{4}"}, logit_bias=bias))
    assert (output.text, output.finish_reason) == ("aaaa", "stop")


def const(text):
    return {"type": "const_string", "value": text}


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def either(*elements):
    return {"type": "or", "elements": list(elements)}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**fields):
    return {"type": "triggered_tags", "triggers": ["<"], "tags": TAGS, **fields}


ANY = {"type": "any_text"}


def test_structural_tag(llm):
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}]}
    bias = {llm.tokenizer.encode("<")[0]: 9, llm.tokenizer.encode("f")[0]: 8}
    [output] = llm.generate("x", SamplingParams(structured_outputs={"structural_tag": tag}, max_tokens=200, logit_bias=bias))
    begun = [match.start() for match in re.finditer("<f", output.text) if match.start() < len(output.text) - 60]
    assert begun and all(re.match(r"<f>\s*(true|false)\s*</f>", output.text[start:]) for start in begun)


TAGS = [tag("<a>", regex("[ab]+"), "</a>"), tag("<b ", {"type": "json_schema", "json_schema": {"const": 7}}, ["/>", "</b>"])]
TAGS_PATTERN = "(<a>[ab]+</a>|<b 7(/>|</b>))"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (const("ab"), "ab"),
        (sequence(const("x"), regex("[0-9]{2}|z"), const("y/")), "x([0-9]{2}|z)y/"),
        (either(const("no"), {"type": "json_schema", "json_schema": {"enum": [7, "a"]}}, regex("ma?")), 'no|7|"a"|ma?'),
        (TAGS[1], "<b 7(/>|</b>)"),
        (sequence({"type": "grammar", "grammar": 'root ::= "u" | "v"'}, const("!")), "[uv]!"),
        (sequence({"type": "grammar", "grammar": 'start: "u"'}, {"type": "grammar", "grammar": 'start: "w"'}), "uw"),
        (tag("<", ANY, "."), "<[^.]*[.]"),
        (tag("<", either(ANY, const("")), "."), "<[^.]*[.]"),
        (sequence(tag("<", ANY, ""), const("."), const("z")), "<[^.]*[.]z"),
        (sequence(tag("<", ANY, "."), tag("(", const("z"), ")")), "<[^.]*[.][(]z[)]"),
        (sequence(ANY, tag(".", regex("[ab]"), ";")), "[^.]*[.][ab];"),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ", "}, f"({TAGS_PATTERN}(, {TAGS_PATTERN})*)?"),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": "", "at_least_one": True}, f"{TAGS_PATTERN}+"),
        (sequence({"type": "tags_with_separator", "tags": TAGS, "separator": ",", "stop_after_first": True}, const("!")),
         f"{TAGS_PATTERN}?!"),
        (triggered(at_least_one=True, stop_after_first=True), TAGS_PATTERN),
        (sequence(triggered(stop_after_first=True), const(".")), f"([^<.]*{TAGS_PATTERN}|[^<.]*)[.]"),
        (tag("(", triggered(at_least_one=True), ")"), f"[(]{TAGS_PATTERN}([^<)]*{TAGS_PATTERN})*[^<)]*[)]"),
        (tag("(", triggered(), ")"), f"[(]([^<)]*{TAGS_PATTERN})*[^<)]*[)]"),
    ],
    ids=str,
)  # fmt: skip
def test_structural_formats(llm, form, pattern):
    """Free text and repetitions last until their end is sampled, which a bias makes likely."""
    bias = dict.fromkeys([*llm.tokenizer.encode(".<)"), *llm.tokenizer.eos_token_ids], 5)
    given = {"structural_tag": {"type": "structural_tag", "format": form}}
    params = SamplingParams(structured_outputs=given, max_tokens=900, logit_bias=bias, n=8, seed=3)
    for sample in llm.generate("x", params)[0].outputs:
        assert sample.finish_reason == "stop" and re.fullmatch(pattern, sample.text, re.DOTALL), sample.text


def test_marks_that_are_special_tokens(llm):
    named = llm.tokenizer.special_by_name.items()
    [(begin, first), (end, last)] = [(name, token) for name, token in named if token not in llm.tokenizer.eos_token_ids]
    opened, closed = re.escape(begin), re.escape(end)
    one = tag(f"{begin}a", regex("[bc]"), end)
    cases = [
        (sequence(tag(begin, ANY, [f"/{end}", "."]), const("z")), f"{opened}[^.]*?(/{closed}|[.])z"),
        (sequence(triggered(triggers=[begin], tags=[one], stop_after_first=True), const("z")), f".*?{opened}a[bc]{closed}z"),
    ]
    bias = {first: 50, last: 50, **dict.fromkeys(llm.tokenizer.encode("/."), 5)}
    shared = {"max_tokens": 900, "logit_bias": bias, "n": 4, "seed": 3, "skip_special_tokens": False}
    for form, pattern in cases:
        params = SamplingParams(structured_outputs={"structural_tag": {"format": form}}, **shared)
        for sample in llm.generate("x", params)[0].outputs:
            assert re.fullmatch(pattern, sample.text, re.DOTALL) and first in sample.token_ids, sample.text
            assert (last in sample.token_ids) == (end in sample.text)


@pytest.mark.parametrize(
    ("form", "kind", "message"),
    [
        ({"type": "token", "token": 5}, UnsupportedError, "have 'token'"),
        (None, UnsupportedError, "have 'None'"),
        ({"type": "any_text", "max_chars": 5}, UnsupportedError, "'max_chars' of any_text is not supported"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, UnsupportedError, "'style' of json_schema"),
        ({**TAGS[0], "end": [{"type": "token"}]}, UnsupportedError, "tokens are not supported"),
        (sequence(ANY, regex("a")), UnsupportedError, "must follow what has no end"),
        ({"type": "const_string"}, InvalidRequestError, "const_string misses its 'value'"),
        ({"type": "regex", "pattern": 5}, InvalidRequestError, "'pattern' of regex must be a str"),
        (sequence(), InvalidRequestError, "'elements' of sequence must be a list"),
        (triggered(triggers=["<a"]), InvalidRequestError, "no trigger begins the tag '<b '"),
        (triggered(triggers=["<", "x"]), InvalidRequestError, "no structure begins with the trigger 'x'"),
        (triggered(tags=[ANY]), InvalidRequestError, "must be tags"),
        pytest.param(
            functools.reduce(lambda form, _: sequence(form), range(2000), ANY), InvalidRequestError, "too deeply", id="deep"
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_structural_formats_that_are_none(form, kind, message):
    with pytest.raises(kind, match=f"structural_tag: .*{re.escape(message)}"):
        Structured(structural_tag={"format": form})


def test_async_engine(tmp_path, write_model):
    async def ask(engine, **given):
        return await engine.generate("x", SamplingParams(structured_outputs=given, max_tokens=30, n=2))

    async def run():
        async with AsyncEngine(write_model(tmp_path), device="cpu", kv_cache_memory_bytes="16MiB") as engine:
            asked = [ask(engine, regex="[ab]{9}"), ask(engine, json={"type": "x"}), ask(engine, choice=["c"])]
            return await asyncio.gather(*asked, return_exceptions=True)

    letters, bad, choice = asyncio.run(run())
    assert all(re.fullmatch("[ab]{9}", sample.text) for sample in letters.outputs)
    assert [sample.text for sample in choice.outputs] == ["c", "c"]
    assert bad.__cause__.parameter == "structured_outputs" and "Invalid type: x" in str(bad)


def test_without_a_tokenizer(tmp_path, write_model):
    wanted = "structured_outputs needs a tokenizer; skip_tokenizer_init is True"
    llm = LLM(write_model(tmp_path), device="cpu", kv_cache_memory_bytes="16MiB", skip_tokenizer_init=True)
    with llm, pytest.raises(InvalidRequestError, match=wanted):
        llm.generate([5], structured_outputs={"choice": ["a"]})


def test_without_llguidance(llm, monkeypatch):
    monkeypatch.setattr(lark, "library_path", lark.library_path.__wrapped__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'llmpy\[structured\]'"):
        llm.generate("x", structured_outputs={"choice": ["a"]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (VERSION % "2.0.0", "wanted llguidance >=1.8,<2, have llguidance@2.0.0"),
        (VERSION % "1.7.6", "wanted llguidance >=1.8,<2, have llguidance@1.7.6"),
        (VERSION % "1.9.1", "llguidance@1.9.1 lacks llg_new_tokenizer_v2"),
        ("int other;", "a library without llg_get_version"),
    ],
)
def test_another_llguidance(tmp_path, write_model, monkeypatch, source, message):
    (tmp_path / "fake.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "fake.so", tmp_path / "fake.c"], check=True)
    monkeypatch.setattr(lark, "library_path", lambda: str(tmp_path / "fake.so"))
    with LLM(write_model(tmp_path), device="cpu", kv_cache_memory_bytes="16MiB") as llm:
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            llm.generate("x", structured_outputs={"choice": ["a"]})
        assert llm.generate("x", max_tokens=2)[0].finish_reason == "length"
