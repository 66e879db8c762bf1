"""The table of docs/use/parallel.md on the memory of ranks is what benchmarks/rank_memory.py prints."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_rows_of_the_table() -> None:
    page = (ROOT / "docs/use/parallel.md").read_text()
    command = [sys.executable, "benchmarks/rank_memory.py", "Llama 3 8B", "Qwen3 30B-A3B", "--ranks", "1,2"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(printed) == 4
    for row in printed[2:]:
        assert row.removesuffix("|") in page, row
