"""Text piece by piece: for any split the joined pieces equal one decode, and returned text never changes."""

import codecs
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpy import _core
from llmpy.hub import resolve
from llmpy.text import token_texts
from llmpy.text.detokenizer import Detokenizer
from llmpy.text.tokenizer import Backend, Tokenizer, load_tokenizer

SPACE = "▁"
WORDS = ["a", "b", SPACE, f"{SPACE}a", f"{SPACE}b", "ab", "€", "é", f"{SPACE}€"]
SPECIAL = ["<s>", "</s>", f"{SPACE}<x>"]


def make(vocabulary: list[str], decoder: dict[str, Any] | None, special: list[str]) -> Tokenizer:
    """A tokenizer with a decoder, as tokenizer.json describes it."""
    from tokenizers import Tokenizer as Library

    added = [
        {"id": place, "content": token, "special": token != special[-1], "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for place, token in enumerate(vocabulary)
        if token in special
    ]
    model = {"type": "BPE", "vocab": {token: place for place, token in enumerate(vocabulary)}, "merges": []}
    described = {"version": "1.0", "added_tokens": added, "decoder": decoder, "model": model}
    backend: Any = Library.from_str(json.dumps(described))
    ids = [place for place, token in backend.get_added_tokens_decoder().items() if token.special]
    checked: Backend = backend
    return Tokenizer(checked, token_texts.of_backend(backend), ids, {}, [], {})


def step(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


SPM_DECODER = step(
    "Sequence",
    decoders=[
        step("Replace", pattern={"String": SPACE}, content=" "),
        step("ByteFallback"),
        step("Fuse"),
        step("Strip", content=" ", start=1, stop=0),
    ],
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
BYTES = token_texts.byte_characters()


def byte_level() -> Tokenizer:
    decoder = step("ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    return make([*BYTES, "ab", "Ġa", *SPECIAL], decoder, SPECIAL)


def sentencepiece() -> Tokenizer:
    return make([*BYTE_TOKENS, *WORDS, *SPECIAL], SPM_DECODER, SPECIAL)


def other() -> Tokenizer:
    decoder = step("Metaspace", replacement=SPACE, prepend_scheme="always", split=True)
    return make([*WORDS, *SPECIAL], decoder, SPECIAL)


IDS = st.lists(st.integers(0, 280), max_size=24)
CHARACTERS = st.lists(st.sampled_from("a €é😀\u0301"), max_size=8).map(lambda parts: list("".join(parts).encode()))


def run(tokenizer: Tokenizer, prompt: list[int], ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    """Pieces of text for ids pushed in parts."""
    way = Detokenizer(tokenizer, prompt, skip)
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    parts = [ids[low:high] for low, high in pairwise(places)]
    return [*(way.push(part) for part in parts), way.push([], True)]


def expected(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """The text after the prompt's whole characters in one decode of prompt and output."""
    assert tokenizer.texts is not None
    table = tokenizer.texts.hidden if skip else tokenizer.texts.table

    def data(some: list[int]) -> bytes:
        joined = b"".join(table[token] for token in some if token < len(table))
        return joined.removeprefix(b" ") if tokenizer.texts is not None and tokenizer.texts.strip_leading else joined

    before = codecs.getincrementaldecoder("utf-8")("replace").decode(data(prompt))
    return data(prompt + ids).decode("utf-8", "replace")[len(before) :]


@pytest.mark.parametrize("make_tokenizer", [byte_level, sentencepiece])
@settings(max_examples=300, deadline=None)
@given(prompt=IDS | CHARACTERS, ids=IDS | CHARACTERS, cuts=st.lists(st.integers(0, 99)), skip=st.booleans())
def test_pieces_are_one_decode(
    make_tokenizer: Any, prompt: list[int], ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = make_tokenizer()
    pieces = run(tokenizer, prompt, ids, cuts, skip)
    assert "".join(pieces) == expected(tokenizer, prompt, ids, skip)


@settings(max_examples=300, deadline=None)
@given(ids=IDS | CHARACTERS, skip=st.booleans())
def test_byte_level_equals_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    known = [token for token in ids if token < len(tokenizer)]
    assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(known, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(256, 267), max_size=12), prompt=st.lists(st.integers(256, 267), max_size=4))
def test_sentencepiece_equals_the_library(ids: list[int], prompt: list[int]) -> None:
    tokenizer = sentencepiece()
    decode = tokenizer.backend.decode
    assert tokenizer.decode(ids, True) == decode(ids)
    assert "".join(run(tokenizer, prompt, ids, [1, 2])) == decode(prompt + ids)[len(decode(prompt)) :]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 8), max_size=12), prompt=st.lists(st.integers(0, 8), max_size=4), cuts=IDS)
def test_other_decoders(ids: list[int], prompt: list[int], cuts: list[int]) -> None:
    tokenizer = other()
    assert tokenizer.texts is None
    assert tokenizer.token_bytes() is None
    decode = tokenizer.backend.decode
    pieces = run(tokenizer, prompt, ids, cuts)
    assert "".join(pieces) == decode(prompt + ids)[len(decode(prompt)) :]


def test_incomplete_characters_wait() -> None:
    way = Detokenizer(byte_level(), [])
    pieces = [way.push([byte]) for byte in "x€😀".encode()]
    assert pieces == ["x", "", "", "€", "", "", "", "😀"]
    assert way.push([0xE2, 0x82]) == ""
    assert way.push([ord("a")]) == "\ufffda"
    assert way.push([0xE2]) == ""
    assert way.push([], True) == "\ufffd"


def test_prompt_that_ends_inside_a_character() -> None:
    way = Detokenizer(byte_level(), list("x€".encode())[:-1])
    assert way.push(list("€".encode())[-1:]) == "€"


def test_leading_space_depends_on_the_prompt() -> None:
    tokenizer = sentencepiece()
    word, bos = 256 + WORDS.index(f"{SPACE}a"), 256 + len(WORDS)
    assert Detokenizer(tokenizer, []).push([word, word]) == "a a"
    assert Detokenizer(tokenizer, [bos]).push([word]) == "a"
    assert Detokenizer(tokenizer, [bos], skip_special_tokens=False).push([word]) == " a"
    assert Detokenizer(tokenizer, [bos, word]).push([word]) == " a"


def test_special_tokens_shown_or_hidden() -> None:
    tokenizer = sentencepiece()
    bos, named, word = 256 + len(WORDS), 256 + len(WORDS) + 2, 256
    ids = [bos, word, bos, named, named]
    assert Detokenizer(tokenizer, [word]).push(ids) == "a <x> <x>"
    assert Detokenizer(tokenizer, [word], skip_special_tokens=False).push(ids) == "<s>a<s> <x> <x>"
    close = Detokenizer(tokenizer, [word], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert [close.push([token]) for token in ids] == ["<s>", "a", "<s>", "<x>", "<x>"]
    behind = Detokenizer(tokenizer, [bos], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert behind.push([named]) == "<x>"


@pytest.mark.parametrize("make_tokenizer", [byte_level, sentencepiece, other])
def test_unknown_ids_add_nothing(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    way = Detokenizer(tokenizer, [99_999])
    word = tokenizer.convert_tokens_to_ids("a")
    assert way.push([10_000, word, 99_999, -1, word], True) == "aa"
    assert tokenizer.decode([10_000, word, -5]) == "a"


def test_demo_model(demo_model: Path) -> None:
    tokenizer = load_tokenizer(resolve(demo_model), _core.Checkpoint([str(demo_model)]))
    text = "naïve 😀 中文 'quoted'  \n\tdef f(): return 1"
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
        way = Detokenizer(tokenizer, ids[:cut])
        pieces = [way.push([token]) for token in ids[cut:]]
        assert text.endswith("".join(pieces))
    table = tokenizer.token_bytes()
    assert table is not None
    assert b"".join(table[token] for token in ids) == text.encode()
