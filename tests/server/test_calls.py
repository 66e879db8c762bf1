"""Reasoning, text and calls of a scripted model, through the released clients of every protocol."""

import json
from types import SimpleNamespace

import anthropic
import numpy as np
import openai
import pytest

from llmpy import RequestOutputKind
from llmpy.server import build_app

SAID = {
    "hermes": "<think>Two cities.</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 1}}\n</tool_call>',
    "harmony": "<|channel|>analysis<|message|>Two cities.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 3}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Łódź", "days": 1}<|call|>',
}
CITIES = [{"city": "Oslo", "days": 3}, {"city": "Łódź", "days": 1}]
TALK = [{"role": "user", "content": "weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


class Scripted:
    """An engine that always generates the same text.

    Args:
        engine: The engine for all other calls.
        said: The text.
        step: Number of characters per output.
    """

    def __init__(self, engine, said, step):
        self._engine, self._said, self._step = engine, said, step

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def _open(self, prompt, special_tokens, fields, **how):
        step = self._step if fields["output_kind"] is RequestOutputKind.DELTA else len(self._said)
        return _Stream([self._said[i : i + step] for i in range(0, len(self._said), step)])


class _Stream:
    def __init__(self, texts):
        self._texts = texts

    def close(self):
        pass

    async def __aiter__(self):
        for i, text in enumerate(self._texts):
            yield _output(text, i + 1 == len(self._texts))

    def __await__(self):
        yield from ()
        return _output(self._texts[0], True)


def _output(text, is_last):
    sample = {"index": 0, "text": text, "token_ids": [7], "token_ids_array": np.array([7]), "logprobs": None}
    sample |= {"finish_reason": "stop" if is_last else None, "stop_reason": None}
    output = {"prompt": "user: weather?", "prompt_token_ids_array": np.array([1]), "num_cached_tokens": 0, "error": None}
    output["num_image_tokens"] = 0
    output |= {"finished": is_last, "prompt_logprobs": None}
    return SimpleNamespace(**output, outputs=[SimpleNamespace(**sample)])


@pytest.fixture(scope="module", params=[("hermes", 1), ("harmony", 3), ("harmony", 1000)], ids=str)
def scripted(request, engine, running):
    name, step = request.param
    how = {"served_model_name": ("tiny",), "tool_call_parser": name, "reasoning_parser": "think"}
    return running(build_app(Scripted(engine, SAID[name], step), **how)).url


def test_chat(scripted):
    client = openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    ask = {"model": "tiny", "messages": TALK, "tools": tools}
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I look."
    assert whole.message.reasoning == "Two cities."
    assert [json.loads(call.function.arguments) for call in whole.message.tool_calls] == CITIES
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.content == "I look." and streamed.finish_reason == "tool_calls"
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_messages(scripted):
    client = anthropic.Anthropic(base_url=scripted, api_key="none", max_retries=0)
    ask = {"model": "tiny", "messages": TALK, "max_tokens": 100, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for made in (whole, streamed):
        assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert made.content[0].thinking == "Two cities." and made.content[1].text == "I look."
        assert [block.input for block in made.content[2:]] == CITIES and made.stop_reason == "tool_use"


def test_responses(scripted):
    client = openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    ask = {"model": "tiny", "input": "weather?", "tools": tools}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for made in (whole, streamed):
        assert [item.type for item in made.output] == ["reasoning", "message", "function_call", "function_call"]
        assert made.output[0].content[0].text == "Two cities." and made.output_text == "I look."
        assert [json.loads(item.arguments) for item in made.output[2:]] == CITIES
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(item.arguments for item in streamed.output[2:])
