"""PLaMo's tokenizer against an exhaustive search of all cuts, and rules for any text."""

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpy.errors import CheckpointError
from llmpy.text.gguf_tokenizer import from_metadata
from llmpy.text.plamo_tokenizer import PlamoTokenizer
from llmpy.text.tokenizer import load_tokenizer

SPECIAL = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>"]
BYTES = [(f"<0x{byte:02X}>", 0.0, "BYTE") for byte in range(256)]
# Scores of -1000 cost what a character in bytes does; below -2000 a piece is not used. "ab" + "c" ties with "abc".
WORDS = [
    ("a", -3.0), ("b", -3.5), ("c", -2.0), ("ab", -4.0), ("abc", -6.0), ("bc", -5.25), ("bca", -1.0), ("日", -2.5),
    ("日本", -3.0), ("本語", -3.0), (" ", -1.5), (" a", -2.0), ("\n", -1000.0), ("x", -1001.0), ("xy", -2000.5),
    ("abcab", -11.0), ("<0x", -4.0), ("\ufeff", -5.0),
]  # fmt: skip
LINES = [(name, 0.0, "UNKNOWN" if i == 0 else "CONTROL") for i, name in enumerate(SPECIAL)]
LINES += [*BYTES, *((word, score, "NORMAL") for word, score in WORDS)]
LETTERS = "abcxyz 日本語\n\ufeff<0>é\U0001f600"


def made(lines: list[tuple[str, float, str]] = LINES, **options: object) -> PlamoTokenizer:
    return PlamoTokenizer(*map(list, zip(*lines, strict=True)), added={}, **options)


def all_ways(text: str) -> list[tuple[int, list[int], list[str]]]:
    """(cost, lengths of the pieces negated, pieces) of every way to cut a text; a character in bytes counts as length 0."""
    if not text:
        return [(0, [], [])]
    ways = [(10**7 + cost, [0, *lengths], [f"bytes {text[0]}", *rest]) for cost, lengths, rest in all_ways(text[1:])]
    for piece, score, kind in LINES:
        if kind != "BYTE" and text.startswith(piece) and round(score * 1e4) > -20_000_000:
            ways += [
                (cost - round(score * 1e4), [-len(piece), *lengths], [piece, *rest])
                for cost, lengths, rest in all_ways(text[len(piece) :])
            ]
    return ways


@settings(max_examples=150, deadline=None)
@given(st.text(LETTERS, max_size=8))
def test_the_best_of_all_ways(text: str) -> None:
    """The cheapest cut wins; of equal costs the one with the longer first piece, then second piece, and so on."""
    tokenizer = made()
    pieces = min(all_ways(text))[2]
    names = [line[0] for line in LINES]
    want = []
    for piece in pieces:
        if piece.startswith("bytes "):
            want += [names.index(f"<0x{byte:02X}>") for byte in piece[6:].encode()]
        else:
            want.append(names.index(piece))
    assert tokenizer.encode(text).ids == want


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = made()
    encoding = tokenizer.encode(text)
    assert tokenizer.texts(()).decode(encoding.ids, False) == text
    assert [high for _, high in encoding.offsets][-1:] == ([len(text)] if text else [])
    assert all(low < high for low, high in encoding.offsets)


def test_ties_and_bytes() -> None:
    tokenizer = made()
    names = [line[0] for line in LINES]
    assert [names[i] for i in tokenizer.encode("abc").ids] == ["abc"]  # not ab + c, of the same cost
    assert [names[i] for i in tokenizer.encode("\n").ids] == ["\n"]  # not <0x0A>
    assert [names[i] for i in tokenizer.encode("x").ids] == ["<0x78>"]  # the piece costs a little more
    assert [names[i] for i in tokenizer.encode("<|plamo:op|>").ids] == ["<|plamo:op|>"]
    assert [names[i] for i in tokenizer.encode("<0x").ids] == ["<0x"]
    assert "<0x41>" not in [names[i] for i in tokenizer.encode("<0x41>").ids]
    assert tokenizer.encode("\ufeffé").ids == [names.index("\ufeff"), names.index("<0xC3>"), names.index("<0xA9>")]


def save(directory: Path, lines: list[tuple[object, ...]] = LINES, **settings: object) -> SimpleNamespace:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (directory / "tokenizer.jsonl").write_text(text, encoding="utf-8")
    roles = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[3]}
    (directory / "tokenizer_config.json").write_text(json.dumps({**roles, **settings}))
    return SimpleNamespace(kind="hf", directory=directory, config={"eos_token_id": [2, 4]}, generation_config={})


def test_a_directory(tmp_path: Path) -> None:
    extra = {"280": {"content": "<image>", "special": True}}
    tokenizer = load_tokenizer(save(tmp_path, add_bos_token=True, added_tokens_decoder=extra))
    assert len(tokenizer) == 280 and tokenizer.vocab_size == 279 and tokenizer.max_token_id == 280
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, [2, 4], 3)
    assert tokenizer.encode("a<image>b<|plamo:eos|>") == [1, 261, 280, 262, 2]
    assert tokenizer.encode("ab", add_special_tokens=False) == [264]
    assert tokenizer.decode([1, 261, 280, 262, 2], skip_special_tokens=True) == "ab"
    assert tokenizer.decode([1, 261, 4]) == "<|plamo:bos|>a<|plamo:op|>"
    assert tokenizer.decode([5 + 0xE6, 5 + 0x97]) == "\ufffd" and tokenizer.decode([5 + 0xE6, 5 + 0x97, 5 + 0xA5]) == "日"
    ids, ends = tokenizer.encode_with_ends("日x", add_special_tokens=False)
    assert ends == [1, 2] and len(ids) == 2
    assert tokenizer.token_bytes()[5 + 0x41] == b"A"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([*LINES[:-1], ("a", -1.0, "NORMAL")], "holds 'a' twice"),
        (LINES[:100] + LINES[101:], "wanted the 256 byte tokens .* have 255"),
        ([*LINES, ("q",)], "line 280: wanted .piece, score, kind."),
        ([*LINES, ("q", "much", "NORMAL")], "line 280: wanted .piece, score, kind."),
        ([*LINES, ("q", 1.0, "OTHER")], "line 280: wanted a piece of a known kind"),
    ],
)
def test_damaged_files(tmp_path: Path, lines: list[tuple[object, ...]], text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as caught:
        load_tokenizer(save(tmp_path, lines))
    assert caught.value.file == str(tmp_path / "tokenizer.jsonl")


def test_long_texts_are_cut_fast() -> None:
    """A megabyte takes a few seconds: a twentieth of it a twentieth of that, on a busy machine, too."""
    rng = random.Random(5)
    words = {"".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(20000)}
    lines = LINES + [(" " + word, -rng.uniform(5, 15), "NORMAL") for word in sorted(words)]
    lines += [(letter, -12.0, "NORMAL") for letter in "etaoinshrdlu"]
    tokenizer, text = made(lines), " ".join(rng.choices(sorted(words), k=8000))
    tokenizer.encode("a")
    before = time.thread_time()
    ids = tokenizer.encode(text).ids
    assert time.thread_time() - before < 5e-6 * len(text) * 4
    assert tokenizer.texts(()).decode(ids, False) == text


def test_a_vocabulary_of_a_gguf_file() -> None:
    """The same ids as tokenizer.jsonl gives, special tokens cut out of the text."""
    kinds = {"NORMAL": 1, "UNKNOWN": 2, "CONTROL": 3, "BYTE": 6}
    metadata = {
        "tokenizer.ggml.model": "plamo2", "tokenizer.ggml.tokens": [line[0] for line in LINES],
        "tokenizer.ggml.scores": [line[1] for line in LINES], "tokenizer.ggml.token_type": [kinds[line[2]] for line in LINES],
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    tokenizer, plain = from_metadata(metadata, "vocabulary.gguf"), made(bos=1)
    for text in ("abcab", "日本語 a", "é\n<0xabc", "", "xy" * 20):
        ids = tokenizer.encode(text)
        assert ids == plain.encode(text).ids
        assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.encode("a<|plamo:op|>a").count(4) == 1
    with pytest.raises(CheckpointError, match="scores"):
        from_metadata({**metadata, "tokenizer.ggml.scores": [0.0]}, "vocabulary.gguf")
