"""How things look: one-line reprs, HTML with everything escaped, progress bars."""

import html.parser
import io
import sys
import types

import pytest

from llmpy import SamplingParams, progress
from llmpy.notebook import completion_html, request_html, request_line, score_line, size, table_html
from llmpy.outputs import CompletionOutput, RequestOutput, RequestOutputs
from llmpy.progress import LoadBar, Progress

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


def test_repr_says_whose_choice_the_limit_was(fake_llm):
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
    out = fake_llm().generate("hello", max_tokens=6, logprobs=1)[0]
    checked = Check(out._repr_html_())
    spans = [attributes for tag, attributes in checked.tags if tag == "span"]
    assert len(spans) == 6 and not checked.open
    for span, row in zip(spans, out.outputs[0].logprobs, strict=True):
        token, entry = next(iter(row.items()))
        assert span["title"] == f"id {token}, logprob {entry.logprob:.3f}, rank {entry.rank}"
    assert len({span["style"] for span in spans}) > 1
    assert "tokens/s" in checked.text and "length" in checked.text


def test_table_is_bounded(fake_llm):
    outs = fake_llm().generate([[5]] * 60, max_tokens=1)
    checked = Check(outs._repr_html_())
    assert sum(tag == "tr" for tag, _ in checked.tags) == 51 and "10 more" in checked.text and "60 requests" in checked.text


def test_llm_html(fake_llm):
    llm = fake_llm()
    checked = Check(llm._repr_html_())
    assert not checked.open and "weights" in checked.text and "prefix_cache_hits" in checked.text
    llm.close()
    assert "closed" in Check(llm._repr_html_()).text


@pytest.mark.parametrize(("count", "text"), [(98_362_432, "98.4 MB"), (1_200_000_000, "1.2 GB"), (5, "5 B"), (123e9, "123 GB")])
def test_size(count, text):
    assert size(int(count)) == text


class Bar:
    """Remembers what a tqdm would show."""

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
        monkeypatch.setattr(progress, "tqdm_class", lambda: Bar)
        with Progress(use_tqdm, total, lambda: (0, 0)) as bar:
            bar.update(0)
            bar.update(1)
        return len(Bar.made)

    assert bars(None, 2) == 1 and bars(True, 1) == 1
    assert bars(None, 1) == bars(None, 2, terminal=False) == bars(None, 2, seconds=0.1) == bars(False, 2) == 0
    with pytest.raises(TypeError, match="use_tqdm must be"):
        Progress(3, 2, lambda: (0, 0))


def test_notebooks_get_a_bar_and_widgets_only_where_they_import(monkeypatch):
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert progress.tqdm_class().__module__ == "tqdm.std" and progress._in_notebook()


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
