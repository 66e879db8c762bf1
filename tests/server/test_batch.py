"""Batch files: every line has its answer, once, also after an interruption."""

import asyncio
import io
import json

from llmpy.server import build_app
from llmpy.server.batch import done_ids, run_batch


def line(i, **body):
    request = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "seed": i, "ignore_eos": True, **body}
    return json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": request}) + "\n"


def run(engine, lines, done=(), window=4):
    output, told = io.StringIO(), []
    app = build_app(engine, served_model_name=("tiny",))
    counts = asyncio.run(run_batch(app, lines, output, set(done), window, lambda *n: told.append(n)))
    made = [json.loads(text) for text in output.getvalue().splitlines()]
    assert told[-1] == counts == (len(made), sum(item["error"] is not None for item in made))
    return {item["custom_id"]: item for item in made}


def test_every_line_is_answered(engine):
    lines = [*map(line, range(9)), "\n", "no json\n", '{"custom_id": "x", "url": "/v1/audio"}\n', line(9, temperature=5)]
    made = run(engine, lines)
    assert len(made) == 12
    for i in range(9):
        body = made[f"r{i}"]["response"]["body"]
        assert body["usage"]["completion_tokens"] == 3 and made[f"r{i}"]["error"] is None
    assert made["r9"]["response"]["status_code"] == 400 and "temperature" in made["r9"]["error"]["message"]
    assert made["line-11"]["response"] is None and "line 11" in made["line-11"]["error"]["message"]
    assert "url" in made["x"]["error"]["message"]


def test_chat_and_embeddings(engine):
    talk = {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hello"}]}}
    made = run(engine, [json.dumps(talk), json.dumps({"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "hello"}})])
    assert made["c"]["response"]["body"]["object"] == "chat.completion"
    assert len(made["e"]["response"]["body"]["data"]) == 1


def test_responses_and_scores(engine):
    asked = {"custom_id": "r", "url": "/v1/responses", "body": {"input": "hello", "max_output_tokens": 3}}
    pairs = {"custom_id": "s", "url": "/v1/score", "body": {"text_1": "hello", "text_2": ["hello", "you"]}}
    made = run(engine, [json.dumps(asked), json.dumps(pairs)])
    assert made["r"]["response"]["body"]["object"] == "response"
    assert abs(made["s"]["response"]["body"]["data"][0]["score"] - 1) < 1e-5


def test_it_goes_on_where_it_stopped(engine, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"custom_id": "r0"}\n{"custom_id": "r2"}\n{"custom_id": "r1", "resp')
    done = done_ids(path)
    assert done == {"r0", "r2"} and path.read_text() == '{"custom_id": "r0"}\n{"custom_id": "r2"}\n'
    assert run(engine, map(line, range(4)), done).keys() == {"r1", "r3"}
    assert done_ids(tmp_path / "none") == set()


def test_lines_are_read_as_they_are_needed(engine):
    read = []

    def lines():
        for i in range(40):
            read.append(i)
            yield line(i)

    output = io.StringIO()
    ahead = []
    app = build_app(engine, served_model_name=("tiny",))
    asyncio.run(run_batch(app, lines(), output, set(), 5, lambda n, _: ahead.append(len(read) - n)))
    assert len(read) == 40 and max(ahead) <= 5
