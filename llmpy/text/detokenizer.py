"""Text of a running sample, piece by piece: returned text never changes, and no piece ends inside a character."""

from __future__ import annotations

import codecs
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .token_texts import TokenTexts
    from .tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4
_PRIMING_TOKENS = 32


class Detokenizer:
    """Turns the ids of one sample into text.

    The joined pieces equal the text after the prompt in one decode of prompt and output.

    Args:
        tokenizer: The tokenizer.
        prompt_ids: Ids before the output; they decide whether a leading space is kept, and may end inside a character.
        skip_special_tokens: Hide special tokens.
        spaces_between_special_tokens: False: join adjacent added tokens without spaces.
    """

    __slots__ = ("_way",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        texts = tokenizer.texts
        self._way: _Joining | _Streaming
        if texts is None:
            self._way = _Streaming(tokenizer, prompt_ids, skip_special_tokens)
        else:
            self._way = _Joining(texts, prompt_ids, skip_special_tokens, spaces_between_special_tokens)

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """Adds ids.

        Args:
            ids: New ids; ids unknown to the tokenizer add nothing.
            final: No ids follow; an incomplete character becomes U+FFFD.

            Returns:
                The new text; "" while a character is incomplete.
        """
        return self._way.push(ids, final)


class _Joining:
    """Detokenizer for decoders that join bytes: an incremental UTF-8 decoder over the bytes of the ids."""

    __slots__ = ("_added", "_decoder", "_last_added", "_skip", "_strip", "_texts")

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int], skip: bool, spaces: bool) -> None:
        self._texts = texts
        self._skip = skip
        self._added = texts.added if not spaces and not skip else frozenset()
        self._last_added = bool(len(prompt_ids)) and int(prompt_ids[-1]) in self._added
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        start = self._prime(prompt_ids)
        self._strip = texts.strip_leading and not start

    def _prime(self, prompt_ids: Sequence[int]) -> bytes:
        """Feeds the prompt's last bytes, which may begin a character, to the decoder; returns b"" if the prompt has no text."""
        end = b""
        for token in reversed(prompt_ids):
            end = self._texts.join((int(token),), self._skip) + end
            if len(end) >= _LONGEST_CHARACTER_BYTES:
                break
        self._decoder.decode(end)
        return end

    def push(self, ids: Sequence[int], final: bool) -> str:
        data = self._join_added(ids) if self._added else self._texts.join(ids, self._skip)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data, final)

    def _join_added(self, ids: Sequence[int]) -> bytes:
        """Bytes of the ids, without spaces between adjacent added tokens."""
        parts = []
        for token in ids:
            part = self._texts.join((token,), self._skip)
            is_added = token in self._added
            parts.append(part.removeprefix(b" ") if is_added and self._last_added else part)
            self._last_added = is_added
        return b"".join(parts)


class _Streaming:
    """Detokenizer for other decoders: the library's DecodeStream, restarted from the last ids if it fails."""

    __slots__ = ("_backend", "_ids", "_shown", "_skip", "_start", "_stream")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: bool) -> None:
        self._backend = tokenizer.backend
        self._skip = skip
        start = [int(token) for token in prompt_ids[-_PRIMING_TOKENS:]]
        self._start = [token for token in start if self._is_known(token)]
        self._ids: list[int] = []
        self._shown = io.StringIO()
        self._restart(self._start)

    def _is_known(self, token: int) -> bool:
        return token >= 0 and self._backend.id_to_token(token) is not None

    def _restart(self, ids: list[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(ids=list(ids), skip_special_tokens=self._skip)

    def push(self, ids: Sequence[int], final: bool) -> str:
        text = ""
        for token in ids:
            if self._is_known(token):
                self._ids.append(token)
                text += self._step(token)
        self._shown.write(text)
        return text + (self._rest() if final else "")

    def _step(self, token: int) -> str:
        """The stream's new text for one id."""
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception:  # the library raises a bare Exception when a prefix of its text changed
            self._restart(self._ids[-_PRIMING_TOKENS:-1])
            return self._stream.step(self._backend, token) or ""

    def _rest(self) -> str:
        """The text that the stream still holds back."""
        before = self._backend.decode(self._start, skip_special_tokens=self._skip)
        whole = self._backend.decode(self._start + self._ids, skip_special_tokens=self._skip)
        known = before + self._shown.getvalue()
        return whole[len(known) :] if whole.startswith(known) else ""
