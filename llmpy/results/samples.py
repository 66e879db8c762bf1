"""One sample of a running request: the data that the core has delivered, and the output made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..logprobs import Floats, Ints, Logprobs, PromptLogprobs, SampledLogprobs, Top
from ..outputs import CompletionOutput, SampleMetrics, VersionSpan, sum_in_order
from ..text.sample_text import HIDDEN_ENDS, SampleText

if TYPE_CHECKING:
    from .._core import CoreOutput
    from ..engine.context import Context
    from ..sampling_params import SamplingParams

_REASONS = {"eos": "stop", "stop_id": "stop", "stop_string": "stop", "grammar": "stop", None: None}
_MODES = ("raw_logprobs", "full_logprobs", "processed_logprobs")
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
NO_IDS: Ints = np.frombuffer(b"", np.int32)
NO_FLOATS: Floats = np.frombuffer(b"", np.float32)


class Sample:
    """One sample.

    `pieces` holds the columns of each update as bytes: ids; with logprobs also raw, full, processed, kept mass and rank; with
    alternatives also their ids, values and ranks.
    """

    __slots__ = (
        "_summed_tokens",
        "_text_is_complete",
        "_text_tokens",
        "_total",
        "epoch",
        "epochs",
        "finish",
        "metrics",
        "num_tokens",
        "pieces",
        "shown_end",
        "shown_tokens",
        "stop",
        "text",
    )

    def __init__(self) -> None:
        self.pieces: list[tuple[bytes, ...]] = []
        self.num_tokens = 0
        self.epoch = -1
        """Epoch of the weights that made the last token."""
        self.epochs: list[tuple[int, int]] = []
        """(first token, epoch) for each change of the weights."""
        self.finish: str | None = None
        self.metrics = SampleMetrics()
        self.stop: int | str | None = None
        self.text: SampleText | None = None
        self._text_tokens = 0
        self._text_is_complete = False
        self._total = 0.0
        self._summed_tokens = 0
        self.shown_tokens = 0
        self.shown_end = False

    def add(self, output: CoreOutput, params: SamplingParams) -> None:
        """Adds an update from the core; known tokens are skipped."""
        if self.finish is not None:
            return
        if output["first"] == self.num_tokens and output["ids"]:
            self.pieces.append((output["ids"], *(output["logprobs"] or ()), *(output["top"] or ())))
            for count, epoch in output["epochs"]:
                if epoch != self.epoch:
                    self.mark(epoch)
                self.num_tokens += count
        self.finish = output["finish"]
        if self.finish == "stop_id":
            self.stop = output["stop"]
        elif self.finish == "stop_string":
            self.stop = params.stop_strings[output["stop"]]

    def mark(self, epoch: int) -> None:
        """Records that later tokens are made by the weights of another epoch."""
        self.epoch = epoch
        self.epochs.append((self.num_tokens, epoch))

    def spans(self, start: int, context: Context) -> list[VersionSpan]:
        """The weight versions that made the tokens from `start` on."""
        found, end = [], self.num_tokens
        for first, epoch in reversed(self.epochs):
            if first < end:
                found.append(VersionSpan(max(first, start), end, context.version(epoch), epoch))
                end = first
            if first <= start:
                break
        found.reverse()
        return found

    @property
    def has_output(self) -> bool:
        """Whether the sample has output that no delta has shown."""
        return self.num_tokens > self.shown_tokens or (self.finish is not None and not self.shown_end)

    def columns(self) -> tuple[bytes, ...]:
        """The joined columns of all pieces."""
        if len(self.pieces) > 1:
            self.pieces = [tuple(b"".join(parts) for parts in zip(*self.pieces, strict=True))]
        return self.pieces[0] if self.pieces else (b"",) * 6

    def since(self, start: int) -> tuple[bytes, ...]:
        """The joined columns from a token on. The cost does not depend on the length of the sample before it."""
        if start == 0:
            return self.columns()
        begin, place = self.num_tokens, len(self.pieces)
        while begin > start:
            place -= 1
            begin -= len(self.pieces[place][0]) // 4
        parts = self.pieces[place:]
        if not parts:
            return (b"",) * 6
        joined = parts[0] if len(parts) == 1 else tuple(b"".join(column) for column in zip(*parts, strict=True))
        if begin == start:
            return joined
        rows = self.num_tokens - begin
        return tuple(column[len(column) // rows * (start - begin) :] for column in joined)

    def total(self, mode: int) -> float:
        """Float64 sum of the logprobs so far, in the order of the tokens."""
        if self._summed_tokens < self.num_tokens:
            values = np.frombuffer(self.since(self._summed_tokens)[1 + mode], np.float32)
            self._total = sum_in_order(values, self._total)
            self._summed_tokens = self.num_tokens
        return self._total

    def match_stops(self, params: SamplingParams) -> None:
        """Searches the new text for a stop string; a match ends the sample and drops the tokens after it."""
        if self.text is None or self._text_is_complete:
            return
        ids = np.frombuffer(self.since(self._text_tokens)[0], np.int32).tolist()
        usable = ids[:-1] if self.finish in HIDDEN_ENDS else ids
        found = self.text.match(usable)
        if found is None:
            self.text.push(ids[len(usable) :], self.finish, None)
        else:
            kept, self.finish, self.stop = self._text_tokens + found[0], "stop_string", params.stop_strings[found[1]]
            self.pieces = [tuple(part[: len(part) // self.num_tokens * kept] for part in self.columns())]
            self.num_tokens = kept
        self._text_tokens = self.num_tokens
        self._text_is_complete = self.finish is not None

    def _shown_text(self, delta: bool) -> str:
        """Text so far, without an end that may still become a stop string; with `delta` only text that no delta has shown."""
        if self.text is None:
            return ""
        if not self._text_is_complete:
            ids = np.frombuffer(self.since(self._text_tokens)[0], np.int32).tolist()
            self.text.push(ids, self.finish, self.stop if isinstance(self.stop, str) else None)
            self._text_tokens = self.num_tokens
            self._text_is_complete = self.finish is not None
        return self.text.output() if delta else self.text.shown

    def output(self, index: int, params: SamplingParams, mode: str, context: Context, delta: bool) -> CompletionOutput:
        """The sample's output so far; with `delta` only the part that no earlier delta has shown."""
        columns = self.since(self.shown_tokens if delta else 0)
        output = CompletionOutput(
            index=index,
            text=self._shown_text(delta),
            token_ids_array=np.frombuffer(columns[0], np.int32),
            finish_reason=_REASONS.get(self.finish, self.finish),
            stop_reason=self.stop,
            metrics=None if self.finish is None else self.metrics,
        )
        if params.logprobs is not None:
            number = _MODES.index(mode)
            _add_logprobs(output, columns, number, context, params)
            output.cumulative_logprob = self.total(number)
        if delta:
            self.shown_tokens = self.num_tokens
            self.shown_end = self.finish is not None
        return output

    def plain_delta(
        self, columns: tuple[bytes, ...], epoch: int, params: SamplingParams, mode: str, context: Context
    ) -> CompletionOutput:
        """Adds a piece and returns its output alone. The sample must go on, and deltas must have shown all older output."""
        start = self.num_tokens
        if epoch != self.epoch:
            self.mark(epoch)
        self.pieces.append(columns)
        end = self.num_tokens = self.shown_tokens = start + (len(columns[0]) >> 2)
        output = CompletionOutput(
            index=0,
            text=self._shown_text(True),
            token_ids_array=np.frombuffer(columns[0], _INT32),
            weight_versions=[VersionSpan(start, end, context.version(epoch), epoch)],
        )
        if params.logprobs is not None:
            number = _MODES.index(mode)
            _add_logprobs(output, columns, number, context, params)
            output.cumulative_logprob = self.total(number)
        return output


def _add_logprobs(
    output: CompletionOutput, columns: tuple[bytes, ...], mode: int, context: Context, params: SamplingParams
) -> None:
    """Adds the logprobs of the tokens to the output."""
    raw, full, processed, kept = [np.frombuffer(part, _FLOAT32) for part in columns[1:5]]
    rank = np.frombuffer(columns[5], _INT32)
    values = (raw, full, processed)[mode]
    output.sampled = SampledLogprobs(raw, full, processed, kept, rank)
    output.token_logprobs = values
    top = top_arrays(columns[6:], len(columns[0]) // 4)
    if not len(rank) and params.logprobs:
        none = np.zeros((0, params.logprobs), np.int32)
        top = none, none.astype(np.float32), none
    output.logprobs = view(output.token_ids_array, values, rank, top, context, params.detokenize)


def top_arrays(parts: tuple[bytes, ...] | None, rows: int) -> Top | None:
    """Ids, values and ranks [rows, k] of the alternatives, or None."""
    if not parts or not rows or not parts[0]:
        return None
    ids, ranks = (np.frombuffer(part, np.int32).reshape(rows, -1) for part in (parts[0], parts[2]))
    return ids, np.frombuffer(parts[1], np.float32).reshape(rows, -1), ranks


def view(ids: Ints, values: Floats, ranks: Ints, top: Top | None, context: Context, decode: bool) -> Logprobs:
    """Logprobs of the tokens and their alternatives."""
    return Logprobs.of(ids, values, ranks, top, context.vocab_size, context.decode if decode else None)


def prompt_view(
    ids: Ints, logprobs: tuple[bytes, ...], top: tuple[bytes, ...] | None, context: Context, decode: bool
) -> tuple[PromptLogprobs, Floats]:
    """Logprobs of a prompt (its first entry is None), and their values (NaN at index 0)."""
    values = np.concatenate([np.array([np.nan], np.float32), np.frombuffer(logprobs[0], np.float32)])
    values.setflags(write=False)
    ranks = np.concatenate([np.zeros(1, np.int32), np.frombuffer(logprobs[1], np.int32)])
    ids = ids.copy()
    ids[0] = context.vocab_size
    best = top_arrays(top, len(ids) - 1)
    if top is not None and top[0] and best is not None:
        padding = np.full_like(best[0][:1], context.vocab_size), np.full_like(best[1][:1], -np.inf)
        best = (
            np.concatenate([padding[0], best[0]]),
            np.concatenate([padding[1], best[1]]),
            np.concatenate([np.zeros_like(best[2][:1]), best[2]]),
        )
    decoder = context.decode if decode else None
    return PromptLogprobs.of(ids, values, ranks, best, context.vocab_size, decoder), values
