"""Logprobs of tokens: arrays, and a view of them as a list of dicts that makes objects only when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int32]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Top: TypeAlias = "tuple[Ints, Floats, Ints]"
Decode = Callable[[int], str | None]
Entry = Mapping[int, "Logprob"]


class Logprob(NamedTuple):
    """One token's logprob.

    Args:
        logprob: Natural logarithm of its probability.
        rank: 1 + the number of tokens with a strictly larger value.
        decoded_token: The token's own text, or None without detokenisation.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class SampledLogprobs(NamedTuple):
    """What is known of the sampled tokens, whatever `logprobs_mode` is.

    Args:
        raw: Under the model's own distribution, float32 [T].
        full: With bias, penalties and temperature, nothing removed, float32 [T].
        processed: Under the distribution drawn from, float32 [T].
        kept_mass: Share of `full` that truncation and masks kept, float32 [T].
        rank: 1 + number of tokens with a larger value in the request's mode, int32 [T].
    """

    raw: Floats
    full: Floats
    processed: Floats
    kept_mass: Floats
    rank: Ints


class Logprobs(Sequence["Entry | None"]):
    """Acts as `list[dict[int, Logprob]]`, one read-only mapping per token with the sampled id first.

    Args:
        ids: int32 [T, k + 1]: column 0 the token itself, then the k best; padding `vocab_size`. A row that begins with
            padding stands for None (a prompt's first token).
        values: float32 [T, k + 1], padding -inf.
        ranks: int32 [T, k + 1].
        vocab_size: Rows of the vocabulary.
        decode: Gives a token's text, or None.
    """

    __slots__ = ("_arrays", "_decode", "_parts", "_vocab_size")

    def __init__(self, ids: Ints, values: Floats, ranks: Ints, vocab_size: int, decode: Decode | None = None) -> None:
        self._arrays: tuple[Ints, Floats, Ints] | None = (ids, values, ranks)
        self._parts: tuple[Ints, Floats, Ints, Top | None] | None = None
        self._vocab_size = vocab_size
        self._decode = decode

    @classmethod
    def of(
        cls, token_ids: Ints, values: Floats, ranks: Ints, top: Top | None, vocab_size: int, decode: Decode | None = None
    ) -> Logprobs:
        """Of the tokens and their k alternatives, which are joined when somebody looks."""
        made = cls(token_ids, values, ranks, vocab_size, decode)
        made._arrays, made._parts = None, (token_ids, values, ranks, top)
        return made

    def _joined(self) -> tuple[Ints, Floats, Ints]:
        if self._arrays is None:
            assert self._parts is not None
            self._arrays = join(*self._parts)
        return self._arrays

    @property
    def ids(self) -> Ints:
        """int32 [T, k + 1]."""
        return self._joined()[0]

    @property
    def values(self) -> Floats:
        """float32 [T, k + 1]."""
        return self._joined()[1]

    @property
    def ranks(self) -> Ints:
        """int32 [T, k + 1]."""
        return self._joined()[2]

    def text(self, token: int) -> str | None:
        """A token's own text, or None where texts are not known; a pickled view knows those of its own tokens."""
        return self._decode(token) if self._decode else None

    def followed_by(self, other: Logprobs) -> Logprobs:
        """These tokens, then the other's, which have as many alternatives."""
        import numpy as np

        pairs = zip((self.ids, self.values, self.ranks), (other.ids, other.values, other.ranks), strict=True)
        ids, values, ranks = (np.concatenate(pair) for pair in pairs)
        return Logprobs(ids, values, ranks, self._vocab_size, self._decode)

    def __len__(self) -> int:
        return len(self._parts[0] if self._parts is not None else self.ids)

    @overload
    def __getitem__(self, index: int) -> Entry | None: ...

    @overload
    def __getitem__(self, index: slice) -> Logprobs: ...

    def __getitem__(self, index: int | slice) -> Entry | Logprobs | None:
        if isinstance(index, slice):
            return Logprobs(self.ids[index], self.values[index], self.ranks[index], self._vocab_size, self._decode)
        return self._row(self.ids[index].tolist(), self.values[index].tolist(), self.ranks[index].tolist())

    def __iter__(self) -> Iterator[Entry | None]:
        for start in range(0, len(self), 256):
            block = slice(start, start + 256)
            rows = zip(self.ids[block].tolist(), self.values[block].tolist(), self.ranks[block].tolist(), strict=True)
            for ids, values, ranks in rows:
                yield self._row(ids, values, ranks)

    def _row(self, ids: list[int], values: list[float], ranks: list[int]) -> Entry | None:
        if ids[0] == self._vocab_size:
            return None
        row: dict[int, Logprob] = {}
        for token, value, rank in zip(ids, values, ranks, strict=True):
            if token != self._vocab_size and token not in row:
                row[token] = Logprob(value, rank, self.text(token))
        return MappingProxyType(row)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Logprobs({len(self)} tokens, {self.ids.shape[1] - 1} alternatives)"

    def __reduce__(self) -> tuple[Any, ...]:
        texts = {token: self.text(token) for token in set(self.ids.ravel().tolist())} if self._decode else None
        return _restore, (self.ids, self.values, self.ranks, self._vocab_size, texts)


def _restore(ids: Ints, values: Floats, ranks: Ints, vocab_size: int, texts: dict[int, str | None] | None) -> Logprobs:
    """A pickled Logprobs: the texts of its tokens instead of a tokenizer."""
    return Logprobs(ids, values, ranks, vocab_size, texts.get if texts else None)


def join(token_ids: Ints, values: Floats, ranks: Ints, top: Top | None) -> tuple[Ints, Floats, Ints]:
    """Puts the tokens themselves before their k alternatives: three arrays [T, k + 1], read-only."""
    import numpy as np

    columns = [(token_ids[:, None], values[:, None], ranks[:, None])]
    if top is not None:
        columns.append(top)
    joined = tuple(np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True))
    for array in joined:
        array.setflags(write=False)
    return joined  # type: ignore[return-value]
