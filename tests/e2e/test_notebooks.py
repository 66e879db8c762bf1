"""The notebooks of docs/use/ run, and show the kinds of outputs that they were saved with."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from modules import load

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = DOCS / "use/notebooks"
SLOW = {"small_rl_run"}


def cases():
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        yield pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])


def kinds(notebook):
    """Kinds of each cell's outputs except progress, which short calls do not show."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), "saved without its outputs: python docs/run_notebooks.py"
    shown = ([output for output in cell.outputs if not progress(output)] for cell in cells)
    return [[(output.output_type, *sorted(output.get("data", ()))) for output in outputs] for outputs in shown]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_saved_notebook_has_no_state_of_widgets_that_nothing_shows(path: Path) -> None:
    text = path.read_text()
    assert "widget-view" in text or '"widgets"' not in text


NEEDS = {"first_steps": {"pandas"}, "probabilities_and_taps": set(), "small_rl_run": {"torch", "transformers"}}
"""Packages beyond those of the core that the cells of each notebook import, or that llmpy imports for them."""


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_an_extra_brings_what_a_notebook_imports(name: str) -> None:
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    given = {"llmpy", "numpy", *sys.stdlib_module_names}
    source = "".join(line for cell in json.loads(text)["cells"] if cell["cell_type"] == "code" for line in cell["source"])
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) - given
    assert imported | ({"pandas"} if "to_pandas" in source else set()) == NEEDS[name]
    extras = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extra = "notebook-rl" if "torch" in imported else "notebook"
    assert NEEDS[name] <= {re.split(r"[<>=\[]", one)[0] for one in extras[extra]}
    assert f".[{extra}]" in text or not NEEDS[name]


def progress(output):
    return output.output_type == "display_data" or output.get("name") == "stderr"


@pytest.mark.parametrize("name", list(cases()))
def test_notebook(name: str, device: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    import nbformat

    runner = load(DOCS / "run_notebooks.py")
    monkeypatch.setenv("LLMPY_DEVICE", device)
    assert kinds(runner.run(name)) == kinds(nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4))
