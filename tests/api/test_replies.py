"""Chat answers parsed in Python: reasoning, tool calls and content, as in the server."""

import copy
import json
import pickle
import subprocess
import sys

import pytest

from llmpy import ConfigError, Reply, SamplingParams, ToolCall
from llmpy.results.replies import ReplyReader
from llmpy.server.dialect import Dialect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
HERMES = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools | length if tools }}"
    "{# <think> </think> #}{% if false %}<think></think><tool_call>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def plain(reply):
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.tool_calls]


def test_a_text_is_taken_apart(fake_llm):
    llm = fake_llm(template=HERMES)
    text = f"<think>Which city?</think>\n\nI look.\n{CALL}"
    reply = llm.parse_reply(text, TOOLS)
    assert plain(reply) == ("I look.", "Which city?", [("weather", {"city": "Rome", "days": 2})])
    assert plain(llm.parse_reply(text)) == (f"I look.\n{CALL}", "Which city?", [])
    assert plain(llm.parse_reply("Thought</think>Said", prompt="...<think>")) == ("Said", "Thought", [])
    assert plain(llm.parse_reply(text, TOOLS, reasoning_parser="none", tool_call_parser="none")) == (text, None, [])
    bad = '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'
    assert plain(llm.parse_reply(bad, TOOLS)) == (bad, None, []), "a malformed call is content"
    with pytest.raises(ConfigError, match=r"^tool_call_parser: wanted one of auto, none, hermes.*, have 'hermès'"):
        llm.parse_reply(text, tool_call_parser="hermès")
    other = llm.parse_reply('[weather(city="Oslo", days=1)]', TOOLS, tool_call_parser="pythonic")
    assert plain(other) == ("", None, [("weather", {"city": "Oslo", "days": 1})])


def test_a_reply_goes_on_as_a_message():
    call = ToolCall(id="call_1", name="weather", arguments={"city": "Rome"})
    reply = Reply(content="", reasoning="Hm.", tool_calls=[call])
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert reply.message == {
        "role": "assistant", "content": "", "reasoning_content": "Hm.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }  # fmt: skip
    assert Reply(content="Hi").message == {"role": "assistant", "content": "Hi"}


def sample_of(llm, text, finish="stop", stop=None):
    """A sample with this text, as if the model had written it."""
    out = llm.generate("a", SamplingParams(max_tokens=1))[0].outputs[0]
    ids = llm.tokenizer.encode(text)
    out.token_ids_array = type(out.token_ids_array)(len(ids), out.token_ids_array.dtype)
    out.token_ids_array[:] = ids
    out.text, out.finish_reason, out.stop_reason = text, finish, stop
    return out


@pytest.mark.parametrize("is_special", [False, True])
def test_a_sample_is_read_when_it_is_asked_for(fake_llm, is_special):
    """Markers that are special tokens are not in the output's text; the parser finds them in the ids."""
    llm = fake_llm(template="[TOOL_CALLS]" if is_special else HERMES)
    body = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]' if is_special else CALL
    text = f"I look. {body}<|end|>"
    sample = sample_of(llm, text)
    sample.text = "I look." if is_special else text.removesuffix("<|end|>")
    reader = ReplyReader(Dialect(llm.tokenizer), llm.tokenizer, TOOLS)
    sample._reply = reader.of(sample, "p", sample.token_ids_array[:0], SamplingParams())
    assert sample.content == "I look." and [call.name for call in sample.tool_calls] == ["weather"]
    assert sample.tool_calls is sample.reply.tool_calls and sample.tool_calls[0].id.startswith("call_")
    for other in (pickle.loads(pickle.dumps(sample)), copy.copy(sample)):
        assert other.tool_calls == sample.tool_calls and other.content == "I look."
    json.dumps(sample.to_dict())


def test_a_stop_string_ends_the_reply_too(fake_llm):
    llm = fake_llm(template="[TOOL_CALLS]")
    sample = sample_of(llm, "I look. STOP[TOOL_CALLS]", stop="STOP")
    reader = ReplyReader(Dialect(llm.tokenizer), llm.tokenizer, TOOLS)
    for include, content in ((False, "I look."), (True, "I look. STOP")):
        params = SamplingParams(stop="STOP", include_stop_str_in_output=include)
        assert reader.of(sample, "p", sample.token_ids_array[:0], params).get().content.rstrip() == content


def test_chat_gives_replies_and_generate_gives_content(fake_llm):
    llm = fake_llm(template=HERMES)
    for out in (llm.chat("hi", tools=TOOLS, max_tokens=4)[0], llm.generate("hi", max_tokens=4)[0]):
        assert out.content == out.text.strip() or out.content == out.text
        assert out.tool_calls == [] and out.reasoning is None and out.reply.message["role"] == "assistant"
    last = list(llm.stream_chat("hi", max_tokens=4))[-1]
    assert last.output.outputs[0]._reply is not None and last.output.content == last.output.text


def test_python_and_the_server_read_alike(fake_llm):
    """Python and the server give equal results for any text."""
    pytest.importorskip("msgspec")
    from llmpy.server.chat import Message
    from llmpy.server.parsing import Parser

    llm = fake_llm(template=HERMES)
    dialect = Dialect(llm.tokenizer)
    for text in ("", "Hi", f"<think>a</think>{CALL}", f"{CALL} and {CALL}", "<think>never closed", f"x {CALL[:40]}"):
        parser: Parser = dialect.parser("p", TOOLS, holds=True)
        sample = sample_of(llm, text, finish="length")
        served = Message(parser)
        served.take(sample)
        ours = llm.parse_reply(text, TOOLS, prompt="p")
        theirs = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in served.calls]
        assert plain(ours) == (served.content, served.reasoning or None, theirs)


def test_neither_the_server_nor_its_packages_are_needed():
    code = (
        "import sys\n"
        "for name in ('msgspec', 'starlette', 'uvicorn', 'llguidance', 'h11'): sys.modules[name] = None\n"
        "import llmpy.server.dialect, llmpy.results.replies\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
