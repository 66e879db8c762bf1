"""StructuredOutputsParams: what a request's text must be, and the same in the words of llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import InvalidRequestError, UnsupportedError

ANY_TEXT = "/(?s:.*)/"
WHITESPACE = r"[ \t\n\r]{0,32}"
"""Between the parts of JSON. Bounded: a model that is unsure of itself would go on with spaces for ever."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must be; exactly one field is set.

    Args:
        json: A JSON schema: its text, a dict, or a class that has `model_json_schema()`, as pydantic's have.
        regex: A regular expression that the whole text matches (syntax of Rust's `regex` crate).
        choice: Texts, one of which it is.
        grammar: A context-free grammar in llguidance's variant of Lark, its JSON list of such grammars, or GBNF.
        json_object: True: any JSON object.
        structural_tag: Text with tagged parts that follow schemas: a dict, or its text, of `triggers` and `structures` (each
            with `begin`, `schema`, `end`).

    Raises:
        TypeError: A field has a wrong type.
        InvalidRequestError: None or several are set, or JSON cannot be read.
        UnsupportedError: A structural tag of another form.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = self.to_dict()
        for name in ("regex", "grammar"):
            if not isinstance(given.get(name, ""), str):
                raise TypeError(f"{name} must be a str, but is of type {type(given[name]).__name__}")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise TypeError(f"json_object must be a bool, but is of type {type(self.json_object).__name__}")
        if not self.json_object:
            given.pop("json_object", None)
        if len(given) != 1:
            how = "can only" if given else "must"
            what = "multiple" if given else "none"
            message = f"You {how} use one kind of structured outputs constraint but {what} are specified: {self.to_dict()}"
            raise _bad(message, self.to_dict())
        _ = self.language  # what cannot be said is refused here

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, ready for JSON."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        schema_of = getattr(self.json, "model_json_schema", None)
        if schema_of is not None:
            found["json"] = schema_of()
        if self.choice is not None and not isinstance(self.choice, str):
            found["choice"] = list(self.choice)
        return {name: value for name, value in found.items() if value is not None}

    @functools.cached_property
    def language(self) -> tuple[str, str]:
        """The name of one of llguidance's languages, and a grammar in it."""
        kind, text = self._language()
        if "\0" in text:
            raise _bad("structured_outputs cannot contain a NUL character.", text)
        return kind, text

    def _language(self) -> tuple[str, str]:
        if self.json is not None:
            return "json_schema", schema_text(_object("json", self.to_dict()["json"]))
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "lark", _choice(self.choice)
        if self.structural_tag is not None:
            return "lark", _structural_tag(_object("structural_tag", self.structural_tag))
        if self.grammar is not None and self.grammar.lstrip().startswith("{"):
            return "llguidance", self.grammar
        if self.grammar is not None:
            return "lark", _lark_of_gbnf(self.grammar) if "::=" in self.grammar else self.grammar
        return "json_schema", schema_text({"type": "object"})


def _bad(message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(message, parameter="structured_outputs", value=value)


def _object(name: str, value: object) -> Any:
    """JSON of a field, given as text or as it is. A schema may be true or false."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _bad(f"{name} must be JSON: {error}", value) from None
    if not isinstance(value, Mapping | bool) or (name != "json" and isinstance(value, bool)):
        raise TypeError(f"{name} must be a dict or its JSON, but is of type {type(value).__name__}")
    return dict(value) if isinstance(value, Mapping) else value


def schema_text(schema: Any) -> str:
    """A schema's JSON, with the whitespace that is allowed unless it says so itself."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict) and "x-guidance" not in schema:
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return json.dumps(schema)


def _choice(texts: Sequence[str]) -> str:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError("choice must be a list of str")
    if not texts:
        raise _bad("choice cannot be empty.", texts)
    return f"start: {' | '.join(quoted(text) for text in texts)}"


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _structural_tag(tag: Mapping[str, Any]) -> str:
    """Any text, in which each trigger is the beginning of one of the structures."""
    try:
        triggers, structures = list(tag["triggers"]), [(one["begin"], one["schema"], one["end"]) for one in tag["structures"]]
    except (KeyError, TypeError):
        raise UnsupportedError(
            "structural_tag: wanted 'triggers' and 'structures' with 'begin', 'schema' and 'end'; other forms are not "
            "supported, write them as a grammar"
        ) from None
    tags = " | ".join(f"tag_{i}" for i in range(len(triggers)))
    lines = [f"start: ({tags})* rest", f"rest: {ANY_TEXT}"]
    for i, trigger in enumerate(triggers):
        bodies = [
            f"{quoted(begin[len(trigger) :])} %json {schema_text(schema)} {quoted(end)}"
            for begin, schema, end in structures
            if begin.startswith(trigger)
        ]
        if not bodies:
            raise _bad(f"structural_tag: no structure begins with the trigger {trigger!r}.", tag)
        lines += [f"tag_{i}: trigger_{i} ({' | '.join(bodies)})", f"trigger_{i}[lazy]: {ANY_TEXT} {quoted(trigger)}"]
    return "\n".join(lines)


def _lark_of_gbnf(text: str) -> str:
    library_path()  # or an error that names the extra
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:
        raise _bad(f"grammar must be GBNF or Lark: {error}", text) from None


@functools.cache
def library_path() -> str:
    """Where llguidance's shared library lies; nothing is imported.

    Raises:
        ImportError: It is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("llguidance")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for path in Path(folder).glob("_lib*.so"):
            return str(path)
    raise ImportError("structured_outputs needs llguidance: pip install 'llmpy[structured]'")
