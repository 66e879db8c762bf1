"""PLaMo's tokenizer (tokenizer.jsonl): cuts a text into the pieces with the highest total score.

Costs are integers, so rounding does not matter. The best end of the piece at each character is found from right to left. Of
equal costs the longer piece wins. A character without a piece becomes the tokens of its bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from ..json_files import damaged, parse_json
from .token_texts import TokenTexts, byte_fallback

FILE = "tokenizer.jsonl"
_KINDS = ("NORMAL", "CONTROL", "UNKNOWN", "BYTE")
_SCORE_UNIT = 10_000
_UNUSABLE = -20_000_000  # pieces with this score or less are not used
_FALLBACK = 10_000_000  # cost of a character that is cut into its bytes
_NO_PIECE = -(10**12)  # score of a prefix that is not a piece; too low to be chosen


class PlamoEncoding:
    """Ids of a text, and the character span of each id."""

    def __init__(self, ids: list[int], spans: list[tuple[int, int]]) -> None:
        self.ids, self.offsets = ids, spans


class PlamoTokenizer:
    """A tokenizer of a vocabulary of pieces with scores.

    Args:
        pieces: Vocabulary entries by id.
        scores: The score of each.
        kinds: "NORMAL", "CONTROL", "UNKNOWN" or "BYTE" of each.
        added: Text -> id of the tokens that are cut out of a text first.
        unknown: Id for text with neither a piece nor bytes.
        bos, eos: Ids added with `add_special_tokens`; None = none.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        kinds: Sequence[str],
        *,
        added: Mapping[str, int],
        unknown: int = 0,
        bos: int | None = None,
        eos: int | None = None,
    ) -> None:
        self._pieces = list(pieces)
        self._ids = {piece: place for place, piece in enumerate(self._pieces)} | dict(added)
        self._added = dict(added)
        self._bos, self._eos, self._unknown = bos, eos, unknown
        names = "|".join(re.escape(text) for text in sorted(added, key=len, reverse=True))
        self._cut: Callable[[str], list[str]] = re.compile(f"({names})").split if names else lambda text: [text]
        self._bytes = {piece: place for place, piece in enumerate(self._pieces) if kinds[place] == "BYTE"}
        self._kinds, self._given = list(kinds), list(scores)

    @cached_property
    def _scores(self) -> dict[str, int]:
        """The score of every piece; also of every prefix of a piece, too low to be chosen."""
        table: dict[str, int] = {}
        for piece, score, kind in zip(self._pieces, self._given, self._kinds, strict=True):
            whole = round(score * _SCORE_UNIT)
            if kind == "BYTE" or whole <= _UNUSABLE or not piece:
                continue
            for end in range(1, len(piece)):
                table.setdefault(piece[:end], _NO_PIECE)
            table[piece] = whole
        return table

    keeps_text = True
    """Every character becomes a token or a part of one."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> PlamoEncoding:
        """Ids of a text."""
        found = PlamoEncoding([], [])
        if add_special_tokens and self._bos is not None:
            self._put(found, [self._bos], 0, 0)
        start = 0
        for i, part in enumerate(self._cut(sequence)):
            if i % 2:
                self._put(found, [self._added[part]], start, start + len(part))
            elif part:
                self._encode_part(part, start, found)
            start += len(part)
        if add_special_tokens and self._eos is not None:
            self._put(found, [self._eos], 0, 0)
        return found

    @staticmethod
    def _put(found: PlamoEncoding, ids: Sequence[int], start: int, end: int) -> None:
        found.ids += ids
        found.offsets += [(start, end)] * len(ids)

    def _encode_part(self, text: str, start: int, found: PlamoEncoding) -> None:
        """Adds the ids of a part without added tokens; the part begins at character `start` of the text."""
        ends, place = self._best_ends(text), 0
        while place < len(text):
            end = ends[place] or place + 1
            piece = text[place:end]
            self._put(found, [self._ids[piece]] if ends[place] else self._byte_ids(piece), start + place, start + end)
            place = end

    def _best_ends(self, text: str) -> list[int]:
        """For every character: the end of the best piece that begins there; 0: the character is cut into bytes."""
        find, n = self._scores.get, len(text)
        costs, ends = [0] * (n + 1), [0] * n
        for i in range(n - 1, -1, -1):
            best, best_end, end = costs[i + 1] + _FALLBACK, 0, i + 1
            score = find(text[i])
            while score is not None:
                cost = costs[end] - score
                if cost <= best:  # from the shortest to the longest, so ties go to the longer one
                    best, best_end = cost, end
                end += 1
                score = find(text[i:end]) if end <= n else None
            costs[i], ends[i] = best, best_end
        return ends

    def _byte_ids(self, character: str) -> list[int]:
        """The tokens of a character's bytes."""
        return [self._bytes.get(f"<0x{byte:02X}>", self._unknown) for byte in character.encode("utf-8", "surrogatepass")]

    def encode_batch(self, input: Sequence[str], *, add_special_tokens: bool = True) -> list[PlamoEncoding]:
        """Ids of several texts."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in input]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self.texts(self._added.values()).decode(ids, skip_special_tokens)

    def texts(self, special: Iterable[int]) -> TokenTexts:
        """The text bytes of every id."""
        table = [b""] * (max(self._ids.values(), default=-1) + 1)
        for text, token in self._ids.items():
            is_byte = token < len(self._kinds) and self._kinds[token] == "BYTE"
            table[token] = (byte_fallback(text) if is_byte else None) or text.encode("utf-8", "surrogatepass")
        return TokenTexts(table, False, special, self._added.values())

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token: text for text, token in self._ids.items()}

    def id_to_token(self, id: int) -> str | None:
        """Vocabulary entry of an id."""
        return self._names.get(id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary entry."""
        return self._ids.get(token)

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Number of vocabulary entries."""
        return len(self._ids) if with_added_tokens else len(self._pieces)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Ids by vocabulary entry."""
        return {text: token for text, token in self._ids.items() if with_added_tokens or token < len(self._pieces)}


def read(
    path: Path, named: Mapping[str, str], special: Sequence[str], added: Mapping[str, int], adds: Container[str]
) -> PlamoTokenizer:
    """Reads the tokenizer of a file.

    Args:
        path: tokenizer.jsonl: one line per id, [piece, score, kind, ...].
        named: Special tokens by role.
        special: Further tokens that are cut out of a text.
        added: Ids of the tokens that tokenizer_config.json lists.
        adds: "bos" and "eos", if texts get them.

    Raises:
        CheckpointError: A line has another form, or the byte tokens are not exactly the 256 bytes.
    """
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        piece, score, kind = _entry(path, number, line)
        pieces.append(piece)
        scores.append(score)
        kinds.append(kind)
    bytes_found = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind == "BYTE"}
    if bytes_found != {f"<0x{byte:02X}>" for byte in range(256)}:
        raise damaged(path, f"wanted the 256 byte tokens <0x00> to <0xFF>, have {len(bytes_found)}")
    if len(set(pieces)) != len(pieces):
        twice = Counter(pieces).most_common(1)[0][0]
        raise damaged(path, f"holds {twice!r} twice")
    ids = {piece: place for place, piece in enumerate(pieces)}
    given = dict(added)
    for text in (*named.values(), *special):
        if text not in given:
            given[text] = ids.get(text, max([len(pieces) - 1, *given.values()]) + 1)

    def wanted(role: str) -> int | None:
        return given.get(named.get(f"{role}_token", "")) if role in adds else None

    unknown = given.get(named.get("unk_token", ""), 0)
    return PlamoTokenizer(pieces, scores, kinds, added=given, unknown=unknown, bos=wanted("bos"), eos=wanted("eos"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"cannot be read as text: {error}; download it again") from error


def _entry(path: Path, number: int, line: str) -> tuple[str, float, str]:
    """Piece, score and kind of a line."""
    try:
        piece, score, *rest = parse_json(line, path, list)
        kind = rest[0] if rest and rest[0] is not None else "NORMAL"
        score = float(score)
    except (ValueError, TypeError, OverflowError) as error:
        raise damaged(path, f"line {number}: wanted [piece, score, kind], have {line[:80]!r}") from error
    if not isinstance(piece, str) or kind not in _KINDS or not math.isfinite(score):
        raise damaged(path, f"line {number}: wanted a piece of a known kind and a finite score, have {line[:80]!r}")
    return piece, score, kind
