"""`llmpy inspect`, `llmpy devices`, `llmpy version`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from .. import __version__, build_info, devices


def run(chosen: Namespace) -> int:
    """Runs one of the three."""
    return {"inspect": _inspect, "devices": _devices, "version": _version}[chosen.command](chosen)


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


def _inspect(chosen: Namespace) -> int:
    from .common import open_model

    with open_model(chosen) as llm:
        print(repr(llm))
        _show({name: value for name, value in llm.config.to_dict().items() if value not in (None, (), {}, [])}, "configuration")
        print(f"tokenizer\n  {llm.tokenizer!r}")
        _show({name: f"{size:,} bytes" for name, size in llm.memory().items()}, "memory")
        print("program")
        for line in llm.program():
            print(f"  {line}")
        weights = llm.weight_info()
        print(f"weights: {len(weights)}")
        for weight in weights if chosen.weights else []:
            print(f"  {weight['name']}  {list(weight['shape'])}  {weight['dtype']}")
    return 0


def _show(values: dict[str, Any], title: str = "") -> None:
    """Names and values in two columns."""
    if title:
        print(title)
    width = max(map(len, values), default=0)
    for name, value in values.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        print(f"  {name:{width}}  {shown}")
