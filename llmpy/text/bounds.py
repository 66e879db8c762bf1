"""Bounds on the text of a token, to refuse a text that cannot fit before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .token_texts import byte_characters

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

USUAL_CHARS = 8
"""Texts with at most this many characters per token of room are not checked; usual texts have 2 to 5 per token."""
LEAST_CHARS = 32768
"""Least number of characters in a part that is tokenised alone."""
LONGEST_UTF8 = 4

SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 8, "NFKD": 8, "Lowercase": 3, "ByteLevel": 1, "Prepend": 1}
"""Normalizers that keep every character -> the largest factor by which they shorten a text (Unicode 15: 3.5, 3, 4, 4, 3)."""
KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
"""Pre-tokenizers that keep every character."""
CUTTING = {"Split", "Punctuation"}
"""Pre-tokenizers that keep every character unless their behavior is "Removed"."""


def max_token_bytes(tokenizer: Tokenizer) -> int | None:
    """Most UTF-8 bytes of text that one token can represent.

    The bound is the length of the longest token, added tokens included, times the normalizer's shrink factor. A tokenizer that
    drops text (white space between words), or that makes one token of an unknown word, has no bound.

    Args:
        tokenizer: The tokenizer.

    Returns:
        The bound in bytes; None: no bound.
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
    """Whether a text certainly has more than `tokens` tokens, at about the cost of tokenising that many.

    The result is never True for a text that fits. A text with more bytes than `tokens` times the longest token exceeds by its
    length alone. Otherwise parts of the text are tokenised one after another. A cut can split the token across it into as many
    tokens as it has bytes, and changes a few tokens next to it. White space at a cut may belong to one token with all of it. So
    the function strips the parts, subtracts the longest token's bytes for each cut, and asks for more than twice `tokens`.

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
    """Whether a text has more bytes than `tokens` tokens can represent; does not tokenise."""
    if len(text) <= USUAL_CHARS * tokens:  # the usual case does not need the vocabulary
        return False
    most = tokenizer.max_token_bytes
    if most is None or LONGEST_UTF8 * len(text) <= most * tokens:
        return False
    return len(text) > most * tokens or text_bytes(text) > most * tokens


def text_bytes(text: str) -> int:
    """Bytes of a text as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _parts(text: str, size: int) -> Iterator[str]:
    """Parts of about `size` characters, cut before white space if possible."""
    start = 0
    while start < len(text):
        end = start + size
        near = text.rfind(" ", end - size // 8, end) if end < len(text) else -1
        end = near if near > start else end
        yield text[start:end]
        start = end


def _shrinking(backend: Any) -> int | None:
    """The largest factor by which a `tokenizers.Tokenizer` shortens a text before cutting it into tokens; None: no bound."""
    if not hasattr(backend, "pre_tokenizer") or not _keeps_bytes(backend):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token absorbs all adjacent white space
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
    """The shrink factor of a Replace normalizer; None unless it replaces a fixed text by a non-empty text."""
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
