"""Text of outputs: stop strings are cut and held back, matched in the core or in Python, for any split of the ids."""

import random
import time
from itertools import pairwise

import pytest
from fake_core import make_tokenizer

from llmpy import SamplingParams
from llmpy.text.sample_text import SampleText, held_back


def ids_of(text, texts=True):
    return make_tokenizer(texts).encode(text)


def push_all(text_maker, ids, finish, stop=None, cuts=()):
    """Pushes ids in pieces; returns the shown text after each."""
    shown = []
    places = [0, *sorted(cuts), len(ids)]
    for start, end in pairwise(places):
        last = end == len(ids)
        text_maker.push(ids[start:end], finish if last else None, stop if last else None)
        shown.append(text_maker.shown)
    return shown


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("abc", ["cd"], 1), ("abc", ["bcd", "cx"], 2), ("abc", ["abc"], 0), ("ab", ["abc"], 2), ("", ["a"], 0),
        ("aab", ["aabaab"], 3), ("xyz", ["q"], 0), ("a", [], 0), ("aaa", ["aaaa"], 3), ("éé", ["éé!"], 2),
    ],
)  # fmt: skip
def test_held_back(text, stops, held):
    assert held_back(text, stops) == held


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_even_inside_a_token(include):
    params = SamplingParams(stop=["ha"], include_stop_str_in_output=include)
    ids = ids_of("say hahe")
    tokens = make_tokenizer().convert_ids_to_tokens(ids)
    until = tokens.index("ha") + 1
    maker = SampleText(make_tokenizer(), [], params)
    shown = push_all(maker, ids[:until], "stop_string", "ha", range(1, until))
    assert maker.shown == ("say ha" if include else "say ")
    assert all(maker.shown.startswith(text) for text in shown)


def test_the_occurrence_that_the_last_token_completed_counts():
    params = SamplingParams(stop=["ab"], min_tokens=3)
    ids = ids_of("abxab")
    maker = SampleText(make_tokenizer(), [], params)
    push_all(maker, ids, "stop_string", "ab", (1,))
    assert maker.shown == "abx"


def test_nothing_shown_is_taken_back_and_the_end_is_flushed():
    rng = random.Random(3)
    words = "stop strings may begin in many ways: st sto stop! € 𝄞 日本 "
    for _ in range(60):
        text = "".join(rng.choice(words) for _ in range(30))
        params = SamplingParams(stop=["stop!", "st€", "日本"])
        ids = ids_of(text)
        maker = SampleText(make_tokenizer(), [], params)
        cuts = sorted(rng.sample(range(1, len(ids)), min(10, len(ids) - 1)))
        shown = push_all(maker, ids, "length", None, cuts)
        assert maker.shown == maker.output() == text and maker.output() == ""
        for before, after in pairwise(shown):
            assert after.startswith(before)


def test_a_push_costs_what_it_adds():
    maker = SampleText(make_tokenizer(), [], SamplingParams(stop=["stop!"]))
    ids = ids_of("many words \r\n" * 100)
    seconds = []
    for _ in range(300):
        start = time.thread_time()
        for token in ids:
            maker.push([token], None, None)
            maker.output()
        seconds.append(time.thread_time() - start)
    assert min(seconds[-20:]) < 3 * min(seconds[:20])
    assert maker.shown == "many words \r\n" * 30_000


@pytest.mark.parametrize("finish", ["eos", "stop_id"])
@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ended_it_shows_only_on_request(finish, include):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
    maker = SampleText(make_tokenizer(), [], params)
    push_all(maker, ids_of("bye<|end|>"), finish, None, (1,))
    assert maker.shown == ("bye<|end|>" if include else "bye")


def test_special_tokens_are_skipped():
    for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
        maker = SampleText(make_tokenizer(), [], SamplingParams(skip_special_tokens=skip))
        push_all(maker, ids_of("a<|im_end|>b"), "length")
        assert maker.shown == text


def test_prior_text_takes_part_but_is_not_shown():
    params = SamplingParams(stop=["lo wo"])
    maker = SampleText(make_tokenizer(), [], params)
    maker.prime(ids_of("hello"))
    push_all(maker, ids_of(" wo"), "stop_string", "lo wo", (1,))
    assert maker.shown == ""
    maker = SampleText(make_tokenizer(), [], params)
    maker.prime(ids_of("hel"))
    push_all(maker, ids_of("p lo wo"), "stop_string", "lo wo")
    assert maker.shown == "p "


def test_incomplete_characters_wait_and_end_as_replacement():
    maker = SampleText(make_tokenizer(), [], SamplingParams())
    ids = ids_of("a€")
    maker.push(ids[:-1], None, None)
    assert maker.shown == "a"
    maker.push([], "length", None)
    assert maker.shown == "a\ufffd"


def stopped(llm, text_stops, **fields):
    """Output of "hello" with these stop strings."""
    return llm.generate("hello", SamplingParams(max_tokens=40, stop=text_stops, **fields))[0].outputs[0]


def test_core_and_python_agree_on_stop_strings(fake_llm):
    free = fake_llm().generate("hello", max_tokens=40)[0].text
    for start in range(0, len(free) - 3, 2):
        if "\ufffd" in (stop := free[start : start + 3]):
            continue
        for fields in ({}, {"include_stop_str_in_output": True}, {"logprobs": 2}):
            here, there = (
                stopped(fake_llm(texts=False), [stop, "never"], **fields),
                stopped(fake_llm(), [stop], **fields),
            )
            assert (here.text, here.token_ids, here.finish_reason, here.stop_reason) == (
                there.text, there.token_ids, "stop", stop,
            )  # fmt: skip
            assert (here.logprobs is None) == (there.logprobs is None) and here.logprobs == there.logprobs
            assert here.text == free[: free.index(stop) + (3 if "include_stop_str_in_output" in fields else 0)]


def test_python_matching_streams_and_finishes_the_request(fake_llm):
    llm = fake_llm(texts=False)
    free = llm.generate("hello", max_tokens=40)[0].text
    stop = next(free[i : i + 2] for i in range(8, len(free)) if "\ufffd" not in free[i : i + 2])
    whole = stopped(llm, [stop])
    chunks = list(llm.stream("hello", max_tokens=40, stop=[stop]))
    assert "".join(chunks) == whole.text and chunks[-1].finish_reason == "stop"
    llm.step()
    assert llm.stats().num_unfinished <= 1


def test_of_several_the_one_that_ends_first_then_the_longest(fake_llm):
    llm = fake_llm(texts=False)
    free = llm.generate("hello", max_tokens=40)[0].text
    place = next(i for i in range(6, len(free) - 4) if "\ufffd" not in free[i : i + 4])
    long, short, later = free[place : place + 3], free[place + 1 : place + 3], free[place + 1 : place + 4]
    assert stopped(llm, [later, short, long]).stop_reason == long


def test_detokenize_off(fake_llm):
    llm = fake_llm()
    out = llm.generate("hello", detokenize=False, logprobs=1, max_tokens=4)[0]
    assert out.text == "" and len(out.token_ids) == 4
    assert next(iter(out.outputs[0].logprobs[0].values())).decoded_token is None
