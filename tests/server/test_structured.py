"""Answers that must fit a schema, a grammar or a tool, through the released clients; the model is random."""

import json
import re
from typing import Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from llmpy.server import build_app
from llmpy.server.errors import HttpError
from llmpy.server.formats import FORMATS, REASONING
from llmpy.server.grammars import Constraint
from llmpy.server.protocol import ChatRequest
from llmpy.structured.params import StructuredOutputsParams

pytest.importorskip("llguidance")

TALK = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Łódź"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "hourly": {"type": "boolean"},
        "at": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False},
    },
    "required": ["city", "days", "at"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
FUNCTIONS = {"weather": WEATHER, "stop": STOP}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FUNCTIONS.items()]


class Color(BaseModel):
    name: Literal["red", "green"]
    bright: bool


def ask(url, **fields):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.chat.completions.create(model="tiny", messages=TALK, **fields)


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_parse_and_fit(name, engine, running):
    url = running(build_app(engine, served_model_name=("tiny",), tool_call_parser=name, reasoning_parser="none")).url
    for seed, extra in (
        (1, {"parallel_tool_calls": False}),
        (2, {"tool_choice": TOOLS[0] | {"function": {"name": "weather"}}}),
    ):
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 900, "seed": seed, "n": 4, **extra}
        if name == "harmony":  # its reasoning, which would go on and on
            fields["logit_bias"] = {str(engine.tokenizer.encode(mark)[0]): 30 for mark in "fc"}
        for choice in ask(url, **fields).choices:
            assert choice.finish_reason == "tool_calls", choice
            [call] = choice.message.tool_calls
            assert not choice.message.content and (extra.get("tool_choice") is None or call.function.name == "weather")
            jsonschema.validate(json.loads(call.function.arguments), FUNCTIONS[call.function.name])


def test_a_forced_call_in_a_stream_and_in_the_other_protocols(engine, running):
    url = running(build_app(engine, served_model_name=("tiny",), tool_call_parser="hermes")).url
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    one = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(model="tiny", messages=TALK, tools=TOOLS, tool_choice=one, max_tokens=900) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER}]
    made = client.responses.create(
        model="tiny", input="hello", tools=tools, tool_choice={"type": "function", "name": "weather"}
    )
    assert [item.type for item in made.output] == ["function_call"]
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        answer = theirs.messages.create(model="tiny", messages=TALK, tools=tools, tool_choice=choice, max_tokens=900)
        assert answer.stop_reason == "tool_use" and {block.type for block in answer.content} == {"tool_use"}
        for block in answer.content:
            jsonschema.validate(block.input, FUNCTIONS[block.name])


def test_response_format(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(model="tiny", messages=TALK, response_format=Color, max_tokens=400)
    assert isinstance(parsed.choices[0].message.parsed, Color)
    answer = client.responses.parse(model="tiny", input="hello", text_format=Color, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Color)
    bias = {str(token): 50 for token in (92, 1, 25, 16)}  # closing marks, quotes
    made = ask(url, response_format={"type": "json_object"}, max_tokens=60, logit_bias=bias)
    assert made.choices[0].finish_reason != "stop" or isinstance(json.loads(made.choices[0].message.content), dict)
    assert ask(url, response_format={"type": "text"}, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["hermes", "llama3", "pythonic", "harmony"])
def test_an_answer_that_may_be_a_call_is_one_or_fits(name, engine, running):
    url = running(build_app(engine, served_model_name=("tiny",), tool_call_parser=name, reasoning_parser="none")).url
    form = {"type": "json_schema", "json_schema": {"name": "color", "schema": Color.model_json_schema()}}
    fields = {"tools": TOOLS, "response_format": form, "parallel_tool_calls": False, "max_tokens": 900, "temperature": 2}
    if name == "harmony":  # its reasoning, which would go on and on
        fields["logit_bias"] = {str(engine.tokenizer.encode(mark)[0]): 30 for mark in "fc"}
    ends = set()
    for choice in ask(url, n=24, seed=1, **fields).choices:
        ends.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            [call] = choice.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), FUNCTIONS[call.function.name])
        elif choice.finish_reason == "stop":
            Color.model_validate_json(choice.message.content)
    assert {"tool_calls", "stop"} <= ends


def test_structured_outputs(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    body = {"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}
    made = client.completions.create(model="tiny", prompt="hello", max_tokens=20, extra_body=body, n=2)
    assert all(re.fullmatch("[ab]{3}-[0-9]", choice.text) and choice.finish_reason == "stop" for choice in made.choices)
    made = ask(url, extra_body={"structured_outputs": {"choice": ["x/y", "z"]}})
    assert made.choices[0].message.content in ("x/y", "z")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
        ({"tool_choice": {"function": "weather"}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integr"}}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * (300 << 10)}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"nonsense": 1}}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "perhaps", "tools": TOOLS}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(client, fields, param):
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json={"messages": TALK, "stream": stream, **fields})
        text = answer.text.removeprefix("data: ").split("\n\n")[0]
        assert (answer.status_code == 400 or stream) and json.loads(text)["error"]["param"] == param


@pytest.mark.parametrize("marks", ["think", "mistral"])
@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("{open}", "so?{close}\n\n"), ("hello", "{open}so?{close}"), ("hello", "b"), ("{open}\n{close}\n\n", "")],
)
def test_grammars_begin_behind_reasoning(engine, marks, prompt, begins):
    names = {"open": REASONING[marks].open, "close": REASONING[marks].close}
    body = ChatRequest(messages=TALK)
    content = StructuredOutputsParams(regex="[a-c]/[0-9]{3}")
    params = Constraint(body, content, engine.tokenizer, None, REASONING[marks]).params(prompt.format(**names))
    given = {"prompt": "x", "output_token_ids": engine.tokenizer.encode(begins.format(**names))}
    handle = engine.add_request(given, structured_outputs=params, max_tokens=60, temperature=0)
    output = handle.wait(60)
    said = begins.replace("{close}", "\n") + output.text
    assert output.error is None and re.fullmatch("[a-c]/[0-9]{3}", said.split("\n")[-1])


def test_structural_tags(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": "</a>"}
    form = {"type": "tags_with_separator", "tags": [tag], "separator": " ", "at_least_one": True}
    body = {"response_format": {"type": "structural_tag", "format": form}}
    plain = {"structured_outputs": {"structural_tag": body["response_format"]}}
    made = [ask(url, extra_body=extra, max_tokens=300).choices[0].message.content for extra in (body, plain)]
    made.append(client.completions.create(model="tiny", prompt="x", max_tokens=300, extra_body=body).choices[0].text)
    assert all(re.fullmatch("<a>[ab]{2}</a>( <a>[ab]{2}</a>)*", text) for text in made), made
    structures = [{"begin": "<a>", "schema": {"const": 7}, "end": "</a>"}]
    older = {"type": "structural_tag", "triggers": ["<"], "structures": structures}
    text = ask(url, response_format=older, max_tokens=40, logit_bias={"27": 50}).choices[0].message.content
    assert "<a>7</a>" in text


def test_a_list_of_grammars_stands_behind_reasoning(engine):
    elements = [{"type": "grammar", "grammar": 'start: "u"'}, {"type": "const_string", "value": "/"}]
    form = {"type": "sequence", "elements": elements}
    content = StructuredOutputsParams(structural_tag={"format": form})
    body, marks = ChatRequest(messages=TALK), REASONING["think"]
    params = Constraint(body, content, engine.tokenizer, None, marks).params("<think>")
    given = {"prompt": "x", "output_token_ids": engine.tokenizer.encode("so</think>")}
    handle = engine.add_request(given, structured_outputs=params)
    output = handle.wait(60)
    assert output.text.strip() == "u/" and output.finish_reason == "stop"
    named = StructuredOutputsParams(grammar=json.dumps({"grammars": [{"name": "a", "lark_grammar": 'start: "u"'}]}))
    with pytest.raises(HttpError, match="the first one must have no name here"):
        Constraint(body, named, engine.tokenizer, None, marks).params("<think>")


def test_response_format_of_completions(url, client):
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": Color.model_json_schema()}}
    made = api.completions.create(model="tiny", prompt=["a", "x"], max_tokens=400, seed=1, extra_body={"response_format": form})
    assert [choice.finish_reason for choice in made.choices] == ["stop"] * 2  # with this seed; JSON may be of any length
    assert all(Color.model_validate_json(choice.text) for choice in made.choices)
    for wrong in ({"type": "nonsense"}, {"type": "json_schema"}):
        answer = client.post("/v1/completions", json={"prompt": "x", "response_format": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
