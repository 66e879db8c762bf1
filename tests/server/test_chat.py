"""Chat completions and Anthropic's messages: one conversation, two protocols, the same tokens."""

import json
from types import SimpleNamespace

from llmpy.server.anthropic import _Blocks
from llmpy.server.chat import Message, for_template, reason_of
from llmpy.server.formats import FORMATS, REASONING
from llmpy.server.parsing import PlainParser, ReasoningParser, ToolParser
from llmpy.server.service import Options, Service

PATH = "/v1/chat/completions"
TALK = [{"role": "user", "content": "hello"}]
ASK = {"messages": TALK, "max_tokens": 10, "temperature": 0.8, "seed": 4, "ignore_eos": True}


def said_by(text, is_last):
    return SimpleNamespace(text=text, finish_reason="stop" if is_last else None)


def post(client, path=PATH, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_frames_join_to_the_whole(client, frames):
    ask = {**ASK, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = post(client, **ask)
    chunks = frames(PATH, **ask, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all("usage" in chunk for chunk in chunks)
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant" and all("role" not in c["delta"] for c in own[1:])
        assert "".join(c["delta"].get("content") or "" for c in own) == choice["message"]["content"]
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
        assert [t for c in own for t in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_logprobs_have_the_tokens_bytes(client):
    content = post(client, **ASK, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(content) == 10
    for token in content:
        assert len(token["top_logprobs"]) == 3 and token["logprob"] <= 0
        values = [top["logprob"] for top in token["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"] or "\ufffd" in token["token"]


def test_the_prompt_is_the_rendered_conversation(client):
    counted = post(client, "/tokenize", messages=TALK)
    answer = post(client, **ASK, return_token_ids=True)
    assert answer["prompt_token_ids"] == counted["tokens"] and counted["count"] == len(counted["tokens"])
    assert post(client, "/v1/messages/count_tokens", messages=TALK) == {"input_tokens": counted["count"]}


def test_anthropic_says_the_same(client):
    ask = {"messages": TALK, "max_tokens": 10, "temperature": 0, "stop_sequences": ["zzz"]}
    chat = post(client, messages=TALK, max_tokens=10, temperature=0)
    whole = post(client, "/v1/messages", **ask)
    text = chat["choices"][0]["message"]["content"]
    assert whole["content"] == [{"type": "text", "text": text}] and whole["role"] == "assistant"
    reason = {"length": "max_tokens", "stop": "end_turn"}[chat["choices"][0]["finish_reason"]]
    assert whole["stop_reason"] == reason
    assert whole["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    with client.stream("POST", "/v1/messages", json={**ask, "stream": True}) as response:
        events = "".join(response.iter_text()).split("\n\n")
    assert events.pop() == ""
    kinds = [event.split("\n")[0].removeprefix("event: ") for event in events]
    data = [json.loads(event.split("\ndata: ")[1]) for event in events]
    assert [item["type"] for item in data] == kinds
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(item["delta"]["text"] for item in data if item["type"] == "content_block_delta") == text
    assert data[-2]["delta"]["stop_reason"] == reason


def test_errors_have_the_protocols_shape(client):
    response = client.post("/v1/messages", json={"messages": TALK})
    assert response.status_code == 400
    assert response.json()["type"] == "error" and response.json()["error"]["type"] == "invalid_request_error"
    for body, param in (
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({**ASK, "response_format": {"type": "nonsense"}}, "response_format"),
        ({**ASK, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({**ASK, "top_logprobs": 2}, "top_logprobs"),
        ({**ASK, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ):
        response = client.post(PATH, json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_tools_and_reasoning_are_fields_of_their_own(engine):
    said = "<think>hm</think>\n\nI look.\n" + '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    dialect = Service(engine=engine, options=Options(tool_call_parser="hermes", reasoning_parser="think")).dialect
    tools = [{"type": "function", "function": {"name": "weather"}}]
    message = Message(dialect.parser("user: hello", tools, holds=False))
    deltas = [message.delta(message.take(said_by(said[i : i + 5], i + 5 >= len(said)))) for i in range(0, len(said), 5)]
    whole = message.whole()
    assert whole["reasoning"] == "hm" and whole["content"] == "I look."
    assert whole["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["id"] == whole["tool_calls"][0]["id"] and calls[0]["index"] == 0
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Oslo"}'
    assert reason_of(said_by("", True), message) == "tool_calls"
    assert dialect.parser("assistant: <think>\n", None, holds=False).push("hm")[0].kind == "reasoning"


def test_anthropics_stream_has_the_same_calls():
    said = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}</tool_call>' for name in "ab")
    for step in (7, len(said)):
        message, blocks, frames = Message(ToolParser(FORMATS["hermes"], {}, holds=False)), _Blocks(), b""
        for i in range(0, len(said), step):
            for piece in message.take(said_by(said[i : i + step], i + step >= len(said))):
                frames += blocks.take(piece, message)
        data = [json.loads(frame.split(b"\ndata: ")[1]) for frame in (frames + blocks.close()).split(b"\n\n")[:-1]]
        begun = [item["content_block"] for item in data if item["type"] == "content_block_start"]
        assert [(block["type"], block["name"]) for block in begun] == [("tool_use", "a"), ("tool_use", "b")]
        assert [block["id"] for block in begun] == [call["id"] for call in message.calls]
        for index in (0, 1):
            parts = [item["delta"]["partial_json"] for item in data if item.get("delta") and item["index"] == index]
            assert "".join(parts) == '{"city": "Oslo"}' and (step > 7 or len(parts) > 1)


def test_reasoning_is_counted(engine):
    """Reasoning is counted by the token that ends it, or else by its text; equal for whole and streamed answers."""
    said = [(5, "<think>h"), (6, "m"), (9, "</think>"), (7, "Yes"), (9, "."), (2, "")]
    for step in (1, 2, 6):
        for close_id, expected in ((9, 3), (None, len(engine.tokenizer.encode("hm", False)))):
            message = Message(ReasoningParser(REASONING["think"], False, PlainParser()), close_id=close_id)
            for i in range(0, len(said), step):
                ids, texts = zip(*said[i : i + step], strict=True)
                sample = SimpleNamespace(text="".join(texts), token_ids=list(ids), finish_reason=None)
                sample.finish_reason = "stop" if i + step >= len(said) else None
                message.take(sample)
            assert message.num_reasoning(engine.tokenizer) == expected and message.content == "Yes."
    assert Message(PlainParser(), close_id=9).num_reasoning(engine.tokenizer) == 0


def test_what_templates_read():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    made = for_template({"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]})
    assert made["tool_calls"][0]["function"]["arguments"] == {"x": 1} and call["function"]["arguments"] == '{"x": 1}'
    assert made["reasoning_content"] == made["reasoning"] == made["thinking"] == "hm"
    plain = {"role": "user", "content": "hello"}
    assert for_template(plain) == plain
    assert "thinking" not in for_template({"role": "assistant", "content": "Yes.", "reasoning_content": "hm"})
