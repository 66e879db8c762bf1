"""Images of adapters: what a slot of the model's memory holds. They are made where the tensors are: of torch's tensors on the
engine's GPU no byte passes through the host."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..hardware import ordinal
from ..weights import bfloat16
from . import peft

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..config import EngineConfig
    from .adapter_sources import Place
    from .peft import Factors


def device_of(source: object, config: EngineConfig) -> Any:
    """The torch device of an adapter's tensors if all of them are on the GPU of an engine of one rank, else None.

    Args:
        source: What `load_adapter` got.
        config: The engine's resolved options.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(source, Mapping) or not source:
        return None
    if config.tensor_parallel_size > 1 or config.data_parallel_size > 1:
        return None
    if not all(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in source.values()):
        return None
    devices = {tensor.device for tensor in source.values()}
    return devices.pop() if {device.index for device in devices} == {ordinal(str(config.device))} else None


class Run(NamedTuple):
    """Where n tensors of a group lie in an image, in values of their type: the first, and the distance of the next."""

    first: int
    n: int
    at: int
    step: int


class Group(NamedTuple):
    """Tensors of one kind of module and of one shape, in the order of their places in an image.

    Args:
        names: Of the tensors.
        rows: Of B, which an image holds transposed: the wanted rows. None: the tensors are A.
        columns: Of A: the wanted columns. None: all.
        item: Bytes of a value in the image: 2: bfloat16, 4: float32.
        runs: Their places.
    """

    names: list[str]
    rows: Any
    columns: npt.NDArray[np.int64] | None
    item: int
    runs: list[Run]


class Plan:
    """How an image is made of an adapter's tensors. A model has hundreds of them; those of one shape are copied at once.

    Args:
        size_bytes: Of the image.
        pairs: Each place that the adapter changes, with its factors.
        rank: The largest of the adapter.
        num_linears: How many matrices it changes.
        config: The content of adapter_config.json, or None.
        rounds: Whether the factors are rounded to bfloat16.
    """

    def __init__(
        self,
        size_bytes: int,
        pairs: Sequence[tuple[Place, Factors]],
        rank: int,
        num_linears: int,
        config: object,
        rounds: bool,
    ) -> None:
        self.rank, self.num_linears, self._rounds = rank, num_linears, rounds
        self._size, self._config = size_bytes // 4, copy.deepcopy(config)
        self._shapes: dict[str, tuple[int, ...]] = {}
        places: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
        for place, factors in pairs:
            self._shapes |= {name: tuple(each.shape) for name, each in zip(factors.names, factors[:2], strict=True)}
            module = re.sub(r"\d+", "", place.tensor)  # layers lie one like another, so their tensors have equal distances
            order, item = place.order, place.item
            rows = (place.rows, place.first, place.inner, place.stride, order.heads)
            kinds = (module, factors.a.shape, None, order.columns, item), (module, factors.b.shape, rows, b"", item)
            for kind, at, name in zip(kinds, (place.a, place.b), factors.names, strict=True):
                places.setdefault(kind, []).append((at // item, name))
        self._groups = [_group(sorted(each), *kind) for (_, _, *kind), each in places.items()]
        self._at = np.array([place.head // 4 + i for place, _ in pairs for i in range(2)], np.int64)
        self._heads = np.zeros(2 * len(pairs), np.int32)
        self._heads[::2] = [len(factors.a) for _, factors in pairs]
        self._heads[1::2] = np.array([factors.scale for _, factors in pairs], np.float32).view(np.int32)

    def fits(self, tensors: Mapping[str, Any], config: object) -> bool:
        """Whether these are other tensors of the same adapter, of types that need no check.

        Args:
            tensors: As `load_adapter` gets them.
            config: The content of adapter_config.json.
        """
        torch = sys.modules.get("torch")
        types = {np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64)}
        if torch is not None:
            types |= {torch.float32, torch.bfloat16, torch.float16, torch.float64}
        wanted = self._shapes
        if len(tensors) != len(wanted) or config != self._config:
            return False
        each = tensors.items()
        return all(getattr(tensor, "shape", None) == wanted.get(name) and tensor.dtype in types for name, tensor in each)

    def image(self, tensors: Mapping[str, Any], device: Any) -> Any:
        """The image of tensors.

        Args:
            tensors: By name.
            device: The torch device of all of them, and of the image; None: the image is an array.
        """
        torch: Any = sys.modules.get("torch")
        if device is None:
            array = np.zeros(self._size, np.float32)
            array.view(np.int32)[self._at] = self._heads
            if _are_together(tensors.values()):
                self._fill(torch.from_numpy(array), tensors)
            else:
                self._fill(array, {name: peft.array(name, tensors[name], "adapter") for name in self._shapes})
            return array
        image = torch.zeros(self._size, dtype=torch.float32, device=device)
        image.view(torch.int32)[torch.from_numpy(self._at).to(device)] = torch.from_numpy(self._heads).to(device)
        self._fill(image, tensors)
        if image.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        return image

    def _fill(self, image: Any, tensors: Mapping[str, Any]) -> None:
        """Writes the factors: each group is gathered, rounded, then copied to its places."""
        is_array = isinstance(image, np.ndarray)
        stacked, strided = (np.stack, _strided) if is_array else (sys.modules["torch"].stack, type(image).as_strided)
        for group in self._groups:
            stack = stacked([tensors[name] if is_array else tensors[name].detach() for name in group.names])
            if group.rows is not None:
                stack = stack[:, group.rows].swapaxes(1, 2)
            if group.columns is not None:
                stack = stack[..., group.columns]
            if self._rounds:
                stack = _rounded(stack, group.item)
            into = image if group.item == 4 else image.view(stack.dtype)
            for run in group.runs:
                part = strided(into, (run.n, *stack.shape[1:]), (run.step, stack.shape[2], 1), run.at)
                part[...] = stack[run.first : run.first + run.n]


def _rounded(stack: Any, item: int) -> Any:
    """The nearest bfloat16 of each value of an array, as its bits (item 2) or as float32, or of a tensor, as torch's type."""
    if not isinstance(stack, np.ndarray):
        return stack.bfloat16()
    return bfloat16.bits(stack) if item == 2 else bfloat16.rounded(stack)


def _strided(image: npt.NDArray[Any], shape: Sequence[int], steps: Sequence[int], at: int) -> npt.NDArray[Any]:
    """`torch.Tensor.as_strided` of an array."""
    return np.lib.stride_tricks.as_strided(image[at:], shape, [image.itemsize * step for step in steps])


def _are_together(tensors: Iterable[Any]) -> bool:
    """Whether all of these are torch's tensors on one device."""
    torch = sys.modules.get("torch")
    return torch is not None and len({each.device if torch.is_tensor(each) else i for i, each in enumerate(tensors)}) == 1


def _group(
    tensors: Sequence[tuple[int, str]], rows: tuple[int, int, int, int, int] | None, columns: bytes, item: int
) -> Group:
    """A group of tensors with their places in ascending order."""
    at = [each for each, _ in tensors]
    runs: list[Run] = []
    for i, each in enumerate(at):
        last = runs[-1] if runs else None
        if last is not None and (last.n == 1 or each - at[i - 1] == last.step):
            runs[-1] = last._replace(n=last.n + 1, step=each - at[i - 1])
        else:
            runs.append(Run(i, 1, each, 0))
    names, selected = [name for _, name in tensors], None if rows is None else _selected(*rows)
    return Group(names, selected, source_columns(columns), item, runs)


def source_rows(rows: int, first: int, inner: int, stride: int, heads: int) -> npt.NDArray[np.int64]:
    """The checkpoint's row of each row of a place; the numbers are those of `Place`."""
    numbers = np.arange(rows)
    found: npt.NDArray[np.int64] = first + numbers // inner * stride + numbers % inner
    if not heads:
        return found
    inside = found % heads
    return found - inside + inside % 2 * (heads // 2) + inside // 2


def source_columns(columns: bytes) -> npt.NDArray[np.int64] | None:
    """The checkpoint's column of each column of a place; None: they are in order."""
    return np.frombuffer(columns, np.uint32).astype(np.int64) if columns else None


def _selected(rows: int, first: int, inner: int, stride: int, heads: int) -> Any:
    """The rows of B that a place has: a slice, or their numbers."""
    is_slice = inner >= rows and not heads
    return slice(first, first + rows) if is_slice else source_rows(rows, first, inner, stride, heads)


class Made(NamedTuple):
    """An image, and the matrices that it has addresses of.

    Args:
        image: An array, or a tensor on the device.
        kept: By the place of the address in the image.
    """

    image: Any
    kept: dict[int, npt.NDArray[np.float32]]

    @property
    def memory(self) -> tuple[int, int]:
        """The address of the image, and its bytes."""
        image = self.image
        return (image.ctypes.data, image.nbytes) if isinstance(image, np.ndarray) else (image.data_ptr(), 4 * image.numel())

    def equals(self, other: Made) -> bool:
        """Whether both have the same bits."""
        if self.kept.keys() != other.kept.keys():
            return False
        if any(not _same(matrix, other.kept[at]) for at, matrix in self.kept.items()):
            return False
        return _same(self._plain(), other._plain())

    def _plain(self) -> Any:
        """The image without addresses."""
        image = self.image.copy() if self.kept else self.image
        for at in self.kept:
            image[at // 4 : at // 4 + 2] = 0
        return image


def _same(one: Any, other: Any) -> bool:
    """Whether arrays, or tensors on the device, have the same bits."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one.view(np.int32), other.view(np.int32))
    import torch

    both = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in (one, other)]
    device = next(each.device for each in both if each.is_cuda or each is both[-1])
    return torch.equal(*(each.to(device).view(torch.int32) for each in both))
