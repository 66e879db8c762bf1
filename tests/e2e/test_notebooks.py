"""The notebooks of docs/ run, and show the kinds of outputs that they were saved with."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SLOW = {"small_rl_run"}


def cases():
    for path in sorted(DOCS.glob("notebooks/*.ipynb")):
        yield pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])


def kinds(notebook):
    """What each cell shows, but for progress: a call that is over soon has none."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), "saved without its outputs: python docs/run_notebooks.py"
    shown = ([output for output in cell.outputs if not progress(output)] for cell in cells)
    return [[(output.output_type, *sorted(output.get("data", ()))) for output in outputs] for outputs in shown]


def progress(output):
    return output.output_type == "display_data" or output.get("name") == "stderr"


@pytest.mark.parametrize("name", list(cases()))
def test_notebook(name: str, device: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    import nbformat

    spec = importlib.util.spec_from_file_location("run_notebooks", DOCS / "run_notebooks.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    monkeypatch.setenv("LLMPY_DEVICE", device)
    assert kinds(runner.run(name)) == kinds(nbformat.read(DOCS / f"notebooks/{name}.ipynb", 4))
