"""Hidden tokens, ids of added tokens, unknown tokens, and the mask of the assistant's tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmpy.hub import resolve
from llmpy.text import token_texts
from llmpy.text.chat import token_mask
from llmpy.text.tokenizer import Tokenizer, load_tokenizer


def load(directory: Path, settings: dict[str, Any], unknown: str | None = None) -> Tokenizer:
    """A tokenizer of single bytes, with tokenizer_config.json as given."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    backend = Library(models.BPE({char: place for place, char in enumerate(token_texts.byte_characters())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([unknown] if unknown else [])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(resolve(directory, weights=False))


def added(*texts: str, special: bool) -> list[dict[str, Any]]:
    return [{"content": text, "special": special, "normalized": False} for text in texts]


def test_added_tokens_get_their_ids_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Whatever the order in the file, and by number: 10 comes behind 9."""
    first, second, third = added("<a>", "<b>", "<c>", special=True)
    tokenizer = load(tmp_path, {"added_tokens_decoder": {"1000": third, "257": second, "256": first}})
    assert tokenizer.convert_tokens_to_ids(["<a>", "<b>", "<c>"]) == [256, 257, 258]


def test_only_special_tokens_are_hidden(tmp_path: Path) -> None:
    (shown,), (hidden,) = added("<tool>", special=False), added("<end>", special=True)
    tokenizer = load(tmp_path, {"added_tokens_decoder": {"256": shown, "257": hidden}})
    assert tokenizer.special_ids == [257]
    assert tokenizer.special_tokens == ["<end>"]
    assert tokenizer.decode(tokenizer.encode("a<tool>b<end>c"), skip_special_tokens=True) == "a<tool>bc"


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_an_unknown_entry_becomes_the_unknown_token(unknown: str | None, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {"unk_token": unknown} if unknown else {}, unknown)
    expected = 256 if unknown else None
    assert tokenizer.convert_tokens_to_ids("no such entry") == expected
    assert tokenizer.convert_tokens_to_ids(["A", "no such entry"]) == [tokenizer.encode("A")[0], expected]


def test_a_byte_token_stands_for_its_byte() -> None:
    for byte in range(256):
        assert token_texts.byte_fallback(f"<0x{byte:02X}>") == bytes([byte])
    for other in ("<0x1>", "<0x123>", "<0xGG>", "0x41", "<1x41>"):
        assert token_texts.byte_fallback(other) is None


def test_the_assistants_mask_marks_every_token_that_touches_its_text() -> None:
    """The assistant wrote characters 3 to 6 and 9 to 11."""
    offsets = [(0, 3), (2, 4), (3, 6), (5, 8), (6, 9), (8, 12), (11, 13), (4, 4)]
    assert token_mask(offsets, [(3, 6), (9, 11)]) == [0, 1, 1, 1, 0, 1, 0, 1]
