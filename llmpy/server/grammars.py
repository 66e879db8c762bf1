"""What an answer must be, as one grammar: a schema behind reasoning, or calls in the way that the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..structured_outputs import ANY_TEXT, StructuredOutputsParams, quoted, schema_text
from ..tokenizer import Tokenizer
from .errors import HttpError
from .formats import FORMATS, HARMONY, Format, Markers
from .protocol import ChatRequest

MAX_BYTES = 256 << 10
"""Longest grammar of a request."""
Functions = Mapping[str, dict[str, Any]]
"""Schemas of the functions that may be called."""


def checked(given: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same, if it is not too long."""
    size = len(given.language[1].encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise HttpError(400, f"structured_outputs: wanted at most {MAX_BYTES} bytes, have {size}", "structured_outputs")
    return given


class Rules:
    """A grammar in Lark that is being written.

    Args:
        tokenizer: The model's: its special tokens are no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = zip(tokenizer.convert_ids_to_tokens(tokenizer.special_ids), tokenizer.special_ids, strict=True)
        self._special = {name: token for name, token in ids if name}
        self._split = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        self.lines: list[str] = []

    def rule(self, expression: str, attributes: str = "") -> str:
        """Name of a new rule."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {expression}")
        return name

    def text(self, text: str) -> str:
        """Exactly this text, in which names of special tokens stand for these."""
        found, at = [], 0
        for match in self._split.finditer(text):
            found += [quoted(text[at : match.start()])] if match.start() > at else []
            found.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        return " ".join([*found, quoted(text[at:])] if text[at:] or not found else found)

    def until(self, mark: str) -> str:
        """Any text up to a mark and with it."""
        if self._split.search(mark):
            return f"{self.rule(ANY_TEXT)} {self.text(mark)}"
        return self.rule(f"{ANY_TEXT} {quoted(mark)}", "[lazy]")

    def any(self, expressions: Iterable[str]) -> str:
        """One of several."""
        return self.rule(" | ".join(expressions))


def _arguments(schema: dict[str, Any]) -> str:
    return f"%json {schema_text({**schema, 'type': 'object'})}"


def _call(rules: Rules, name: str, schema: dict[str, Any], key: str = "arguments") -> str:
    """{"name": ..., "arguments": {...}}"""
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f'{rules.text(begin)} {_arguments(schema)} "}}"'


def _repeated(rules: Rules, one: str, between: str, many: bool) -> str:
    return f"{one} ({rules.text(between)} {one})*" if many else one


def _hermes(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    call = rules.any(_call(rules, *item) for item in functions.items())
    one = rules.rule(f"{rules.text('<tool_call>' + chr(10))} {call} {rules.text(chr(10) + '</tool_call>')}")
    return _repeated(rules, one, "\n", many)


def _llama3(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    return rules.any(_call(rules, name, schema, "parameters") for name, schema in functions.items())


def _mistral(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    mark = rules.text("[TOOL_CALLS]")
    if "[ARGS]" in template:
        one = rules.any(f"{mark} {rules.text(name + '[ARGS]')} {_arguments(schema)}" for name, schema in functions.items())
        return f"{one}+" if many else one
    call = rules.any(_call(rules, *item) for item in functions.items())
    return f'{mark} " "? "[" {_repeated(rules, call, ", ", many)} "]"'


def _deepseek(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    fenced = "```json" in template
    begin = "<｜tool▁call▁begin｜>" + ("function<｜tool▁sep｜>" if fenced else "")
    middle, end = ("\n```json\n", "\n```<｜tool▁call▁end｜>") if fenced else ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    one = rules.any(
        f"{rules.text(begin + name + middle)} {_arguments(schema)} {rules.text(end)}" for name, schema in functions.items()
    )
    calls = _repeated(rules, one, "\n", many) if fenced else f"{one}+" if many else one
    return f"{rules.text('<｜tool▁calls▁begin｜>')} {calls} {rules.text('<｜tool▁calls▁end｜>')}"


def _pairs(rules: Rules, schema: dict[str, Any], begin: str, end: str) -> str:
    """Arguments one by one, in the order of the schema; text as it is, all else as JSON."""
    properties = schema.get("properties")
    required, known = schema.get("required") or (), properties if isinstance(properties, dict) else {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = []
    for key, wanted in known.items():
        wanted = wanted if isinstance(wanted, dict) else {}
        choices = wanted.get("enum") or ([wanted["const"]] if "const" in wanted else None)
        if wanted.get("type") != "string":
            value = f"%json {schema_text({**wanted, **shared})} {rules.text(end)}"
        elif choices:
            value = f"{rules.any(rules.text(str(choice)) for choice in choices)} {rules.text(end)}"
        else:
            value = rules.until(end)
        pair = rules.rule(f"{rules.text(begin.format(key))} {value}")
        found.append(pair if key in required else f"{pair}?")
    return " ".join(found) or '""'


def _glm(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    def call(name: str, schema: dict[str, Any]) -> str:
        pairs = _pairs(rules, schema, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
        return f"{rules.text(f'<tool_call>{name}' + chr(10))} {pairs} {rules.text('</tool_call>')}"

    return _repeated(rules, rules.any(call(*item) for item in functions.items()), "\n", many)


def _qwen_coder(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    def call(name: str, schema: dict[str, Any]) -> str:
        pairs = _pairs(rules, schema, "<parameter={}>\n", "\n</parameter>\n")
        begin, end = f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
        return f"{rules.text(begin)} {pairs} {rules.text(end)}"

    return _repeated(rules, rules.any(call(*item) for item in functions.items()), "\n", many)


def _plamo(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    def tag(name: str) -> str:
        return f"<|plamo:{name}:plamo|>"

    one = rules.any(
        f"{rules.text(tag('begin_tool_request') + tag('begin_tool_name') + name + tag('end_tool_name'))} "
        f"{rules.text(tag('begin_tool_arguments'))} {_arguments(schema)} "
        f"{rules.text(tag('end_tool_arguments') + tag('end_tool_request'))}"
        for name, schema in functions.items()
    )
    begin, end = rules.text(tag("begin_tool_requests")), rules.text(tag("end_tool_requests"))
    return f"{begin} {one}{'+' if many else ''} {end}"


def _harmony(rules: Rules, functions: Functions, many: bool, template: str) -> str:
    return rules.any(
        f"{rules.text(f'<|channel|>commentary to=functions.{name} ')} ({rules.text('<|constrain|>json')})? "
        f"{rules.text('<|message|>')} {_arguments(schema)}"
        for name, schema in functions.items()
    )


CALLS: dict[str, Callable[[Rules, Functions, bool, str], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "glm": _glm,
    "qwen_coder": _qwen_coder,
    "plamo": _plamo,
    "harmony": _harmony,
}
"""Calls of some functions, one or many, in the formats whose arguments a JSON schema can hold."""


def wanted_content(body: ChatRequest) -> StructuredOutputsParams | None:
    """What a request says of its answer's content."""
    given = body.response_format or {}
    kind = given.get("type", "text")
    if body.structured_outputs is not None:
        if kind != "text":
            raise HttpError(400, "response_format and structured_outputs exclude each other", "response_format")
        return checked(StructuredOutputsParams(**body.structured_outputs))
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


def offered_functions(body: ChatRequest) -> Functions:
    """The functions that a request's tools are."""
    functions = [tool["function"] for tool in body.tools or () if isinstance(tool.get("function"), dict)]
    return {str(item.get("name")): item.get("parameters") or {} for item in functions}


def wanted_functions(body: ChatRequest) -> Functions | None:
    """The functions of which one must be called; None: none must."""
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
    """What a chat answer must be.

    Args:
        body: The request.
        tokenizer: The model's.
        form: How the model writes calls.
        markers: What it puts around its reasoning.
    """

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, form: Format | None, markers: Markers | None) -> None:
        self.content = wanted_content(body)
        self.functions = wanted_functions(body)
        self._offered = offered_functions(body) if body.tool_choice in (None, "auto") else {}
        self._many = not isinstance(body.tool_choice, dict) and body.parallel_tool_calls is not False
        self._tokenizer, self._markers, self._is_harmony = tokenizer, markers, form is HARMONY
        self._template = tokenizer.chat_template or ""
        self._name = next((name for name, known in FORMATS.items() if known is form), None)
        if self.functions is not None and self._name not in CALLS:
            how = "no known way" if self._name is None else f"the way {self._name!r}"
            message = f"tool_choice: the model writes calls in {how}, which cannot be forced; use 'auto' or --tool-call-parser"
            raise HttpError(400, message, "tool_choice")

    @property
    def needs_prompt(self) -> bool:
        """Whether the rendered conversation tells where reasoning stands."""
        return self._markers is not None and not self._is_harmony and not (self.functions is None and self.content is None)

    def params(self, prompt: str) -> StructuredOutputsParams | None:
        """The constraint of the whole answer, reasoning included.

        Args:
            prompt: The rendered conversation, if it is needed.
        """
        if self.functions is None and self.content is None:
            return None
        rules = Rules(self._tokenizer)
        head = self._head(rules, prompt)
        if self.functions is not None:
            body = CALLS[str(self._name)](rules, self.functions, self._many, self._template)
        elif self._is_harmony:
            body = f"{rules.text('<|channel|>final<|message|>')} @answer"
        elif self._offered and self._name in CALLS:
            body = f"(@answer | {CALLS[self._name](rules, self._offered, self._many, self._template)})"
        elif not head and self.content is not None:
            return self.content
        else:
            body = "@answer"
        grammars = [{"lark_grammar": "\n".join([f"start: {head} {body}", *rules.lines])}]
        if self.functions is None and self.content is not None:
            grammars.append({"name": "answer", **_nested(*self.content.language)})
        return checked(StructuredOutputsParams(grammar=json.dumps({"grammars": grammars})))

    def _head(self, rules: Rules, prompt: str) -> str:
        """What may come before."""
        if self._is_harmony:
            begin, end = "<|channel|>analysis<|message|>", rules.until("<|end|>")
            return f"({rules.text(begin)} {end} {rules.text('<|start|>assistant')})?"
        markers, end = self._markers, prompt.rstrip()
        if markers is None or end.endswith(markers.close):
            return ""
        thought = rf"{rules.until(markers.close)} /\n{{0,2}}/"
        return thought if end.endswith(markers.open) else f"({rules.text(markers.open)} {thought})?"


def _nested(kind: str, text: str) -> dict[str, Any]:
    """A grammar as a part of another one."""
    if kind == "json_schema":
        return {"json_schema": json.loads(text)}
    if kind == "regex":
        slashes = re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), text, flags=re.DOTALL)
        return {"lark_grammar": f"start: /{slashes}/"}
    if kind == "llguidance":
        raise HttpError(400, "structured_outputs: a list of grammars cannot stand behind reasoning", "structured_outputs")
    return {"lark_grammar": text}
