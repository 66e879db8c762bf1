"""The table of docs/use/models.md equals the package's registry."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from modules import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(ROOT / "docs/models_table.py")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python docs/models_table.py"


def test_every_family_says_what_it_is(script: ModuleType) -> None:
    rows = script.cells()
    assert len(rows) >= 30
    for family, names, released, formats, reference, _ in rows:
        assert family and names and released and reference, f"{family}: wanted CHECKPOINTS in its file"
        assert formats.startswith("safetensors")


def test_references_are_there(script: ModuleType) -> None:
    """A model that claims a test against transformers is a case of tests/models, or has a separate test there."""
    text = "".join(path.read_text() for path in (ROOT / "tests/models").glob("*.py")).lower()
    for module, names in script.families().items():
        if getattr(module, "REFERENCE", "transformers") == "transformers":
            for name in script.shortened(names):
                stem = re.sub("For[A-Z].*|LMHeadModel|Model", "", name)
                assert stem.lower() in text, f"{name}: wanted a case in tests/models/conftest.py"
