"""`llmpy export`: writes the architecture function, or the program, of a class that transformers has."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from ..errors import UnsupportedError
from .common import model_path


def run(chosen: Namespace) -> int:
    """Prints or writes the function; returns 1 if the class cannot be converted."""
    from .. import export, hub

    files = hub.resolve(model_path(chosen), weights=False)
    if files.kind == "gguf":
        raise UnsupportedError("export reads config.json, a GGUF file has none; give the directory of the checkpoint")
    out = None if chosen.output is None else Path(chosen.output)
    if out is not None and out.suffix == ".json":
        out.write_text(json.dumps(export.converted(files.config)), encoding="utf-8")
        return 0
    source, error = export.sketched(files.config)
    if out is None:
        print(source, end="")
    elif source:
        out.write_text(source, encoding="utf-8")
    if error is not None:
        print(f"llmpy: {error}", file=sys.stderr)
    return int(error is not None)
