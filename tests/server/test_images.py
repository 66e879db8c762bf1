"""Images over HTTP: every protocol's form, limits, and what the server refuses to fetch."""

import asyncio
import base64
import io
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from modules import load
from PIL import Image

from llmpy import LLM, AsyncEngine
from llmpy.server import Renderer, build_app, images
from llmpy.server.errors import HttpError
from llmpy.vision.images import Images

PIXELS = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
FEATURES = 6  # of PIXELS


def png(pixels=PIXELS):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


DATA = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = {"type": "text", "text": "what?"}


@pytest.fixture
def seeing(engine, monkeypatch, tmp_path):
    """The engine with what prepares images: its tokens stand for features, which the model reads as text."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    mark = engine.tokenizer.convert_tokens_to_ids("<|end|>")
    config = {"model_type": "qwen2_vl", "vision_config": {}, "image_token_id": mark}
    monkeypatch.setattr(engine._frontend, "images", Images(engine.config, config, tmp_path, engine.tokenizer))
    monkeypatch.setattr("llmpy.engine.images.core_params", lambda *given: {})
    return mark


@pytest.fixture
def post(engine):
    """Posts a body to the application, in process."""

    def send(path, body, **options):
        async def call():
            transport = httpx.ASGITransport(build_app(engine, served_model_name=("tiny",), **options))
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                return await client.post(path, json={"model": "tiny", **body})

        return asyncio.run(call())

    return send


def chat(*parts, **more):
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2, "temperature": 0, **more}


@pytest.mark.filterwarnings("ignore:the chat template")
@pytest.mark.parametrize("image", [{"url": URL}, URL, {"url": URL, "detail": "high"}], ids=["object", "text", "detail"])
def test_chat_completions(post, seeing, image):
    answer = post("/v1/chat/completions", chat(TEXT, {"type": "image_url", "image_url": image}, return_token_ids=True))
    assert answer.status_code == 200, answer.text
    ids = answer.json()["prompt_token_ids"]
    usage = answer.json()["usage"]
    assert ids.count(seeing) == usage["prompt_tokens_details"]["image_tokens"] == FEATURES
    assert usage["prompt_tokens"] == len(ids)
    ignored = answer.headers.get("x-llmpy-ignored", "")
    assert ("image_url.detail" in ignored) == ("detail" in image)


@pytest.mark.filterwarnings("ignore:the chat template")
def test_responses(post, seeing):
    content = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": URL}]
    plain = [{"type": "input_text", "text": "what?"}]
    counts = []
    for one in (content, plain):
        answer = post("/v1/responses", {"input": [{"role": "user", "content": one}], "max_output_tokens": 2})
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["input_tokens"])
    assert counts[0] == counts[1] + FEATURES + 1  # and a line end
    answer = post("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]})
    assert answer.status_code == 400 and "input_image: wanted an image_url" in answer.text


SOURCES = [{"type": "base64", "media_type": "image/png", "data": DATA}, {"type": "url", "url": URL}]


@pytest.mark.filterwarnings("ignore:the chat template")
@pytest.mark.parametrize("source", SOURCES, ids=["base64", "url"])
def test_messages_of_anthropic(post, seeing, source):
    image, text = {"type": "image", "source": source}, {"type": "text", "text": "see"}
    body = {"messages": [{"role": "user", "content": [image, text]}], "max_tokens": 2}
    answer = post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    counted = post("/v1/messages/count_tokens", body).json()["input_tokens"]
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0) == counted
    without = post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [text]}]}).json()["input_tokens"]
    assert counted == without + FEATURES + 1
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = post("/v1/messages", {"messages": turns, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    for wrong in ({}, {"type": "file", "file_id": "f"}, {"type": "base64", "data": 3}):
        turn = {"role": "user", "content": [{**image, "source": wrong}]}
        answer = post("/v1/messages", {"messages": [turn], "max_tokens": 2})
        assert answer.status_code == 400 and "image: wanted a source" in answer.text


@pytest.mark.filterwarnings("ignore:the chat template")
def test_tokenize_expands(post, seeing):
    part = {"type": "image_url", "image_url": {"url": URL}}
    answer = post("/tokenize", {"messages": [{"role": "user", "content": [part]}]})
    assert answer.json()["tokens"].count(seeing) == FEATURES
    answer = post("/v1/chat/completions", chat(part, truncation="auto"))
    assert answer.status_code == 400 and "truncation" in answer.text
    answer = post("/v1/chat/completions/render", chat(part, truncation="auto"))
    assert answer.status_code == 400 and "truncation" in answer.text


@pytest.mark.filterwarnings("ignore:the chat template")
def test_what_is_rendered_runs_as_the_chat_would(post, seeing):
    """With the places and keys of two images; a body whose images are not those of its keys is refused."""
    other = base64.b64encode(png(PIXELS[::-1])).decode()
    parts = [{"type": "image_url", "image_url": {"url": URL}},
             {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}, "uuid": "a"}]  # fmt: skip
    body = chat(*parts, TEXT, return_token_ids=True)
    whole = post("/v1/chat/completions", body).json()
    rendered = post("/v1/chat/completions/render", body).json()
    features, ids = rendered["features"], rendered["token_ids"]
    assert ids == whole["prompt_token_ids"]
    places = features["mm_placeholders"]["image"]
    assert [ids[at["offset"] : at["offset"] + at["length"]] for at in places] == [[seeing] * FEATURES] * 2
    assert len({*features["mm_hashes"]["image"]}) == 2 and features["image_uuids"] == [None, "a"]
    made = post("/inference/v1/generate", rendered)
    assert made.status_code == 200, made.text
    assert made.json()["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert made.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * FEATURES
    turned = {**features, "image_urls": features["image_urls"][::-1]}
    for wrong, words in (
        (turned, "features.mm_hashes: wanted the images"),
        ({**features, "image_urls": []}, "features: wanted image_urls"),
        ({**features, "image_urls": [URL]}, "names for 1 images"),
        ({**features, "image_urls": ["ftp://a/b"] * 2}, "wanted a data: URL"),
    ):
        made = post("/inference/v1/generate", {**rendered, "features": wrong})
        assert made.status_code == 400 and words in made.text, made.text


@pytest.mark.filterwarnings("ignore:the chat template")
def test_a_server_that_only_renders(post, seeing, engine, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).symlink_to(f"{engine.config.model}/{name}")
    renderer = Renderer(tmp_path)
    body = chat({"type": "image_url", "image_url": {"url": URL}}, TEXT)
    theirs = post("/v1/chat/completions/render", body).json()

    async def call():
        transport = httpx.ASGITransport(build_app(renderer, served_model_name=("tiny",)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return await client.post("/v1/chat/completions/render", json={"model": "tiny", **body})

    refused = asyncio.run(call())
    assert refused.status_code == 400 and "no tower for images" in refused.text
    renderer.images = engine._frontend.images
    assert {**asyncio.run(call()).json(), "request_id": None} == {**theirs, "request_id": None}


def test_a_model_without_a_tower_refuses_images(post):
    for path, body in (
        ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": URL}})),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}),
        ("/v1/messages", {**chat({"type": "image", "source": SOURCES[0]}), "max_tokens": 2}),
        ("/tokenize", {"messages": chat({"type": "image_url", "image_url": {"url": URL}})["messages"]}),
    ):
        answer = post(path, body)
        assert answer.status_code == 400 and "no tower for images" in answer.text, (path, answer.text)


def bomb():
    """A PNG of 30000 x 30000 pixels in 50 KB."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(50_000_000))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:the chat template")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64," + base64.b64encode(bomb()).decode(), "more pixels than 50000000"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64,", "no image of JPEG"),
        ("DATA:image/png;base64," + DATA, "wanted a data: URL, have one of 'data'"),
        ("/etc/passwd", "wanted a data: URL"),
        ("0", "wanted a data: URL"),
        ("file:///etc/passwd", "the server's option --allowed-image-folder would allow it"),
        ("http://8.8.8.8/a.png", "the server's option --allow-image-urls would allow it"),
        ("ftp://8.8.8.8/a.png", "wanted a data: URL, have one of 'ftp'"),
    ],
)
def test_other_sources_are_refused(post, seeing, url, words):
    answer = post("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": url}}))
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_too_many_images_are_refused(post, seeing):
    parts = [{"type": "image_url", "image_url": {"url": URL}}] * 17
    answer = post("/v1/chat/completions", chat(*parts))
    assert answer.status_code == 400 and "17 images in one request" in answer.text


@pytest.mark.filterwarnings("ignore:the chat template")
def test_files_of_the_allowed_folder(post, seeing, engine, monkeypatch, tmp_path):
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "in" / "a.png", tmp_path / "b.png"):
        path.write_bytes(png())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "b.png")
    known = engine._frontend.images
    monkeypatch.setattr(known, "limits", known.limits._replace(folder=tmp_path / "in"))
    monkeypatch.setattr(engine, "config", engine.config.replace(allowed_image_folder=str(tmp_path / "in")))
    for name, status in (("in/a.png", 200), ("b.png", 400), ("in/link.png", 400), ("in/../b.png", 400), ("in/none", 400)):
        answer = post("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": f"file://{tmp_path}/{name}"}}))
        assert answer.status_code == status, (name, answer.text)


# ---- fetching ------------------------------------------------------------------------------------------------------------


def fetched(url, domains=()):
    return asyncio.run(images.fetch(url, domains))


PRIVATE = [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1",
    "198.18.0.1", "192.88.99.1", "255.255.255.255", "::", "::1", "::7f00:1", "fe80::1", "fe80::1%eth0", "fd00::1", "fec0::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:1::1", "2001:db8::1",
]  # fmt: skip


def test_private_addresses_are_no_public_ones():
    assert [address for address in PRIVATE if images.is_public(address)] == []
    assert all(map(images.is_public, ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"]))


@pytest.fixture
def named(monkeypatch):
    """Makes names resolve to given addresses; returns the questions."""

    def make(*answers):
        asked, left = [], list(answers)

        async def getaddrinfo(self, host, port, **how):
            asked.append(host)
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return [(2, 1, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
        return asked

    return make


@pytest.mark.parametrize("answer", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], [], OSError("no such name")], ids=str)
def test_names_of_private_addresses_are_refused(named, monkeypatch, answer):
    asked = named(answer)
    monkeypatch.setattr(asyncio, "open_connection", None)  # nothing is connected to
    with pytest.raises(HttpError, match="the image cannot be fetched"):
        fetched("http://host.example/a.png")
    assert asked == ["host.example"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host.example:8080/a", "wanted port 80"),
        ("https://host.example:80/a", "wanted port 443"),
        ("http://host.example:port/a", "not a URL"),
        ("http://me:pass@host.example/a", "a name or a password"),
        ("http:///a", "no host"),
        ("http://host.example/a b", "printable ASCII"),
        ("http://host.example/a\r\nX: y", "printable ASCII"),
        ("http://h\u00f6st.example/a", "printable ASCII"),
        ("http://host.example/" + "a" * 2048, "2048"),
        ("http://[::1/a", "not a URL"),
    ],
)
def test_urls_of_other_forms_are_refused(named, url, words):
    named()
    with pytest.raises(HttpError, match=words):
        fetched(url)


def test_domains_bound_hosts(named):
    for host in ("evil.example", "notgood.example", "good.example.evil"):
        with pytest.raises(HttpError, match="not among --image-domains"):
            fetched(f"http://{host}/a", ("good.example",))
    asked = named(OSError(), OSError())
    for host in ("good.example", "a.good.example"):
        with pytest.raises(HttpError, match="cannot be fetched"):
            fetched(f"http://{host}/a", ("Good.example",))
    assert asked == ["good.example", "a.good.example"]


@pytest.fixture
def origin(monkeypatch, named):
    """A server on this machine that counts as public; its answer is given. Returns what a fetch of it gives, and the head."""

    def ask(answer, pause=0.0):
        heads = []

        async def serve(reader, writer):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in answer:
                writer.write(piece)
                await asyncio.sleep(pause)
            writer.close()

        async def run():
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            monkeypatch.setitem(images.PORTS, "http", server.sockets[0].getsockname()[1])
            monkeypatch.setattr(images, "is_public", lambda address: True)
            try:
                return await images.fetch("http://host.example/a.png?b=c")
            finally:
                server.close()

        asked = named(["127.0.0.1"])  # a second question would fail
        try:
            return asyncio.run(run()), heads[0]
        finally:
            assert len(asked) == 1

    return ask


def head(*fields, status=b"200 OK"):
    return b"HTTP/1.1 " + status + b"\r\n" + b"".join(field + b"\r\n" for field in fields) + b"\r\n"


def test_an_image_is_fetched(origin):
    for answer in (
        [head(b"Content-Type: image/png", b"Content-Length: 3"), b"abc"],
        [head(b"Content-Type: image/png", b"Transfer-Encoding: chunked"), b"1\r\na\r\n", b"2\r\nbc\r\n0\r\n\r\n"],
        [head(b"Content-Type: IMAGE/PNG"), b"ab", b"c"],
    ):
        body, sent = origin(answer)
        assert body == b"abc"
        assert sent.startswith(b"GET /a.png?b=c HTTP/1.1\r\n") and b"host.example" in sent and b"ookie" not in sent


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([head(b"Location: http://127.0.0.1/", status=b"302 Found")], "cannot be fetched"),
        ([head(b"Content-Type: image/png", status=b"404 Not Found")], "cannot be fetched"),
        ([head(b"Content-Type: text/html")], "image/"),
        ([head()], "image/"),
        ([head(b"Content-Type: image/png", b"Content-Encoding: gzip")], "cannot be fetched"),
        ([head(b"Content-Type: image/png", b"Content-Length: 99999999")], "more than 20 MiB"),
        ([head(b"Content-Type: image/png"), *[bytes(1 << 20)] * 21], "more than 20 MiB"),
        ([head(b"Content-Type: image/png", b"Content-Length: 9"), b"torn"], "cannot be fetched"),
        ([b"\x00\x01nonsense\r\n\r\n"], "cannot be fetched"),
        ([b""], "cannot be fetched"),
    ],
    ids=range(10),
)
def test_other_answers_are_refused(origin, answer, words):
    with pytest.raises(HttpError, match=words):
        origin(answer)


def test_a_slow_answer_ends(origin, monkeypatch):
    monkeypatch.setattr(images, "seconds", lambda name: 0.1)
    with pytest.raises(HttpError, match="cannot be fetched"):
        origin([head(b"Content-Type: image/png"), *[b"a"] * 20], pause=0.05)


@pytest.mark.filterwarnings("ignore:the chat template")
def test_a_url_of_a_request_is_fetched(post, seeing, monkeypatch):
    asked = []

    async def fetch(url, domains):
        asked.append((url, domains))
        return png()

    monkeypatch.setattr(images, "fetch", fetch)
    part = {"type": "image_url", "image_url": {"url": "https://host.example/a.png"}}
    answer = post("/v1/chat/completions", chat(part, return_token_ids=True), allow_image_urls=True, image_domains=("a.b",))
    assert answer.json()["prompt_token_ids"].count(seeing) == FEATURES
    assert asked == [("https://host.example/a.png", ("a.b",))]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A server's engine of a tiny model with a tower, and the answer of `LLM.chat` to MESSAGES."""
    tiny = load(Path(__file__).parents[1] / "helpers/tiny_llava.py")
    options = {"device": "cpu", "kv_cache_memory_bytes": "16MiB"}
    path = tiny.write(tmp_path_factory.mktemp("real") / "llava")
    part = {"type": "image_url", "image_url": {"url": URL}}
    with LLM(path, **options) as llm:
        parts = [TEXT, part, {"type": "text", "text": "w9 w10"}]
        wanted = llm.chat([{"role": "user", "content": parts}], max_tokens=6, temperature=0)[0]
    with AsyncEngine(path, **options) as engine:
        yield SimpleNamespace(engine=engine, wanted=wanted)


def test_answers_of_a_real_tower(real):
    """Chat, responses and messages give the tokens of `LLM.chat`, streamed and at once."""
    text, image = real.wanted.outputs[0].text, {"type": "base64", "media_type": "image/png", "data": DATA}
    url, rest = {"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "w9 w10"}
    texts = [{**TEXT, "type": "input_text"}, {**rest, "type": "input_text"}]
    chats = {"messages": [{"role": "user", "content": [TEXT, url, rest]}], "max_tokens": 6, "temperature": 0}
    messages = {**chats, "messages": [{"role": "user", "content": [TEXT, {"type": "image", "source": image}, rest]}]}
    content = [texts[0], {"type": "input_image", "image_url": URL}, texts[1]]
    responses = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6, "temperature": 0}

    async def ask():
        transport = httpx.ASGITransport(build_app(real.engine, served_model_name=("tiny",)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            found = []
            for path, body in (("chat/completions", chats), ("messages", messages), ("responses", responses)):
                answer = await client.post(f"/v1/{path}", json={"model": "tiny", **body})
                assert answer.status_code == 200, answer.text
                found.append(answer.json())
            streamed = await client.post("/v1/chat/completions", json={"model": "tiny", "stream": True, **chats})
        return *found, streamed.text

    chat_, message, response, streamed = asyncio.run(ask())
    assert len(text) > 6
    assert chat_["choices"][0]["message"]["content"] == message["content"][0]["text"] == text
    assert response["output"][0]["content"][0]["text"] == text
    frames = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in frames if each["choices"]) == text
    n = len(real.wanted.prompt_token_ids)
    assert chat_["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == n
    assert chat_["usage"]["prompt_tokens_details"]["image_tokens"] == real.wanted.num_image_tokens == 9

