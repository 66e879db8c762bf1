"""A model's format of tool calls and reasoning, found from its chat template; for the server and for `chat` in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError
from .formats import FORMATS, HARMONY, REASONING, Format, Markers, reasoning_format, tool_format
from .harmony import HarmonyParser
from .parsing import Parser, PlainParser, ReasoningParser, ToolParser

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

Known = TypeVar("Known")


def check_parser_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Refuses unknown names of parsers."""
    given = [("tool_call_parser", tool_call_parser, [*FORMATS]), ("reasoning_parser", reasoning_parser, [*REASONING])]
    for option, name, parsers in given:
        known = ["auto", "none", *parsers]
        if name not in known:
            message = f"{option}: wanted one of {', '.join(known)}, have {name!r}"
            raise ConfigError(message, option=option, value=name)


class Dialect:
    """The parsers of one model's answers.

    Args:
        tokenizer: The model's tokenizer.
        tool_call_parser: Name of the model's tool call format, "none", or "auto" (found from the chat template).
        reasoning_parser: Name of the model's reasoning markers, "none", or "auto" (found from the chat template).
        template: Chat template of the conversation; None = the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        template: str | None = None,
    ) -> None:
        check_parser_names(tool_call_parser, reasoning_parser)
        text = (tokenizer.chat_template or "") if template is None else template
        self._tokenizer = tokenizer
        self.names = {
            "tool_call_parser": _name(tool_call_parser, tool_format, text),
            "reasoning_parser": _name(reasoning_parser, reasoning_format, text),
        }
        """Names of the chosen parsers; None: no parser."""
        self.tool_format: Format | None = _found(FORMATS, self.names["tool_call_parser"])
        """The model's tool call format."""
        self.reasoning: Markers | None = _found(REASONING, self.names["reasoning_parser"])
        """The model's reasoning markers."""

    def shows_marks(self, has_tools: bool) -> bool:
        """Whether special tokens must be shown because the parser needs some of them."""
        form, markers = self.tool_format, self.reasoning
        if form is HARMONY or (markers is not None and markers.is_special):
            return True
        return has_tools and form is not None and form.is_special

    @cached_property
    def close_id(self) -> int | None:
        """The token that ends reasoning; None if that is not a single token."""
        return None if self.reasoning is None else self._tokenizer.convert_tokens_to_ids(self.reasoning.close)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end an answer when special tokens are shown."""
        return tuple(self._tokenizer.decode([token]) for token in self._tokenizer.eos_token_ids)

    def without_end(self, text: str) -> str:
        """An answer's text without the token that ended it."""
        return text.removesuffix(next((end for end in self.ends if text.endswith(end)), ""))

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None, holds: bool) -> Parser:
        """A parser for one answer.

        Args:
            prompt: The rendered conversation; it may end with the opening marker of reasoning.
            tools: The tools that the answer may call.
            holds: Return a call only when it is complete; a malformed call becomes content.
        """
        if self.tool_format is HARMONY:
            return HarmonyParser(holds)
        parser: Parser = PlainParser()
        if tools and self.tool_format is not None:
            parser = ToolParser(self.tool_format, _schemas(tools), holds)
        if self.reasoning is None:
            return parser
        return ReasoningParser(self.reasoning, prompt.rstrip().endswith(self.reasoning.open), parser)


def _name(given: str, find: Callable[[str], str | None], template: str) -> str | None:
    """The parser named by an option, or found from the chat template."""
    return find(template) if given == "auto" else given if given != "none" else None


def _found(known: Mapping[str, Known], name: str | None) -> Known | None:
    return None if name is None else known.get(name)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of every function's parameters."""
    functions = [tool.get("function") for tool in tools]
    named = {item["name"]: item.get("parameters") for item in functions if isinstance(item, Mapping) and "name" in item}
    return {name: dict(schema) for name, schema in named.items() if isinstance(schema, Mapping)}
