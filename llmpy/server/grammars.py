"""The constraint of an answer as one grammar: optional reasoning, then a schema or calls in the model's format."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ..structured.lark import Rules, slashed
from ..structured.params import StructuredOutputsParams
from ..text.tokenizer import Tokenizer
from .errors import HttpError
from .formats import FORMATS, HARMONY, Format, Markers
from .limits import most
from .protocol import ChatRequest, Sampling
from .scanning import Schemas

MAX_BYTES = most("grammar_bytes")
"""Longest grammar of a request, in bytes."""


def checked(given: StructuredOutputsParams) -> StructuredOutputsParams:
    """Returns the argument; raises if it is too long."""
    size = len(given.language[1].encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise HttpError(400, f"structured_outputs: wanted at most {MAX_BYTES} bytes, have {size}", "structured_outputs")
    return given


def wanted_content(body: Sampling) -> StructuredOutputsParams | None:
    """The constraint that a request sets on the content of its answer."""
    given = body.response_format or {}
    kind = given.get("type", "text")
    if body.structured_outputs is not None:
        if kind != "text":
            raise HttpError(400, "response_format and structured_outputs exclude each other", "response_format")
        return checked(_structured(body.structured_outputs))
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            raise HttpError(400, "response_format: json_schema misses its schema", "response_format")
        return checked(StructuredOutputsParams(json=schema))
    if kind == "structural_tag":
        return checked(StructuredOutputsParams(structural_tag=given))
    raise HttpError(400, f"response_format of type {str(kind)[:40]!r} is not supported", "response_format")


def _structured(given: dict[str, Any]) -> StructuredOutputsParams:
    known = [field.name for field in fields(StructuredOutputsParams)]
    for name in given:
        if name not in known:
            message = f"structured_outputs: unknown key {name[:40]!r}; use one of {', '.join(known)}"
            raise HttpError(400, message, "structured_outputs")
    return StructuredOutputsParams(**given)


def offered_functions(body: ChatRequest) -> Schemas:
    """The functions in a request's tools."""
    functions = [tool["function"] for tool in body.tools or () if isinstance(tool.get("function"), dict)]
    found = {str(item.get("name")): item.get("parameters") or {} for item in functions}
    for name, schema in found.items():
        if not isinstance(schema, dict):
            raise HttpError(400, f"tools: the parameters of {name[:64]!r} must be an object", "tools")
    return found


def wanted_functions(body: ChatRequest) -> Schemas | None:
    """The functions of which one must be called; None: no call is required."""
    choice, known = body.tool_choice, offered_functions(body)
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = str(function.get("name") if isinstance(function, dict) else function)
        if name not in known:
            raise HttpError(400, f"tool_choice: tools have no function {name[:64]!r}", "tool_choice")
        return {name: known[name]}
    if choice != "required":
        message = "tool_choice: wanted 'none', 'auto', 'required' or a function"
        raise HttpError(400, message, "tool_choice")
    if not known:
        raise HttpError(400, "tool_choice: 'required' wants tools", "tool_choice")
    return known


class Constraint:
    """The constraint of a chat answer.

    Args:
        body: The request.
        content: The request's constraint on the content.
        tokenizer: The model's tokenizer.
        form: The model's tool call format.
        markers: The model's reasoning markers.
    """

    def __init__(
        self,
        body: ChatRequest,
        content: StructuredOutputsParams | None,
        tokenizer: Tokenizer,
        form: Format | None,
        markers: Markers | None,
    ) -> None:
        self.content = content
        self.functions = wanted_functions(body)
        self._offered = offered_functions(body) if body.tool_choice in (None, "auto") else {}
        self._many = not isinstance(body.tool_choice, dict) and body.parallel_tool_calls is not False
        self._tokenizer, self._markers, self._is_harmony = tokenizer, markers, form is HARMONY
        self._template = tokenizer.chat_template or ""
        self._grammar = None if form is None else form.grammar
        if self.functions is not None and self._grammar is None:
            name = next((name for name, known in FORMATS.items() if known is form), None)
            how = "no known way" if name is None else f"the way {name!r}, whose Format has no grammar"
            message = f"tool_choice: calls that are written in {how} cannot be forced; use 'auto' or --tool-call-parser"
            raise HttpError(400, message, "tool_choice")

    @property
    def needs_prompt(self) -> bool:
        """Whether the constraint depends on the end of the rendered conversation, which may open reasoning."""
        return self._markers is not None and not self._is_harmony and not (self.functions is None and self.content is None)

    def params(self, prompt: str) -> StructuredOutputsParams | None:
        """The constraint of the whole answer, reasoning included.

        Args:
            prompt: The rendered conversation; read only if `needs_prompt`.
        """
        if self.functions is None and self.content is None:
            return None
        rules = Rules(self._tokenizer.special_by_name)
        head = self._head(rules, prompt)
        final = f"{rules.text('<|channel|>final<|message|>')} @answer" if self._is_harmony else "@answer"
        if self.functions is not None and self._grammar is not None:
            body = self._grammar(rules, self.functions, self._many, self._template)
        elif self._offered and self._grammar is not None:
            body = f"({final} | {self._grammar(rules, self._offered, self._many, self._template)})"
        elif not head and self.content is not None:
            return self.content
        else:
            body = final
        content = None if self.functions is not None else self.content
        nested = [] if content is None else _nested(*content.language_of(self._tokenizer))
        grammars = [{"lark_grammar": rules.grammar(f"{head} {body}")}, *nested]
        return checked(StructuredOutputsParams(grammar=json.dumps({"grammars": grammars})))

    def _head(self, rules: Rules, prompt: str) -> str:
        """The grammar of the reasoning that may come first."""
        if self._is_harmony:
            begin, end = "<|channel|>analysis<|message|>", rules.until("<|end|>")
            return f"({rules.text(begin)} {end} {rules.text('<|start|>assistant')})?"
        markers, end = self._markers, prompt.rstrip()
        if markers is None or end.endswith(markers.close):
            return ""
        thought = rf"{rules.until(markers.close)} /\n{{0,2}}/"
        return thought if end.endswith(markers.open) else f"({rules.text(markers.open)} {thought})?"


def _nested(kind: str, text: str) -> list[dict[str, Any]]:
    """A grammar, and the grammars that it names, as named parts of another grammar."""
    if kind == "json_schema":
        return [{"name": "answer", "json_schema": json.loads(text)}]
    if kind == "regex":
        return [{"name": "answer", "lark_grammar": f"start: {slashed(text)}"}]
    if kind == "llguidance":
        return _renamed(text)
    return [{"name": "answer", "lark_grammar": text}]


def _renamed(text: str) -> list[dict[str, Any]]:
    """A list of grammars; the first becomes a named part of another grammar."""
    try:
        first, *others = json.loads(text)["grammars"]
        if first.get("name") is None and all(other.get("name") != "answer" for other in others):
            return [{**first, "name": "answer"}, *others]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    message = "structured_outputs: of a list of grammars the first one must have no name here, and none the name 'answer'"
    raise HttpError(400, message, "structured_outputs")
