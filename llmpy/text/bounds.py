"""How much text a token can stand for, so that a text which cannot fit is refused before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .token_texts import byte_characters

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

USUAL_CHARS = 8
"""Characters a token of a text that is not looked at more closely; texts have 2 to 5."""
LEAST_CHARS = 32768
"""Least length of a part that is tokenised by itself."""
LONGEST_UTF8 = 4

SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 8, "NFKD": 8, "Lowercase": 3, "ByteLevel": 1, "Prepend": 1}
"""Normalizers that keep every character, by how many times shorter they make a text at most (Unicode 15: 3.5, 3, 4, 4, 3)."""
KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
"""Pre-tokenizers that keep every character."""
CUTTING = {"Split", "Punctuation"}
"""Those that keep every character unless their behavior is "Removed"."""


def max_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Most UTF-8 bytes of a text that one of its tokens can stand for.

    It is the length of the longest token, added tokens included, times what the normalizer can shrink a text by. A tokenizer
    that drops text (white space between words), or that makes one token of an unknown word, has no such number.

    Args:
        tokenizer: The tokenizer.

    Returns:
        The bytes, or None.
    """
    backend, texts = tokenizer.backend, tokenizer.texts
    factor = 1 if getattr(backend, "keeps_text", False) else _shrinking(backend)
    if factor is None:
        return None
    if texts is not None and _is_byte_level(backend):
        return factor * max(map(len, texts.table), default=1)
    return factor * _longest_name(tokenizer)


def _longest_name(tokenizer: Tokenizer) -> int:
    """Bytes of the longest vocabulary entry."""
    return max((len(name.encode("utf-8", "replace")) for name in tokenizer.get_vocab()), default=1)


def surely_exceeds(tokenizer: Tokenizer, text: str, tokens: int) -> bool:
    """Whether a text has more than so many tokens, told at the cost of tokenising about so many.

    A text that fits is never said to exceed. By its length alone a text exceeds that has more bytes than so many of the longest
    tokens. Otherwise parts of it are tokenised one after another. A cut can make of the token that it goes through as many
    tokens as that one has bytes, and changes a few beside it; white space at a cut may belong to a token that takes all of it.
    So parts with more than twice as many tokens, beside all that, leave no doubt.

    Args:
        tokenizer: The tokenizer.
        text: The text.
        tokens: Most tokens that fit.
    """
    if exceeds_by_length(tokenizer, text, tokens):
        return True
    if len(text) <= USUAL_CHARS * tokens:
        return False
    count, cut = 0, _longest_name(tokenizer)
    for part in _parts(text, max(USUAL_CHARS * tokens, LEAST_CHARS)):
        count += tokenizer.count(part.strip()) - cut
        if count > 2 * tokens:
            return True
    return False


def exceeds_by_length(tokenizer: Tokenizer, text: str, tokens: int) -> bool:
    """Whether a text has more bytes than so many tokens can stand for; nothing is tokenised."""
    if len(text) <= USUAL_CHARS * tokens:  # the usual case needs no look at the vocabulary
        return False
    most = tokenizer.max_token_bytes
    if most is None or LONGEST_UTF8 * len(text) <= most * tokens:
        return False
    return len(text) > most * tokens or text_bytes(text) > most * tokens


def text_bytes(text: str) -> int:
    """Bytes of a text as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _parts(text: str, size: int) -> Iterator[str]:
    """Parts of about so many characters, cut before white space where there is some."""
    start = 0
    while start < len(text):
        end = start + size
        near = text.rfind(" ", end - size // 8, end) if end < len(text) else -1
        end = near if near > start else end
        yield text[start:end]
        start = end


def _shrinking(backend: Any) -> int | None:
    """How many times shorter a `tokenizers.Tokenizer` makes a text before it is cut into tokens; None: no bound."""
    if not hasattr(backend, "pre_tokenizer") or not _keeps_bytes(backend):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # one token takes all the white space beside it
    factor = 1
    for step in _steps(backend.normalizer, "normalizers"):
        found = _replacing(step) if step["type"] == "Replace" else SHRINKING.get(step["type"])
        if found is None:
            return None
        factor *= found
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        cuts = step["type"] in CUTTING and step.get("behavior") != "Removed"
        if not cuts and step["type"] not in KEEPING:
            return None
    return factor


def _replacing(step: dict[str, Any]) -> int | None:
    """The same of a replacement: one of fixed text by some text has a bound."""
    pattern, content = step["pattern"].get("String"), step["content"]
    return None if not pattern or not content else -(-len(pattern.encode()) // len(content.encode()))


def _keeps_bytes(backend: Any) -> bool:
    """Whether every byte of a text becomes a part of a token: the vocabulary has a token for each byte."""
    if type(backend.model).__name__ != "BPE":
        return False
    by_level = _is_byte_level(backend)
    names = byte_characters() if by_level else [f"<0x{byte:02X}>" for byte in range(256)]
    return bool(by_level or backend.model.byte_fallback) and all(backend.token_to_id(name) is not None for name in names)


def _is_byte_level(backend: Any) -> bool:
    """Whether a `tokenizers.Tokenizer` writes bytes as characters, so that a token's text is as long as its bytes."""
    if not hasattr(backend, "pre_tokenizer"):
        return False
    parts = ((backend.pre_tokenizer, "pretokenizers"), (backend.normalizer, "normalizers"))
    return any(step["type"] == "ByteLevel" for part, key in parts for step in _steps(part, key))


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, sequences flattened."""
    return [] if part is None else _flat(json.loads(part.__getstate__()), key)


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [step for one in state[key] for step in _flat(one, key)] if state["type"] == "Sequence" else [state]
