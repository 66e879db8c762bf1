"""Tool calls and reasoning: every format, whole and cut anywhere."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpy.server.formats import FORMATS, THINK, reasoning_markers, tool_format
from llmpy.server.parsing import PlainParser, ReasoningParser, ToolParser

WEATHER = {"city": "Łódź", "days": 3, "units": ["C", "F"]}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>units</arg_key>\n<arg_value>["C", "F"]</arg_value>\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=units>\n["C", "F"]\n</parameter>\n</function>\n</tool_call>',
}  # fmt: skip


def call(name):
    return WRITTEN[name].replace("%s", json.dumps(WEATHER, ensure_ascii=False))


def pieces(parser, text, cuts=()):
    """The pieces, those of one kind behind each other as one."""
    found = []
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(places):
        found += parser.push(text[start:end])
    found += parser.finish()
    joined = []
    for piece in found:
        if joined and joined[-1][0] == piece.kind != "call":
            joined[-1][1] += piece.text
        else:
            joined.append([piece.kind, piece.text])
    return joined


@pytest.mark.parametrize("name", FORMATS)
@given(cuts=st.lists(st.integers(0, 200)))
def test_calls(name, cuts):
    before = "" if FORMATS[name].at_start else "I look it up."
    found = pieces(ToolParser(FORMATS[name]), f"{before}\n{call(name)}", cuts)
    assert found[-2] == ["call", "weather"] and json.loads(found[-1][1]) == WEATHER
    assert found[:-2] == ([["content", before]] if before else [])


@given(cuts=st.lists(st.integers(0, 200)))
def test_two_calls_and_words_behind_them(cuts):
    text = f"{call('hermes')}\n{call('hermes')}\nDone."
    kinds = [kind for kind, _ in pieces(ToolParser(FORMATS["hermes"]), text, cuts)]
    assert kinds == ["call", "arguments", "call", "arguments", "content"]


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet="<{[｜tol_ca>\n :\"x", max_size=60), cuts=st.lists(st.integers(0, 60)))
def test_cuts_change_nothing_and_malformed_calls_are_content(name, text, cuts):
    whole = pieces(ToolParser(FORMATS[name]), text)
    assert pieces(ToolParser(FORMATS[name]), text, cuts) == whole
    if all(kind == "content" for kind, _ in whole):
        assert "".join(body for _, body in whole).split() == text.split()


@given(
    cuts=st.lists(st.integers(0, 80)),
    thought=st.text(alphabet="a<th/ink>\n", max_size=30).filter(lambda t: THINK[1] not in t + THINK[1][:-1]),
)
def test_reasoning(cuts, thought):
    for is_open in (False, True):
        text = ("" if is_open else "<think>") + thought + "</think>\n\nYes." + call("hermes")
        parser = ReasoningParser(THINK, is_open, ToolParser(FORMATS["hermes"]))
        found = pieces(parser, text, cuts)
        expected = [["reasoning", thought]] if thought else []
        assert found[:-2] == [*expected, ["content", "Yes."]] and found[-2] == ["call", "weather"]
    assert pieces(ReasoningParser(THINK, False, PlainParser()), "No thought.", cuts) == [["content", "No thought."]]
    assert pieces(ReasoningParser(THINK, True, PlainParser()), "cut off </thi", cuts) == [["reasoning", "cut off </thi"]]


def test_templates_tell_their_format():
    assert tool_format("{{ tools }}<tool_call>{{ x }}") is FORMATS["hermes"]
    assert tool_format("<tool_call><arg_key>") is FORMATS["glm"]
    assert tool_format("<tool_call><function=") is FORMATS["qwen_coder"]
    assert tool_format("[TOOL_CALLS]") is FORMATS["mistral"]
    assert tool_format("plain") is None
    assert reasoning_markers("{% if '</think>' in content %}") == THINK and reasoning_markers("") is None
