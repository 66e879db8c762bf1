"""`llmpy devices`, `llmpy version`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from .. import __version__, build_info, devices
from ..hardware import operations_by_kind


def run(chosen: Namespace) -> int:
    """Runs `devices` or `version`."""
    return {"devices": _devices, "version": _version}[chosen.command](chosen)


def _version(chosen: Namespace) -> int:
    print(f"llmpy {__version__}")
    _show({name: value for name, value in build_info().items() if name != "version"})
    return 0


def _devices(chosen: Namespace) -> int:
    if chosen.operations:
        print("\n".join(_table(operations_by_kind())))
        return 0
    for device in devices():
        values = dict(device)
        state = "available" if values.pop("available") else "not available"
        print(f"{values.pop('device')}: {values.pop('name')}, {state}")
        _show({name: value for name, value in values.items() if value not in ("", 0)})  # what the backend does not know
    return 0


def _table(places: dict[str, dict[str, str]]) -> list[str]:
    """A line an operation, a column a kind of devices, for a terminal and for Markdown."""
    names = sorted({name for found in places.values() for name in found})
    rows = [["operation", *places], *([name, *(found.get(name, "") for found in places.values())] for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)) + " |" for row in rows]


def _show(values: dict[str, Any]) -> None:
    """Names and values in two columns."""
    shown = dict(_shown(name, value) for name, value in values.items())
    width = max(map(len, shown), default=0)
    for name, text in shown.items():
        print(f"  {name:{width}}  {text}")


def _shown(name: str, value: Any) -> tuple[str, str]:
    if name.endswith("_bytes"):
        return name.removesuffix("_bytes"), f"{value / (1 << 30):.1f} GiB"
    return name, (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)
