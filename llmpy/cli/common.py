"""Helpers of several commands: the chosen model, sampling fields, lines of input."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .terminal import harmless

if TYPE_CHECKING:
    from .. import LLM


def model_path(chosen: Namespace) -> str:
    """The model named by an option or a word of the command line, else the demo model."""
    from ..hub import is_demo

    given = getattr(chosen, "name", None) or chosen.model
    if given is not None and not is_demo(given):
        return str(given)
    from ..demo import fetch_model

    return str(fetch_model())


def open_model(chosen: Namespace) -> LLM:
    """Opens the engine for the chosen model, else for the demo model."""
    from .. import LLM

    return LLM(model_path(chosen), device=chosen.device, dtype=chosen.dtype, max_model_len=chosen.max_model_len)


def sampling(chosen: Namespace) -> dict[str, Any]:
    """The given sampling fields."""
    from ..sampling_params import FLAGS, SamplingParams

    given = {name: value for name in (*FLAGS, "n", "logprobs") if (value := getattr(chosen, name, None)) is not None}
    if getattr(chosen, "json_schema", None) is not None:
        given["structured_outputs"] = {"json": _schema(chosen.json_schema)}
    if "logprobs" in given and not chosen.jsonl:
        raise InvalidRequestError("--logprobs shows logprobs in --jsonl only; give both", parameter="logprobs")
    SamplingParams(**given)  # raises before a model is loaded
    return given


def texts(chosen: Namespace) -> list[str]:
    """The texts of the command line and the non-blank lines of its file; without both, the lines of standard input."""
    path = chosen.file or (None if chosen.prompt else "-")
    found = [*chosen.prompt, *([] if path is None else _lines(path))]
    if not found:
        raise InvalidRequestError("there is no text; give -p TEXT, -f FILE, or lines of standard input", parameter="prompt")
    return found


def _schema(given: str) -> str:
    """A JSON schema: the text itself, or the content of a file."""
    return given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")


def _lines(path: str) -> list[str]:
    """The non-blank lines of a file."""
    if path == "-" and sys.stdin is None:
        return []
    if path == "-" and sys.stdin.isatty():
        print("one text per line; Ctrl-D ends", file=sys.stderr)
    with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def show(text: str) -> None:
    """Prints a piece of text at once."""
    print(harmless(text), end="", flush=True)
