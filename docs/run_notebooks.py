"""Runs notebooks and saves them with what they show: python docs/run_notebooks.py [NAME ...]; without names all of them."""

import sys
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent / "use/notebooks"


def run(name: str) -> nbformat.NotebookNode:
    """A notebook with the outputs of a run, without the times that would make every save a change."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    place = {"metadata": {"path": FOLDER}}
    client = nbclient.NotebookClient(notebook, timeout=1800, resources=place, coalesce_streams=True, record_timing=False)
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.pop("widgets", None)  # the state of bars that no output shows
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        nbformat.write(run(name), FOLDER / f"{name}.ipynb")
