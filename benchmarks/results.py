"""Lines of a benchmark for the table of results: `python benchmarks/cuda.py --merge results.csv` adds them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cuda


class Results:
    """What a script has measured.

    Args:
        script: The script's path in the repository.
        parser: Gets the options --out and --commit.
    """

    def __init__(self, script: str, parser: argparse.ArgumentParser) -> None:
        self.script, self.lines = script, list[dict[str, object]]()
        parser.add_argument("--out", type=Path, help="directory for results.csv")
        parser.add_argument("--commit", default="", help="what is measured; default: git's HEAD, if there is one")

    def add(self, row: str, value: float, unit: str, must: float | None = None) -> None:
        """Adds a row. Units that end with "/s" are better if they are greater, all others if they are less."""
        line = {"row": row, "value": f"{value:.4g}", "unit": unit}
        self.lines.append(line | ({"must": f"{must:.4g}"} if must is not None else {}))

    def write(self, chosen: argparse.Namespace) -> None:
        """Adds the rows to results.csv in the directory --out, if there is one."""
        cuda.add_lines(chosen.out, chosen.commit, " ".join([self.script, *cuda.words_of(sys.argv)]), self.lines)
