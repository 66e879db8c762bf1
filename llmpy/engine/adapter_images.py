"""Images of adapters in a GPU's memory, made of torch's tensors there: no byte of them passes through the host."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..hardware import ordinal

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .adapters import Place
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


def make(size_bytes: int, pairs: Iterable[tuple[Place, Factors]], device: Any) -> Any:
    """A float32 tensor with what a slot of the model's memory holds.

    Args:
        size_bytes: Of the image.
        pairs: Each place that the adapter changes, with its factors on the device.
        device: The torch device.
    """
    import torch

    image = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
    at: list[int] = []
    heads: list[int] = []
    targets: list[Any] = []
    sources: list[Any] = []
    for place, factors in pairs:
        rank, head = len(factors.a), place.head // 4
        at += [head, head + 1]
        heads += [rank, *struct.unpack("i", struct.pack("f", factors.scale))]
        targets.append(image.narrow(0, place.a // 4, rank * place.columns).view(rank, place.columns))
        sources.append(factors.a)
        b: Any = factors.b
        if place.inner < place.rows:
            b = b[torch.from_numpy(place.source_rows()).to(device)]
        elif place.rows < len(b):
            b = b.narrow(0, place.first, place.rows)
        targets.append(image.narrow(0, place.b // 4, rank * place.rows).view(rank, place.rows))
        sources.append(b.t())
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
        image.view(torch.int32)[torch.tensor(at, device=device)] = torch.tensor(heads, dtype=torch.int32, device=device)
    if image.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return image


def equal(image: Any, other: Any) -> bool:
    """Whether an image on a device and one there or in an array have the same bits."""
    import torch

    if not isinstance(other, torch.Tensor):
        other = torch.from_numpy(other).to(image.device)
    return torch.equal(image.view(torch.int32), other.view(torch.int32))
