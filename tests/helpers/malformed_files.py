"""Changes every tensor of a quantised weight in many ways, and checks that each file loads or is refused by name."""

from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from packed_files import open_llm

from llmpy import CheckpointError, UnsupportedError

Tensor = torch.Tensor


def _fill(value: float) -> Callable[[Tensor], Tensor | None]:
    return lambda t: torch.full(t.shape, value).to(t.dtype) if t.is_floating_point() else None


CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "absent": lambda _: None,
    "long": lambda t: torch.cat([t, t[:1]]) if t.ndim else t.repeat(3),
    "short": lambda t: t[:-1] if t.ndim and len(t) > 1 else None,
    "wide": lambda t: torch.cat([t, t[..., :1]], -1) if t.ndim else None,
    "turned": lambda t: t.mT.contiguous() if t.ndim > 1 else None,
    "flat": lambda t: t.reshape(-1) if t.ndim > 1 else None,
    "deep": lambda t: t[..., None],
    "empty": lambda t: t.reshape(-1)[:0],
    "scalar": lambda t: t.reshape(-1)[0].clone(),
    "nan": _fill(torch.nan),
    "infinite": _fill(torch.inf),
    "huge": lambda t: torch.full_like(t, 3e38) if t.dtype == torch.float32 else None,
    "zero": torch.zeros_like,
    "negative": lambda t: torch.full(t.shape, -1.0).to(t.dtype),
    "most": lambda t: None if t.is_floating_point() else torch.full_like(t, torch.iinfo(t.dtype).max),
    "float32": lambda t: t.float(),
    "float64": lambda t: t.double(),
    "int32": lambda t: t.float().to(torch.int32),
    "uint8": lambda t: t.float().to(torch.uint8),
    "bool": lambda t: t.to(torch.bool),
}
FATAL = ("absent", "long", "short", "wide", "empty", "nan", "infinite", "huge", "float64", "bool")
"""Changes that leave no weight. Not of groups, biases and numbers of FP8: a g_idx may be absent, FP8 has no infinity."""


def check_changes(path: Path, module: str, scheme: str, ignored: tuple[str, ...] = (".bias", ".weight_format")) -> None:
    """Fails if a changed file loads with a fatal change, or fails without the names of its tensor, file and scheme.

    Args:
        path: A checkpoint of one file.
        module: The start of the names of the weight's tensors.
        scheme: What an UnsupportedError must name.
        ignored: Endings of tensors that may have any value.
    """
    (file,) = path.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    names = [name for name in tensors if name.startswith(module) and not name.endswith(ignored)]
    assert len(names) > 1
    for name in names:
        for change, edit in CHANGES.items():
            value = edit(tensors[name])
            if value is None and change != "absent":
                continue
            others = {other: tensor for other, tensor in tensors.items() if other != name}
            safetensors.torch.save_file(others if value is None else {**others, name: value.contiguous()}, file)
            may_load = change not in FATAL or (name.endswith("g_idx") and change == "absent")
            may_load |= tensors[name].dtype == torch.float8_e4m3fn and change == "infinite"  # becomes 448
            may_load |= name.endswith(".lookup_table") and change == "huge"  # a table's values are no factors
            _check_one(path, file, module, scheme, f"{name} {change}", may_load)


def _check_one(path: Path, file: Path, module: str, scheme: str, what: str, may_load: bool) -> None:
    try:
        open_llm(path).close()
    except CheckpointError as error:
        assert str(error.tensor).startswith(module) and error.file == str(file), f"{what}: {error}"
    except UnsupportedError as error:
        assert all(part in str(error) for part in (module, str(file), scheme)), f"{what}: {error}"
    else:
        assert may_load, f"{what} loads"
