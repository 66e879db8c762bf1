"""/v1/responses with the released client: whole, streamed, in turns."""

import json
import re
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest

from llmpy.logprobs import Logprobs
from llmpy.server.chat import Message
from llmpy.server.errors import HttpError
from llmpy.server.formats import FORMATS, REASONING
from llmpy.server.harmony import HarmonyParser
from llmpy.server.logprobs import LogprobWriter, TextLogprobs
from llmpy.server.parsing import ReasoningParser, ToolParser
from llmpy.server.responses_input import items_of, messages_of
from llmpy.server.responses_output import Output
from llmpy.server.responses_store import Kept, ResponseStore
from llmpy.text.detokenizer import Detokenizer

ASK = {"model": "tiny", "input": "hello", "max_output_tokens": 8, "temperature": 0}
PATH = "/v1/responses"


@pytest.fixture
def openai_client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_stream_and_whole_are_the_answer_of_chat(openai_client, client):
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    ask = {"messages": talk, "max_tokens": 8, "temperature": 0}
    ask["stop"] = client.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]["content"][-2:]
    chat = client.post("/v1/chat/completions", json=ask).json()
    said = {**ASK, "instructions": "be brief", "extra_body": {"stop": ask["stop"]}}
    whole = openai_client.responses.create(**said, metadata={"a": "b"})
    assert whole.output_text == chat["choices"][0]["message"]["content"] and whole.metadata == {"a": "b"}
    assert whole.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert whole.usage.input_tokens == chat["usage"]["prompt_tokens"]
    with openai_client.responses.stream(**said) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and final.usage.total_tokens == whole.usage.total_tokens
    assert [event.sequence_number for event in events if event.type != "response.output_text.delta"][:2] == [0, 1]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_logprobs(client):
    whole = client.post(PATH, json={**ASK, "top_logprobs": 2, "ignore_eos": True}).json()
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == whole["usage"]["output_tokens"] == 8 and len(logprobs[0]["top_logprobs"]) == 2
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    with client.stream("POST", PATH, json={**ASK, "top_logprobs": 2, "ignore_eos": True, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


CALL = '{"name": "f", "arguments": {"x": "é"}}'
HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"x": 1}<|call|>'


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("kind", "said", "texts"),
    [
        ("hermes", f"<think>hé I look</think>\n\nI look é.\n<tool_call>\n{CALL}\n</tool_call>\n so é", ["I look é.", "so é"]),
        ("hermes", f"I look<tool_call>\n{CALL[:-9]}", [f"I look<tool_call>\n{CALL[:-9]}"]),
        ("hermes", "<think>hm</think>  a <b", ["  a <b"]),
        ("llama3", f" {CALL}", []),
        ("harmony", f"<|channel|>analysis<|message|>é so<|end|>{HARMONY_CALL}<|start|>assistant<|message|>é so", ["é so"]),
    ],
)
def test_logprobs_are_those_of_the_text(engine, kind, said, texts, step):
    rest = ToolParser(FORMATS[kind], {}, True)
    parser = HarmonyParser(True) if kind == "harmony" else ReasoningParser(REASONING["think"], False, rest)
    tokenizer, message, output = engine.tokenizer, Message(parser), Output("1")
    output.logprobs = TextLogprobs(LogprobWriter(tokenizer, 0, False), Detokenizer(tokenizer))
    ids, shown = tokenizer.encode(said), Detokenizer(tokenizer)
    for start in range(0, len(ids), step):
        part, is_last = ids[start : start + step], start + step >= len(ids)
        column = np.array(part, np.int32)[:, None]
        logprobs = Logprobs(column, -column.astype(np.float32), column, 2**20, lambda token: "")
        text = shown.push(part, is_last)
        sample = SimpleNamespace(text=text, finish_reason="stop" if is_last else None, token_ids=part, logprobs=logprobs)
        output.logprobs.add(sample)
        output.take(message.take(sample), message)
    output.finish("completed")
    parts = [item["content"][0] for item in output.items if item["type"] == "message"]
    assert [part["text"] for part in parts] == texts
    for part in parts:
        assert b"".join(bytes(token["bytes"]) for token in part["logprobs"]).decode() == part["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_beside_a_call(serve, stream):
    pytest.importorskip("llguidance")
    said = r'h[ij] <tool_call>\{"name": "f", "arguments": \{\}\}</tool_call>'
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    ask = {"model": "tiny", "input": "x", "tools": tools, "include": ["message.output_text.logprobs"], "stream": stream}
    url = serve(tool_call_parser="hermes", reasoning_parser="none").url
    answer = httpx.post(url + PATH, json={**ask, "structured_outputs": {"regex": said}, "logit_bias": {"71": 50}}, timeout=60)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        output = events[-1]["response"]["output"]
    else:
        output = answer.json()["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    [part] = output[0]["content"]
    assert re.fullmatch("h[ij]", part["text"]) and "".join(token["token"] for token in part["logprobs"]) == part["text"]
    assert all(token["logprob"] <= 0 for token in part["logprobs"])


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rain."}]},
    ]
    made = messages_of(items)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "assistant"]
    assert made[1]["content"] == "weather?" and made[2]["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in made[2]["tool_calls"]] == ["weather", "time"]
    assert made[3] == {"role": "tool", "tool_call_id": "c1", "content": "rain"} and made[4]["content"] == "Rain."


def test_reasoning_text_and_calls_are_items_in_their_order():
    said = '<think>hm</think>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    message = Message(ReasoningParser(REASONING["think"], False, ToolParser(FORMATS["hermes"], {}, False)))
    output, frames = Output("1"), b""
    for i in range(0, len(said), 7):
        sample = SimpleNamespace(text=said[i : i + 7], finish_reason="stop" if i + 7 >= len(said) else None)
        frames += output.take(message.take(sample), message)
    frames += output.finish("completed")
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call"]
    assert output.items[0]["content"][0]["text"] == "hm" and output.items[1]["content"][0]["text"] == "I look."
    assert output.items[2]["name"] == "weather" and json.loads(output.items[2]["arguments"]) == {"city": "Oslo"}
    events = [json.loads(frame.split(b"\ndata: ")[1]) for frame in frames.split(b"\n\n")[:-1]]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output.items and all(item["status"] == "completed" for item in done)
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
    assert deltas == output.items[2]["arguments"]


def test_refusals(client):
    for body, why in (
        ({**ASK, "input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({**ASK, "tools": [{"type": "web_search"}]}, "web_search"),
        ({**ASK, "background": True}, "background"),
        ({**ASK, "truncation": "perhaps"}, "truncation"),
        ({**ASK, "text": {"format": "json_schema"}}, "text.format: wanted dict, have str"),
        ({**ASK, "reasoning": {"effort": 3}}, "reasoning.effort: wanted str, have int"),
        ({"model": "tiny"}, "input"),
    ):
        response = client.post(PATH, json=body)
        assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
    response = client.post(PATH, json={**ASK, "previous_response_id": "resp_1"})
    assert response.status_code == 404 and "--keep-responses" in response.json()["error"]["message"]


def test_responses_that_are_kept(serve, client):
    openai_client = openai.OpenAI(base_url=f"{serve(keep_responses=2).url}/v1", api_key="none", max_retries=0)
    first = openai_client.responses.create(**ASK)
    again = openai_client.responses.retrieve(first.id)
    assert again.model_dump() == first.model_dump() and again.store
    second = openai_client.responses.create(**{**ASK, "input": "go on"}, previous_response_id=first.id)
    talk = messages_of([*items_of("hello"), *(item.model_dump() for item in first.output), *items_of("go on")])
    chat = client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 8, "temperature": 0}).json()
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"] and second.previous_response_id == first.id
    openai_client.responses.create(**ASK, store=False)
    assert openai_client.responses.retrieve(first.id).id == first.id
    openai_client.responses.delete(second.id)
    third, fourth = openai_client.responses.create(**ASK), openai_client.responses.create(**ASK)
    assert openai_client.responses.retrieve(fourth.id).id != third.id
    for gone in (first.id, second.id):
        with pytest.raises(openai.NotFoundError):
            openai_client.responses.retrieve(gone)


def test_responses_in_the_background(serve, wait_until):
    openai_client = openai.OpenAI(base_url=f"{serve(keep_responses=4).url}/v1", api_key="none", max_retries=0)
    long = {**ASK, "max_output_tokens": 16000, "extra_body": {"ignore_eos": True}}
    running = openai_client.responses.create(**long, background=True)
    assert running.status == "in_progress" and running.background
    cancelled = openai_client.responses.cancel(running.id)
    assert cancelled.status == "cancelled" == openai_client.responses.retrieve(running.id).status
    whole = openai_client.responses.create(**ASK, background=True)
    wait_until(lambda: openai_client.responses.retrieve(whole.id).status != "in_progress")
    whole = openai_client.responses.retrieve(whole.id)
    assert whole.output_text == openai_client.responses.create(**ASK).output_text
    with pytest.raises(openai.BadRequestError):
        openai_client.responses.cancel(openai_client.responses.create(**ASK).id)


def test_keys_see_their_own(serve):
    url = serve(keep_responses=4, api_keys=("one", "two")).url
    mine, other = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    made = mine.responses.create(**ASK)
    assert mine.responses.retrieve(made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(made.id)


def test_what_is_forgotten_in_the_background_ends(serve, until_idle):
    openai_client = openai.OpenAI(base_url=f"{serve(keep_responses=4).url}/v1", api_key="none", max_retries=0)
    long = {**ASK, "max_output_tokens": 16000, "extra_body": {"ignore_eos": True}}
    running = openai_client.responses.create(**long, background=True)
    openai_client.responses.delete(running.id)
    until_idle()
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(running.id)


def test_a_stream_that_nobody_reads_to_its_end_is_cancelled(serve, until_idle, wait_until):
    openai_client = openai.OpenAI(base_url=f"{serve(keep_responses=4).url}/v1", api_key="none", max_retries=0)
    stream = openai_client.responses.create(**{**ASK, "max_output_tokens": 16000}, stream=True, extra_body={"ignore_eos": True})
    id = next(stream).response.id
    seen = next(event for event in stream if event.type == "response.output_text.delta").delta
    assert openai_client.responses.retrieve(id).output_text.startswith(seen)
    stream.close()
    until_idle()
    wait_until(lambda: openai_client.responses.retrieve(id).status != "in_progress")
    response = openai_client.responses.retrieve(id)
    assert response.status == "cancelled" and response.output_text.startswith(seen)


def test_the_store_keeps_no_more_than_it_may():
    """More responses may run than the store keeps; when they finish, the surplus is dropped."""
    store, tasks = ResponseStore(2, 100), [SimpleNamespace(done=lambda: is_done) for _ in range(5)]
    is_done = False
    for i, task in enumerate(tasks):
        store.add(None, str(i), Kept(dict, list, str(i), 5, task))
    assert [store.get(None, str(i)).request_id for i in range(5)] == list("01234")
    is_done = True
    store.add(None, "5", Kept(dict, list, "5", 5))
    assert store.get(None, "4") and store.get(None, "5")
    for gone in "0123":
        with pytest.raises(HttpError, match="not found"):
            store.get(None, gone)


def test_the_store_keeps_no_more_bytes_than_it_may():
    store = ResponseStore(10, 100)
    kept = [Kept(dict, list, str(i), 30) for i in range(4)]
    for i, one in enumerate(kept):
        store.add(None, str(i), one)
    assert store.size == 90 and "0" not in [name for _, name in store._kept]
    store.grow(kept[0], 1000)  # it has gone
    store.grow(kept[2], 20)
    assert store.size == 80 and [name for _, name in store._kept] == ["2", "3"]
    store.add(None, "2", Kept(dict, list, "again", 10))
    assert store.size == 40
    store.remove(None, "3")
    store.add(None, "all", Kept(dict, list, "all", 101))
    assert store.size == 0 and not store._kept


def test_kept_responses_are_counted_in_bytes(serve, http):
    server = serve(keep_responses=100)
    store = server.server.config.app._service.responses
    ask = {"input": "hello", "max_output_tokens": 4, "instructions": "x" * 3000}
    for stream in (False, True):
        before = store.size
        assert http.post(f"{server.url}/v1/responses", json={**ask, "stream": stream}).status_code == 200
        assert 3000 < store.size - before < 3500


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({str(i): "" for i in range(17)}, "metadata: wanted at most 16 pairs, have 17"),
        ({"a" * 65: "b"}, "metadata: wanted at most 64 characters a key, have 65"),
        ({"a": "b" * 513}, "metadata: wanted at most 512 characters a value, have 513"),
    ],
)
def test_metadata_are_limited(client, metadata, message):
    response = client.post("/v1/responses", json={"input": "hello", "metadata": metadata})
    assert response.status_code == 400 and response.json()["error"]["message"] == message
