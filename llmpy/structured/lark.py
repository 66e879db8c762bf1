"""Writes grammars in llguidance's variant of Lark."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError

ANY_TEXT = "/(?s:.*)/"
WHITESPACE = r"[ \t\n\r]{0,32}"
"""White space between the parts of JSON. It is bounded, because a model may otherwise generate spaces forever."""


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def slashed(pattern: str) -> str:
    """A regular expression in Rust's syntax as a terminal of Lark."""
    body = re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.DOTALL)
    return f"/{body}/"


def schema_text(schema: Any) -> str:
    """A schema as JSON; sets the allowed white space unless the schema has `x-guidance`."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict) and "x-guidance" not in schema:
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return json.dumps(schema)


class Rules:
    """A grammar under construction.

    Args:
        special: Ids of special tokens by name. In texts, these names mean the tokens.
    """

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = special or {}
        self._split = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        self._lines: list[str] = []

    def grammar(self, start: str) -> str:
        """The whole grammar, with `start` as its start expression."""
        return "\n".join([f"start: {start}", *self._lines])

    def rule(self, expression: str, attributes: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Adds a terminal and returns its name."""
        name = f"TEXT_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def any(self, expressions: Iterable[str]) -> str:
        """Adds a rule for one of several expressions and returns its name."""
        return self.rule(" | ".join(expressions))

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        found, at = [], 0
        for match in self._split.finditer(text):
            found += [quoted(text[at : match.start()])] if match.start() > at else []
            found.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        return " ".join([*found, quoted(text[at:])] if text[at:] or not found else found)

    def until(self, mark: str, body: str = ANY_TEXT, never: str = "") -> str:
        """An expression for a text up to a mark, and the mark.

        Args:
            mark: End of the text: the first occurrence after a text that matches `body`.
            body: A terminal for the text.
            never: Text that must not occur in it.
        """
        match = self._split.search(mark)
        plain, rest = (mark, "") if match is None else (mark[: match.start()], self.text(mark[match.start() :]))
        allowed = f"({body}) & ~({ANY_TEXT} {quoted(never)} {ANY_TEXT})" if never else body
        terminal = self.terminal(f"({allowed}) {quoted(plain)}")
        return self.rule(terminal, "[lazy]") if match is None else f"{terminal} {rest}"


def lark_of(grammar: str) -> str:
    """Converts a grammar in Lark or GBNF to Lark.

    Raises:
        InvalidRequestError: The GBNF cannot be read.
    """
    if "::=" not in grammar:
        return grammar
    library_path()  # raises an error that names the extra if llguidance is missing
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:
        message = f"grammar must be GBNF or Lark: {error}"
        raise InvalidRequestError(message, parameter="structured_outputs", value=grammar) from None


@functools.cache
def library_path() -> str:
    """Path of llguidance's shared library; does not import llguidance.

    Raises:
        ImportError: llguidance is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("llguidance")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for path in Path(folder).glob("_lib*.so"):
            return str(path)
    raise ImportError("structured_outputs needs llguidance: pip install 'llmpy[structured]'")
