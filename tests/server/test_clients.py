"""The released clients work unchanged."""

import anthropic
import openai
import pytest

TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_openai(client):
    assert [model.id for model in client.models.list()] == ["tiny", "same"]
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
