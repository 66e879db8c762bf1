"""StructuredOutputsParams: a constraint on a request's text, and its grammar for llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..checks import frozen, refuse_names
from ..errors import InvalidRequestError
from .lark import lark_of, quoted, schema_text
from .structural_tags import language_of

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the generated text; set exactly one field.

    Args:
        json: A JSON schema: its text, a dict, or a class with `model_json_schema()`, such as a pydantic model.
        regex: A regular expression that the whole text must match (syntax of Rust's `regex` crate).
        choice: The allowed texts.
        grammar: A context-free grammar in llguidance's variant of Lark, its JSON list of such grammars, or GBNF.
        json_object: True: any JSON object.
        structural_tag: Text with constrained parts: a dict, or its JSON, with a `format` (`any_text`, `const_string`,
            `json_schema`, `regex`, `grammar`, or with nested formats `tag`, `sequence`, `or`, `triggered_tags`,
            `tags_with_separator`), or with `triggers` and `structures` (each with `begin`, `schema`, `end`).

        Raises:
            TypeError: A field has a wrong type.
            InvalidRequestError: No field or several fields are set, or JSON cannot be read.
            UnsupportedError: A structural tag has an unknown format or field.

    Example:
        >>> answer = StructuredOutputsParams(choice=["yes", "no"])
        >>> llm.generate("Is the sky blue? ", structured_outputs=answer).texts
    """

    def __new__(cls, *args: object, **given: object) -> StructuredOutputsParams:
        refuse_names(cls.__name__, [name for name in given if name not in cls.__dataclass_fields__], cls.__dataclass_fields__)
        return super().__new__(cls)

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
        _ = self.language  # raises if the constraint has no grammar

    def __hash__(self) -> int:
        return hash(frozen(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """The set fields as JSON data."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        schema_of = getattr(self.json, "model_json_schema", None)
        if schema_of is not None:
            found["json"] = schema_of()
        if self.choice is not None and not isinstance(self.choice, str):
            found["choice"] = list(self.choice)
        return {name: value for name, value in found.items() if value is not None}

    @functools.cached_property
    def language(self) -> tuple[str, str]:
        """Name of a language of llguidance, and a grammar in it. Special tokens are not resolved; see `language_of`."""
        kind, text = self._language({})
        if "\0" in text:
            raise _bad("structured_outputs cannot contain a NUL character.", text)
        return kind, text

    def language_of(self, tokenizer: Tokenizer) -> tuple[str, str]:
        """`language` for a tokenizer: marks of structural tags may be special tokens."""
        return self.language if self.structural_tag is None else self._language(tokenizer.special_by_name)

    def _language(self, special: Mapping[str, int]) -> tuple[str, str]:
        if self.json is not None:
            return "json_schema", schema_text(_object("json", self.to_dict()["json"]))
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "lark", _choice(self.choice)
        if self.structural_tag is not None:
            return language_of(_object("structural_tag", self.structural_tag), special)
        if self.grammar is not None and self.grammar.lstrip().startswith("{"):
            return "llguidance", self.grammar
        if self.grammar is not None:
            return "lark", lark_of(self.grammar)
        return "json_schema", schema_text({"type": "object"})


def _bad(message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(message, parameter="structured_outputs", value=value)


def _object(name: str, value: object) -> Any:
    """A field's JSON value from text or from an object. A schema may be true or false."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _bad(f"{name} must be JSON: {error}", value) from None
    if not isinstance(value, Mapping | bool) or (name != "json" and isinstance(value, bool)):
        raise TypeError(f"{name} must be a dict or its JSON, but is of type {type(value).__name__}")
    return dict(value) if isinstance(value, Mapping) else value


def _choice(texts: Sequence[str]) -> str:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError("choice must be a list of str")
    if not texts:
        raise _bad("choice cannot be empty.", texts)
    return f"start: {' | '.join(quoted(text) for text in texts)}"
