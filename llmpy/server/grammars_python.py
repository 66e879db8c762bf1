"""Grammars of calls in Python syntax with literals that fit the function's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..errors import InvalidRequestError
from ..structured.lark import Rules, quoted
from .grammars_json import repeated
from .scanning import NAME, Schemas

Field = TypeVar("Field")

_LARGEST = 10**18
"""Largest magnitude of a number without a limit in the schema, because Python limits the length of integer literals."""
_DEPTH = 5
"""Nesting depth of lists and dicts in a value without a schema."""
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "additionalProperties", "required"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_HELD = {"type", "enum", "const", "anyOf", "allOf", "$ref"}.union(*_OF_TYPE.values())
_REFUSED = {
    "additionalItems", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "maxProperties", "minContains", "minProperties", "not", "oneOf", "patternProperties", "prefixItems", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip


def pythonic(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """[NAME(key=value, ...), ...]"""
    return f'"[" {repeated(rules, _any_call(rules, functions), ", ", many)} "]"'


def lfm2(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """[NAME(key=value, ...), ...] between marks."""
    calls = repeated(rules, _any_call(rules, functions), ", ", many)
    return f"{rules.text('<|tool_call_start|>[')} {calls} {rules.text(']<|tool_call_end|>')}"


def olmo3(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """NAME(key=value, ...) on separate lines between tags."""
    calls = repeated(rules, _any_call(rules, functions), "\n", many)
    return f"{rules.text('<function_calls>' + chr(10))} {calls} {rules.text(chr(10) + '</function_calls>')}"


def _any_call(rules: Rules, functions: Schemas) -> str:
    return rules.any(
        f'{quoted(f"{name}(")} {_Literals(rules, name, schema).arguments()} ")"' for name, schema in functions.items()
    )


def _written(value: Any) -> str:
    """A JSON value as a Python literal."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(key)}: {_written(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _is_of(value: Any, types: Iterable[str]) -> bool:
    """Whether a JSON value has one of the types."""
    kinds: dict[type, tuple[str, ...]] = {
        dict: ("object",), list: ("array",), str: ("string",), bool: ("boolean",), type(None): ("null",),
        int: ("integer", "number"), float: ("number",),
    }  # fmt: skip
    return not set(kinds[type(value)]).isdisjoint(types)


class _Literals:
    """Rules for the arguments of one function.

    Args:
        rules: The grammar.
        name: Name of the function.
        schema: Schema of the function's parameters.
    """

    def __init__(self, rules: Rules, name: str, schema: Mapping[str, Any]) -> None:
        self._rules, self._name, self._root = rules, name, schema
        self._anything: dict[int, str] = {}
        self._referred: dict[str, str] = {}

    def _refused(self, what: str) -> InvalidRequestError:
        message = f"tools: {what} in the parameters of {self._name!r} cannot be forced in calls written as Python"
        return InvalidRequestError(message, parameter="tools")

    def arguments(self) -> str:
        """The grammar of all keyword arguments."""
        schema: Any = self._root
        within: tuple[str, ...] = ()
        try:
            while isinstance(schema, Mapping) and "$ref" in schema:
                schema, within = self._target(schema, within)
            if not isinstance(schema, Mapping) or self._types(schema) not in ([], ["object"]):
                raise self._refused("another type than 'object'")
            for name in ("anyOf", "allOf", "enum", "const"):
                if name in schema:
                    raise self._refused(f"{name!r} of all arguments")
            return self._listed(self._properties(schema, within, self._keyword))
        except RecursionError:
            raise self._refused("nesting of this depth") from None

    def _keyword(self, key: str) -> str:
        if not NAME.fullmatch(key):
            raise self._refused(f"the name {key[:60]!r}")
        return f"{key}="

    def _value(self, schema: Any, within: tuple[str, ...]) -> str:
        """A rule for the literals that fit a schema; `within` has the references that led to the schema."""
        if schema is True:
            return self._any(_DEPTH)
        if not isinstance(schema, Mapping):
            raise self._refused("a schema that nothing fits")
        if "$ref" in schema:
            found, within = self._target(schema, within)
            if within[-1] not in self._referred:
                self._referred[within[-1]] = self._value(found, within)
            return self._referred[within[-1]]
        types = self._types(schema)
        for name in ("anyOf", "allOf"):
            if name in schema:
                return self._options(schema, name, within)
        if "enum" in schema or "const" in schema:
            return self._choices(schema, types)
        if not types:
            return self._any(_DEPTH)
        return self._rules.any(self._of_type(kind, schema, within) for kind in types)

    def _target(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """The schema that a reference names, and the references so far."""
        self._alone(schema, "$ref")
        reference = str(schema["$ref"])
        if reference in within:
            raise self._refused(f"the recursive $ref {reference[:60]!r}")
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not reference.startswith("#") or found is None:
            raise self._refused(f"the $ref {reference[:60]!r}")
        return found, (*within, reference)

    def _alone(self, schema: Mapping[str, Any], name: str) -> None:
        """Refuses other keywords beside this one if they would constrain the value too."""
        for other in schema:
            if other != name and other in _HELD | _REFUSED:
                raise self._refused(f"{other!r} beside {name!r}")

    def _types(self, schema: Mapping[str, Any]) -> list[str]:
        """The types that a schema names, or to which its keywords apply; []: any type."""
        for name in schema:
            if name in _REFUSED and (name, schema[name]) != ("uniqueItems", False):
                raise self._refused(repr(name))
        types = schema.get("type")
        if types is None:
            return [kind for kind, names in _OF_TYPE.items() if any(name in schema for name in names)]
        return [str(kind) for kind in types] if isinstance(types, list) else [str(types)]

    def _options(self, schema: Mapping[str, Any], name: str, within: tuple[str, ...]) -> str:
        self._alone(schema, name)
        options = schema[name]
        if not isinstance(options, list) or not options or (name == "allOf" and len(options) > 1):
            raise self._refused(f"{name!r} of {len(options) if isinstance(options, list) else 'no'} schemas")
        return self._rules.any(self._value(option, within) for option in options)

    def _choices(self, schema: Mapping[str, Any], types: list[str]) -> str:
        choices = [schema["const"]] if "const" in schema else schema["enum"]
        for other in schema:
            if other in _HELD - {"type", "enum" if "enum" in schema else "const"}:
                raise self._refused(f"{other!r} beside 'enum' or 'const'")
        fit = [choice for choice in choices if not types or _is_of(choice, types)] if isinstance(choices, list) else []
        if not fit:
            raise self._refused("an 'enum' that nothing fits")
        return self._rules.any(quoted(_written(choice)) for choice in fit)

    def _of_type(self, kind: str, schema: Mapping[str, Any], within: tuple[str, ...]) -> str:
        if kind == "null":
            return '"None"'
        if kind == "boolean":
            return '"True" | "False"'
        if kind == "string":
            return self._json(kind, {name: schema[name] for name in _OF_TYPE[kind] if name in schema})
        if kind in ("integer", "number"):
            limits = {name: schema[name] for name in _OF_TYPE["number"] if name in schema}
            least = {} if "exclusiveMinimum" in limits else {"minimum": -_LARGEST}
            most = {} if "exclusiveMaximum" in limits else {"maximum": _LARGEST}
            return self._json(kind, {**least, **most, **limits})
        if kind == "array":
            return self._array(schema, within)
        if kind == "object":
            return self._object(schema, within)
        raise self._refused(f"the type {kind[:60]!r}")

    def _json(self, kind: str, rest: Mapping[str, Any]) -> str:
        """A scalar with the same syntax in Python and JSON."""
        return f"%json {json.dumps({'type': kind, **rest, 'x-guidance': {'whitespace_flexible': False}})}"

    def _array(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> str:
        least, most = self._field(schema, "minItems", int) or 0, self._field(schema, "maxItems", int)
        if most is not None and most < least:
            raise self._refused("'maxItems' below 'minItems'")
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", True), within)
        more = f'(", " {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = item if most == 1 else f"{item} {more}"
        return f'"[" {items if least else f"({items})?"} "]"'

    def _object(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> str:
        known = self._properties(schema, within, lambda key: f"{_written(key)}: ")
        if known or schema.get("additionalProperties") is False:
            return f'"{{" {self._listed(known)} "}}"'
        return self._dict(self._value(schema.get("additionalProperties", True), within))

    def _dict(self, value: str) -> str:
        """A dict with arbitrary keys."""
        pair = self._rules.rule(f'{self._json("string", {})} ": " {value}')
        return f'"{{" ({pair} (", " {pair})*)? "}}"'

    def _field(self, schema: Mapping[str, Any], name: str, kind: type[Field]) -> Field | None:
        """The value of a keyword; None: it is absent."""
        value = schema.get(name)
        if value is not None and not isinstance(value, kind):
            raise self._refused(f"{name!r} of type {type(value).__name__}")
        return value

    def _properties(
        self, schema: Mapping[str, Any], within: tuple[str, ...], written: Callable[[str], str]
    ) -> list[tuple[str, bool]]:
        """Rules for a schema's properties, and whether each is required."""
        given, required = self._field(schema, "properties", dict) or {}, self._field(schema, "required", list) or []
        if not all(isinstance(key, str) for key in required):
            raise self._refused("'required' that are no names")
        rest = schema.get("additionalProperties", True)
        known = {**given, **{key: rest for key in required if key not in given}}
        found = []
        for key, wanted in known.items():
            if wanted is not False or key in required:
                pair = self._rules.rule(f"{quoted(written(key))} {self._value(wanted, within)}")
                found.append((pair, key in required))
        return found

    def _listed(self, items: list[tuple[str, bool]]) -> str:
        """Items in order, separated by commas; optional items may be left out."""
        first = more = '""'  # rules for the remaining items: before the first item written, and after it
        for item, is_required in reversed(items):
            here = f"{item} {more}"
            first = self._rules.rule(here if is_required else f"{here} | {first}")
            more = self._rules.rule(f'", " {here}' if is_required else f'", " {here} | {more}')
        return first

    def _any(self, depth: int) -> str:
        """Any value with limited nesting depth."""
        if depth not in self._anything:
            limits = {"minimum": -_LARGEST, "maximum": _LARGEST}
            options = ['"None"', '"True"', '"False"', self._json("string", {}), self._json("number", limits)]
            if depth:
                inner = self._any(depth - 1)
                options += [f'"[" ({inner} (", " {inner})*)? "]"', self._dict(inner)]
            self._anything[depth] = self._rules.any(options)
        return self._anything[depth]
