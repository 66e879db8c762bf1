"""Tool calls and reasoning: every format, whole and cut anywhere."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpy.server import formats, parsing, scanning
from llmpy.server.formats import FORMATS, HARMONY, REASONING, Format, reasoning_format, tool_format
from llmpy.server.harmony import HarmonyParser
from llmpy.server.parsing import PlainParser, ReasoningParser, ToolParser

FEW = settings(max_examples=20, deadline=None)
WEATHER = {"city": "Łódź", "days": 3, "units": ["C", "F"], "note": 'a "}]</tool_call>'}
PLAIN = {"city": "Łódź", "days": 3, "units": ["C", "F"]}
TEXTS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "plamo": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>weather"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>%s"
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s<|call|>",
    "mistral_named": "[TOOL_CALLS]weather[ARGS]%s",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
"""Formats with JSON arguments."""
WRITTEN = {
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>units</arg_key>\n<arg_value>["C", "F"]</arg_value>\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=units>\n["C", "F"]\n</parameter>\n</function>\n</tool_call>',
    "pythonic": "[weather(city='Łódź', days=3, units=[\"C\", 'F'])]",
    "lfm2": "<|tool_call_start|>[weather(city='Łódź', days=3, units=[\"C\", 'F'])]<|tool_call_end|>",
    "olmo3": "<function_calls>\nweather(city='Łódź', days=3, units=[\"C\", 'F'])\n</function_calls>",
}
"""Formats without JSON arguments."""
NAMES = [*TEXTS, *WRITTEN]
THINK = REASONING["think"]


def form_of(name):
    return FORMATS[name.removesuffix("_named").removesuffix("_v31")]


def parser_of(name, holds=False, **schemas):
    return HarmonyParser(holds) if form_of(name) is HARMONY else ToolParser(form_of(name), schemas, holds)


def call(name):
    return TEXTS[name].replace("%s", json.dumps(WEATHER, ensure_ascii=False)) if name in TEXTS else WRITTEN[name]


def pieces(parser, text, cuts=()):
    """The pieces, with adjacent pieces of one kind joined."""
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


def test_every_format_is_tested():
    assert {form_of(name).open for name in NAMES} == {form.open for form in FORMATS.values()}


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("name", NAMES)
@FEW
@given(cuts=st.lists(st.integers(0, 300)))
def test_calls(name, holds, cuts):
    is_alone = form_of(name).at_start or name == "harmony"
    before = "" if is_alone else "I look it up."
    found = pieces(parser_of(name, holds), call(name) if is_alone else f"{before}\n{call(name)}", cuts)
    assert found[-2] == ["call", "weather"] and json.loads(found[-1][1]) == (WEATHER if name in TEXTS else PLAIN)
    assert found[:-2] == ([["content", before]] if before else [])


@pytest.mark.parametrize("name", NAMES)
def test_names_and_arguments_come_early(name):
    """The name before the arguments are complete, and JSON as it is written."""
    text, parser, found = call(name), parser_of(name), []
    for char in text:
        found.append(parser.push(char))
    kinds = [[piece.kind for piece in some] for some in found]
    named = next(i for i, some in enumerate(kinds) if "call" in some)
    if name in ("pythonic", "lfm2", "olmo3"):
        assert text[named] == ")"
        return
    assert named < text.index("Ł") and sum("arguments" in some for some in kinds) >= (30 if name in TEXTS else 4)


@FEW
@given(cuts=st.lists(st.integers(0, 200)))
def test_two_calls_and_words_behind_them(cuts):
    text = f"{call('hermes')}\n{call('hermes')}\nDone."
    for holds in (False, True):
        found = pieces(parser_of("hermes", holds), text, cuts)
        assert [kind for kind, _ in found] == ["call", "arguments", "call", "arguments", "content"]
        assert found[-1][1] == "Done."


def test_keys_that_are_words_of_python():
    text = r"""[f(from='a, b)"', class = -1, x-é=(1, {"k": [None, True]},), y="\"",)]"""
    made = {"from": 'a, b)"', "class": -1, "x-é": [1, {"k": [None, True]}], "y": '"'}
    told = [["call", "f"], ["arguments", json.dumps(made, ensure_ascii=False)]]
    assert pieces(parser_of("pythonic", False), text) == pieces(parser_of("pythonic", True), text) == told
    for wrong in ("[f(5)]", "[f(x=)]", "[f(x=1 y=2)]", "[f(**x)]", "[f(x=g())]", "[f(,)]"):
        assert pieces(parser_of("pythonic"), wrong) == [["content", wrong]]


@pytest.mark.parametrize("name", ["llama3", "mistral", "pythonic", "deepseek_v31", "plamo", "olmo3"])
def test_several_calls_between_the_same_marks(name):
    text = {
        "llama3": '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
        "mistral": '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}, "id": "123"}]',
        "pythonic": "[a(), b(x=1)]",
        "olmo3": "<function_calls>\na()\nb(x=1)\n</function_calls>",
    }.get(name)
    if text is None:
        one = "begin｜>" if name == "deepseek_v31" else "<|plamo:begin_tool_requests:plamo|>"
        begin, end = (one, "<｜tool▁calls▁end｜>") if name == "deepseek_v31" else (one, "<|plamo:end_tool_requests:plamo|>")
        whole = TEXTS[name]
        start = whole.index(begin) + len(begin)
        inner = whole[start : -len(end)]
        both = inner.replace("weather", "a").replace("%s", "{}") + inner.replace("weather", "b").replace("%s", '{"x": 1}')
        text = whole[:start] + both + end
    for holds in (False, True):
        found = pieces(parser_of(name, holds), text)
        expected = [["call", "a"], ["arguments", "{}"], ["call", "b"], ["arguments", '{"x": 1}']]
        assert found == expected


def test_arguments_in_other_places():
    def parse(text):
        return pieces(parser_of("hermes"), f"<tool_call>{text}</tool_call>")

    expected = [["call", "a"], ["arguments", '{"x": 1}']]
    assert parse('{"arguments": {"x": 1}, "name": "a"}') == expected
    assert parse('{"name": "a", "arguments": "{\\"x\\": 1}"}') == expected
    assert parse('{"name": "a"}') == [["call", "a"], ["arguments", "{}"]]


def test_schemas_tell_text_from_numbers():
    schema = {"properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    pairs = "<arg_key>zip</arg_key><arg_value>01234</arg_value><arg_key>n</arg_key><arg_value>5</arg_value>"
    text = f"<tool_call>f\n{pairs}</tool_call>"
    assert pieces(parser_of("glm", f=schema), text)[1][1] == '{"zip": "01234", "n": 5}'


MALFORMED = {
    "hermes": '<tool_call>{"name": "a", "arguments": {"x": Oslo}}</tool_call> and more',
    "llama3": '{"name": "a", "parameters": {"x": Oslo}}',
    "mistral": '[TOOL_CALLS]a[ARGS]{"x": Oslo}',
    "plamo": TEXTS["plamo"].replace("%s", '{"x": Oslo}'),
    "harmony": "<|channel|>commentary to=functions.a<|message|>Oslo<|call|>",
}


@pytest.mark.parametrize("name", MALFORMED)
@FEW
@given(cuts=st.lists(st.integers(0, 300)))
def test_what_is_malformed_behind_its_beginning(name, cuts):
    """In a whole answer it is content; in a stream the name was sent already, and the arguments are the text."""
    text = MALFORMED[name]
    held = pieces(parser_of(name, True), text, cuts)
    assert [kind for kind, _ in held] == ["content"] and "".join(held[0][1].split()) in "".join(text.split())
    told = pieces(parser_of(name), text, cuts)
    assert told[0][0] == "call" and told[1] in (["arguments", '{"x": Oslo}'], ["arguments", "Oslo"])


def test_an_answer_that_is_cut_off():
    text = '<tool_call>{"name": "a", "arguments": {"x": [1, 2'
    assert pieces(parser_of("hermes", True), text) == [["content", text]]
    assert pieces(parser_of("hermes"), text) == [["call", "a"], ["arguments", '{"x": [1, 2']]
    assert pieces(parser_of("hermes"), text[:20]) == [["content", text[:20]]]


@pytest.mark.parametrize("text", ['{"answer": 42}', "[1] is a list", "{", '{"name": 3}', "[see (this)]", "[f(1, 2)]"])
def test_answers_that_only_look_like_calls(text):
    for name in ("llama3", "pythonic"):
        for holds in (False, True):
            assert pieces(parser_of(name, holds), text) == [["content", text]]


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("name", NAMES)
@FEW
@given(
    text=st.text(alphabet="<{[｜tol_ca>\n :\"x(),='|em", max_size=60),
    cuts=st.lists(st.integers(0, 400)),
    at=st.integers(0, 400),
)
def test_cuts_change_nothing_and_no_text_is_lost(name, holds, text, cuts, at):
    """Noise inside calls, and noise alone, within and beyond the limits for long answers."""
    if name == "harmony":
        return
    written = call(name)
    at = min(at, len(written))
    for noise in (text, written[:at] + text + written[at:]):
        for limits in ((4096, 65536), (5, 30)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scanning, "SLICE_CHARS", limits[0])
                patch.setattr(parsing, "MAX_AGAIN", limits[1])
                whole = pieces(parser_of(name, holds), noise)
                assert pieces(parser_of(name, holds), noise, cuts) == whole
                parser = parser_of(name, holds)
                for piece in parser.push(noise) + parser.finish():
                    start = len(noise) - piece.behind
                    assert piece.kind != "content" or noise[start:].startswith(piece.text)
            if all(kind == "content" for kind, _ in whole):
                assert "".join(body for _, body in whole).split() == noise.split()


LONG = {name: text.replace("%s", '{"x": "' + "y" * 8_000 + '"}') for name, text in TEXTS.items()}
LONG |= {name: text.replace("Łódź", "y" * 8_000) for name, text in WRITTEN.items()}


def texts_of(parser):
    """All texts that a parser holds in one string, which is copied whenever text is added."""
    parts = [parser, getattr(parser, "_source", None), getattr(parser, "_rest", None)]
    return [value for part in parts if part is not None for value in vars(part).values() if isinstance(value, str)]


def push_slowly(parser, text):
    """Pushes one character at a time: the time is linear in the length, because no long text is held in one string."""
    found = []
    for place, char in enumerate(text):
        found += parser.push(char)
        assert place % 500 or max(map(len, texts_of(parser)), default=0) < 5000
    return found + parser.finish()


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_long_answers_by_the_character(name, holds):
    slow, whole = push_slowly(parser_of(name, holds), LONG[name]), pieces(parser_of(name, holds), LONG[name])
    assert [body for kind, body in whole if kind == "call"] == ["weather"]
    assert "".join(piece.text for piece in slow) == "".join(body for _, body in whole)


@pytest.mark.parametrize("begin", ["", "<tool_call>\n<function=", '<tool_call>{"', "<|channel|>", '<tool_call>{"name": "f'])
@pytest.mark.parametrize("char", [" ", "x"])
def test_long_answers_that_are_nothing(begin, char):
    """For example the endless white space of a model that must write JSON."""
    text = begin + char * 8_000
    inner = [parser_of(name, holds) for name in ("hermes", "qwen_coder", "pythonic", "harmony") for holds in (False, True)]
    for parser in [*inner, ReasoningParser(THINK, False, parser_of("hermes"))]:
        assert "".join(piece.text for piece in push_slowly(parser, text)) in (text, char * 8_000)


def test_beginnings_of_calls_within_each_other():
    """Nested beginnings of calls are scanned again only a limited number of times."""
    for name, begin in (("hermes", '<tool_call>{"arguments": ['), ("lfm2", "<|tool_call_start|>[f(")):
        parser = parser_of(name, True)
        assert pieces(parser, begin * 20_000) == [["content", begin * 20_000]]
        assert parser._num_again < parsing.MAX_AGAIN + 20_000 * len(begin)


def test_numbers_that_json_has_not():
    for number in ("NaN", "-Infinity", "1e999"):
        pairs = f"<arg_key>x</arg_key><arg_value>{number}</arg_value>"
        assert pieces(parser_of("glm"), f"<tool_call>f\n{pairs}</tool_call>")[1][1] == json.dumps({"x": number})
        text = f'<tool_call>{{"name": "f", "arguments": {{"x": {number}}}}}</tool_call>'
        assert pieces(parser_of("hermes", True), text) == [["content", text]]
    assert pieces(parser_of("pythonic"), "[f(x=1e999)]") == [["content", "[f(x=1e999)]"]]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_too_deep(name):
    if name in TEXTS:
        deep = TEXTS[name].replace("%s", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}")
        assert [kind for kind, _ in pieces(parser_of(name, True), deep)] == ["content"]
    else:
        deep = WRITTEN[name].replace("3", "[" * 100_000 + "]" * 100_000)
        assert pieces(parser_of(name, True), deep)[0][0] in ("content", "call")


HARMONY_TEXT = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
)


@FEW
@given(cuts=st.lists(st.integers(0, 300)))
def test_harmonys_channels(cuts):
    for holds in (False, True):
        found = pieces(HarmonyParser(holds), HARMONY_TEXT, cuts)
        calls = [["call", "weather"], ["arguments", '{"city": "Oslo"}']]
        assert found == [["reasoning", "The user asks."], ["content", "I look it up."], *calls]
        thought = HARMONY_TEXT.partition("commentary")[0]
        assert pieces(HarmonyParser(holds), f"{thought}final<|message|>Rain.<|return|>", cuts) == [
            ["reasoning", "The user asks."],
            ["content", "Rain."],
        ]
        assert pieces(HarmonyParser(holds), '{"a": 1}', cuts) == [["content", '{"a": 1}']]
        assert pieces(HarmonyParser(holds), "<|channel|>final<|message|>cut o<|e", cuts) == [["content", "cut o<|e"]]


@pytest.mark.parametrize("size", [3, 7, 4096])
def test_harmonys_texts_stand_where_they_say(monkeypatch, size):
    monkeypatch.setattr(scanning, "SLICE_CHARS", size)
    text, parser = f"{HARMONY_TEXT}<|start|>assistant<|channel|>final<|message|>Rain.", HarmonyParser(True)
    found = [piece for piece in parser.push(text) + parser.finish() if piece.kind in ("content", "reasoning")]
    assert "".join(piece.text for piece in found) == "The user asks.I look it up.Rain."
    assert all(text[len(text) - piece.behind :].startswith(piece.text) for piece in found)


@FEW
@given(
    cuts=st.lists(st.integers(0, 80)),
    thought=st.text(alphabet="a<th/ink>\n", max_size=30).filter(lambda t: THINK.close not in t + THINK.close[:-1]),
)
def test_reasoning(cuts, thought):
    for is_open in (False, True):
        text = ("" if is_open else "<think>") + thought + "</think>\n\nYes." + call("hermes")
        parser = ReasoningParser(THINK, is_open, parser_of("hermes"))
        found = pieces(parser, text, cuts)
        expected = [["reasoning", thought]] if thought else []
        assert found[:-2] == [*expected, ["content", "Yes."]] and found[-2] == ["call", "weather"]
    assert pieces(ReasoningParser(THINK, False, PlainParser()), "No thought.", cuts) == [["content", "No thought."]]
    assert pieces(ReasoningParser(THINK, True, PlainParser()), "cut off </thi", cuts) == [["reasoning", "cut off </thi"]]


def test_templates_tell_their_format():
    assert tool_format("{{ tools }}<tool_call>{{ x }}") == "hermes"
    assert tool_format("<tool_call><arg_key>") == "glm"
    assert tool_format("<tool_call><function=") == "qwen_coder"
    assert tool_format("[TOOL_CALLS]") == "mistral"
    assert tool_format("<|start|>assistant<|channel|>final") == "harmony"
    assert tool_format("plain") is None
    assert reasoning_format("{% if '</think>' in content %}") == "think" and reasoning_format("") is None
    assert reasoning_format("<|plamo:end_think:plamo|>") == "plamo"


def test_formats_of_ones_own(monkeypatch):
    monkeypatch.setattr(formats, "FORMATS", dict(FORMATS))
    monkeypatch.setattr(formats, "_SIGNS", list(formats._SIGNS))

    def scan(source, schemas):
        name, _ = yield from source.until("!")
        yield source.tell("call", name)
        yield from source.value(tells=True)

    formats.register_tool_format("mine", Format("CALL ", scan), sign="CALL ")
    assert tool_format("<tool_call> CALL ") == "mine"
    found = pieces(ToolParser(formats.FORMATS["mine"], {}, True), 'Hm. CALL f!{"x": 1} Done.', [5, 12])
    assert found == [["content", "Hm."], ["call", "f"], ["arguments", '{"x": 1}'], ["content", "Done."]]
