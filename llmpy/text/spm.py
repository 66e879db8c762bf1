"""SentencePiece-style tokenizing as in llama.cpp: adjacent symbols are merged in the order of the merged token's score.

Two symbols merge if their joint text is a token; the highest score goes first, then the leftmost pair. A final symbol that is
not a token becomes byte tokens. Special tokens are cut out first, the longest before the shorter ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .token_texts import SPACE_MARK, TokenTexts

_MOST_CACHED_WORDS = 1 << 16
_LONGEST_CACHED_WORD = 64


class Piece(NamedTuple):
    """Ids of a word, and the character span of each id in the word."""

    ids: list[int]
    spans: list[tuple[int, int]]


class SpmEncoding:
    """Ids of a text; character spans are computed on demand."""

    def __init__(self, ids: list[int], parts: list[tuple[int, Piece]], length: int) -> None:
        self.ids = ids
        self._parts = parts
        self._length = length

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Spans of characters; (0, 0) for ids that were added."""
        found = []
        for start, piece in self._parts:
            for low, high in piece.spans:
                found.append((max(low + start, 0), max(high + start, 0)))
        return found


class SpmTokenizer:
    """A tokenizer of SentencePiece's BPE kind.

    Args:
        tokens: Vocabulary entries by id, spaces as "▁".
        scores: The score of each entry; higher scores merge first.
        texts: Text bytes of each entry.
        cut_out: Ids of tokens that are cut out of a text first.
        byte_ids: Id of the token of each byte; None: the byte has no token.
        unknown: Id for text without a token or byte tokens; None = such text is dropped.
        bos, eos: Ids added with `add_special_tokens`; None = none.
        add_space_prefix: Put a space before a text, and after a special token.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        texts: TokenTexts,
        *,
        cut_out: Sequence[int],
        byte_ids: Sequence[int | None],
        unknown: int | None,
        bos: int | None,
        eos: int | None,
        add_space_prefix: bool,
    ) -> None:
        self._tokens = tokens
        self._ids = {token: place for place, token in enumerate(tokens)}
        self._scores = scores
        self._texts = texts
        self._cut_out = sorted(((tokens[token], token) for token in cut_out), key=lambda one: -len(one[0].encode()))
        self._byte_ids = byte_ids
        self._unknown = unknown
        self._bos, self._eos = bos, eos
        self._prefix = SPACE_MARK if add_space_prefix else ""
        # If no token crosses the start of a word, words are merged one by one and cached.
        inside = re.compile(f"[^{SPACE_MARK}]{SPACE_MARK}")
        is_split = not any(SPACE_MARK in token and inside.search(token) for token in tokens)
        pattern = f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+" if is_split else "(?s:.+)"
        self._words = re.compile(pattern).findall
        self._cache: dict[str, Piece] = {}

    @property
    def keeps_text(self) -> bool:
        """Whether every character becomes a token or a part of one."""
        return self._unknown is not None or None not in self._byte_ids

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> SpmEncoding:
        """Ids of a text."""
        parts: list[tuple[int, Piece]] = []
        if add_special_tokens and self._bos is not None:
            parts.append((0, Piece([self._bos], [(0, 0)])))
        for start, text, token in self._fragments(sequence):
            if token is None:
                place = start - len(self._prefix)
                for word in self._words(self._prefix + text.replace(" ", SPACE_MARK)):
                    parts.append((place, self._word(word)))
                    place += len(word)
            else:
                parts.append((start, Piece([token], [(0, len(text))])))
        if add_special_tokens and self._eos is not None:
            parts.append((0, Piece([self._eos], [(0, 0)])))
        return SpmEncoding([token for _, piece in parts for token in piece.ids], parts, len(sequence))

    def encode_batch(self, input: Sequence[str], *, add_special_tokens: bool = True) -> list[SpmEncoding]:
        """Ids of several texts."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in input]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self._texts.decode(ids, skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        """Vocabulary entry of an id."""
        return self._tokens[id] if 0 <= id < len(self._tokens) else None

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry."""
        return self._ids.get(token)

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Number of vocabulary entries."""
        return len(self._tokens)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Ids by vocabulary entry."""
        return dict(self._ids)

    def _fragments(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        """(start, text, id) of special tokens, (start, text, None) of the texts between them."""
        parts: list[tuple[int, str, int | None]] = [(0, text, None)] if text else []
        for name, token in self._cut_out:
            if name in text:
                parts = [piece for part in parts for piece in _cut(part, name, token)]
        return iter(parts)

    def _word(self, word: str) -> Piece:
        """Ids of a word; uses the cache."""
        found = self._cache.get(word)
        if found is None:
            found = self._merge(word)
            if len(word) <= _LONGEST_CACHED_WORD:
                if len(self._cache) >= _MOST_CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = found
        return found

    def _merge(self, word: str) -> Piece:
        """Ids of a word, by merging."""
        size = len(word)
        lengths = [1] * size  # length of the symbol that begins here; 0 = merged into a symbol to the left
        before = list(range(-1, size - 1))
        queue = [pair for left in range(size - 1) if (pair := self._pair(word, left, left + 1, left + 2))]
        heapify(queue)
        while queue:
            _, left, right, end = heappop(queue)
            # A pair is outdated if one of its symbols was merged away or has grown.
            if not lengths[left] or left + lengths[left] != right or not lengths[right] or right + lengths[right] != end:
                continue
            lengths[left], lengths[right] = end - left, 0
            if end < size:
                before[end] = left
                if pair := self._pair(word, left, end, end + lengths[end]):
                    heappush(queue, pair)
            first = before[left]
            if first >= 0 and (pair := self._pair(word, first, left, end)):
                heappush(queue, pair)
        return self._symbols(word, lengths)

    def _pair(self, word: str, left: int, right: int, end: int) -> tuple[float, int, int, int] | None:
        """A queue entry for two adjacent symbols; None if their joint text is not a token."""
        token = self._ids.get(word[left:end])
        return None if token is None else (-self._scores[token], left, right, end)

    def _symbols(self, word: str, lengths: Sequence[int]) -> Piece:
        """Ids of the symbols after merging."""
        piece = Piece([], [])
        for start, length in enumerate(lengths):
            if not length:
                continue
            symbol = word[start : start + length]
            token = self._ids.get(symbol)
            found = [token] if token is not None else [self._byte_ids[byte] for byte in symbol.encode()]
            for one in found:
                if (used := self._unknown if one is None else one) is not None:
                    piece.ids.append(used)
                    piece.spans.append((start, start + length))
        return piece


def _cut(part: tuple[int, str, int | None], name: str, token: int) -> Iterator[tuple[int, str, int | None]]:
    """Cuts every occurrence of a special token out of a piece of text."""
    start, text, cut = part
    if cut is not None:
        yield part
        return
    for place, between in enumerate(text.split(name)):
        if place:
            yield start, name, token
            start += len(name)
        if between:
            yield start, between, None
            start += len(between)
