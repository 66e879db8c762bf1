"""Every released model in docs/use/models.md has a configuration that compiles, with the published number of parameters.

released.json has for each name in the column "released models" of that page one release: its repository, billions of
parameters and the fields of its config.json, written down from what the publishers say. Left out are ids of tokens and most
fields about training; the factors of longrope, on which no shape depends, are not the publishers'.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from modules import load

from llmpy import models

ROOT = Path(__file__).parents[2]


RELEASED = json.loads((ROOT / "tests/models/released.json").read_text())


def names_on_the_page() -> set[str]:
    """The names of the column: between commas and semicolons that are not in parentheses; sizes belong to the name before."""
    found: list[str] = []
    for family in load(ROOT / "docs/models_table.py").families():
        start = len(found)
        for part in re.split(r"[;,] (?![^(]*\))", family.CHECKPOINTS):
            name = part.removeprefix("and ")
            if len(found) > start and (name[0].isdigit() or name == "saved alone"):
                found[-1] += f", {name}"
            else:
                found.append(name)
    return set(found)


def test_every_name_on_the_page_has_a_configuration() -> None:
    missing = names_on_the_page() - RELEASED.keys()
    page = (ROOT / "docs/use/models.md").read_text()
    told = re.search(r"Not checked so, for want of their fields:\s+(.*?)\.\n", page, re.DOTALL)
    assert told and missing == set(re.split(r"; ", re.sub(r"\s+", " ", told[1])))
    assert not RELEASED.keys() - names_on_the_page()


@pytest.mark.parametrize("name", RELEASED)
def test_it_compiles(name: str) -> None:
    billions, config = RELEASED[name]["billions"], dict(RELEASED[name]["config"])
    files = SimpleNamespace(kind="hf", directory="hub", weights=[], config=config)
    compiled = models.load(files, None)
    counted = sum(part.rows * weight["cols"] for weight in compiled.spec["weights"] for part in weight["parts"])
    assert counted == pytest.approx(1e9 * billions, rel=0.02)
    assert compiled.config.max_position_embeddings >= 512
