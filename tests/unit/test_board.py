"""The page of results: it is current, and it marks what became slower."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "device,date,commit,command,row,value,unit,must,aim\n"


@pytest.fixture(scope="module")
def board() -> ModuleType:
    spec = importlib.util.spec_from_file_location("board", ROOT / "benchmarks/board.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["board"] = module
    spec.loader.exec_module(module)
    return module


def rows(board: ModuleType, folder: Path, *lines: str) -> dict[str, object]:
    """The rows of one device from lines of date, commit, row, value, unit."""
    text = "".join("D,{},{},c,{},{},{},4,\n".format(*line.split()) for line in lines)
    (folder / "results_h.csv").write_text(HEAD + text)
    return {series.row: series for series in board.read([folder / "results_h.csv"]).get("D", [])}


def test_the_committed_page_is_current(board: ModuleType) -> None:
    have = board.PAGE.read_text()
    assert have == board.page(ROOT / "benchmarks"), "run python benchmarks/board.py"
    assert "8b.step.1<" in have and "NVIDIA H200" in have and "llama.cpp" in have


@pytest.mark.parametrize(
    ("values", "unit", "gain", "has_regressed"),
    [
        ("5 4", "ms", 0.2, False),
        ("4 5", "ms", -0.25, True),
        ("5 4 4.1", "ms", -0.025, False),  # against the best, not the last
        ("3 5 4", "ms", -1 / 3, True),
        ("4 5", "tok/s", 0.25, False),
        ("5 4", "tok/s", -0.2, True),
        ("5", "ms", None, False),
        ("9 8", "passed", None, False),
        ("0 1", "errors", None, False),
    ],
)
def test_gain(board: ModuleType, tmp_path: Path, values: str, unit: str, gain: float | None, has_regressed: bool) -> None:
    lines = [f"2026-01-0{day} c{day} r {value} {unit}" for day, value in enumerate(values.split(), 1)]
    series = rows(board, tmp_path, *reversed(lines))["r"]  # the dates count, not the order in the file
    assert series.gain == (None if gain is None else pytest.approx(gain))
    assert series.has_regressed is has_regressed
    page = board.page(tmp_path)
    assert ("1 rows are worse" in page) is has_regressed


def test_goals_and_what_is_no_number(board: ModuleType, tmp_path: Path) -> None:
    found = rows(board, tmp_path, "2026-01-01 c fast 3 ms", "2026-01-01 c slow 5 ms", "2026-01-01 c none - ms")
    assert set(found) == {"fast", "slow"}
    assert found["fast"].reaches(4) and not found["slow"].reaches(4) and found["slow"].reaches(None) is None
    assert '<td class="met">4</td>' in board.table(found.values()) and '<td class="short">4</td>' in board.table(found.values())
