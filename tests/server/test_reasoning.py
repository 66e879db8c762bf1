"""White space around reasoning, however the text is cut: kept where it belongs to the answer, dropped behind the reasoning."""

import pytest

from llmpy.server.formats import Markers
from llmpy.server.parsing import PlainParser, ReasoningParser

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
