"""Where a module's tensors are in its checkpoints: these may have other names, rows in another order, and experts one by one.

Every tensor is filled with the numbers of its elements, and transformers turns them into a checkpoint. The numbers in the
checkpoint's tensors then say where each row of a module's tensor is. No table of names is needed.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..models.pieces import Piece
from .columns import Parameter
from .refusal import Refusal

Rows = NDArray[np.int64]
LARGE = 1 << 20  # elements; a larger tensor is numbered with a last dimension of 2


class Place(NamedTuple):
    """The rows of a module's tensor in the checkpoint.

    Attributes:
        files: Names of the checkpoint's tensors.
        shapes: Their shapes.
        file: For each row, the number of its tensor in `files`.
        row: For each row, its number in that tensor.
        is_same: The one tensor of the checkpoint equals the module's.
    """

    files: list[str]
    shapes: list[tuple[int, ...]]
    file: Rows
    row: Rows
    is_same: bool


class Names:
    """The places of all tensors of a module.

    Args:
        model: The module.

    Attributes:
        tied: Tensors that are another tensor, by name: the checkpoint may leave them out.
        places: Tensor of the module -> place.
    """

    def __init__(self, model: Any) -> None:
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError as error:
            raise Refusal(f"wanted transformers 5.17 or later, whose weights can be converted back ({error})") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.tied = {name: other for name, other in dict(model.all_tied_weights_keys).items() if name != other}
        for name in self.tied:
            shapes.pop(name, None)
        firsts = np.cumsum([0, *(prod(_numbered(shape)) for shape in shapes.values())])
        self._first = dict(zip(shapes, firsts.tolist(), strict=False))
        numbers = {name: _numbers(self._first[name], shape) for name, shape in shapes.items()}
        stored = revert_weight_conversion(model, numbers)
        self.places: dict[str, Place] = {}
        found: dict[str, list[tuple[str, Any]]] = {}
        names, starts = list(shapes), firsts[:-1]
        for file, tensor in stored.items():
            numbers_of = tensor.numpy().astype(np.int64)
            name = names[int(np.searchsorted(starts, numbers_of.ravel()[0], "right")) - 1]
            if numbers_of.max() - self._first[name] >= prod(_numbered(shapes[name])):
                raise Refusal(f"the checkpoint's {file} has rows of {name} and of other tensors")
            found.setdefault(name, []).append((file, numbers_of - self._first[name]))
        for name, parts in found.items():
            self.places[name] = _place(name, shapes[name], parts)

    def matrix(self, parameter: Parameter, rows: Rows) -> list[Piece] | None:
        """The pieces of rows of a matrix; None: no few pieces have these rows in this order.

        The rows of a tensor of more than two dimensions are counted over all but the columns, which are the last dimension, or
        the last but one if the parameter is transposed.
        """
        place = self._found(parameter.name)
        if parameter.is_transposed:
            if not place.is_same:
                raise Refusal(f"{parameter.name} is transposed, and stored in another order")
            return _pieces(place.files[0], place.shapes[0], rows, True)
        return self._of(place, rows)

    def vector(self, parameter: Parameter, elements: Rows) -> list[Piece]:
        """The pieces of elements of a tensor, in memory order."""
        place = self._found(parameter.name)
        if place.is_same:
            pieces = _pieces(place.files[0], place.shapes[0], elements, False)
        elif len(parameter.shape) == 1:
            pieces = self._of(place, elements)
        else:
            width = parameter.shape[-1]
            pieces = self._elements(place, elements, width)
        if pieces is None:
            raise Refusal(f"{parameter.name}: elements in an order that no pieces have")
        return pieces

    def _found(self, name: str) -> Place:
        if name not in self.places:
            raise Refusal(f"the tensor {name} is not in checkpoints of transformers as one tensor's rows")
        return self.places[name]

    def _of(self, place: Place, rows: Rows) -> list[Piece] | None:
        made: list[Piece] = []
        files, own = place.file[rows], place.row[rows]
        ends = [*np.flatnonzero(np.diff(files)) + 1, len(rows)]
        for start, end in zip([0, *ends], ends, strict=False):
            number = int(files[start])
            if (pieces := _pieces(place.files[number], place.shapes[number], own[start:end], False)) is None:
                return None
            made += pieces
        return made

    def _elements(self, place: Place, elements: Rows, width: int) -> list[Piece] | None:
        """Elements of a tensor of several dimensions whose rows lie in tensors of one dimension each."""
        rows = place.row[elements // width] * width + elements % width
        own = Place(place.files, place.shapes, place.file.repeat(width), np.zeros(0, np.int64), False)
        every = np.zeros(len(place.row) * width, np.int64)
        every[elements] = rows
        return self._of(own._replace(row=every), elements)


def _numbered(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor is numbered."""
    return (*shape[:-1], 2) if len(shape) > 1 and prod(shape) > LARGE and shape[-1] > 2 else shape


def _numbers(first: int, shape: tuple[int, ...]) -> Any:
    shape = _numbered(shape)
    return torch.arange(first, first + prod(shape), dtype=torch.float64).reshape(shape)


def _place(name: str, shape: tuple[int, ...], parts: list[tuple[str, Rows]]) -> Place:
    """The place of a tensor from the numbers in the checkpoint's tensors that have its elements."""
    short = _numbered(shape)
    width = short[-1] if len(short) > 1 else 1
    n_rows = prod(short) // width
    file, row = np.full(n_rows, -1), np.zeros(n_rows, np.int64)
    shapes: list[tuple[int, ...]] = []
    for number, (stored, numbers) in enumerate(parts):
        own = numbers.reshape(-1, width) if numbers.size % width == 0 else numbers[..., :0].reshape(0, width)
        is_rows = len(own) and (numbers.ndim == 1 or numbers.shape[-1] == width)
        if not is_rows or (own // width != own[:, :1] // width).any() or (own % width != np.arange(width)).any():
            raise Refusal(f"{name}: the checkpoint's {stored} {list(numbers.shape)} does not have its rows")
        places = own[:, 0] // width
        file[places], row[places] = number, np.arange(len(own))
        real = (*numbers.shape[:-1], shape[-1]) if len(shape) > 1 else numbers.shape
        shapes.append(tuple(int(size) for size in real))
    if (file < 0).any():
        raise Refusal(f"{name}: the checkpoint does not have all of its rows")
    is_same = len(parts) == 1 and shapes[0] == shape and bool((row == np.arange(n_rows)).all())
    return Place([stored for stored, _ in parts], shapes, file, row, is_same)


def _pieces(name: str, shape: tuple[int, ...], rows: Rows, is_transposed: bool) -> list[Piece] | None:
    """One piece for rows base + r // inner * stride + r % inner; None: they are in another order."""
    n, base = len(rows), int(rows[0])
    gaps = np.flatnonzero(np.diff(rows) != 1)
    inner = int(gaps[0]) + 1 if gaps.size else n
    stride = int(rows[inner]) - base if inner < n else 0
    number = np.arange(n)
    if stride < 0 or (rows != base + number // inner * stride + number % inner).any():
        return None
    return [Piece(name, shape, n, base, inner, stride, is_transposed)]
