"""The tables of the pages on speed are what the benchmarks write from the committed results."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "benchmarks/notebook"


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


def test_the_notebook_lists_its_pages() -> None:
    listed = (NOTEBOOK / "README.md").read_text()
    pages = sorted(path.name for path in NOTEBOOK.glob("*.md") if path.name != "README.md")
    assert len(pages) > 20
    for name in pages:
        assert f"| {name[:10]} | [" in listed and f"({name})" in listed, name
