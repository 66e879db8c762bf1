"""White space around reasoning, and the conditions for an object to be a call, for any split of the text."""

import pytest

from llmpy.server.formats import FORMATS, Markers
from llmpy.server.parsing import PlainParser, ReasoningParser, ToolParser

CASES = [
    ("  \n hello", False, "", "  \n hello"),
    ("  <think>why</think>\n\nhello", False, "why", "hello"),
    (" <thin hello", False, "", " <thin hello"),
    ("why</think>\n\n\nhello\n", True, "why", "hello\n"),
    ("why</think> hello", True, "why", " hello"),
    ("  ", False, "", "  "),
    ("\n<th", False, "", "\n<th"),
    ("why</thi", True, "why</thi", ""),
    ("hello <think>no</think>", False, "", "hello <think>no</think>"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), CASES, ids=[repr(case[0]) for case in CASES])
def test_white_space_around_reasoning(text, is_open, reasoning, content):
    for size in range(1, len(text) + 1):
        parser = ReasoningParser(Markers("<think>", "</think>"), is_open, PlainParser())
        pieces = [piece for start in range(0, len(text), size) for piece in parser.push(text[start : start + size])]
        pieces += parser.finish()
        for kind, wanted in (("reasoning", reasoning), ("content", content)):
            assert "".join(piece.text for piece in pieces if piece.kind == kind) == wanted, size


CALLS = [
    ('{"name": "f", "arguments": {"x": 1}}', True),
    ('{"id": "1", "type": "function", "name": "f", "index": 0, "parameters": {}}', True),
    ('{"arguments": {"x": 1}, "name": "f"}', True),
    ('{"name": "f"}', True),
    ('{"name": "f", "comment": "no key of a call", "arguments": {}}', False),
    ('{"name": "f", "arguments": {}, "result": 3}', False),
    ('{"name": "f", "name": "g", "arguments": {}}', False),
    ('{"arguments": {}}', False),
    ('{"name": 3, "arguments": {}}', False),
    ('{"name": "", "arguments": {}}', False),
]


@pytest.mark.parametrize(("text", "is_call"), CALLS, ids=[text for text, _ in CALLS])
def test_an_object_with_the_keys_of_a_call_is_one(text, is_call):
    whole = f"<tool_call>{text}</tool_call>"
    for size in (1, 7, len(whole)):
        parser = ToolParser(FORMATS["hermes"], {}, True)
        pieces = [piece for start in range(0, len(whole), size) for piece in parser.push(whole[start : start + size])]
        pieces += parser.finish()
        if is_call:
            assert [piece.text for piece in pieces if piece.kind == "call"] == ["f"]
            arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
            assert arguments == ('{"x": 1}' if '"x"' in text else "{}")
        else:
            assert {piece.kind for piece in pieces} == {"content"}
            assert "".join(piece.text for piece in pieces) == whole
