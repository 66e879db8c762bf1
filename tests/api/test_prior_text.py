"""Given output, min_tokens and stop strings together: the core finds the strings on bytes, Python where a decoder does more
than join bytes. Both obey one rule."""

import json

import pytest
from fake_core import make_tokenizer

from llmpy import LLM, SamplingParams
from llmpy.text.detokenizer import Detokenizer
from llmpy.text.sample_text import SampleText

PROMPT = [40, 41, 42]
FREE = {"temperature": 1.5, "seed": 4, "max_tokens": 24, "ignore_eos": True, "use_tqdm": False}


@pytest.fixture(scope="module")
def llms(tmp_path_factory, write_model):
    """One model twice: in one the core knows the tokens' bytes, in the other it does not."""
    made = []
    for joins in (True, False):
        path = write_model(tmp_path_factory.mktemp("joins" if joins else "other"))
        described = json.loads((path / "tokenizer.json").read_text())
        if not joins:  # the same text by a decoder with one more step
            described["decoder"] = {"type": "Sequence", "decoders": [described["decoder"], {"type": "Fuse"}]}
            (path / "tokenizer.json").write_text(json.dumps(described))
        made.append(LLM(path, device="cpu", kv_cache_memory_bytes="16MiB"))
    assert made[0].tokenizer.token_bytes() is not None
    assert made[1].tokenizer.token_bytes() is None
    yield made
    for llm in made:
        llm.close()


def ends(llm, ids, **fields):
    """All ids of the output, its finish reason, its new text."""
    given = {"prompt_token_ids": PROMPT, **({"output_token_ids": ids} if ids else {})}
    output = llm.generate([given], **(FREE | fields))[0].outputs[0]
    return [*ids, *output.token_ids], output.finish_reason, output.stop_reason, output.text


def last_characters(llm, ids):
    """For every token that ends with a plain character: how many tokens there are, and the last characters of the text."""
    found = []
    for count in range(3, len(ids)):
        text = llm.tokenizer.decode(ids[:count])
        before = llm.tokenizer.decode(ids[: count - 1])
        if len(text) > len(before) > 1 and "\ufffd" not in text[-3:]:
            found.append((count, text[-2:]))
    return found


@pytest.mark.parametrize("num_prior", [0, 1, 4, 9])
def test_core_and_python_agree(num_prior, llms):
    free, *_ = ends(llms[0], [])
    assert ends(llms[1], [])[0] == free
    stops = last_characters(llms[0], free)
    assert len(stops) > 5
    ended = 0
    for count, stop in stops:
        for least in {0, count - 1, count, count + 1}:
            here, there = (ends(llm, free[:num_prior], stop=[stop], min_tokens=least) for llm in llms)
            assert here == there, (stop, count, least)
            ended += here[1] == "stop"
    assert ended > 3


@pytest.mark.parametrize("num_prior", [0, 2, 5])
def test_given_tokens_count_for_min_tokens(num_prior):
    """The string is complete with the sixth token; it counts if more than min_tokens tokens are there."""
    tokenizer = make_tokenizer(texts=False)
    ids = tokenizer.encode("12345xy")
    assert len(ids) == 7
    for least in range(9):
        text = SampleText(tokenizer, [], SamplingParams(stop=["x"], max_tokens=16, min_tokens=least))
        text.prime(ids[:num_prior])
        assert text.match(ids[num_prior:]) == ((6 - num_prior, 0) if least < 6 else None)


@pytest.mark.parametrize("texts", [True, False])
def test_a_string_that_begins_in_given_text_is_found_and_cuts_new_text_alone(texts):
    tokenizer = make_tokenizer(texts)
    ids = tokenizer.encode("123456789")
    for stop in ("34567", "4567", "67", "7"):
        for num_prior in range(7):
            text = SampleText(tokenizer, [], SamplingParams(stop=[stop]))
            text.prime(ids[:num_prior])
            assert text.match(ids[num_prior:]) == (7 - num_prior, 0)
            assert text.shown == "123456789"[num_prior : max(7 - len(stop), num_prior)]


@pytest.mark.parametrize("texts", [True, False])
def test_a_stop_string_that_is_shown_is_found_across_tokens_and_ends_the_text(texts):
    """No text is held back if the string is shown; text after the string in its last token is cut."""
    tokenizer = make_tokenizer(texts)
    ids = tokenizer.encode("0123ha")
    assert len(ids) == 5
    for stop in ("3h", "23h", "123h", "0123h"):
        text = SampleText(tokenizer, [], SamplingParams(stop=[stop], include_stop_str_in_output=True))
        for token in ids[:-1]:
            text.push([token], None, None)
        text.push(ids[-1:], "stop_string", stop)
        assert text.shown == "0123h"


def test_an_incomplete_character_at_the_end_comes_out_whatever_the_decoder(llms):
    for llm in llms:
        ids = llm.tokenizer.encode("a€")
        for count, shown in ((2, "a\ufffd"), (3, "a\ufffd"), (4, "a€")):
            way = Detokenizer(llm.tokenizer)
            pieces = [way.push([token]) for token in ids[:count]]
            assert "".join([*pieces, way.push([], True)]) == shown
