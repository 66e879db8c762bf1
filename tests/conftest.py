"""Fixtures that tests of several folders share, and which llmpy is tested: the installed one.

In a clone the working directory's own package has no built core. It must not shadow the installed one, neither here (as
it would under `python -m pytest`) nor in the processes that tests start, which all get to test what this one tests.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

os.environ["PYTHONSAFEPATH"] = "1"
if not any((ROOT / "llmpy").glob("_core*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
elif (found := importlib.util.find_spec("llmpy")) and found.origin == str(ROOT / "llmpy/__init__.py"):
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, fetched once per machine."""
    from llmpy.demo import fetch_model

    return fetch_model()
