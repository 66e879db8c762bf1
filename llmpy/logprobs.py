"""Logprobs of tokens: arrays, and a view of them as a list of dicts, which are made on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from typing import Self

    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int32]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Top: TypeAlias = "tuple[Ints, Floats, Ints]"
Decode = Callable[[int], str | None]
Entry = dict[int, "Logprob"]
Row = TypeVar("Row", bound="Entry | None", covariant=True)


class Logprob(NamedTuple):
    """One token's logprob.

    Args:
        logprob: Natural logarithm of the token's probability.
        rank: 1 + number of tokens with a strictly larger value.
        decoded_token: Text of the token; None without detokenisation.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class SampledLogprobs(NamedTuple):
    """All logprobs of the sampled tokens, for every `logprobs_mode`.

    Args:
        raw: Logprobs under the model's distribution, float32 [T].
        full: Logprobs with bias, penalties and temperature, before truncation and masks, float32 [T].
        processed: Logprobs under the sampling distribution, float32 [T].
        kept_mass: Probability mass of `full` that truncation and masks kept, float32 [T].
        rank: 1 + number of tokens with a larger value in the request's mode, int32 [T].
    """

    raw: Floats
    full: Floats
    processed: Floats
    kept_mass: Floats
    rank: Ints


class LogprobsView(Sequence[Row], Generic[Row]):
    """Acts as a list with one dict per token, made on demand: id -> Logprob, with the token itself first.

    Args:
        ids: int32 [T, k + 1]: column 0 is the token itself, then the k best; padding is `vocab_size`.
        values: Logprobs, float32 [T, k + 1]; padding is -inf.
        ranks: int32 [T, k + 1].
        vocab_size: Size of the vocabulary.
        decode: Returns a token's text; None: no texts.
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
    ) -> Self:
        """Makes a view of tokens and their k alternatives; the arrays are joined on demand."""
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
        """The text of a token; None if it is unknown. A pickled view knows only the texts of its tokens."""
        return self._decode(token) if self._decode else None

    def followed_by(self, other: Self) -> Self:
        """These tokens, then the other view's, which must have the same number of alternatives."""
        import numpy as np

        pairs = zip((self.ids, self.values, self.ranks), (other.ids, other.values, other.ranks), strict=True)
        ids, values, ranks = (np.concatenate(pair) for pair in pairs)
        return type(self)(ids, values, ranks, self._vocab_size, self._decode)

    def cut(self, count: int) -> Self:
        """The same tokens with at most `count` alternatives."""
        columns = slice(1 + count)
        arrays = self.ids[:, columns], self.values[:, columns], self.ranks[:, columns]
        return type(self)(*arrays, self._vocab_size, self._decode)

    def __len__(self) -> int:
        return len(self._parts[0] if self._parts is not None else self.ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Row | Self:
        if isinstance(index, slice):
            return type(self)(self.ids[index], self.values[index], self.ranks[index], self._vocab_size, self._decode)
        return self._row(self.ids[index].tolist(), self.values[index].tolist(), self.ranks[index].tolist())

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), 256):
            block = slice(start, start + 256)
            rows = zip(self.ids[block].tolist(), self.values[block].tolist(), self.ranks[block].tolist(), strict=True)
            for ids, values, ranks in rows:
                yield self._row(ids, values, ranks)

    def to_list(self) -> list[Row]:
        """A plain list of plain dicts, for code that requires these types."""
        return list(self)

    def _row(self, ids: list[int], values: list[float], ranks: list[int]) -> Row:
        raise NotImplementedError

    def _entry(self, ids: list[int], values: list[float], ranks: list[int]) -> Entry:
        row: Entry = {}
        for token, value, rank in zip(ids, values, ranks, strict=True):
            if token != self._vocab_size and token not in row:
                row[token] = Logprob(value, rank, self.text(token))
        return row

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tokens, {self.ids.shape[1] - 1} alternatives)"

    def __reduce__(self) -> tuple[Any, ...]:
        texts = {token: self.text(token) for token in set(self.ids.ravel().tolist())} if self._decode else None
        return _restore, (type(self), self.ids, self.values, self.ranks, self._vocab_size, texts)


class Logprobs(LogprobsView[Entry]):
    """Logprobs of generated or scored tokens; acts as `list[dict[int, Logprob]]`.

    Example:
        >>> sample = llm.generate("The capital of France is", max_tokens=1, logprobs=3)[0].outputs[0]
        >>> sample.logprobs[0][sample.token_ids[0]].logprob
        >>> json.dumps(sample.logprobs.to_list())
    """

    __slots__ = ()

    def _row(self, ids: list[int], values: list[float], ranks: list[int]) -> Entry:
        return self._entry(ids, values, ranks)


class PromptLogprobs(LogprobsView["Entry | None"]):
    """Logprobs of a prompt; acts as `list[dict[int, Logprob] | None]`. The first token has None; its row is padding."""

    __slots__ = ()

    def _row(self, ids: list[int], values: list[float], ranks: list[int]) -> Entry | None:
        return None if ids[0] == self._vocab_size else self._entry(ids, values, ranks)


def _restore(
    kind: type[LogprobsView[Any]], ids: Ints, values: Floats, ranks: Ints, vocab_size: int, texts: dict[int, str | None] | None
) -> LogprobsView[Any]:
    """Restores a pickled view, with the texts of its tokens instead of a tokenizer."""
    return kind(ids, values, ranks, vocab_size, texts.get if texts else None)


def join(token_ids: Ints, values: Floats, ranks: Ints, top: Top | None) -> tuple[Ints, Floats, Ints]:
    """Joins the tokens and their k alternatives to three read-only arrays [T, k + 1]."""
    import numpy as np

    columns = [(token_ids[:, None], values[:, None], ranks[:, None])]
    if top is not None:
        columns.append(top)
    joined = tuple(np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True))
    for array in joined:
        array.setflags(write=False)
    return joined  # type: ignore[return-value]
