"""Structural tags: text with constrained parts between marks, as grammars of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError, UnsupportedError
from .lark import ANY_TEXT, Rules, lark_of, schema_text, slashed

Ends = tuple[str, ...]
"""Texts of which one ends a part and belongs to it; (): the end of the whole text ends it."""

_FIELDS = {
    "any_text": (),
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "tag": ("begin", "content", "end"),
    "sequence": ("elements",),
    "or": ("elements",),
    "triggered_tags": ("triggers", "tags"),
    "tags_with_separator": ("tags", "separator"),
}
_FLAGS = ("at_least_one", "stop_after_first")
_DEFAULTS: tuple[Any, ...] = (None, False, [], "json")
"""Values of optional fields that change nothing."""


def language_of(tag: Mapping[str, Any], special: Mapping[str, int]) -> tuple[str, str]:
    """Name of a language of llguidance, and the grammar of a structural tag in it.

    Args:
        tag: The structural tag, with `format`, or with `triggers` and `structures`.
        special: Ids of special tokens by name. In marks, these names mean the tokens.

    Raises:
        InvalidRequestError: A field is missing or has a wrong type.
        UnsupportedError: A format or a field has no grammar.
    """
    form = tag.get("format")
    if form is None and "structures" in tag:
        form = _older(tag)
    writer = _Writer(Rules(special))
    try:
        grammar = writer.rules.grammar(writer.part(form, ()))
    except RecursionError:
        raise _bad("its formats are nested too deeply", tag) from None
    if not writer.named:
        return "lark", grammar
    return "llguidance", json.dumps({"grammars": [{"lark_grammar": grammar}, *writer.named]})


def _older(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a structural tag in the older form to a format."""
    tags = []
    for one in tag["structures"] if isinstance(tag["structures"], list | tuple) else ():
        if not isinstance(one, Mapping):
            raise _bad("'structures' must be objects", tag)
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _bad(message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"structural_tag: {message}", parameter="structured_outputs", value=value)


def _kind(form: Any) -> str:
    """Checks the fields of a format and returns its type."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise UnsupportedError(f"structural_tag: wanted a format of a type among {known}, have {str(kind)[:60]!r}")
    flags = _FLAGS if kind in ("triggered_tags", "tags_with_separator") else ()
    known_fields = ("type", *_FIELDS[kind], *flags)
    for name, value in form.items():
        if name not in known_fields and value not in _DEFAULTS:
            raise UnsupportedError(f"structural_tag: {str(name)[:60]!r} of {kind} is not supported")
    for name in _FIELDS[kind]:
        if form.get(name) is None:
            raise _bad(f"{kind} misses its {name!r}", form)
    return kind


def _text(form: Mapping[str, Any], name: str) -> str:
    value = form[name]
    if not isinstance(value, str):
        raise _bad(f"{name!r} of {form['type']} must be a str, but is of type {type(value).__name__}", form)
    return value


def _list(form: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = form[name]
    if not isinstance(value, list | tuple) or not value:
        raise _bad(f"{name!r} of {form['type']} must be a list with something in it", form)
    return value


def _ends(tag: Mapping[str, Any]) -> Ends:
    """The texts of which one ends a tag; (): the tag has no end."""
    ends = (tag["end"],) if isinstance(tag["end"], str) else tuple(_list(tag, "end"))
    if not all(isinstance(end, str) for end in ends):
        raise UnsupportedError("structural_tag: 'end' of tag wants texts; tokens are not supported")
    return () if ends == ("",) else ends


def _is_open(form: Any) -> bool:
    """Whether a format has no end, so that only the following text ends it."""
    kind = _kind(form)
    if kind == "tag":
        return not _ends(form) and _is_open(form["content"])
    if kind in ("sequence", "or"):
        elements = _list(form, "elements")
        return any(map(_is_open, elements[-1:] if kind == "sequence" else elements))
    return kind in ("any_text", "triggered_tags")


class _Writer:
    """Writes the grammar of a format, and the further grammars that it names.

    Args:
        rules: The grammar to extend.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.named: list[dict[str, str]] = []

    def part(self, form: Any, ends: Ends) -> str:
        """An expression for a format and its end."""
        made: str = getattr(self, f"_{_kind(form)}")(form, ends)
        return made

    def _closed(self, expression: str, ends: Ends) -> str:
        return f"{expression} ({' | '.join(map(self.rules.text, ends))})" if ends else expression

    def _lazy(self, body: str, ends: Ends) -> str:
        """An expression for a text up to the first of the ends."""
        return self.rules.any(self.rules.until(end, body) for end in ends) if ends else body

    def _any_text(self, form: Mapping[str, Any], ends: Ends) -> str:
        return self._lazy(ANY_TEXT, ends)

    def _regex(self, form: Mapping[str, Any], ends: Ends) -> str:
        return self._lazy(slashed(_text(form, "pattern")), ends)

    def _const_string(self, form: Mapping[str, Any], ends: Ends) -> str:
        return self._closed(self.rules.text(_text(form, "value")), ends)

    def _json_schema(self, form: Mapping[str, Any], ends: Ends) -> str:
        schema = form["json_schema"]
        if not isinstance(schema, Mapping | bool):
            raise _bad(f"a schema must be an object, but is of type {type(schema).__name__}", form)
        return self._closed(f"%json {schema_text(schema)}", ends)

    def _grammar(self, form: Mapping[str, Any], ends: Ends) -> str:
        name = f"part_{len(self.named)}"
        self.named.append({"name": name, "lark_grammar": lark_of(_text(form, "grammar"))})
        return self._closed(f"@{name}", ends)

    def _tag(self, form: Mapping[str, Any], ends: Ends, begun: str = "") -> str:
        """A tag; the part `begun` of its beginning is already written."""
        begin, own = _text(form, "begin").removeprefix(begun), _ends(form)
        opened = f"{self.rules.text(begin)} " if begin else ""
        if not own:
            return opened + self.part(form["content"], ends)
        return opened + self._closed(self.part(form["content"], own), ends)

    def _or(self, form: Mapping[str, Any], ends: Ends) -> str:
        return self.rules.any(self.part(element, ends) for element in _list(form, "elements"))

    def _sequence(self, form: Mapping[str, Any], ends: Ends) -> str:
        elements, made, begun = _list(form, "elements"), [], ""
        for element, after in zip(elements, [*elements[1:], None], strict=True):
            stops = ends if after is None else self._beginning(after) if _is_open(element) else ()
            if begun and element["type"] == "const_string":
                made.append(self._closed('""', stops))
            else:
                made.append(self._tag(element, stops, begun) if begun else self.part(element, stops))
            begun = stops[0] if after is not None and stops else ""
        return " ".join(made)

    def _beginning(self, form: Any) -> Ends:
        """The text that begins a format, so that it can end the format before it."""
        name = {"const_string": "value", "tag": "begin"}.get(_kind(form))
        if name is None or not form[name]:
            message = "structural_tag: in a sequence, a const_string or a tag with a beginning must follow what has no end"
            raise UnsupportedError(message)
        return (_text(form, name),)

    def _tags(self, form: Mapping[str, Any]) -> Sequence[Any]:
        tags = _list(form, "tags")
        if any(_kind(tag) != "tag" for tag in tags):
            raise _bad(f"'tags' of {form['type']} must be tags", form)
        return tags

    def _triggered_tags(self, form: Mapping[str, Any], ends: Ends) -> str:
        tags, triggered = self._tags(form), []
        triggers = tuple(str(trigger) for trigger in _list(form, "triggers"))
        for trigger in triggers:
            bodies = [self._tag(tag, (), trigger) for tag in tags if _text(tag, "begin").startswith(trigger)]
            if not bodies or not trigger:
                raise _bad(f"no structure begins with the trigger {trigger!r}.", form)
            triggered.append(f"{self.rules.until(trigger)} {self.rules.any(bodies)}")
        for tag in tags:
            if not tag["begin"].startswith(triggers):
                raise _bad(f"no trigger begins the tag {tag['begin']!r}.", form)
        one, rest = self.rules.any(triggered), self._any_text(form, ends)
        first = self.rules.any(self._tag(tag, ()) for tag in tags) if form.get("at_least_one") else ""
        if not form.get("stop_after_first"):
            return f"{first} {one}* {rest}"
        return self._closed(first, ends) if first else self.rules.any([self._closed(one, ends), rest])

    def _tags_with_separator(self, form: Mapping[str, Any], ends: Ends) -> str:
        one = self.rules.any(self._tag(tag, ()) for tag in self._tags(form))
        many = one if form.get("stop_after_first") else f"{one} ({self.rules.text(_text(form, 'separator'))} {one})*"
        return self._closed(many if form.get("at_least_one") else f"({many})?", ends)
