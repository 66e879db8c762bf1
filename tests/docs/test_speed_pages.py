"""The tables of the pages on speed, and the README's figures, equal the committed results."""

import csv
import fnmatch
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "benchmarks/notebook"
README = (ROOT / "README.md").read_text()


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"benchmark_{request.param}", ROOT / f"benchmarks/{request.param}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("benchmark", ["cuda"], indirect=True)
def test_speed_on_an_h200(benchmark: ModuleType) -> None:
    text = benchmark.PAGE.read_text()
    assert text.count("\n| 8b.step.1 |") == 1
    assert benchmark.page(text, benchmark.read_table(benchmark.TABLE)) == text, "run python benchmarks/cuda.py --merge"


@pytest.mark.parametrize("benchmark", ["cpu"], indirect=True)
def test_speed_on_the_cpu(benchmark: ModuleType) -> None:
    text = benchmark.PAGE.read_text()
    assert text.count("\n| Q4_0 |") == 1
    assert benchmark.page(text) == text, "run python benchmarks/cpu.py --page"


@pytest.mark.parametrize("benchmark", ["cuda"], indirect=True)
def test_the_readme_shows_results_of_an_h200(benchmark: ModuleType) -> None:
    """The newest value of a row with three digits, and vLLM's value; for several rows the least and the greatest."""
    newest = {line["row"]: float(line["value"]) for line in benchmark.read_table(benchmark.TABLE)}
    shown = re.findall(r"^\|.*\| (.+) \| (.+) \| `python benchmarks/cuda.py \"?(.+?)\"?` \|$", README, re.MULTILINE)
    assert len(shown) == 4
    for ours, others, pattern in shown:
        rows = fnmatch.filter(benchmark.ROWS, pattern)
        values = sorted(newest[row] for row in rows)
        digits = (f"{values[0]:.2f} to {values[-1]:.2f}" if len(rows) > 1 else f"{values[0]:.3g}").ljust(4, "0")
        assert ours.startswith(f"{digits} {benchmark.ROWS[rows[0]].unit}"), (pattern, digits)
        for number in re.findall(r"[\d.]+", benchmark.ROWS[rows[0]].vllm):
            assert re.search(rf"\b{number}\b", others), (pattern, number)


@pytest.mark.parametrize("benchmark", ["cpu"], indirect=True)
def test_the_readme_shows_results_of_a_cpu(benchmark: ModuleType) -> None:
    _, *lines = (ROOT / "benchmarks/results_cpu_zen5.csv").read_text().splitlines()
    row = next(line for line in csv.DictReader(lines) if (line["type"], line["job"]) == ("q4_0", "decode 32"))
    ours, theirs = (benchmark.rate(row[name]) for name in ("llmpy tok/s", "llama.cpp tok/s"))
    assert f"| {ours} tok/s | llama.cpp {theirs} tok/s | `python benchmarks/cpu.py --types q4_0` |" in README


def test_the_notebook_lists_its_pages() -> None:
    listed = (NOTEBOOK / "README.md").read_text()
    pages = sorted(path.name for path in NOTEBOOK.glob("*.md") if path.name != "README.md")
    assert len(pages) > 20
    for name in pages:
        assert f"| {name[:10]} | [" in listed and f"({name})" in listed, name
