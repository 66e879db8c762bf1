"""The table of operations (csrc/program/operations.def): Python's interpreter uses its names, and C refuses others."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from llmpy import _core
from llmpy.models import interpret
from llmpy.models.program import Spec

TABLE = _core.operations()


def test_the_interpreter_knows_every_operation() -> None:
    assert set(re.findall(r'\bname == "(\w+)"', inspect.getsource(interpret))) == set(TABLE)


def test_attributes_have_names_of_their_own() -> None:
    for name, attributes in TABLE.items():
        assert len(set(attributes)) == len(attributes) <= 9, name
    assert TABLE["position_scale"] == ("every", "first", "slope")
    assert TABLE["add"] == ()


@pytest.fixture
def open_changed(open_model: Callable[..., _core.Model]) -> Callable[..., Any]:
    """Opens a model after changing the attributes of its first operation of a kind."""

    def open_it(kind: str, **changes: object) -> _core.Model:
        def change(spec: Spec) -> None:
            first = next(op for name, op in spec["ops"] if name == kind)
            first["attributes"].update(changes)  # type: ignore[arg-type]

        return open_model(change)

    return open_it


WRONG = {
    "rms_norm: has no attribute heads": ("rms_norm", {"heads": 4}, ValueError),
    "integer": ("rms_norm", {"n_heads": 1.5}, TypeError),
    "embed: wanted the name of a known source, have 'ids'": ("embed", {"source": "ids"}, ValueError),
    "embed: wanted the name of a known source, have 1": ("embed", {"source": 1}, ValueError),
    "gated.: wanted that act is known": ("gated", {"act": "scale"}, ValueError),
    "wanted that is_tail is known": ("rope", {"is_tail": 2}, ValueError),
    "wanted that the first row is in the matrix": ("embed", {"first_row": 1 << 20}, ValueError),
}


def test_the_program_of_one_rank_does_not_run_alone(open_model: Callable[..., _core.Model]) -> None:
    def change(spec: Spec) -> None:
        spec["rooms"] = [width for width, _, _ in spec["values"]]

    with pytest.raises(ValueError, match="wanted the programs of all ranks, have that of one"):
        open_model(change)


@pytest.mark.parametrize("message", WRONG)
def test_wrong_attributes_are_refused(open_changed: Callable[..., Any], message: str) -> None:
    kind, changes, error = WRONG[message]
    with pytest.raises(error, match=message):
        open_changed(kind, **changes)


def test_what_is_left_out_is_zero(open_changed: Callable[..., Any]) -> None:
    assert open_changed("rope", k_head_dim=0, is_tail=0) is not None
