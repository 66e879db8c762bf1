"""The bytes that each token id adds to a text, for decoders that only join bytes (byte-level and SentencePiece-style)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE_MARK = "▁"


def byte_characters() -> list[str]:
    """The printable character for each byte in byte-level vocabularies (GPT-2's table)."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in kept)
    places = {byte: 256 + place for place, byte in enumerate(moved)}
    return [chr(places.get(byte, byte)) for byte in range(256)]


_TO_LATIN = {code: "\ufffd" for code in range(256)} | {ord(char): chr(byte) for byte, char in enumerate(byte_characters())}


def byte_level_text(token: str) -> bytes:
    """The bytes of a byte-level token; if the token has other characters, the bytes of its name."""
    try:
        return token.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def byte_fallback(token: str) -> bytes | None:
    """The byte of a token like <0x0A>; None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


class TokenTexts:
    """Text bytes of every id.

    Args:
        table: Text bytes by id; b"" for ids without a token.
        strip_leading: Whether one leading space of a whole text is dropped.
        special: Ids that `skip_special_tokens` hides.
        added: Ids of added tokens, special or not.
    """

    def __init__(self, table: list[bytes], strip_leading: bool, special: Iterable[int], added: Iterable[int]) -> None:
        self.table = table
        self.strip_leading = strip_leading
        self.special = frozenset(special)
        self.added = frozenset(added)

    @cached_property
    def hidden(self) -> list[bytes]:
        """The table with special tokens empty."""
        table = list(self.table)
        for token in self.special:
            if token < len(table):
                table[token] = b""
        return table

    def join(self, ids: Iterable[int], skip_special: bool) -> bytes:
        """Bytes of the ids, including a leading space; unknown ids add nothing."""
        table = self.hidden if skip_special else self.table
        size = len(table)
        return b"".join([table[token] for token in ids if 0 <= token < size])

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """Text of the ids."""
        data = self.join(ids, skip_special)
        if self.strip_leading and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")


def of_backend(backend: Backend) -> TokenTexts | None:
    """The texts of a tokenizers.Tokenizer's ids, or None if its decoder does more than join bytes."""
    rules = _rules(backend)
    if rules is None:
        return None
    byte_level, replaced, falls_back, strip = rules
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, place in vocabulary.items():
        if byte_level:
            table[place] = byte_level_text(token)
            continue
        if replaced:
            token = token.replace(replaced, " ")
        table[place] = (byte_fallback(token) if falls_back else None) or token.encode()
    added: Mapping[int, Any] = backend.get_added_tokens_decoder()
    return TokenTexts(table, strip, (place for place, token in added.items() if token.special), added)


def _rules(backend: Backend) -> tuple[bool, str, bool, bool] | None:
    """(byte-level, character that becomes a space, byte fallback, leading space dropped) of a decoder."""
    if backend.decoder is None:
        return None
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, "", False, False
    replaced, falls_back, strip, fused = "", False, False, False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and step["content"] == " " and not (replaced or falls_back):
            replaced = step["pattern"].get("String", "")
            if not replaced:
                return None
        elif kind == "Metaspace" and step["prepend_scheme"] == "never" and not (replaced or falls_back):
            replaced = step["replacement"]
        elif kind == "ByteFallback":
            falls_back = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            strip = True
        else:
            return None
    return False, replaced, falls_back, strip


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's steps, sequences flattened."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
