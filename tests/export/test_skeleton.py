"""`llmpy export`: the printed function writes the same program; what stops the conversion is a comment in it."""

import json
from pathlib import Path

import pytest
from modules import load

from llmpy import UnsupportedError, export
from llmpy.cli import main
from llmpy.export import conversion, leaves
from llmpy.export.skeleton import skeleton
from llmpy.models import Model, ModelConfig, registry
from llmpy.models.source import Source

helpers = load(Path(__file__).with_name("conftest.py"))
KINDS = ["hunyuan_v1_dense", "mellum"]
MORE = ["biogpt", "gpt_oss", "gpt_neox", "gpt2", "gemma2", "afmoe", "dots1", "phi3", "granitemoeshared", "cohere2"]


def rows_of(weight: dict[str, object]) -> dict[str, object]:
    """A weight whose parts are compared by their rows: of contiguous rows the stride means nothing."""
    return {**weight, "parts": [p._replace(stride=p.stride * (p.inner < p.rows)) for p in weight["parts"]]}


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_the_function_writes_the_same_program(kind, converted, monkeypatch) -> None:
    found = converted(kind)
    fields = export.stored.read(found.program).fields(found.raw)
    spec = helpers.program_of(found.program, found.raw)
    source = skeleton(spec, fields)
    monkeypatch.setattr(registry, "_REGISTRY", {})
    exec(compile(source, "skeleton", "exec"), {})
    (own,) = registry._REGISTRY.values()
    m = Model(ModelConfig(fields, "config.json"), None, Source(), "checkpoint")
    own.build(m.config, m)
    assert [name for name, _ in m.spec["ops"]] == [name for name, _ in spec["ops"]]
    for (name, mine), (_, wanted) in zip(m.spec["ops"], spec["ops"], strict=True):
        assert {key: value for key, value in mine["attributes"].items() if value} == {
            key: value for key, value in wanted["attributes"].items() if value
        }, name
        for a, b in zip(mine["weights"], wanted["weights"], strict=True):
            assert (a < 0) == (b < 0)
            assert a < 0 or rows_of(m.spec["weights"][a]) == rows_of(spec["weights"][b]), name
    assert m.spec["layers"] == spec["layers"] and m.spec["ropes"] == spec["ropes"]
    assert len(source.splitlines()) < 60 and "m.emit(" not in source


def test_the_command_prints_what_was_understood(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}))
    error = UnsupportedError("cannot convert it", module="model.layers.0", node="new_empty")
    monkeypatch.setattr(export, "sketched", lambda raw: ("# the beginning\n", error))
    assert main(["export", str(tmp_path)]) == 1
    out = capsys.readouterr()
    assert out.out == "# the beginning\n" and "cannot convert it" in out.err
    monkeypatch.setattr(export, "converted", lambda raw: {"format": 1})
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "program.json")]) == 0
    assert json.loads((tmp_path / "program.json").read_text()) == {"format": 1}
    made = {"architecture": "X", "operations": [1, 2], "weights": [3]}
    monkeypatch.setattr(export, "converted", lambda raw: made)
    capsys.readouterr()
    assert main(["export", str(tmp_path), "--check"]) == 0
    assert capsys.readouterr().out.startswith("X converts: 2 operations, 1 weights;")
    monkeypatch.setattr(export, "graph", lambda raw: ["a = b()", "c = d()"])
    assert main(["export", str(tmp_path), "--graph"]) == 0
    assert capsys.readouterr().out == "a = b()\nc = d()\n"


def test_the_graph_has_nodes_and_modules(made) -> None:
    found = made("youtu")
    lines = conversion.graph(found.raw)
    assert any("aten.linear" in line and line.endswith("# model.layers.0.mlp.down_proj (Linear)") for line in lines)
    with pytest.raises(UnsupportedError, match="has no class of this name"):
        conversion.graph({**found.raw, "architectures": ["NoForCausalLM"]})


def test_an_error_in_a_rule_of_masks() -> None:
    def rule(*positions: object) -> object:
        raise ValueError("wanted a tensor")

    with pytest.raises(leaves.Refusal, match=r"a mask that is neither .*: wanted a tensor"):
        leaves._mask(mask_function=rule)
