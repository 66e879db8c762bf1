"""`llmpy run-batch`: answers an OpenAI batch file offline; a rerun continues where the last run stopped."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from .adapters import load, modules
from .common import model_path
from .engine_options import engine_options

if TYPE_CHECKING:
    from ..server.batch_files import Counts


def run(chosen: Namespace) -> int:
    """Answers the file; returns 1 if a request had an error."""
    from tqdm import tqdm

    from .. import AsyncEngine
    from ..server import build_app
    from ..server.app import find_service
    from ..server.batch import run_batch
    from ..server.batch_files import locked, requests, unanswered, with_answers

    adapters = modules(chosen)
    with contextlib.ExitStack() as stack:
        source = sys.stdin.buffer if chosen.input == "-" else stack.enter_context(open(chosen.input, "rb"))
        target = Path(chosen.output)
        stack.enter_context(locked(target))
        path, lines = target, requests(source)
        if chosen.retry_errors:
            path, lines = target.with_name(f"{target.name}.retry"), with_answers(lines, target)
        done, lines = unanswered(lines, path)
        if done.answers:
            hint = "; --retry-errors asks those again" if done.errors and not chosen.retry_errors else ""
            print(f"already there: {_told(done)}{hint}", file=sys.stderr)
        first = next(lines, None)
        if first is not None:
            output = stack.enter_context(open(path, "ab"))
            engine = stack.enter_context(contextlib.closing(AsyncEngine(model_path(chosen), **engine_options(chosen))))
            bar = stack.enter_context(tqdm(unit=" requests", initial=done.answers, total=_count(chosen.input), disable=None))

            def tell(counts: Counts) -> None:
                bar.update(counts.answers - bar.n)
                bar.set_postfix(errors=counts.errors, refresh=False)

            app = build_app(engine, served_model_name=tuple(chosen.served_model_name))
            load(engine, adapters, find_service(app).known_names)
            done = asyncio.run(run_batch(app, chain([first], lines), output, done, chosen.window, tell))
        if path != target and path.exists():
            path.replace(target)
    print(_told(done), file=sys.stderr)
    return int(done.errors > 0)


def _told(counts: Counts) -> str:
    return f"{counts.answers:,} requests answered, {counts.errors:,} with an error"


def _count(path: str) -> int | None:
    """Number of requests in a file; None for standard input, which can be read only once."""
    if path == "-":
        return None
    with open(path, "rb") as file:
        return sum(not line.isspace() for line in file)
