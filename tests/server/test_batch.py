"""Batch files: every line has one answer, in order, also after an interruption, in constant memory."""

import asyncio
import io
import json
import tracemalloc

import pytest

from llmpy import cli
from llmpy.errors import ConfigError, RequestFailedError
from llmpy.server import build_app
from llmpy.server.batch import AHEAD, run_batch
from llmpy.server.batch_files import Counts, locked, requests, unanswered, with_answers
from llmpy.server.errors import answer


def line(i, **body):
    request = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "seed": i, "ignore_eos": True, **body}
    made = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": request}
    return json.dumps(made).encode() + b"\n"


NONE = Counts()


def run(app, lines, output, done=NONE, window=4, tell=lambda counts: None):
    return asyncio.run(run_batch(app, lines, output, done, window, tell))


def answers(engine, texts):
    output, told = io.BytesIO(), []
    counts = run(build_app(engine, served_model_name=("tiny",)), requests(texts), output, tell=told.append)
    made = [json.loads(text) for text in output.getvalue().splitlines()]
    assert told[-1] == counts == (len(made), sum(item["error"] is not None for item in made))
    assert len({item["id"] for item in made}) == len(made)
    return made


class Stub:
    """A server that answers with the request's body.

    Args:
        statuses: Statuses of the next answers in reverse order; then 200.
        delay: Coroutine function called with a body before its answer.
    """

    def __init__(self, statuses=(), delay=None):
        self.statuses, self.delay = list(statuses), delay

    async def __call__(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        if self.delay is not None:
            await self.delay(body)
        status = self.statuses.pop() if self.statuses else 200
        await answer({"error": {"message": f"status {status}"}} if status != 200 else body, status)(scope, receive, send)


def test_every_line_is_answered_in_order(engine):
    wrong = [b"no json\n", b'{"custom_id": "x", "url": "/v1/audio"}\n', b'{"custom_id": "y", "url": "/pooling", "body": 1}\n']
    made = answers(engine, [*map(line, range(9)), b"\n", *wrong, line(9, temperature=5)])
    assert [item["custom_id"] for item in made] == [*(f"r{i}" for i in range(9)), "line-11", "x", "y", "r9"]
    for item in made[:9]:
        assert item["response"]["body"]["usage"]["completion_tokens"] == 3 and item["error"] is None
    assert made[9]["response"] is None and "line 11" in made[9]["error"]["message"]
    assert "url" in made[10]["error"]["message"] and "body" in made[11]["error"]["message"]
    assert made[12]["response"]["status_code"] == 400 and "temperature" in made[12]["error"]["message"]


def test_chat_and_embeddings(engine):
    talk = {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hello"}]}}
    embed = {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "hello"}}
    made = answers(engine, [json.dumps(talk).encode(), json.dumps(embed).encode()])
    assert made[0]["response"]["body"]["object"] == "chat.completion"
    assert len(made[1]["response"]["body"]["data"]) == 1


def test_responses_and_scores(engine):
    asked = {"custom_id": "r", "url": "/v1/responses", "body": {"input": "hello", "max_output_tokens": 3}}
    pairs = {"custom_id": "s", "url": "/v1/score", "body": {"text_1": "hello", "text_2": ["hello", "you"]}}
    made = answers(engine, [json.dumps(asked).encode(), json.dumps(pairs).encode()])
    assert made[0]["response"]["body"]["object"] == "response"
    assert abs(made[1]["response"]["body"]["data"][0]["score"] - 1) < 1e-5


def finished(path, texts):
    """Answers the requests without an answer in the file."""
    done, left = unanswered(requests(texts), path)
    with path.open("ab") as output:
        return done, run(Stub(), left, output, done)


def test_it_goes_on_where_it_stopped(tmp_path):
    path, texts = tmp_path / "out.jsonl", [*map(line, range(4)), b"\n", b"no json\n", *map(line, range(6, 12))]
    assert finished(path, texts) == ((0, 0), (11, 1))
    whole = path.read_bytes()
    assert finished(path, texts) == ((11, 1), (11, 1)) and path.read_bytes() == whole
    for end in range(0, len(whole), 7):  # wherever the power went
        path.write_bytes(whole[:end])
        n = whole[:end].count(b"\n")
        assert finished(path, texts) == ((n, int(n > 4)), (11, 1)) and path.read_bytes() == whole


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        ([line(0), line(5), line(2)], "line 2: it does not answer line 2 of the input"),  # one other id
        ([line(0), line(1, top_k=3), line(2)], "line 2: it does not answer line 2"),  # the same ids, another body
        ([line(0), b"\n", line(1), line(2)], "line 2: it does not answer line 3"),
        ([line(0), line(1)], "line 3: the input ends before it"),
    ],
)
def test_another_input_is_noticed(tmp_path, texts, place):
    path = tmp_path / "out.jsonl"
    finished(path, list(map(line, range(3))))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=place):
        unanswered(requests(texts), path)
    assert path.read_bytes() == before


def test_a_file_of_something_else_stays_as_it_is(tmp_path):
    for content in (b"dear diary", b'{"a": 1}\n{"b": 2}\n'):
        path = tmp_path / "diary"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="line 1"):
            unanswered(requests(map(line, range(3))), path)
        assert path.read_bytes() == content


def test_a_full_queue_is_waited_for_and_a_dead_engine_ends_the_run(tmp_path):
    path, texts = tmp_path / "out.jsonl", list(map(line, range(3)))
    with path.open("ab") as output:
        assert run(Stub([429, 429]), requests(texts), output, window=1) == (3, 0)
    with path.open("wb") as output, pytest.raises(RequestFailedError, match="line 3: status 503; run again"):
        run(Stub([503, 400, 200]), requests(texts), output, window=1)
    assert unanswered(requests(texts), path)[0] == (2, 1)


def test_lines_are_read_as_they_are_needed():
    """Other answers may overtake a slow first one, up to a limit of held answers."""
    window, read, written, may_end = 5, [], [], asyncio.Event()

    def lines():
        for i in range(200):
            read.append(i)
            yield line(i)

    async def delay(body):
        if body["seed"] == 0:
            await may_end.wait()
        elif body["seed"] == window * AHEAD - 1:
            assert not written and len(read) <= window * AHEAD + 1
            may_end.set()

    def tell(counts):
        written.append(len(read) - counts.answers)

    output = io.BytesIO()
    counts = run(Stub(delay=delay), requests(lines()), output, window=window, tell=tell)
    assert counts == (200, 0) and max(written) <= window * AHEAD
    assert [json.loads(text)["custom_id"] for text in output.getvalue().splitlines()] == [f"r{i}" for i in range(200)]


def peak(path, n):
    """Most bytes in use while n answered requests were skipped and n were answered."""
    tracemalloc.start()
    finished(path, map(line, range(n)))
    finished(path, map(line, range(2 * n)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_file(tmp_path):
    few, many = (peak(tmp_path / f"{n}.jsonl", n) for n in (200, 3000))
    assert many < few + 64 * 1024  # a set of the ids alone would be 400 KiB more


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(tmp_path, tiny, capsys):
    """Runs `llmpy run-batch` in a folder; returns its status, the answers and its output."""

    def run(texts, *words):
        (tmp_path / "in.jsonl").write_bytes(b"".join(texts))
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        status = cli.main(["run-batch", *files, "--device", "cpu", "--kv-cache-memory-bytes", "16MiB", *words, str(tiny)])
        made = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
        return status, made, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, write_model):
    return write_model(tmp_path_factory.mktemp("tiny"))


def test_a_wrong_model_ends_the_run_at_once(batch):
    texts = [line(i, model="gpt-4o") for i in range(3)]
    status, made, told = batch(texts)
    assert status == 1 and made == [] and "line 1: its model is 'gpt-4o'" in told
    assert "--served-model-name gpt-4o" in told and "already there" not in told
    status, made, told = batch(texts, "--served-model-name", "gpt-4o")
    assert status == 0 and len(made) == 3


def test_errors_are_asked_again_where_that_is_wanted(batch, tmp_path):
    texts = [line(i, model="gpt-4o" if i % 2 else "tiny") for i in range(6)]
    status, made, told = batch(texts, "--served-model-name", "tiny")
    assert status == 1 and [item["error"] is not None for item in made] == [False, True] * 3
    status, again, told = batch(texts, "--served-model-name", "tiny", "gpt-4o")
    assert status == 1 and again == made and "3 with an error; --retry-errors asks those again" in told
    status, mended, told = batch(texts, "--served-model-name", "tiny", "gpt-4o", "--retry-errors")
    assert status == 0 and [item["error"] for item in mended] == [None] * 6
    assert mended[::2] == made[::2] and [item["id"] for item in mended] == [item["id"] for item in made]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_retry_goes_on_where_it_stopped(tmp_path):
    path, texts = tmp_path / "out.jsonl", [line(0), b"no json\n", line(2), line(3)]
    finished(path, texts)
    old = path.read_bytes()
    path.write_bytes(old[: old.rindex(b"{", 0, -5)])  # the last answer is missing
    retry, seen = tmp_path / "retry", []

    async def note(body):
        seen.append(body["seed"])

    for cut in (0, 50, len(old)):
        retry.write_bytes(old[:cut])
        seen.clear()
        done, left = unanswered(with_answers(requests(texts), path), retry)
        with retry.open("ab") as output:
            assert run(Stub(delay=note), left, output, done) == (4, 1)
        assert retry.read_bytes() == old and seen in ([], [3])


def test_one_run_at_a_time_writes_an_output(batch, tmp_path):
    path = tmp_path / "out.jsonl"
    with locked(path):
        status, made, told = batch([line(0)])
    assert status == 1 and made == [] and "another run is writing it" in told and str(path) in told
    assert batch([line(0, model=None)])[0] == 0


def test_a_mark_of_the_byte_order_is_no_request(engine):
    [made] = answers(engine, [b"\xef\xbb\xbf" + line(0)])
    assert made["custom_id"] == "r0" and made["error"] is None
