"""`llmpy run-batch`: an OpenAI batch file answered offline; run again, it goes on where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace
from pathlib import Path

from .common import model_path
from .engine_options import engine_options


def run(chosen: Namespace) -> int:
    """Answers the file; 1 if a request had an error."""
    from tqdm import tqdm

    from .. import AsyncEngine
    from ..server import build_app
    from ..server.batch import WINDOW, done_ids, run_batch

    done = done_ids(Path(chosen.output))
    if done:
        print(f"{len(done)} answers are there already", file=sys.stderr)
    window = chosen.window or WINDOW
    with contextlib.ExitStack() as stack:
        lines = sys.stdin if chosen.input == "-" else stack.enter_context(open(chosen.input, encoding="utf-8"))
        output = stack.enter_context(open(chosen.output, "a", encoding="utf-8"))
        engine = stack.enter_context(contextlib.closing(AsyncEngine(model_path(chosen), **engine_options(chosen))))
        bar = stack.enter_context(tqdm(unit=" requests", disable=None))

        def tell(n: int, n_errors: int) -> None:
            bar.update(n - bar.n)
            bar.set_postfix(errors=n_errors)

        n, n_errors = asyncio.run(run_batch(build_app(engine, served_model_name=()), lines, output, done, window, tell))
    print(f"{n} requests answered, {n_errors} with an error", file=sys.stderr)
    return int(n_errors > 0)
