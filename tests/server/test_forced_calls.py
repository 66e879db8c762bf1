"""Random calls sampled under the formats' grammars: they parse, and their arguments fit the schema."""

import json
import re

import jsonschema
import openai
import pytest

from llmpy.errors import InvalidRequestError
from llmpy.server import build_app
from llmpy.server.errors import to_http
from llmpy.server.formats import FORMATS, Format, register_tool_format
from llmpy.server.parsing import ToolParser
from llmpy.structured.lark import Rules
from llmpy.structured.params import StructuredOutputsParams

pytest.importorskip("llguidance")


N = 6


def drawn(engine, prompt, grammar, **params):
    """The output of a request under a grammar."""
    handle = engine.add_request(prompt, structured_outputs=StructuredOutputsParams(grammar=grammar), **params)
    output = handle.wait(60)
    assert output.error is None
    return output


def forced(engine, name, schema, many=False, hurry=32.0):
    """Arguments of calls under a format's grammar, sampled almost uniformly; the bias `hurry` favours ends of values."""
    form, rules = FORMATS[name], Rules()
    assert form.grammar is not None
    grammar = rules.grammar(form.grammar(rules, {"f": schema}, many, ""))
    bias = {token: hurry for token in range(len(engine.tokenizer.token_bytes())) if engine.tokenizer.decode([token]) in '"])}<'}
    params = {"max_tokens": 3000, "logit_bias": bias, "n": N, "seed": 5, "temperature": 8.0, "skip_special_tokens": False}
    for sample in drawn(engine, "x", grammar, **params).outputs:
        assert sample.finish_reason == "stop", sample
        parser, calls = ToolParser(form, {"f": schema}, True), []
        for piece in parser.push(sample.text) + parser.finish():
            assert piece.kind in ("call", "arguments"), sample.text
            calls += [""] if piece.kind == "call" else []
            calls[-1] += piece.text if piece.kind == "arguments" else ""
        yield from map(json.loads, calls)


PAIR = {
    "type": "object",
    "properties": {"x": {"exclusiveMinimum": 0, "maximum": 9, "multipleOf": 0.5}, "from": {"type": "string", "format": "date"}},
    "required": ["x"],
    "additionalProperties": False,
}
RICH = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "title": "Name"},
        "code": {"type": "string", "pattern": "^[a-c]{2,4}$"},
        "free": {"type": "string"},
        "count": {"type": "integer", "minimum": -5},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean", "default": False},
        "kind": {"enum": ['a"b\n', "ü", 3, -1.5, None, True, [1, {"k": None}]]},
        "unit": {"type": "string", "enum": ["m/s", 5]},
        "maybe": {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3, "uniqueItems": False},
        "one": {"items": {"const": "x"}, "maxItems": 1},
        "none": {"type": "array", "maxItems": 0},
        "many": {"type": "array", "items": {"type": "null"}, "minItems": 2},
        "pair": {"$ref": "#/$defs/pair"},
        "either": {"anyOf": [{"type": "string", "maxLength": 2}, {"allOf": [{"$ref": "#/$defs/pair"}]}], "default": None},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": True,
        "from": {"type": "integer", "maximum": 5},
        "x-é.1": {"type": "null"},
        "never": False,
    },
    "required": ["name", "count", "either", "more"],
    "$defs": {"pair": PAIR},
}


@pytest.mark.parametrize(("name", "many"), [("pythonic", False), ("lfm2", True), ("olmo3", True)])
def test_literals_of_python_fit_their_schema(engine, name, many):
    whole = {**RICH, "required": [*(RICH["properties"].keys() - {"never"}), "more"]}
    for schema in (RICH, whole):
        made = list(forced(engine, name, schema, many))
        assert len(made) >= N
        for arguments in made:
            jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("schema", [{}, {"type": "object", "required": []}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}])
def test_python_without_arguments(engine, schema):
    for name in ("pythonic", "lfm2", "olmo3"):
        assert list(forced(engine, name, schema)) == [{}] * N
        many = list(forced(engine, name, schema, many=True, hurry=0.0))
        assert len(many) > N and many == [{}] * len(many)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"oneOf": [{"type": "null"}]}, "'oneOf'"),
        ({"type": "string", "not": {}}, "'not'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "minItems": "x"}, "'minItems' of type str"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "'maxItems' below 'minItems'"),
        ({"type": "object", "minProperties": 1}, "'minProperties'"),
        ({"type": "object", "required": [5]}, "'required' that are no names"),
        ({"type": "object", "properties": []}, "'properties' of type list"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "a schema that nothing fits"),
        ({"enum": ["a"], "maxLength": 3}, "'maxLength' beside 'enum' or 'const'"),
        ({"type": "string", "enum": [5]}, "an 'enum' that nothing fits"),
        ({"anyOf": [{"type": "null"}], "minimum": 3}, "'minimum' beside 'anyOf'"),
        ({"allOf": [{}, {}]}, "'allOf' of 2 schemas"),
        ({"type": "integr"}, "the type 'integr'"),
        ({"$ref": "#/properties/a"}, "the recursive $ref '#/properties/a'"),
        ({"$ref": "other.json"}, "the $ref 'other.json'"),
        (False, None),
    ],
    ids=str,
)
def test_python_names_what_it_cannot_force(schema, named):
    functions = {"f": {"type": "object", "properties": {"a": schema}}}
    if named is None:  # nothing has to be written
        assert FORMATS["pythonic"].grammar(Rules(), functions, False, "")
        return
    message = re.escape(f"tools: {named} in the parameters of 'f' cannot be forced")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        FORMATS["pythonic"].grammar(Rules(), functions, False, "")
    assert caught.value.parameter == "tools" and to_http(caught.value).status == 400


@pytest.mark.parametrize("key", ["", "a b", "a=1, b", "f("])
def test_python_names_what_cannot_be_a_key(key):
    functions = {"f": {"properties": {key: {"type": "null"}}}}
    with pytest.raises(InvalidRequestError, match=re.escape(f"the name {key!r} in the parameters of 'f'")):
        FORMATS["olmo3"].grammar(Rules(), functions, False, "")


BARE = {
    "type": "object",
    "properties": {
        "free": {"type": "string", "maxLength": 6},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "found": {"type": "string", "pattern": "[0-9]/x|^y$|z$", "maxLength": 12},
        "digits": {"type": "string", "pattern": r"^\d{3}$"},
        "day": {"type": "string", "format": "date-time"},
        "id": {"type": "string", "format": "uuid"},
        "host": {"type": "string", "format": "ipv4"},
        "at": {"type": "string", "format": "time", "pattern": "Z$"},
        "mail": {"type": "string", "format": "email", "maxLength": 12},
        "link": {"type": "string", "format": "uri", "maxLength": 16},
        "choice": {"type": "string", "enum": ["a", "b c"]},
        "number": {"type": "integer", "minimum": 3, "maximum": 7},
        "any": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["free", "short", "found", "digits", "day", "id", "host", "at", "mail", "link", "choice", "number", "any"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["glm", "qwen_coder"])
def test_bare_texts_fit_their_schema(engine, name):
    made = list(forced(engine, name, BARE))
    assert len(made) == N
    for arguments in made:
        jsonschema.validate(arguments, BARE, format_checker=jsonschema.FormatChecker(["ipv4", "uuid", "email"]))
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*", arguments["day"]) and arguments["at"].endswith("Z")


def test_bare_texts_never_hold_the_mark_that_ends_them(engine):
    rules, schema = Rules(), {"properties": {"x": {"type": "string"}}, "required": ["x"]}
    grammar = rules.grammar(FORMATS["qwen_coder"].grammar(rules, {"f": schema}, False, ""))
    begun = "<tool_call>\n<function=f>\n<parameter=x>\na</parameter"
    given = {"prompt": "x", "output_token_ids": engine.tokenizer.encode(begun)}
    output = drawn(engine, given, grammar, max_tokens=1, logit_bias={engine.tokenizer.encode(">")[0]: 99.0})
    assert not output.text.startswith(">")


def test_bare_texts_name_a_format_that_is_not_known():
    functions = {"f": {"properties": {"x": {"type": "string", "format": "iri"}}}}
    with pytest.raises(InvalidRequestError, match=r"tools: the format 'iri' of 'x' cannot be forced .* known are date, time"):
        FORMATS["glm"].grammar(Rules(), functions, False, "")


def test_a_format_of_ones_own(engine, running, monkeypatch):
    def grammar(rules, functions, many, template):
        return rules.any(f"{rules.text(f'CALL {name} ')} %json {json.dumps(schema)}" for name, schema in functions.items())

    def scan(source, schemas):
        yield from source.space()
        name = yield from source.name()
        yield source.tell("call", name)
        yield from source.value(tells=True)

    url = {}
    for name, given in (("own", grammar), ("silent", None)):
        monkeypatch.setitem(FORMATS, name, None)  # it goes with the test
        register_tool_format(name, Format("CALL", scan, grammar=given))
        url[name] = running(build_app(engine, served_model_name=("tiny",), tool_call_parser=name)).url
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "max_tokens": 900}
    ask["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    client = openai.OpenAI(base_url=f"{url['own']}/v1", api_key="none", max_retries=0)
    [call] = client.chat.completions.create(**ask).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["x"] in (1, 2)
    client = openai.OpenAI(base_url=f"{url['silent']}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="the way 'silent', whose Format has no grammar"):
        client.chat.completions.create(**ask)
