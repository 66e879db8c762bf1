"""The list of deliberate breaks fits the code; run by hand or as a slow test, the tests catch them."""

import re
from pathlib import Path

import pytest
from modules import load

ROOT = Path(__file__).parents[2]


mutate = load(ROOT / "tests/mutate.py")


def test_every_old_text_occurs_exactly_once() -> None:
    wrong = []
    for mutation in mutate.mutations():
        try:
            assert mutation.broken(ROOT) != (ROOT / mutation.file).read_text(), mutation.name
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_the_list_is_complete() -> None:
    found = mutate.mutations()
    assert len(found) >= 100
    assert len({mutation.name for mutation in found}) == len(found)
    for mutation in found:
        assert re.fullmatch(r"[a-z0-9-]+", mutation.name)
        assert mutation.rule.endswith(".")
        programs, arguments = mutate.split_tests(mutation.tests)
        named = [ROOT / word for word in [*programs, *arguments] if word.startswith("tests/")]
        assert named and all(path.exists() for path in named), mutation.name
        assert not programs or Path(mutation.file).parts[:2] in [("csrc", part) for part in mutate.C_PARTS], mutation.name


@pytest.mark.slow
def test_mutations_are_caught(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        results = mutate.run(mutate.mutations(), 2, mutate.show)
    is_enough, text = mutate.summary(results)
    assert is_enough, text
