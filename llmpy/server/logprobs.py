"""Logprobs in the formats of completions and of chat completions."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from ..logprobs import Logprob, Logprobs, LogprobsView
from ..outputs import CompletionOutput, RequestOutput
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer

NEVER = -9999.0  # JSON has no infinity


class LogprobWriter:
    """Writes the logprobs of one sample.

    Args:
        tokenizer: The model's tokenizer, for token texts.
        top: Number of requested alternatives.
        as_ids: Write tokens as "token_id:N".
    """

    def __init__(self, tokenizer: Tokenizer, top: int, as_ids: bool) -> None:
        self._tokenizer, self._top, self._as_ids = tokenizer, top, as_ids
        self._bytes = tokenizer.token_bytes()
        self.offset = 0
        """Number of characters of the tokens written so far."""

    def token(self, token_id: int, text: str | None) -> str:
        """The text of a token in the answer."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return text if text is not None else self._tokenizer.decode([token_id])

    def completion(self, entries: LogprobsView[Any]) -> dict[str, Any]:
        """The format of completions: lists of tokens, their logprobs, dicts of the best tokens, and text offsets."""
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            self._add(lists, *_split(entry or {}, self._top))
        return lists

    def first(self, lists: dict[str, Any], token_id: int) -> None:
        """Adds the first token of a prompt, which has no logprob."""
        self._add(lists, (token_id, None), [])

    def _add(self, lists: dict[str, Any], own: tuple[int, Logprob | None], best: list[tuple[int, Logprob]]) -> None:
        token_id, value = own
        text = self.token(token_id, None if value is None else value.decoded_token)
        lists["tokens"].append(text)
        lists["token_logprobs"].append(None if value is None else finite(value.logprob))
        tops = {self.token(i, item.decoded_token): finite(item.logprob) for i, item in best}
        lists["top_logprobs"].append(None if value is None or not self._top else tops)
        lists["text_offset"].append(self.offset)
        self.offset += len(text)

    def chat(self, entries: Logprobs) -> list[dict[str, Any]]:
        """The format of chat completions: one object per token."""
        content = []
        for entry in entries:
            own, best = _split(entry or {}, self._top)
            content.append({**self._object(own), "top_logprobs": [self._object(item) for item in best]})
        return content

    def _object(self, item: tuple[int, Logprob]) -> dict[str, Any]:
        token_id, value = item
        raw = self._bytes[token_id] if self._bytes is not None and token_id < len(self._bytes) else None
        text = self.token(token_id, value.decoded_token)
        return {"token": text, "logprob": finite(value.logprob), "bytes": list(text.encode() if raw is None else raw)}


class TextLogprobs:
    """Finds the logprobs of a part of an answer's text.

    Args:
        writer: Writes the logprobs.
        detokenizer: Decodes the tokens like the answer's text.
    """

    def __init__(self, writer: LogprobWriter, detokenizer: Detokenizer) -> None:
        self._writer, self._detokenizer = writer, detokenizer
        self._tokens: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._chars = 0

    def add(self, sample: CompletionOutput) -> None:
        """Adds the logprobs of new tokens."""
        assert sample.logprobs is not None
        for token, written in zip(sample.token_ids, self._writer.chat(sample.logprobs), strict=True):
            start, self._chars = self._chars, self._chars + len(self._detokenizer.push([token]))
            self._tokens.append((start, self._chars, written))

    def take(self, start: int, end: int) -> list[dict[str, Any]]:
        """Removes and returns the logprobs of the tokens with characters in `start`..`end`; earlier ones are dropped."""
        found = []
        while self._tokens and self._tokens[0][0] < end:
            begins, ends, written = self._tokens.popleft()
            if ends > start or begins == start:
                found.append(written)
        return found

    def rest(self) -> list[dict[str, Any]]:
        """Removes and returns the logprobs of all remaining tokens: they end the text or have no text."""
        found = [written for _, _, written in self._tokens]
        self._tokens.clear()
        return found


def num_logprobs(output: RequestOutput) -> int:
    """Number of logprobs of an output: of its tokens, of its prompt's tokens, and of their alternatives."""
    views = [sample.logprobs for sample in output.outputs] + [output.prompt_logprobs]
    return sum(view.ids.size for view in views if view is not None)


def _split(entry: Any, top: int) -> tuple[tuple[int, Logprob], list[tuple[int, Logprob]]]:
    """The token itself, and the best tokens in order."""
    items: list[tuple[int, Logprob]] = list(entry.items())
    best = items[1:] if len(items) > top else sorted(items, key=lambda item: -item[1].logprob)
    return items[0], best if top else []


def prompt_logprobs(entries: LogprobsView[Any] | None) -> list[Any] | None:
    """For every prompt token: null for the first, else a dict from id to logprob, rank and text."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
            for token_id, value in entry.items()
        }
        for entry in entries
    ]


def finite(value: float) -> float:
    """A logprob for JSON, which has no infinity."""
    return value if math.isfinite(value) else NEVER
