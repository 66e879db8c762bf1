"""Grammars of calls with unquoted texts: arguments follow the schema's order; values other than texts are JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequestError
from ..structured.lark import ANY_TEXT, Rules, schema_text, slashed
from .grammars_json import repeated
from .scanning import Schemas

_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_URL = "(?:[A-Za-z0-9._~/:@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"(?:{_DATE})T{_TIME}",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL})+",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?(?:/{_URL})?(?:\?{_URL})?(?:#{_URL})?",
}
"""Regular expressions of the supported `format` keywords."""
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""One part of a regular expression: an escape, a class, or a character."""


def glm(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """NAME, then pairs of <arg_key> and <arg_value>."""

    def call(name: str, schema: Mapping[str, Any]) -> str:
        pairs = _pairs(rules, schema, "<arg_key>{}</arg_key>\n<arg_value>", "", "</arg_value>", "\n")
        return f"{rules.text(f'<tool_call>{name}' + chr(10))} {pairs} {rules.text('</tool_call>')}"

    return repeated(rules, rules.any(call(*item) for item in functions.items()), "\n", many)


def qwen_coder(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """<function=NAME> with <parameter=KEY> inside."""

    def call(name: str, schema: Mapping[str, Any]) -> str:
        pairs = _pairs(rules, schema, "<parameter={}>\n", "\n", "</parameter>", "\n")
        begin, end = f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
        return f"{rules.text(begin)} {pairs} {rules.text(end)}"

    return repeated(rules, rules.any(call(*item) for item in functions.items()), "\n", many)


def _pairs(rules: Rules, schema: Mapping[str, Any], begin: str, before: str, mark: str, behind: str) -> str:
    """Arguments in the schema's order; each ends with a mark, which no text may contain."""
    properties, required = schema.get("properties"), schema.get("required")
    known, needed = properties if isinstance(properties, dict) else {}, required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    end = f"{before}{mark}{behind}"
    found = []
    for key, wanted in known.items():
        wanted = wanted if isinstance(wanted, dict) else {}
        choices = wanted.get("enum") or ([wanted["const"]] if "const" in wanted else [])
        if wanted.get("type") != "string" or not isinstance(choices, list):
            value = f"%json {schema_text({**wanted, **shared})} {rules.text(end)}"
        elif choices:
            value = f"{rules.any(rules.text(str(choice)) for choice in choices)} {rules.text(end)}"
        else:
            value = rules.until(end, _bare(key, wanted), never=mark)
        pair = rules.rule(f"{rules.text(begin.format(key))} {value}")
        found.append(pair if key in needed else f"{pair}?")
    return " ".join(found) or '""'


def _bare(key: str, schema: Mapping[str, Any]) -> str:
    """A terminal for the unquoted texts that fit a schema."""
    parts = []
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if "pattern" in schema:
        parts.append(_searched(str(schema["pattern"])))
    if "format" in schema:
        form = str(schema["format"])[:60]
        if form not in _FORMATS:
            message = f"tools: the format {form!r} of {key!r} cannot be forced in calls that write texts bare; "
            message += f"known are {', '.join(_FORMATS)}, others can be a pattern"
            raise InvalidRequestError(message, parameter="tools")
        parts.append(slashed(_FORMATS[form]))
    return " & ".join(f"({part})" for part in parts) or ANY_TEXT


def _searched(pattern: str) -> str:
    """A terminal for the texts that contain a match of the pattern; anchors are allowed at its ends."""
    from llguidance import regex_to_lark

    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PART.findall(regex_to_lark(pattern, "dw")):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    found = []
    for parts in alternatives:
        before = "" if parts[:1] == ["^"] else ANY_TEXT
        after = "" if parts[-1:] == ["$"] else ANY_TEXT
        inner = "".join(parts[not before : len(parts) - (not after)])
        found.append(f"{before} /(?:{inner})/ {after}")
    return " | ".join(found)
