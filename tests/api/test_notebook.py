"""Views: one-line reprs, escaped HTML, progress bars."""

import html.parser
import io
import math
import pickle
import re
import sys
import time
import types

import pytest

from llmpy import SamplingParams
from llmpy.engine import progress
from llmpy.engine.progress import LoadBar, Progress
from llmpy.notebook import LineChart, LiveBar
from llmpy.notebook.lines import request_line, score_line, size
from llmpy.notebook.view import completion_html, request_html, table_html
from llmpy.outputs import CompletionOutput, RequestOutput, RequestOutputs

NASTY = "<script>alert('&')</script>\n\"quoted\" \u202e"


def make(text, tokens=3, reason="stop", params=None, prompt=None):
    import numpy as np

    sample = CompletionOutput(index=0, text=text, token_ids_array=np.arange(tokens), finish_reason=reason)
    ids = np.arange(2)
    return RequestOutput(
        request_id="7", index=3, prompt=prompt, prompt_token_ids_array=ids, outputs=[sample], sampling_params=params
    )


def test_repr_is_one_line_of_at_most_120_characters():
    assert repr(make("The quick", 128)) == "RequestOutput(3, 128 tokens, stop, 'The quick')"
    for text in ("word " * 100, NASTY * 9, "日本" * 200, "'" * 300, "\\" * 300, ""):
        for line in (repr(make(text)), repr(make(text).outputs[0])):
            assert len(line) <= 120 and "\n" not in line and line.endswith(("')", '")'))
    assert repr(make("word " * 100)).endswith(" ...')")


def test_repr_says_if_the_limit_was_the_default(fake_llm):
    assert request_line(make("x", reason="length", params=SamplingParams())) == (
        "RequestOutput(3, 3 tokens, length, default max_tokens=16, 'x')"
    )
    assert "default" not in request_line(make("x", reason="length", params=SamplingParams(max_tokens=16)))
    assert "default" not in request_line(make("x", reason="stop", params=SamplingParams()))
    llm = fake_llm(max_model_len=2000)
    out = llm.generate([5], ignore_eos=True)[0]
    assert "length, default max_tokens=256" in repr(out)
    assert "default" not in repr(llm.generate([5], max_tokens=256, ignore_eos=True)[0])


def test_other_reprs(fake_llm):
    llm = fake_llm()
    assert repr(llm) == "LLM(Fake, float32, cpu, weights 98 MB, cache 1,600 tokens, idle)"
    llm.add_request("a")
    assert repr(llm).endswith("1 running, 0 waiting)")
    assert score_line(llm.score([5, 6, 7])[0]) == "ScoreOutput(0, 2 tokens from 1, sum -0.13, perplexity 1.067)"
    bad = llm.generate([[400]], on_error="return")
    assert "error" in repr(bad[0]) and "out of vocabulary" in repr(bad[0])
    out = llm.generate([5], n=3, max_tokens=2)[0]
    assert repr(out).startswith("RequestOutput(0, 3 samples, 6 tokens, length,")


class Check(html.parser.HTMLParser):
    """Collects tags and text, and whether tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_escapes_all_text():
    output = make(NASTY, prompt=NASTY)
    for page in (request_html(output), completion_html(output.outputs[0]), table_html(RequestOutputs([output]))):
        checked = Check(page)
        assert not checked.open and "script" not in [tag for tag, _ in checked.tags]
        assert NASTY in checked.text


def test_html_tints_tokens_by_logprob(fake_llm):
    out = fake_llm().generate("hello", max_tokens=6, logprobs=3)[0]
    checked = Check(out._repr_html_())
    tokens = [attributes for tag, attributes in checked.tags if attributes.get("class") == "llmpy-token"]
    cards = [attributes for tag, attributes in checked.tags if attributes.get("class") == "llmpy-card"]
    assert len(tokens) == 6 == len(cards) and all("hidden" in card for card in cards) and not checked.open
    for row in out.outputs[0].logprobs:
        token, entry = next(iter(row.items()))
        assert f"id {token}, logprob {entry.logprob:.3f}, rank {entry.rank}\n" in checked.text
        for other in row.values():
            assert f"{100 * math.exp(other.logprob):.2f} % {other.decoded_token!r}" in checked.text
    assert len({token["style"] for token in tokens}) > 1
    assert "tokens/s" in checked.text and "length" in checked.text
    plain = Check(fake_llm().generate("hello", max_tokens=6)[0]._repr_html_())
    assert not any(attributes.get("class") for _, attributes in plain.tags)


def tokens_of(checked):
    return [attributes["style"] for tag, attributes in checked.tags if attributes.get("class") == "llmpy-token"]


def test_html_of_scores(fake_llm):
    llm = fake_llm()
    out = llm.score("ab", "hello")[0]
    checked = Check(out._repr_html_())
    assert repr(out) in checked.text and len(tokens_of(checked)) == len(out.token_logprobs) == 4 and not checked.open
    assert re.search(r"ab.*rank \d+\nhe.*\nl.*\nl.*\no", checked.text, re.DOTALL)
    for token, logprob, rank in zip(out.token_ids[out.start :], out.token_logprobs, out.ranks, strict=True):
        assert f"id {token}, logprob {logprob:.3f}, rank {rank}\n" in checked.text
    best = Check(llm.score("ab", "hello", logprobs=2)[0]._repr_html_())
    assert best.text.count(" %") >= 8 and " %" not in checked.text
    failed = llm.score([[400, 401]], on_error="return")[0]
    assert str(failed.error) in Check(failed._repr_html_()).text and failed._logprobs is None


def test_pickled_scores_are_arrays_unless_alternatives_were_asked_for(fake_llm):
    llm = fake_llm()
    for logprobs in (0, 2):
        out = llm.score("ab", "hello", logprobs=logprobs)[0]
        copy = pickle.loads(pickle.dumps(out))
        assert copy.to_dict() == out.to_dict() and repr(copy) == repr(out)
        assert len(tokens_of(Check(copy._repr_html_()))) == (4 if logprobs else 0)


def test_table_is_bounded(fake_llm):
    outs = fake_llm().generate([[5]] * 60, max_tokens=1)
    checked = Check(outs._repr_html_())
    assert sum(tag == "tr" for tag, _ in checked.tags) == 51 and "10 more" in checked.text and "60 requests" in checked.text


def test_llm_html(fake_llm):
    llm = fake_llm()
    llm.generate("hello", max_tokens=2)
    checked = Check(llm._repr_html_())
    assert not checked.open and "prefix_cache_hits" in checked.text and "2 tokens written" in checked.text
    memory, stats = llm.memory(), llm.stats()
    parts = [attributes for tag, attributes in checked.tags if tag == "rect" and attributes["height"] == "18"]
    purposes = sum(bool(n) for name, n in memory.items() if not name.startswith("device_"))
    assert len(parts) == purposes + 3 and f"Cache, {stats.kv_blocks_total:,} blocks" in checked.text
    for widths in (parts[:purposes], parts[purposes:]):
        assert sum(float(part["width"]) for part in widths) == pytest.approx(520, abs=0.5)
    assert float(parts[0]["width"]) == pytest.approx(
        520 * memory["weights"] / sum(n for name, n in memory.items() if not name.startswith("device_")), abs=0.1
    )
    llm.close()
    assert "closed" in Check(llm._repr_html_()).text


def test_line_chart():
    chart = LineChart({"<a>": [0, 2, float("nan"), 4], "b": [1.0]}, title="T & U", x="step", unit="s", height=100)
    checked = Check(chart.svg(500))
    assert not checked.open and "<a> 4 s" in checked.text and "T & U" in checked.text and "step 1" in checked.text
    first, second = (attributes["points"] for tag, attributes in checked.tags if tag == "polyline")
    assert first == "52.0,144.0 198.7,94.0 492.0,44.0" and second == "52.0,119.0 52.0,119.0"
    assert repr(chart) == "LineChart(T & U: <a> 0 -> 4, b 1 -> 1)"
    assert ">0.9<" in LineChart({"": [0.9, 1.0]}).svg() and ">0<" in LineChart({"": [0.4, 1.0]}).svg()
    assert ">1,500<" in LineChart({"": [0, 3000]}).svg() and ">123k<" in LineChart({"": [0, 123456]}).svg()
    assert ">0<" in LineChart({"": [1020.0]}).svg() and Check(LineChart({}).svg()).tags


@pytest.mark.parametrize(("count", "text"), [(98_362_432, "98.4 MB"), (1_200_000_000, "1.2 GB"), (5, "5 B"), (123e9, "123 GB")])
def test_size(count, text):
    assert size(int(count)) == text


class Bar:
    """Records the calls of a tqdm bar."""

    made: list["Bar"] = []  # noqa: RUF012

    def __init__(self, **options):
        self.options, self.n, self.postfix, self.closed = options, 0, [], False
        Bar.made.append(self)

    def update(self, n):
        self.n += n

    def set_postfix_str(self, text):
        self.postfix.append(text)

    def close(self):
        self.closed = True


def test_a_callable_like_tqdm(fake_llm):
    Bar.made.clear()
    fake_llm().generate([[5], [6]], max_tokens=2, use_tqdm=Bar)
    (bar,) = Bar.made
    assert bar.n == bar.options["total"] == 2 and bar.closed and bar.options["desc"] == "Processed prompts"
    assert bar.postfix[-1].startswith("est. speed input: ") and bar.postfix[-1].endswith(" toks/s")


def test_the_bar_is_closed_when_the_call_fails(fake_llm):
    class Broken(Bar):
        def update(self, n):
            raise ValueError("broken bar")

    Bar.made.clear()
    llm = fake_llm()
    with pytest.raises(ValueError, match="broken bar"):
        llm.generate([[5], [6]], max_tokens=2, use_tqdm=Broken)
    assert Bar.made[0].closed and not llm._driver._requests
    assert llm.generate([5], max_tokens=1)[0].finished


def test_tqdm_line(fake_llm, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    fake_llm().generate([[5], [6]], max_tokens=2, use_tqdm=True)
    last = stream.getvalue().replace("\r", "\n").strip().split("\n")[-1]
    assert last.startswith("Processed prompts: 100%") and "2/2 [" in last and "it/s, est. speed input: " in last


def test_when_there_is_a_bar(monkeypatch):
    def bars(use_tqdm, total, seconds=9.0, terminal=True):
        Bar.made.clear()
        clock = iter([0.0, 0.0, *[seconds] * 9])
        monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(progress, "_is_terminal", lambda: terminal)
        monkeypatch.setattr(progress, "bar_class", lambda: Bar)
        with Progress(use_tqdm, total, lambda: (0, 0)) as bar:
            bar.update(0)
            bar.update(1)
        return len(Bar.made)

    assert bars(None, 2) == 1 and bars(True, 1) == 1
    assert bars(None, 1) == bars(None, 2, terminal=False) == bars(None, 2, seconds=0.1) == bars(False, 2) == 0
    with pytest.raises(TypeError, match="use_tqdm must be"):
        Progress(3, 2, lambda: (0, 0))


@pytest.fixture
def shown(monkeypatch):
    """A notebook that records displayed objects."""
    states = []
    shell = types.SimpleNamespace(kernel=object())
    handle = types.SimpleNamespace(update=lambda bar: states.append(bar._repr_html_()))
    display = types.SimpleNamespace(display=lambda bar, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return states


def test_a_notebook_shows_throughput_while_it_runs(fake_llm, shown, monkeypatch):
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    outs = fake_llm(step_s=0.06).generate([[5], [6], [7]], max_tokens=9, use_tqdm=True)
    assert len(shown) > 3 and "<polyline" in shown[-1] and "read 0 " not in shown[-1] and "wrote 0 " not in shown[-1]
    assert "Processed prompts: 3/3" in Check(shown[-1]).text and outs.num_generation_tokens == 27
    assert "Processed prompts: 0/3" in Check(shown[0]).text


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_bar_that_appears_late_counts_from_the_start(shown, monkeypatch, in_notebook):
    now, tokens, stream = [100.0], [(0, 0)], io.StringIO()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    monkeypatch.setattr(progress, "_in_notebook", lambda: in_notebook)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(None, 2, lambda: tokens[0]) as bar:
        for seconds, done in ((1.9, 0), (2.0, 2)):
            now[0], tokens[0] = 100 + seconds, (int(10 * seconds), int(100 * seconds))
            bar.update(done)
    now[0] = 200.0
    with LoadBar(None) as update:
        for seconds in (0, 3, 4):
            now[0] = 200 + seconds
            update(1_000_000 * seconds, 4_000_000)
    if in_notebook:
        texts = [Check(state).text for state in shown]
        assert any("Processed prompts: 2/2, 2.0 s, read 10 tokens/s, wrote 100 tokens/s" in text for text in texts)
        assert texts[-1].startswith("Loading weights: 4 MB/4 MB, 4.0 s")
    else:
        lines = stream.getvalue().replace("\r", "\n").split("\n")
        assert any(re.search(r" 2/2 \[00:0[1-9]<", line) for line in lines), lines  # tqdm keeps its own clock
        assert any(re.search(r"4.00M/4.00M \[00:0[3-9]<", line) for line in lines), lines


def test_the_chart_of_a_long_call_keeps_its_size(shown, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("llmpy.notebook.live.time.perf_counter", lambda: next(clock) / 10)
    bar = LiveBar(total=1)
    for tokens in range(3000):
        bar.set_counts(0, 50 * tokens)
    assert 60 <= len(bar._speeds) <= 120
    assert bar._speeds == pytest.approx([250] * len(bar._speeds))  # it looks at the clock twice


def test_a_notebook_shows_how_much_is_loaded(shown, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with LoadBar(None) as update:
        update(0, 4_000_000)
        update(3_000_000, 4_000_000)
        assert Check(shown[-1]).text.startswith("Loading weights: 3 MB/4 MB, ") and "tokens" not in shown[-1]
    assert Check(shown[-1]).text.startswith("Loading weights: 4 MB/4 MB, ")


def test_load_bar(monkeypatch):
    Bar.made.clear()
    with LoadBar(Bar) as update:
        update(0, 100)
        update(60, 100)
        update(100, 100)
    assert Bar.made[0].n == 100 and Bar.made[0].closed and Bar.made[0].options["unit"] == "B"
    with LoadBar(False) as update:
        update(0, 100)
    assert len(Bar.made) == 1


NAMES = [["The cat sat on the theorem."] * 2, ["x" * 200], ["a", "b", "c"], ["a" * 30, "b", "c", "d"], ["one"]]
TITLES = ["", "Logprob", "A title that is about as long as the picture is wide, so nothing fits beside it"]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("title", TITLES)
def test_a_legend_stays_within_the_picture_and_above_the_plot(names, title):
    lines = {name + " " * i: [1.0, -2.19] for i, name in enumerate(names)}
    svg = LineChart(lines, title, x="token", unit="nats").svg()
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" font-family[^>]*>(?:<title>[^<]*</title>)?([^<]*)</text>', svg)
    labels = [(float(x), float(y), text) for x, y, text in texts if text.endswith(("nats", "…"))]
    assert len(labels) == len(lines)
    assert all(x + 6.5 * len(text) <= 520 for x, _, text in labels)
    plot = min(float(y) for y in re.findall(r'points="[\d.]+,([\d.]+)', svg))
    assert all(y <= plot for _, y, _ in labels)
    rows = [(y, x) for x, y, _ in labels]
    assert sorted(rows) == rows and len(set(rows)) == len(rows)
    assert not [y for _, y, text in labels if y == 14 and 7 * (len(title) + len(text)) > 520]
