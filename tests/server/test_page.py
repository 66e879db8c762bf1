"""The page at `/`, in a headless Chromium: over the engine, and over canned answers for what a tiny model does not say."""

import json
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from modules import load
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from llmpy.server import page

driver = load(Path(__file__).with_name("browser.py"))

READY = "document.getElementById('state').dataset.state === 'ready'"
ANSWERED = "document.querySelector('.turn.assistant:last-child')?.getAttribute('aria-busy') === 'false'"
NASTY = "<img src=x onerror='document.title=1'>\n\n```py\n<b>&amp;</b>\n```\n\n**bold** `<i>`"


@pytest.fixture(scope="module")
def chromium():
    path = driver.find()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    browser = driver.Browser(path)
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    """The browser; messages of its console fail the test."""
    chromium.size(1280, 800)
    yield chromium
    assert chromium.complaints == []


def set_(browser, **fields):
    """Settings of the page, as a user types them."""
    for name, value in fields.items():
        browser.js(f"document.getElementById('settings')[{name!r}].value = {json.dumps(str(value))}")


def ask(browser, text):
    browser.click("#question")
    browser.type(text)
    browser.key("Enter")


# ---- the files -------------------------------------------------------------------------------------------------------


def test_files_are_ours_alone(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        index = client.get("/")
        assert index.headers["content-type"].startswith("text/html")
        names = {file.name for file in files(page).iterdir()} - {"__init__.py", "__pycache__"}
        for name in names - {"index.html"}:
            answer = client.get(f"/page/{name}")
            assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            outside = re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\w[\w.]+/", answer.text)
            assert not outside and "innerHTML" not in answer.text, name
        assert set(re.findall(r'(?:src|href)="page/([^"]+)"', index.text)) <= names
        assert client.get("/page/absent.js").status_code == 404 and client.get("/page/../app.py").status_code == 404


# ---- over the engine -------------------------------------------------------------------------------------------------


def test_chat_streams_and_goes_on(browser, url, http):
    browser.open(url)
    browser.wait(READY)
    assert "tiny · 16,384 tokens" in browser.text("#model")
    set_(browser, temperature=0, max_tokens=24, system="Be brief.")
    ask(browser, "hello")
    browser.wait(ANSWERED)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    for question in ("hello", "and now?"):
        if question != "hello":
            said.append({"role": "user", "content": question})
            ask(browser, question)
            browser.wait(f"document.querySelectorAll('.turn').length === 4 && {ANSWERED}")
        body = {"messages": said, "temperature": 0, "max_tokens": 24}
        wanted = http.post(url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        shown = browser.text(".turn.assistant .content")
        assert re.sub(r"\s+", "", shown) == re.sub(r"\s+|`|\*\*", "", wanted)
        said.append({"role": "assistant", "content": wanted})
    assert "24 tokens" in browser.text(".about") and "tokens/s" in browser.text(".about")
    assert "cut at max tokens" in browser.text(".about") and "from the cache" in browser.text(".about")
    # The line of tokens written has left the floor, which is 2 pixels above the end of 44.
    line = "document.querySelector('.plot path:nth-of-type(2)').getAttribute('d')"
    browser.wait(f"[...{line}.matchAll(/ ([\\d.]+)/g)].some(found => found[1] < 41)")
    assert browser.js("[...document.querySelectorAll('.plot output')].every(value => /\\d/.test(value.innerText))")
    browser.click("#new")
    assert browser.js("document.querySelectorAll('.turn').length") == 0


def test_tokens_show_their_alternatives(browser, url):
    browser.open(url)
    browser.wait(READY)
    set_(browser, temperature=1, max_tokens=30, seed=1)
    browser.click("[name=probabilities]")
    ask(browser, "hello")
    browser.wait(ANSWERED)
    assert len({*browser.js("[...document.querySelectorAll('.token')].map(t => t.className.match(/d(\\d)/)[1])")}) > 1
    browser.js("document.querySelector('.tokens').focus()")
    browser.key("ArrowRight")
    rows = browser.js("[...document.querySelector('#alternatives table').rows].map(r => [r.className, r.innerText])")
    assert len(rows) in (5, 6) and sum(kind == "own" for kind, _ in rows) == 1
    shares = [float(re.search(r"([\d.]+) %", text)[1]) for _, text in rows if "%" in text]
    assert shares[:5] == sorted(shares[:5], reverse=True) and 0 < sum(shares) <= 100.5
    browser.key("Escape")
    assert browser.js("document.getElementById('alternatives').hidden")
    browser.click(".token:nth-child(3)")
    assert not browser.js("document.getElementById('alternatives').hidden")
    assert browser.js("document.querySelector('.token.chosen') === document.querySelector('.token:nth-child(3)')")


def test_stop_keeps_what_came(browser, url, until_idle):
    browser.open(url)
    browser.wait(READY)
    set_(browser, temperature=0)  # it never ends by itself
    ask(browser, "count")
    # Within the page, which may be slower than the answer: the key comes as soon as there is something to stop.
    shown = "document.querySelector('.turn.assistant .content')?.innerText.length > 30"
    press = "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    label = "document.getElementById('send').innerText"
    seen = browser.js(f"new Promise((done) => {{ const look = () => {{ if (!({shown})) return requestAnimationFrame(look);"
                      f"const seen = {label}; {press}; done(seen) }}; look() }})")  # fmt: skip
    assert seen == "Stop"
    browser.wait(ANSWERED)
    assert "stopped" in browser.text(".about") and browser.text("#send") == "Send"
    until_idle()


def test_a_question_that_is_stopped_unanswered_comes_back(browser, url, paused):
    browser.open(url)
    browser.wait(READY)
    with paused():
        ask(browser, "never mind")
        browser.wait("document.querySelector('.wait') && document.getElementById('send').innerText === 'Stop'")
        browser.key("Escape")
        browser.wait("document.querySelectorAll('.turn').length === 0")
    assert browser.js("document.getElementById('question').value") == "never mind"
    assert not browser.js("document.querySelector('.problem')")


def test_a_server_that_wants_a_key(browser, serve):
    browser.open(serve(api_keys=("sesame",)).url)
    browser.wait("!document.getElementById('access').hidden")
    assert browser.text("#state") == "needs a key"
    browser.type("wrong")
    browser.key("Enter")
    browser.wait("!document.getElementById('access').hidden && document.activeElement.id === 'key'")
    browser.js("document.getElementById('key').value = ''")
    browser.type("sesame")
    browser.key("Enter")
    browser.wait(READY)
    set_(browser, max_tokens=2)
    ask(browser, "hello")
    browser.wait(ANSWERED)
    assert "2 tokens" in browser.text(".about")


def test_what_the_server_refuses_and_what_it_forgets(browser, serve):
    server = serve()
    browser.open(server.url)
    browser.wait(READY)

    def refused(told):
        """A refused message shows one error, is not part of the conversation, and can be sent again."""
        browser.wait(f"document.querySelector('.problem')?.innerText.includes({json.dumps(told)})")
        assert browser.js("document.querySelectorAll('.problem').length") == 1
        assert browser.js("document.querySelectorAll('.turn').length") == 0
        assert browser.js("document.getElementById('question').value") == "hello"

    set_(browser, tools="[{")
    ask(browser, "hello")
    refused("Tools: ")
    set_(browser, tools='"none"')
    browser.key("Enter")
    refused("$.tools")
    set_(browser, tools="", temperature=3)
    browser.key("Enter")
    refused("Temperature: ")
    set_(browser, temperature=0, max_tokens=2)
    browser.key("Enter")
    browser.wait(ANSWERED)
    assert browser.js("document.querySelectorAll('.turn').length") == 2 and not browser.js("document.querySelector('.problem')")
    browser.click("#new")
    server.stop()
    browser.wait("document.getElementById('state').dataset.state === 'lost'")
    assert browser.text("#state") == "disconnected"
    ask(browser, "hello")
    refused("cannot be reached")


def test_a_reload_keeps_the_conversation(browser, url):
    browser.open(url)
    browser.wait(READY)
    set_(browser, temperature=0, max_tokens=8)
    for number, question in enumerate(("one", "two"), 1):
        ask(browser, question)
        browser.wait(f"document.querySelectorAll('.turn').length === {2 * number} && {ANSWERED}")
    shown = "[...document.querySelectorAll('.turn .content')].map(e => e.textContent)"
    before = browser.js(shown)
    browser.reload()
    browser.wait(READY)
    assert browser.js(shown) == before
    browser.js("URL.createObjectURL = (blob) => { window.saved = blob.text() }")
    browser.js("HTMLAnchorElement.prototype.click = function () { window.name = this.download }")
    browser.js("document.getElementById('export').click()")
    assert browser.js("window.name") == "conversation.md"
    text = browser.js("window.saved")
    assert text.startswith("**You**\n\none\n\n**Answer**\n\n") and text.count("**You**") == 2
    browser.click(".turn.user:nth-of-type(3) .actions button")
    assert browser.js(shown) == before[:2] and browser.js("document.getElementById('question').value") == "two"
    browser.click("#new")
    browser.reload()
    browser.wait(READY)
    assert browser.js("document.querySelectorAll('.turn').length") == 0


def test_defaults_are_told_and_seen(browser, url):
    browser.open(url)
    browser.wait(READY)
    named = "document.getElementById('settings')"
    assert browser.js(f"{named}.temperature.placeholder") == "default 0.7"
    assert browser.js(f"{named}.top_k.placeholder") == "default off"
    # The room of every field is as wide as what stands there.
    script = (
        "(() => { const pen = document.createElement('canvas').getContext('2d');"
        "return [...document.querySelectorAll('.grid input')].map(e => { const s = getComputedStyle(e); pen.font = s.font;"
        "const room = e.clientWidth - parseFloat(s.paddingLeft) - parseFloat(s.paddingRight);"
        "return room - pen.measureText(e.placeholder).width }) })()"
    )
    assert min(browser.js(script)) >= 0


def test_a_full_context_is_told(browser, canned):
    url, bodies = canned(frames({"content": "Yes."}), headers={"x-llmpy-dropped-messages": "4"})
    browser.open(url)
    browser.wait(READY)
    ask(browser, "Still there?")
    browser.wait(ANSWERED)
    assert bodies[0]["truncation"] == "auto"
    assert "answered without the oldest 4 messages: the context is full" in browser.text(".about")


def test_narrow_and_dark(browser, url):
    browser.size(360, 700, "dark")
    browser.open(url)
    browser.wait(READY)
    assert browser.js("document.documentElement.scrollWidth") == 360
    assert max(map(int, re.findall(r"\d+", browser.js("getComputedStyle(document.body).backgroundColor")))) < 40
    assert browser.js("document.getElementById('panel').offsetParent === null")
    browser.click("#toggle")
    assert browser.js("document.getElementById('panel').offsetParent !== null && document.documentElement.scrollWidth") == 360
    browser.click("#theme")
    assert browser.js("document.documentElement.dataset.theme") == "light"
    assert min(map(int, re.findall(r"\d+", browser.js("getComputedStyle(document.body).backgroundColor")))) > 240
    reached = set()
    for _ in range(20):
        browser.key("Tab")
        reached.add(browser.js("document.activeElement.id || document.activeElement.name"))
    assert {"new", "theme", "toggle", "system", "temperature", "probabilities"} <= reached


# ---- over canned answers ---------------------------------------------------------------------------------------------


def frames(*deltas):
    parts = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + ": waiting\n\ndata: [DONE]\n\n"


@pytest.fixture
def canned(running):
    """Serves the page with the given answers; remembers the bodies of requests."""

    def make(*answers, template="there is one", headers=None):
        bodies, left = [], list(answers)

        async def answer(request):
            bodies.append({"path": request.url.path, **await request.json()})
            return Response(left.pop(0), media_type="text/event-stream", headers=headers)

        async def models(request):
            return JSONResponse({"data": [{"id": "canned", "max_model_len": 100}]})

        async def info(request):
            return JSONResponse({"chat_template": template})

        routes = [Route("/v1/models", models), Route("/tokenizer_info", info), Route("/metrics", PlainTextResponse(""))]
        routes += [Route(path, answer, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions")]
        server = running(Starlette(routes=[*page.routes(), *routes]))
        return server.url, bodies

    return make


def test_all_text_is_text(browser, canned):
    url, _ = canned(frames({"content": NASTY[:20]}, {"content": NASTY[20:]}))
    browser.open(url)
    browser.wait(READY)
    ask(browser, NASTY)
    browser.wait(ANSWERED)
    assert browser.js("document.querySelectorAll('.turn img, .turn b, .turn i').length") == 0
    assert browser.js("document.querySelector('.turn.user .content').textContent") == NASTY
    kinds = browser.js("[...document.querySelectorAll('.turn.assistant .content > *')].map(e => [e.tagName, e.textContent])")
    assert kinds == [["P", NASTY.split("\n")[0]], ["PRE", "<b>&amp;</b>"], ["P", "bold <i>"]]


def test_reasoning_and_calls(browser, canned):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    first = frames(
        {"role": "assistant", "content": ""}, {"reasoning": "Where <is> "}, {"reasoning": "it?"}, {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    )  # fmt: skip
    url, bodies = canned(first, frames({"content": "It rains."}))
    browser.open(url)
    browser.wait(READY)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    set_(browser, tools=json.dumps(tools))
    ask(browser, "Rain in Oslo?")
    browser.wait(ANSWERED)
    assert browser.text(".reasoning p") == "Where <is> it?"
    assert browser.text(".call header") == "calls weather" and browser.text(".call pre") == '{\n  "city": "Oslo"\n}'
    assert browser.js("document.getElementById('question').placeholder") == "Result of weather"
    ask(browser, "rain")
    browser.wait(f"document.querySelectorAll('.turn').length === 4 && {ANSWERED}")
    assert browser.text(".turn.assistant .content") == "It rains."
    asked, called, result = bodies[1]["messages"]
    assert bodies[0]["tools"] == tools and asked == {"role": "user", "content": "Rain in Oslo?"}
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def test_a_failure_in_a_stream_can_be_retried(browser, canned):
    failed = frames({"content": "Well"}).split(": waiting")[0] + 'data: {"error": {"message": "no memory", "code": 500}}\n\n'
    url, bodies = canned(failed, frames({"content": "Better."}))
    browser.open(url)
    browser.wait(READY)
    ask(browser, "Go")
    browser.wait("document.querySelector('.problem')")
    assert browser.text(".problem") == "No answer. no memory" and "Well" in browser.text(".turn.assistant .content")
    browser.click(".turn.assistant .actions button:last-child")
    browser.wait("document.querySelector('.turn.assistant .content').innerText === 'Better.'")
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "Go"}]] * 2


def test_a_model_without_a_chat_template(browser, canned):
    lists = {"tokens": [" Pa", "ris"], "token_logprobs": [-0.1, -3.0], "top_logprobs": [{" Pa": -0.1, " Ly": -2.5}] * 2}
    choice = {"index": 0, "text": " Paris", "logprobs": lists, "finish_reason": "stop"}
    url, bodies = canned(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n", template=None)
    browser.open(url)
    browser.wait(READY)
    assert "no chat template" in browser.text(".empty")
    browser.click("[name=probabilities]")
    ask(browser, "The capital of France is")
    browser.wait(ANSWERED)
    assert bodies[0]["path"] == "/v1/completions" and bodies[0]["prompt"] == "The capital of France is"
    assert browser.js("[...document.querySelectorAll('.token')].map(t => [t.className, t.textContent])") == [
        ["token d0", " Pa"], ["token d3", "ris"],
    ]  # fmt: skip
