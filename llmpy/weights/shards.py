"""Puts shards of tensors together, as trainers hold them whose ranks share each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checks import as_int
from ..errors import InvalidRequestError, WeightUpdateError

Shard = tuple[int, int, int]
"""Axis, index and number of equal parts of a tensor."""


@dataclass
class _Joined:
    """A tensor of which some shards have come."""

    whole: Any
    kind: tuple[object, ...]
    found: set[int] = field(default_factory=set)


class Shards:
    """The tensors of which not all shards have come, by name.

    Args:
        check: Called with name, type and shape of a whole tensor before its first shard is copied.
    """

    def __init__(self, check: Callable[[str, str, Sequence[int]], None]) -> None:
        self._check = check
        self._tensors: dict[str, _Joined] = {}

    def add(self, name: str, tensor: Any, shard: Shard) -> Any:
        """Copies a shard to its place; the caller may change it afterwards.

        Args:
            name: Name of the whole tensor.
            tensor: The shard: a NumPy array, a torch tensor, or another object with `__dlpack__` in host memory.
            shard: Axis, index and number of parts.

        Returns:
            The whole tensor with its last shard; None before.

        Raises:
            InvalidRequestError: `shard` names no part.
            WeightUpdateError: The shard is unlike earlier ones of this name, or the whole tensor would not fit.
        """
        tensor = _array(tensor)
        axis, index, count = _numbers(shard, len(tensor.shape))
        size = tensor.shape[axis]
        shape = (*tensor.shape[:axis], size * count, *tensor.shape[axis + 1 :])
        dtype = str(tensor.dtype).removeprefix("torch.")
        kind = (axis, count, shape, dtype, type(tensor).__module__)
        if name not in self._tensors:
            self._check(name, dtype, shape)
            self._tensors[name] = _Joined(_empty(tensor, shape), kind)
        joined = self._tensors[name]
        if kind != joined.kind:
            message = f"weight {name!r}: wanted a shard like the earlier ones, (axis, count, shape of the whole, type) = "
            raise WeightUpdateError(f"{message}{joined.kind[:4]}, have {kind[:4]}", mismatched=[name])
        joined.whole[(*[slice(None)] * axis, slice(index * size, (index + 1) * size))] = tensor
        joined.found.add(index)
        return self._tensors.pop(name).whole if len(joined.found) == count else None

    def refuse_parts(self) -> None:
        """Raises if shards of a tensor have not come."""
        for name, joined in self._tensors.items():
            count = joined.kind[1]
            assert isinstance(count, int)
            missing = [index for index in range(count) if index not in joined.found]
            message = f"weight {name!r}: wanted {count} shards, have none of the indices {', '.join(map(str, missing))}"
            raise WeightUpdateError(message, missing=[name])


def _numbers(shard: Sequence[int], n_axes: int) -> Shard:
    if not isinstance(shard, list | tuple) or len(shard) != 3:
        raise TypeError(f"shard must be (axis, index, count), but is {shard!r}")
    axis, index, count = (as_int("every number of shard", number) for number in shard)
    if not (0 <= axis < n_axes and 0 <= index < count):
        message = f"shard must be (axis below {n_axes}, index below count, count), got {tuple(shard)}."
        raise InvalidRequestError(message, parameter="shard", value=tuple(shard))
    return axis, index, count


def _array(tensor: Any) -> Any:
    """The tensor without its gradient, as a NumPy array if it is no torch tensor."""
    import numpy

    if hasattr(tensor, "detach"):
        return tensor.detach()
    return tensor if isinstance(tensor, numpy.ndarray) else numpy.from_dlpack(tensor)


def _empty(like: Any, shape: Sequence[int]) -> Any:
    import numpy

    return like.new_empty(shape) if hasattr(like, "new_empty") else numpy.empty(shape, like.dtype)
