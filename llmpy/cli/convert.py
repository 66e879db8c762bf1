"""`llmpy convert`: writes a quantised copy of a model."""

from __future__ import annotations

from argparse import Namespace

from ..convert import convert
from .common import model_path


def run(chosen: Namespace) -> int:
    """Writes the copy and prints its path."""
    chosen.model = None
    print(convert(model_path(chosen), chosen.out, chosen.to))
    return 0
