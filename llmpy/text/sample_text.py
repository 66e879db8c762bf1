"""Text of a running sample: decoded as ids arrive, cut by the stop rule, held back where a stop string may begin."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams
    from .tokenizer import Tokenizer

HIDDEN_ENDS = ("eos", "stop_id")


class SampleText:
    """Text of one sample. The cost of a push depends on the new ids, not on the length of the text.

    Args:
        tokenizer: The tokenizer.
        prompt_ids: The prompt's ids, so that spaces are as in one decode of prompt and output.
        params: Sampling parameters: stop strings and decoding options.
    """

    __slots__ = (
        "_detokenizer", "_end", "_given", "_include", "_min_tokens", "_new", "_num_tokens", "_prior_stop", "_reach", "_shown",
        "_stops",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        from .detokenizer import Detokenizer

        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, params.spaces_between_special_tokens)
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._reach = max(map(len, self._stops), default=1) - 1
        self._end = ""  # end of the text so far: the part that a stop string may reach back into, and the held-back part
        self._given = 0  # characters of `_end` that are shown, or from prior output
        self._shown = io.StringIO()
        self._new = ""
        self._num_tokens = 0
        self._prior_stop: int | None = None  # index of a stop string that the prior output completes

    @property
    def shown(self) -> str:
        """The text that may be shown; it will not change."""
        return self._shown.getvalue()

    def output(self) -> str:
        """The text added to `shown` since the last call."""
        new, self._new = self._new, ""
        return new

    def prime(self, prior: Sequence[int]) -> None:
        """Adds output ids that were generated earlier: they are searched for stop strings, but not shown."""
        self._end += self._detokenizer.push(prior[: self._min_tokens], False)
        before = len(self._end)
        self._end += self._detokenizer.push(prior[self._min_tokens :], False)
        found = self._first_stop(before)
        self._prior_stop = None if found is None else found[1]
        self._num_tokens += len(prior)
        self._given = len(self._end)

    def push(self, ids: Sequence[int], finish: str | None, stop: str | None) -> None:
        """Adds new ids.

        Args:
            ids: The new ids; with `finish` "stop_string" the last one completes the string.
            finish: The core's finish reason, or None.
            stop: The stop string that ended the sample, or None.
        """
        self._num_tokens += len(ids)
        if finish in HIDDEN_ENDS and not self._include:
            ids = ids[:-1]
        if finish == "stop_string" and stop is not None:
            self._end += self._detokenizer.push(ids[:-1], False)
            before = len(self._end)
            self._end += self._detokenizer.push(ids[-1:], True)
            self._cut(stop, self._find(stop, before))
        else:
            self._end += self._detokenizer.push(ids, finish is not None)
        hidden = 0 if finish or self._include else held_back(self._end, self._stops)
        self._show(max(len(self._end) - hidden, self._given))

    def match(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Adds ids one by one until a stop string is complete. Used if the core cannot match on bytes.

        Args:
            ids: The new ids that may be part of a match.

        Returns:
            The number of ids used and the index of the string in `stop`; None without a match. The number is 0 if the prior
            output completes a string.
        """
        if self._prior_stop is not None:
            return 0, self._prior_stop
        for used, token in enumerate(ids, 1):
            before = len(self._end)
            self._end += self._detokenizer.push([token], False)
            self._num_tokens += 1
            if self._num_tokens > self._min_tokens:
                found = self._first_stop(before)
                if found is not None:
                    end, index = found
                    self._cut(self._stops[index], end)
                    self._show(len(self._end))
                    return used, index
        return None

    def _show(self, until: int) -> None:
        """Shows `_end` up to `until`, and drops the part that is no longer needed."""
        piece = self._end[self._given : until]
        self._shown.write(piece)
        self._new += piece
        done = max(0, min(until, len(self._end) - self._reach))
        self._end, self._given = self._end[done:], until - done

    def _first_stop(self, before: int) -> tuple[int, int] | None:
        """End and index of the stop string that ends first after `before` characters; of several with that end, the longest."""
        ends = [(self._find(stop, before), -len(stop), index) for index, stop in enumerate(self._stops)]
        found = min(((end, length, index) for end, length, index in ends if end is not None), default=None)
        return None if found is None else (found[0], found[2])

    def _find(self, stop: str, before: int) -> int | None:
        """End of the first occurrence that ends after `before` characters."""
        start = self._end.find(stop, max(0, before - len(stop) + 1))
        return None if start < 0 else start + len(stop)

    def _cut(self, stop: str, end: int | None) -> None:
        if end is not None:
            self._end = self._end[: end if self._include else max(end - len(stop), self._given)]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of the text that can become a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
