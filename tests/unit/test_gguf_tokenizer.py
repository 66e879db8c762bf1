"""Vocabularies of GGUF files give the ids of llama.cpp: small trained ones of every kind, and the demo model's."""

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmpy import _core
from llmpy.errors import CheckpointError, UnsupportedError
from llmpy.hub import resolve
from llmpy.text.gguf_pre_tokenizers import KINDS
from llmpy.text.gguf_tokenizer import from_metadata
from llmpy.text.tokenizer import Tokenizer, load_tokenizer

Reference = Callable[[str, bool], list[int]]

PARTS = [
    *(
        "a",
        "b",
        "Z",
        "é",
        "ß",
        "\u017f",
        "K",
        "Ǆ",
        "ﬁ",
        "'",
        "'s",
        "'S",
        "'ll",
        "'LL",
        "don't",
        "I'VE",
        "hello",
        "Hello",
        "HELLO",
    ),
    *(" ", "  ", "     ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x85", "\u200b", "\x04", "\x1d", "\x00"),
    *(
        "1",
        "12",
        "1234567",
        "٣",
        "½",
        "Ⅷ",
        "!",
        "~",
        "$",
        "...",
        "?!",
        "_",
        "-",
        "==",
        "->",
        "{}",
        "code()",
        "# x",
        "//",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<|",
        "|>",
        "<s>",
        "</s>",
        "<unk>",
        "<0x0A>",
        "中",
        "文",
        "中文字",
        "あ",
        "カ",
        "한국",
    ),
    *(
        "русский",
        "हिन्दी",
        "עברית",
        "العربية",
        "ไทย",
        "Ελλ",
        "😀",
        "👩‍👩‍👧",
        "\u0301",
        "\ufffd",
        "\u2581",
        "\U0001d400",
        "𐐀",
        "\ue000",
    ),
]
SENTENCES = [
    "The capital of France is Paris, isn't it?  They'll say: 3.14159 and 1,000,000!",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(10))\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "北京是中国的首都。东京は日本の首都です。서울은 대한민국의 수도입니다。",
    "Съешь же ещё этих мягких французских булок; हिन्दी में लिखा। שלום עולם",
    "\t\tindented\r\nlines   \n with trailing blanks   ",
    "emoji 😀😃 👩‍👩‍👧‍👦 flags 🇩🇪 and e\u0301 combining",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of parts that meet in all orders, with some code points from anywhere."""
    rng = random.Random(seed)

    def part() -> str:
        if rng.random() < 0.85:
            return rng.choice(PARTS)
        return chr(rng.choice([rng.randint(1, 0x2FF), rng.randint(0x300, 0xD7FF), rng.randint(0xE000, 0x10FFFF)]))

    return ["".join(part() for _ in range(rng.randint(1, 14))) for _ in range(count)]


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file without tensors."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ours(path: Path) -> Tokenizer:
    return load_tokenizer(resolve(path), _core.Checkpoint([str(path)]))


def llama_cpp_of(path: Path) -> Reference:
    """llama.cpp's tokenizer of a file."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def tokenize(text: str, add_special_tokens: bool = True) -> list[int]:
        return list(model.tokenize(text.encode(), add_bos=add_special_tokens, special=True))

    return tokenize


def assert_equal_ids(tokenizer: Tokenizer, reference: Reference, texts: list[str]) -> None:
    wrong = [text for text in texts if tokenizer.encode(text) != reference(text, True)]
    found = [(text, tokenizer.encode(text), reference(text, True)) for text in wrong[:3]]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ: {found}"


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """A byte-level vocabulary with merges across all word boundaries, so that the ids show every cut."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    trained.train_from_iterator(random_texts(2000, 7) + SENTENCES * 20, trainer)
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    import json

    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_byte_level_kinds(kind: str, byte_level: dict[str, Any], tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", {**byte_level, "pre": kind})
    try:
        reference = llama_cpp_of(path)
    except ValueError:
        pytest.skip(f"this llama.cpp does not know {kind}")
    assert_equal_ids(ours(path), reference, SENTENCES + random_texts(600, 11))


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_bos_and_eos(flags: dict[str, bool], byte_level: dict[str, Any], tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", {**byte_level, "pre": "llama-bpe", **flags})
    tokenizer = ours(path)
    assert_equal_ids(tokenizer, llama_cpp_of(path), ["hello", "", "<s>hello"])
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *bare, *([2] if "add_eos_token" in flags else [])]
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.eos_token_ids) == ("<s>", 2, [2, 4])


def test_bytes_without_a_token_vanish(byte_level: dict[str, Any], tmp_path: Path) -> None:
    place = byte_level["tokens"].index("Ą")  # byte 4
    tokens = [*byte_level["tokens"][:place], "<gone>", *byte_level["tokens"][place + 1 :]]
    merges = [merge for merge in byte_level["merges"] if "Ą" not in merge]
    kept = {*tokens}
    merges = [merge for merge in merges if merge.replace(" ", "") in kept]
    path = write_vocabulary(tmp_path / "v.gguf", {**byte_level, "tokens": tokens, "merges": merges, "pre": "smollm"})
    tokenizer = ours(path)
    assert_equal_ids(tokenizer, llama_cpp_of(path), ["a\x04b", "!\x04!", "\x04", " \x04 x"])
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


SPACE = "▁"


def spm_metadata(seed: int, equal_scores: bool = False, size: int = 900) -> dict[str, Any]:
    """A SentencePiece-style vocabulary: random substrings of texts, random scores, byte tokens."""
    rng = random.Random(seed)
    texts = [SPACE + text.replace(" ", SPACE) for text in SENTENCES + random_texts(300, seed)]
    characters = sorted({char for text in texts for char in text if ord(char) < 0x3000})[: size // 3]
    pieces: dict[str, None] = {}
    while len(pieces) < size:
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randint(2, 5)]
        if len(piece) > 1 and "\x00" not in piece and SPACE not in piece[1:].lstrip(SPACE):
            pieces[piece] = None
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    known = {*special, *byte_tokens}
    normal = [piece for piece in dict.fromkeys([*characters, *pieces]) if piece not in known and piece != "\x00"]
    tokens = [*special, *byte_tokens, *normal, "<user>", "\t\t"]
    scores = [0.0] * 259 + [-float(rng.randint(0, 5) if equal_scores else place) for place in range(len(normal))]
    if not equal_scores:
        rng.shuffle(scores)
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [*scores, 0.0, 0.0],
        "token_type": [2, 3, 3, *([6] * 256), *([1] * len(normal)), 4, 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.mark.parametrize("flags", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("equal_scores", [False, True])
def test_sentencepiece(flags: dict[str, bool], equal_scores: bool, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", {**spm_metadata(3, equal_scores), **flags})
    texts = [*SENTENCES, *random_texts(1500, 5), "", " ", "a" * 300, "aab" * 50, "<user>x<s> y</s>", "ab" * 99 + " c"]
    assert_equal_ids(ours(path), llama_cpp_of(path), [text for text in texts if "\x00" not in text])


def test_sentencepiece_token_across_words(tmp_path: Path) -> None:
    metadata = spm_metadata(4)
    place = len(metadata["tokens"]) - 3
    tokens = list(metadata["tokens"])
    tokens[place] = f"a{SPACE}b"
    tokens[place - 1 : place] = [] if f"a{SPACE}" in tokens else [f"a{SPACE}"]
    path = write_vocabulary(tmp_path / "v.gguf", {**metadata, "tokens": tokens})
    assert_equal_ids(ours(path), llama_cpp_of(path), ["a b", "xa b a b", "a b a", *SENTENCES])


def test_sentencepiece_texts(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", spm_metadata(3))
    tokenizer = ours(path)
    for text in SENTENCES + random_texts(200, 9):
        ids = tokenizer.encode(text)
        if not any(mark in text for mark in ("<s>", "</s>", "<unk>", "▁", "\t\t", "<0x0A>")):
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
        ids, ends = tokenizer.encode_with_ends(text)
        assert ids == tokenizer.encode(text)
        assert len(ends) == len(ids)
        assert ends == sorted(ends)
        assert max(ends, default=0) == len(text)
    assert tokenizer.special_tokens == ["<unk>", "<s>", "</s>"]
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.vocab_size == len(tokenizer) == tokenizer.max_token_id + 1


GOLDEN = {
    "Hello world": [19556, 905],
    "The capital of France is": [504, 3575, 282, 4649, 314],
}


def test_demo_model_golden(demo_model: Path) -> None:
    tokenizer = ours(demo_model)
    for text, ids in GOLDEN.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == [2, 0]
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.chat_template is not None


def test_demo_model_equals_llama_cpp(demo_model: Path) -> None:
    assert_equal_ids(ours(demo_model), llama_cpp_of(demo_model), SENTENCES + random_texts(5000, 1))


def test_demo_model_loads_quickly(demo_model: Path) -> None:
    """The load is fast compared with the time to hash the file."""
    times = []
    for _ in range(5):
        start = time.process_time()
        ours(demo_model)
        loaded = time.process_time()
        hashlib.sha256(demo_model.read_bytes())
        times.append((loaded - start, time.process_time() - loaded))
    assert min(loaded / hashed for loaded, hashed in times) < 3, times


def test_demo_model_later_unicode(demo_model: Path) -> None:
    texts = [f"{chr(code)}'s {chr(code)}1" for code in range(0x80, 0x20000, 7) if not 0xD800 <= code < 0xE000]
    assert_equal_ids(ours(demo_model), llama_cpp_of(demo_model), texts)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"pre": "of-another-world"}, UnsupportedError, "tokenizer.ggml.pre is 'of-another-world'"),
        ({"model": "rwkv"}, UnsupportedError, "tokenizer.ggml.model is 'rwkv'"),
        ({"model": None}, CheckpointError, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, CheckpointError, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, CheckpointError, "tokens is empty"),
        ({"tokens": [1, 2]}, CheckpointError, "tokens wanted an array of str"),
        ({"tokens": ["a", "b", "a"]}, CheckpointError, "tokens holds 'a' twice"),
        ({"merges": None}, CheckpointError, "merges is missing"),
        ({"merges": ["q zz"]}, CheckpointError, "contradict each other"),
        ({"merges": ["nospace"]}, CheckpointError, "contradict each other"),
        ({"token_type": [1]}, CheckpointError, "token_type wanted 3 entries, have 1"),
        ({"add_bos_token": True}, CheckpointError, "bos_token_id is missing though"),
        ({"model": "llama", "scores": [1.0]}, CheckpointError, "scores wanted 3 entries"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], **change}
    with pytest.raises(error, match=text):
        from_metadata({f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}, "x.gguf")


def test_missing_kind_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata: dict[str, Any] = {"model": "gpt2", "tokens": ["a"], "merges": []}
    from_metadata({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "x.gguf")
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_named_templates() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "one",
        "tokenizer.chat_template.tool_use": "two",
    }
    tokenizer = from_metadata(metadata, "x.gguf")
    assert tokenizer.chat_template == "one"
    assert tokenizer.chat_templates["tool_use"] == "two"
