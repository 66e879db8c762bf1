"""What several commands need: the model that was asked for, sampling fields, lines of input."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import harmless

if TYPE_CHECKING:
    from .. import LLM


def model_path(chosen: Namespace) -> str:
    """The model that the command line names, by an option or a word, else the demo model."""
    from ..hub import DEMO

    given = getattr(chosen, "name", None) or chosen.model
    if given is not None and (given != DEMO or Path(DEMO).exists()):
        return str(given)
    from ..demo import fetch_model

    return str(fetch_model())


def open_model(chosen: Namespace) -> LLM:
    """The engine for the model that the options name, else for the demo model."""
    from .. import LLM

    return LLM(model_path(chosen), device=chosen.device, dtype=chosen.dtype, max_model_len=chosen.max_model_len)


def sampling(chosen: Namespace) -> dict[str, Any]:
    """The sampling fields that were given."""
    from ..sampling_params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    given = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    SamplingParams(**given)  # what is wrong is told before a model is loaded
    return given


def texts(chosen: Namespace) -> list[str]:
    """The texts of the command line and the lines, which are not empty, of its file; without both, of standard input."""
    path = chosen.file or (None if chosen.prompt else "-")
    found = [*chosen.prompt, *([] if path is None else _lines(path))]
    if not found:
        print("llmpy: there is no text; -p TEXT, -f FILE, or lines of standard input", file=sys.stderr)
    return found


def _lines(path: str) -> list[str]:
    """The lines of a file that are not blank."""
    if path == "-" and sys.stdin.isatty():
        print("one text per line; Ctrl-D ends", file=sys.stderr)
    with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def show(text: str) -> None:
    """A piece of text at once."""
    print(harmless(text), end="", flush=True)
