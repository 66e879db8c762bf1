"""The engine's matrices as a trainer's tensors: one copy of the weights in the memory of a CUDA device (docs/use/rl.md)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.cores import update_of
from ..errors import EngineBusyError

if TYPE_CHECKING:
    from .calls import Weights

_ITEMS = {"float32": ("<f4", 4), "float16": ("<f2", 2), "bfloat16": ("<i2", 2)}
"""The item of `__cuda_array_interface__`, which has no bfloat16, and its bytes."""


@dataclass(frozen=True, eq=False)
class SharedMatrix:
    """A matrix in the engine's memory, for any package that reads `__cuda_array_interface__` (bfloat16 as int16).

    Attributes:
        dtype: "float32", "float16" or "bfloat16".
        shape: Rows and columns.
        owner: The engine; the memory is valid until its `close`.
    """

    dtype: str
    shape: tuple[int, int]
    owner: Any
    __cuda_array_interface__: dict[str, Any]

    @property
    def address(self) -> int:
        """The address of the first value."""
        address: int = self.__cuda_array_interface__["data"][0]
        return address


def matrices(weights: Weights, owner: Any) -> dict[str, SharedMatrix]:
    """The matrices of an engine that lie in rows, by name.

    Args:
        weights: Of the engine.
        owner: The engine, which the matrices keep alive.

    Raises:
        UnsupportedError: The device's backend shares no weights (the CPU), or there are several ranks.
    """
    found = {}
    with weights.claim():
        update = update_of(weights.model, weights.runner, weights.ordinal)
        update.check_awake()
        rows = update.rows()
    for name, address, dtype, shape, row_bytes in rows:
        item, size = _ITEMS[dtype]
        interface = {"shape": shape, "typestr": item, "data": (address, False), "strides": (row_bytes, size), "version": 3}
        found[name] = SharedMatrix(dtype, shape, owner, interface)
    weights.shared.update(found.values())
    return found


def check_unshared(shared: weakref.WeakSet[SharedMatrix], what: str) -> None:
    """Raises EngineBusyError if tensors still use the engine's memory.

    Args:
        shared: The matrices that were given out.
        what: The call that would free the memory, for the message.
    """
    if shared:
        raise EngineBusyError(
            f"{what} would free the memory of {len(shared)} weights that tensors of a trainer use (share_weights); delete the "
            "tensors, or call OnPolicy.release(), which copies them"
        )
