"""The table of operations (csrc/program/operations.def): what Python interprets has its names, and C refuses all others."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmpy import _core, hub, models
from llmpy.models import interpret

TABLE = _core.operations()


def test_the_interpreter_knows_every_operation() -> None:
    source = inspect.getsource(interpret.Interpreter)
    assert set(TABLE) == set(re.findall(r'name == "(\w+)"', source))


def test_attributes_have_names_of_their_own() -> None:
    for name, attributes in TABLE.items():
        assert len(set(attributes)) == len(attributes) <= 8, name
    assert TABLE["position_scale"] == ("every", "first", "slope")
    assert TABLE["add"] == ()


@pytest.fixture
def open_changed(core_options: Callable[[str], dict[str, str]], tiny_model: Callable[[str, str], Path]) -> Callable[..., Any]:
    """Opens a model whose first operation of a kind has other attributes."""
    files = hub.resolve(tiny_model("llama", "float32"))
    checkpoint = _core.Checkpoint([str(path) for path in files.weights])
    options = {
        **core_options("cpu"), "num_threads": 1, "dtype": "auto", "kv_dtype": "auto", "activation_dtype": "auto",
        "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_bytes": 16 << 20,
        "fit_model_len": False, "dummy_seed": None, "dummy_mxfp4": False,
    }  # fmt: skip

    def open_model(kind: str, **changes: object) -> _core.Model:
        spec = models.load(files, checkpoint).spec
        first = next(op for name, op in spec["ops"] if name == kind)
        first["attributes"].update(changes)  # type: ignore[arg-type]
        return _core.Model(spec, checkpoint, options)

    return open_model


WRONG = {
    "rms_norm: has no attribute heads": ("rms_norm", {"heads": 4}, ValueError),
    "integer": ("rms_norm", {"n_heads": 1.5}, TypeError),
    "wanted that source is known": ("embed", {"source": 3}, ValueError),
    "wanted that is_tail is known": ("rope", {"is_tail": 2}, ValueError),
    "wanted that the first row is in the matrix": ("embed", {"first_row": 1 << 20}, ValueError),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_attributes_are_refused(open_changed: Callable[..., Any], message: str) -> None:
    kind, changes, error = WRONG[message]
    with pytest.raises(error, match=message):
        open_changed(kind, **changes)


def test_what_is_left_out_is_zero(open_changed: Callable[..., Any]) -> None:
    assert open_changed("rope", k_head_dim=0, is_tail=0) is not None
