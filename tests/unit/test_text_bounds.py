"""Texts that cannot fit are refused before they are tokenised, texts that fit never; other threads run meanwhile."""

import random
import time

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from llmpy.text import bounds
from llmpy.text.bounds import exceeds_by_length, surely_exceeds, text_bytes
from llmpy.text.token_texts import byte_characters, of_backend
from llmpy.text.tokenizer import Tokenizer

WORDS = {"he": 256, "hello": 257, "Ġhello": 258, "Ġ" * 20: 259}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(normalizer=None, steps=(), added=(), bytes_missing=()):
    letters = {char: place for place, char in enumerate(byte_characters()) if place not in bytes_missing}
    merges = [("h", "e"), *[("Ġ" * n, "Ġ") for n in range(1, 3)]]
    words = {"he": 256, "ĠĠ": 257, "ĠĠĠ": 258}
    backend = tokenizers.Tokenizer(models.BPE({**letters, **words}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken("<|a_long_mark|>", normalized=False), *added])
    return backend


def with_bytes(normalizer=None, bytes_known=256):
    """As Llama 2: characters without a token are bytes."""
    vocabulary = {name: place for name, place in BYTES.items() if place < bytes_known}
    vocabulary |= {"▁": 256, "a": 257, "▁a": 258, "aaaa": 259, "aa": 260, "<unk>": 261}
    merges = [("a", "a"), ("aa", "aa"), ("▁", "a")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def words():
    """As BERT: white space is dropped, an unknown word is one token."""
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def tokenizer_of(backend):
    return Tokenizer(backend, of_backend(backend), [], {}, [], {})


KINDS = {
    "byte level": (lambda: byte_level(), 15),
    "cut": (lambda: byte_level(steps=[pre_tokenizers.Split(Regex(r"\s+"), "isolated")]), 15),
    "nfc": (lambda: byte_level(normalizers.NFC()), 60),
    "lower": (lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])), 24 * 15),
    "shorter": (lambda: byte_level(normalizers.Replace("hello", "he")), 45),
    "bytes": (lambda: with_bytes(), 6),
    "strip": (lambda: byte_level(normalizers.Strip()), None),
    "replace": (lambda: byte_level(normalizers.Replace(Regex(" +"), " ")), None),
    "removed text": (lambda: byte_level(normalizers.Replace("x", "")), None),
    "removed": (lambda: byte_level(steps=[pre_tokenizers.Split("-", "removed")]), None),
    "white space": (lambda: byte_level(steps=[pre_tokenizers.WhitespaceSplit()]), None),
    "greedy mark": (lambda: byte_level(added=[AddedToken("<mask>", lstrip=True)]), None),
    "missing byte": (lambda: byte_level(bytes_missing=(4,)), None),
    "missing bytes": (lambda: with_bytes(bytes_known=200), None),
    "words": (words, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_token(kind):
    make, most = KINDS[kind]
    assert tokenizer_of(make()).max_token_bytes == most


def test_other_backends():
    """GGUF tokenizers declare whether they keep all text; a tokenizer that does not has no bound."""
    for backend in (lambda: byte_level()), words:
        inner = backend()

        class Own:
            keeps_text = True
            pre_tokenizer = None

            def get_vocab(self, with_added_tokens=True, inner=inner):
                return inner.get_vocab(with_added_tokens)

        own = Own()
        assert Tokenizer(own, None, [], {}, [], {}).max_token_bytes == max(len(name.encode()) for name in inner.get_vocab())
        Own.keeps_text = False
        del Own.pre_tokenizer
        assert Tokenizer(own, None, [], {}, [], {}).max_token_bytes is None


def pieces(kind):
    common = ["a", "he", "hello", " ", "  ", " " * 40, "x", "-", "<mask>", "<|a_long_mark|>", "字", "😀", "\x04", "é"]
    return [*common, "e\u0301", "\u212a", "\u03b9\u0308\u0301", "\u1fbe\u0308\u0301", "ﷺ", "\U0001d400", "\n", "K"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_fits_is_never_refused(kind, monkeypatch):
    """Random texts of the pieces that shrink most, with the tightest bounds."""
    monkeypatch.setattr(bounds, "USUAL_CHARS", 0)
    monkeypatch.setattr(bounds, "LEAST_CHARS", 60)
    tokenizer, chance = tokenizer_of(KINDS[kind][0]()), random.Random(7)
    choices = pieces(kind)
    for _ in range(300):
        few = chance.sample(choices, chance.randint(1, 3))
        text = "".join(chance.choices(few, k=chance.randint(1, 200)))
        count = len(tokenizer.encode(text))
        assert not surely_exceeds(tokenizer, text, max(count, 4)), (text, count)


@pytest.mark.parametrize("kind", ["byte level", "words", "bytes", "missing byte"])
def test_long_texts_are_refused_early(kind, monkeypatch):
    tokenizer = tokenizer_of(KINDS[kind][0]())
    seen = []
    encode = Tokenizer._encodings

    def counted(self, texts, special):
        seen.extend(texts)
        return encode(self, texts, special)

    monkeypatch.setattr(Tokenizer, "_encodings", counted)
    assert surely_exceeds(tokenizer, "a b " * 500_000, 1000)
    assert sum(map(len, seen)) <= 40_000
    if tokenizer.max_token_bytes:
        assert not seen and exceeds_by_length(tokenizer, "a" * 60_001, 1000)
    else:
        assert not exceeds_by_length(tokenizer, "a b " * 500_000, 1000)


def test_texts_up_to_the_bound_are_looked_at(monkeypatch):
    monkeypatch.setattr(bounds, "USUAL_CHARS", 1)
    tokenizer = tokenizer_of(byte_level())
    mark = "<|a_long_mark|>"
    assert tokenizer.encode(mark * 1000) == [tokenizer.encode(mark)[0]] * 1000
    assert not surely_exceeds(tokenizer, mark * 1000, 1000)
    assert exceeds_by_length(tokenizer, mark * 1000 + "a", 1000)
    assert exceeds_by_length(tokenizer, "字" * 5001, 1000) and not exceeds_by_length(tokenizer, "字" * 5000, 1000)
    assert text_bytes("字a") == 4 and text_bytes("abc") == 3 and text_bytes("\ud800") == 1


CALLS = {
    "encode": lambda tokenizer, text: tokenizer.encode(text),
    "encode_pair": lambda tokenizer, text: tokenizer.encode_pair(text, text),
    "encode_with_ends": lambda tokenizer, text: tokenizer.encode_with_ends(text),
    "encode_batch": lambda tokenizer, text: tokenizer.encode_batch([text]),
    "count": lambda tokenizer, text: tokenizer.count(text),
    "call": lambda tokenizer, text: tokenizer(text),
    "template": lambda tokenizer, text: tokenizer.apply_chat_template([{"role": "user", "content": text}]),
    "mask": lambda tokenizer, text: tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], return_assistant_tokens_mask=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_threads_run_meanwhile(name, longest_stall):
    """The longest stall of another thread is compared with the time of the call."""
    tokenizer = tokenizer_of(byte_level(normalizers.NFC(), [pre_tokenizers.Split(Regex(r"\s+"), "isolated")]))
    tokenizer.chat_templates["default"] = "{{ messages[0].content }}"
    text = "hello there 字字 " * 20_000
    found = []
    for _ in range(5):  # what holds the GIL does so each time, other work on a busy machine does not
        begin = time.perf_counter()
        with longest_stall() as stall:
            CALLS[name](tokenizer, text)
        found.append((stall.seconds, time.perf_counter() - begin))
        if stall.seconds < max(0.4 * found[-1][1], 0.15):
            return
    pytest.fail(f"stalls, and the time of the call: {found}")


def test_the_stall_is_seen(longest_stall):
    """A call that blocks other threads is detected."""
    numbers = list(range(3_000_000))
    with longest_stall() as stall:
        sum(numbers * 20)
    assert stall.seconds > 0.05
