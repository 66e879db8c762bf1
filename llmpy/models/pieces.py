"""The rows of a checkpoint's tensors that form a weight."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Part(NamedTuple):
    """Rows of a matrix, or elements of a vector, from one tensor: r is its row base + r // inner * stride + r % inner.

    The columns of a tensor are its last dimension, or the last but one if it is transposed. Its rows are counted over all other
    dimensions. For a vector the rows are the tensor's elements.

    Attributes:
        name: Name of the tensor in the Hugging Face checkpoint.
        source: Name of the tensor in the file.
        rows: Number of rows.
        shape: Shape of the whole tensor.
        base, inner, stride: Position of the rows in the tensor, by the formula above.
        transposed: Whether the tensor's last two dimensions are [columns, rows].
        constant: For a buffer that updates may leave out: its value if no checkpoint is read. None: not such a buffer.
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
    """Rows that `Model.matrix` and `Model.vector` turn into a `Part`.

    Attributes:
        name: Whole name of the tensor, with ".weight".
        shape: Shape of the whole tensor.
        rows: Number of rows.
        base: First row.
        inner: Number of contiguous rows; None: all rows.
        stride: Distance from the start of one contiguous run to the next.
        transposed: Whether the tensor's last two dimensions are [columns, rows].
        constant: As in `Part`.
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
    """One piece per width. The tensor's rows are `groups` groups; each group has an equal part of every piece in order."""
    each = sum(widths) // groups
    starts = [sum(widths[:i]) // groups for i in range(len(widths))]
    return [
        Piece(name, shape, width, start, width // groups, each, transposed) for width, start in zip(widths, starts, strict=True)
    ]


def whole(name: str, *shape: int) -> Piece:
    """All rows of a tensor [rows, columns], or of a vector [rows]."""
    return Piece(name, shape, shape[0])


def flat(name: str, shape: int | tuple[int, ...]) -> Piece:
    """All elements of a tensor in memory order, for a vector."""
    shape = (shape,) if isinstance(shape, int) else shape
    return Piece(name, shape, prod(shape))
