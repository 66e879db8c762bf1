"""Which rows of which tensor of a checkpoint a weight is made of."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Part(NamedTuple):
    """Rows of a matrix, or elements of a vector, that come from one tensor: row base + r // inner * stride + r % inner of it.

    The rows of a tensor are counted over all dimensions but the columns: the last one, or the last but one of a transposed
    tensor. Those of a vector's tensor are its elements.

    Attributes:
        name: The tensor's, in the Hugging Face checkpoint.
        source: Its name in the file.
        rows: How many.
        shape: Of the whole tensor.
        base, inner, stride: Where they lie in it.
        transposed: Whether its last two dimensions are [columns, rows].
        constant: Of a buffer that updates need not bring: its values where no checkpoint is read; None: it is none.
    """

    name: str
    source: str
    rows: int
    shape: tuple[int, ...]
    base: int
    inner: int
    stride: int
    transposed: bool
    constant: float | None = None


class Piece(NamedTuple):
    """What `Model.matrix` and `Model.vector` make a part of; see `Part`.

    Attributes:
        name: The tensor's whole name, with ".weight".
        shape: Of the whole tensor.
        rows: How many of its rows.
        base: The first of them.
        inner: How many lie together; None: all.
        stride: From the first of those to the first of the next ones.
        transposed: Whether the tensor's last two dimensions are [columns, rows].
        constant: As of a part.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    base: int = 0
    inner: int | None = None
    stride: int = 0
    transposed: bool = False
    constant: float | None = None


def pieces_of(name: str, shape: tuple[int, ...], widths: Sequence[int], groups: int, transposed: bool) -> list[Piece]:
    """One piece a width of a tensor whose rows are groups, each with an equal share of every piece, one after the other."""
    each = sum(widths) // groups
    starts = [sum(widths[:i]) // groups for i in range(len(widths))]
    return [
        Piece(name, shape, width, start, width // groups, each, transposed)
        for width, start in zip(widths, starts, strict=True)
    ]


def whole(name: str, *shape: int) -> Piece:
    """A tensor [rows, columns], or a vector [rows], as it is."""
    return Piece(name, shape, shape[0])


def flat(name: str, shape: int | tuple[int, ...]) -> Piece:
    """All elements of a tensor as they lie, for a vector."""
    shape = (shape,) if isinstance(shape, int) else shape
    return Piece(name, shape, prod(shape))
