"""The base class of output lists: slices and sums keep the class, a long list has a short repr, tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeVar, overload

from ..errors import LlmpyError

if TYPE_CHECKING:
    from typing import Self

    import pandas
    import pyarrow

SHOWN = 20
"""Longest list with every output in its repr."""


class _Output(Protocol):
    """The attributes that all outputs have."""

    @property
    def error(self) -> LlmpyError | None: ...

    def to_dict(self) -> dict[str, Any]: ...


AnyOutput = TypeVar("AnyOutput", bound=_Output)


class OutputList(list[AnyOutput]):
    """The outputs of a call, in the order of its input. Slices, copies and sums are of the same class.

    Args:
        outputs: The outputs.
        elapsed: Duration of the call in seconds; 0 if not measured.
    """

    def __init__(self, outputs: Iterable[AnyOutput] = (), elapsed: float = 0.0) -> None:
        super().__init__(outputs)
        self.elapsed = elapsed

    @overload
    def __getitem__(self, index: SupportsIndex) -> AnyOutput: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: SupportsIndex | slice) -> AnyOutput | Self:
        if isinstance(index, slice):
            return type(self)(super().__getitem__(index), self.elapsed)
        return super().__getitem__(index)

    def __add__(self, other: list[AnyOutput]) -> Self:  # type: ignore[override]
        if not isinstance(other, list):
            return NotImplemented
        return type(self)([*self, *other], self.elapsed + getattr(other, "elapsed", 0.0))

    def __radd__(self, other: list[AnyOutput] | int) -> Self:
        if other == 0:  # the start of sum()
            return self.copy()
        return type(self)([*other, *self], self.elapsed) if isinstance(other, list) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Self:
        return type(self)(super().__mul__(count), self.elapsed)

    def copy(self) -> Self:
        """A new list with the same outputs."""
        return type(self)(self, self.elapsed)

    @property
    def errors(self) -> list[LlmpyError]:
        """Errors of the requests that failed."""
        return [output.error for output in self if output.error is not None]

    def to_dict(self) -> list[dict[str, Any]]:
        """All outputs, ready for JSON."""
        return [output.to_dict() for output in self]

    def to_pandas(self) -> pandas.DataFrame:
        """A table: one row per sample of a generation, one row per output of a score or of a pooling.

        Raises:
            ImportError: pandas is not installed.
        """
        from .tables import to_pandas

        return to_pandas(self)

    def to_arrow(self) -> pyarrow.Table:
        """The table of `to_pandas` as an Arrow table.

        Raises:
            ImportError: pyarrow is not installed.
        """
        from .tables import to_arrow

        return to_arrow(self)

    def __repr__(self) -> str:
        if len(self) <= SHOWN:
            return super().__repr__()
        shown = [*map(repr, self[:3]), f"... {len(self) - 4:,} more ...", repr(self[-1])]
        return f"[{', '.join(shown)}]"
