"""What the value of a traced node is: its columns, as terms over the columns of the program's values, or an unfinished formula.

A tensor of a traced graph has one batch entry and n rows. Here both dimensions have size 1, so that an array of the tensor's
shape has an element for each column of a row. Layout operations are then the same operations on these arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WIDEST = 1 << 24  # columns of a value
PLAIN, COS, SIN = 0, 1, 2


@dataclass(frozen=True)
class Term:
    """A summand of every column: factor * the source column * 1, cos or sin of position * frequency.

    Args:
        factor: The factor, float64.
        source: value * WIDEST + column; -1: no summand here.
        frequency: Radians per position, float64.
        turn: PLAIN, COS or SIN.
    """

    factor: Array
    source: Array
    frequency: Array
    turn: Array

    def map(self, change: Callable[[Array], Array]) -> Term:
        """The term with a layout operation on its arrays."""
        return Term(change(self.factor), change(self.source), change(self.frequency), change(self.turn))


class Columns:
    """Rows of activations, as a sum of terms."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms = terms

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, with 1 for batch and rows."""
        return tuple(self.terms[0].source.shape)

    @property
    def is_turned(self) -> bool:
        """Whether a column depends on the position."""
        return any(bool(term.turn.any()) for term in self.terms)

    def map(self, change: Callable[[Array], Array]) -> Columns:
        """The columns after a layout operation."""
        return Columns([term.map(change) for term in self.terms])

    def times(self, factor: float | Array) -> Columns:
        """The columns times a number, or times one for each."""
        shape = np.broadcast_shapes(self.shape, np.shape(factor))
        wide = self.map(lambda array: np.broadcast_to(array, shape))
        return Columns([replace(term, factor=term.factor * factor) for term in wide.terms])

    def turned(self, trig: Trig) -> Columns:
        """The columns times cos or sin of an angle."""
        shape = np.broadcast_shapes(self.shape, trig.frequency.shape)
        kind = np.full(shape, trig.kind, np.int8)
        made = [term.map(lambda array: np.broadcast_to(array, shape)) for term in self.terms]
        wide = np.broadcast_to(trig.frequency, shape)
        return Columns([Term(term.factor * trig.magnitude, term.source, wide, kind) for term in made])


def columns_of(index: int, shape: tuple[int, ...]) -> Columns:
    """All columns of a value, in order."""
    width = int(np.prod(shape))
    source = (index * WIDEST + np.arange(width, dtype=np.int64)).reshape(shape)
    return Columns([Term(np.ones(shape), source, np.zeros(shape), np.zeros(shape, np.int8))])


@dataclass(frozen=True)
class Positions:
    """The position of each row, plus a constant."""

    first: int = 0


class Ones:
    """The attention mask of a text without padding: 1 for each row."""


@dataclass(frozen=True)
class Trig:
    """Angles position * frequency of a row (kind PLAIN), or magnitude * their cos or sin."""

    frequency: Array
    kind: int = PLAIN
    magnitude: float = 1.0

    def map(self, change: Callable[[Array], Array]) -> Trig:
        """The angles after a layout operation."""
        return replace(self, frequency=change(self.frequency))


@dataclass(frozen=True)
class Parameter:
    """A tensor of the checkpoint, by its name in the model: (values + offset) * factor."""

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    factor: float = 1.0
    is_transposed: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Mask:
    """A mask: its number in `leaves.MASKS`, and its size."""

    kind: int
    size: int


class Lazy:
    """A formula that a later node may complete; `Walk.force` writes what it is so far."""


@dataclass(frozen=True, eq=False)
class Activated(Lazy):
    """factor * act(x)."""

    x: Columns
    act: str
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Embedded(Lazy):
    """scale * rows of an embedding's matrix, by token ids or (positions not None) by first + position."""

    matrix: Parameter
    positions: Positions | None
    shape: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Mean(Lazy):
    """The mean of x over its last dimension."""

    x: object


@dataclass(frozen=True, eq=False)
class Centred(Lazy):
    """x less its mean."""

    x: object


@dataclass(frozen=True, eq=False)
class Square(Lazy):
    """x^2, or (is_centred) the square of x less its mean."""

    x: object
    is_centred: bool


@dataclass(frozen=True, eq=False)
class MeanSquare(Lazy):
    """The mean over the last dimension of `Square`, plus eps; is_root: 1 / its square root."""

    x: object
    is_centred: bool
    eps: float | None = None
    is_root: bool = False


@dataclass(frozen=True, eq=False)
class Normed(Lazy):
    """A norm over the last dimension of x, without a weight so far."""

    x: object
    is_centred: bool
    eps: float


class Parts(list[object]):
    """The results of a node that has several."""


class Symbol:
    """A number that depends on the number of rows."""


SYMBOL = Symbol()
