"""The calls that docs/develop/adding-an-architecture.md lists against the code."""

import inspect
import re
from ast import literal_eval
from pathlib import Path

from llmpy.models.blocks import Block, Model

PAGE = (Path(__file__).parents[2] / "docs/develop/adding-an-architecture.md").read_text()
TABLE = PAGE.partition("## The vocabulary")[2].partition("\n\n`b` is")[0]
CALL = re.compile(r"`(b|m)\.(\w+)\((.*?)\)`")


def test_calls_have_the_arguments_that_the_page_names() -> None:
    calls = CALL.findall(TABLE)
    assert len(calls) > 25
    for owner, name, words in calls:
        parameters = inspect.signature(getattr(Model if owner == "m" else Block, name)).parameters
        for word, default in re.findall(r"(\w+)=([\w.\"]*)", words):
            assert word in parameters, f"{owner}.{name}({words})"
            if default:
                assert literal_eval(default) == parameters[word].default, f"{owner}.{name}({words})"


def test_every_operation_is_listed() -> None:
    """Not listed are Value's operators, and what only the package's own families call."""
    named = {name for _, name, _ in CALL.findall(PAGE)} | set(re.findall(r"`(?:layer|m|b)\.(\w+)", PAGE))
    public = {name for name, value in inspect.getmembers(Block, inspect.isfunction) if name[0] != "_"}
    assert not public - named
