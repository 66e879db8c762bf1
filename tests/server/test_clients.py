"""The released clients work unchanged."""

import os
import subprocess
import sys

import anthropic
import openai
import pytest

TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_openai(client):
    assert [model.id for model in client.models.list()] == ["tiny", "same"]
    for _ in range(2):  # the second finds the prompt in the cache, as the stream will
        whole = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=8, temperature=0, logprobs=True)
    parts = list(
        client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content and parts[-1].usage == whole.usage
    completion = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=1)
    assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens
    assert len(client.embeddings.create(model="tiny", input="hello").data[0].embedding) == 64


def test_openais_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=TALK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=TALK, temperature=5)


def test_anthropic(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    ask = {"model": "tiny", "max_tokens": 8, "messages": TALK, "extra_body": {"temperature": 0.0}}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    assert client.messages.count_tokens(model="tiny", messages=TALK).input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**{**ask, "extra_body": {"temperature": 5.0}})


def test_langchain(url):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=8, max_retries=0)
    whole = chat.invoke("hello")
    assert whole.usage_metadata["output_tokens"] == 8 or whole.response_metadata["finish_reason"] == "stop"
    assert "".join(part.content for part in chat.stream("hello")) == whole.content
    kinds = {"check_embedding_ctx_length": False, "model": "tiny", "api_key": "none", "base_url": f"{url}/v1"}
    assert len(OpenAIEmbeddings(**kinds).embed_query("hello")) == 64


LITELLM = """
import sys
import litellm

ask = {"model": "openai/tiny", "messages": [{"role": "user", "content": "hello"}], "api_base": sys.argv[1] + "/v1"}
ask |= {"api_key": "none", "max_tokens": 8, "temperature": 0}
whole = litellm.completion(**ask)
text = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True))
assert text == whole.choices[0].message.content and whole.usage.completion_tokens > 0
found = litellm.embedding(model="openai/tiny", input=["hello"], api_base=ask["api_base"], api_key="none")
assert len(found.data[0]["embedding"]) == 64
try:
    litellm.completion(**{**ask, "model": "openai/other"})
except litellm.NotFoundError:
    print("fine")
"""


@pytest.mark.slow
def test_litellm(url, tmp_path):
    """LiteLLM in a separate environment, because it needs older packages than the other clients."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "litellm"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([python, "-c", LITELLM, url], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert "fine" in ran.stdout
