"""`llmpy export`: writes the architecture function, the program or the graph of a class that transformers has."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from ..errors import UnsupportedError
from .common import model_path


def run(chosen: Namespace) -> int:
    """Prints or writes what was asked for; returns 1 if the class cannot be converted."""
    from .. import export, hub

    files = hub.resolve(model_path(chosen), weights=False)
    if files.kind == "gguf":
        raise UnsupportedError("export reads config.json, a GGUF file has none; give the directory of the checkpoint")
    out = None if chosen.output is None else Path(chosen.output)
    error: UnsupportedError | None = None
    if chosen.check:
        made = export.converted(files.config)
        text = f"{made['architecture']} converts: {len(_list(made, 'operations'))} operations, "
        text += f"{len(_list(made, 'weights'))} weights; equal to the class for random weights\n"
    elif chosen.graph:
        text = "".join(f"{line}\n" for line in export.graph(files.config))
    elif out is not None and out.suffix == ".json" and not chosen.skeleton:
        text = json.dumps(export.converted(files.config))
    else:
        text, error = export.sketched(files.config)
    if out is None or chosen.check:
        print(text, end="")
    elif text:
        out.write_text(text, encoding="utf-8")
    if error is not None:
        print(f"llmpy: {error}", file=sys.stderr)
    return int(error is not None)


def _list(made: dict[str, object], name: str) -> list[object]:
    found = made[name]
    return found if isinstance(found, list) else []
