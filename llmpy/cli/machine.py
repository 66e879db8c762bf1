"""`llmpy devices`, `llmpy version`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from .. import __version__, build_info, devices


def run(chosen: Namespace) -> int:
    """Runs one of the two."""
    return {"devices": _devices, "version": _version}[chosen.command](chosen)


def _version(chosen: Namespace) -> int:
    print(f"llmpy {__version__}")
    _show({name: value for name, value in build_info().items() if name != "version"})
    return 0


def _devices(chosen: Namespace) -> int:
    for device in devices():
        values = dict(device)
        state = "available" if values.pop("available") else "not available"
        print(f"{values.pop('device')}: {values.pop('name')}, {state}")
        _show(values)
    return 0


def _show(values: dict[str, Any]) -> None:
    """Names and values in two columns."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        if name.endswith("_bytes"):
            shown = f"{value} ({value / (1 << 30):.1f} GiB)"
        print(f"  {name:{width}}  {shown}")
