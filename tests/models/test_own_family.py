"""A family in a user's file: the page's example on the command line, and errors that name the function and its file."""

import json
import re
import shutil
from pathlib import Path

import pytest

from llmpy import UnsupportedError, cli, models
from llmpy.models import registry
from llmpy.models.source import Source

PAGE = Path(__file__).parents[2] / "docs/develop/adding-an-architecture.md"
IDS = ",".join(str(3 + 11 * i % 90) for i in range(20))
COMMANDS = [["inspect"], ["compare"], ["generate"], ["chat"], ["score"], ["serve"], ["run-batch"]]
COMMANDS += [["bench", each] for each in ("throughput", "latency", "startup")]


@pytest.fixture
def mine(tiny, tmp_path, monkeypatch) -> Path:
    """A folder with the page's file and a checkpoint for it."""
    others = {name: family for name, family in registry._REGISTRY.items() if name != "MyForCausalLM"}
    monkeypatch.setattr(registry, "_REGISTRY", others)  # the page's own test registers it, too
    example = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert example
    (tmp_path / "my_family.py").write_text(example[1])
    shutil.copytree(tiny("llama").directory, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint/config.json").read_text())
    (tmp_path / "checkpoint/config.json").write_text(json.dumps({**config, "architectures": ["MyForCausalLM"]}))
    return tmp_path


def test_inspect_sees_the_file(mine, capsys) -> None:
    words = ["inspect", str(mine / "checkpoint")]
    assert cli.main(words) == 1
    shown = capsys.readouterr().err
    assert "'MyForCausalLM' is not supported; similar: " in shown and "--import FILE" in shown and len(shown) < 500
    assert cli.main([*words, "--import", str(mine / "my_family.py")]) == 0
    assert "MyForCausalLM, float32" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_it(command, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert not ended.value.code and "--import FILE" in capsys.readouterr().out


def test_files_that_cannot_be_imported(mine, capsys) -> None:
    (mine / "wrong.py").write_text("a = 1\nb = a.c\n")
    (mine / "torn.py").write_text("a = (\n")
    for name, text in (
        ("gone.py", "--import: wanted a Python file, have"),
        ("wrong.py", "wrong.py, line 2: AttributeError: 'int' object has no attribute 'c'"),
        ("torn.py", "torn.py, line 1: SyntaxError"),
    ):
        assert cli.main(["inspect", str(mine / "checkpoint"), "--import", str(mine / name)]) == 1
        shown = capsys.readouterr().err
        assert text in shown and "Traceback" not in shown


MISTAKES = {
    'layer.linear("mlp.up_proj", x, 4)': r"wanted linear\(x, name, width\), have \(str, a value, int\)",
    "0.5 * x": r"wanted x \* y of two values, have \(float, a value\); b\.scale\(x, \[factor\]\)",
    "x * 0.5": r"wanted x \* y of two values, have \(a value, float\); b\.scale\(x, \[factor\]\)",
    "x / 2": r"the vocabulary has x \+ y and x \* y; b\.scale\(x, \[factor\]\)",
    "x - x": r"x - y is x \+ b\.scale\(y, \[-1\.0\]\)",
    "1 + x": r"wanted x \+ y of two values, have \(int, a value\)",
    "layer.rms_norm(x, 'norm1', 1e-6)": r"layers\.0\.norm1\.weight, needed .*; nearest in the checkpoint: model\.layers\.0\.",
    "x": r"logits of Mine\w+: wanted m\.logits\(\.\.\.\) or m\.states\(\.\.\.\) as the last operation, have embed",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_name_the_function(line, mine, capsys) -> None:
    name = f"Mine{abs(hash(line))}ForCausalLM"
    (mine / "wrong_family.py").write_text(
        f"from llmpy import architecture\n@architecture({name!r})\ndef wrong(cfg, m):\n    x = m.embed('model.embed_tokens')\n"
        f"    for layer in m.layers('model.layers', 1):\n        x = {line}\n"
    )
    config = json.loads((mine / "checkpoint/config.json").read_text())
    (mine / "checkpoint/config.json").write_text(json.dumps({**config, "architectures": [name]}))
    assert cli.main(["inspect", str(mine / "checkpoint"), "--import", str(mine / "wrong_family.py")]) == 1
    shown = capsys.readouterr().err
    assert re.search(MISTAKES[line], shown), shown
    assert f"{mine}/wrong_family.py: wrong" in shown and "hf_overrides" not in shown


def test_scaling_is_as_the_error_says() -> None:
    raw = {"architectures": ["A"], "vocab_size": 9, "hidden_size": 4, "num_attention_heads": 1}
    model = models.Model(models.ModelConfig(raw, "config.json"), None, Source(), "file")
    x = model.embed("e")
    assert (x + model.scale(x, [-1.0])).width == x.width


def test_similar_names() -> None:
    with pytest.raises(UnsupportedError, match=r"'LamaForCausalLM' is not supported; similar: .*LlamaForCausalLM") as caught:
        registry.find("LamaForCausalLM")
    assert len(str(caught.value)) < 400
    with pytest.raises(UnsupportedError, match=r"'Zq' is not supported; docs/use/models\.md lists those that are"):
        registry.find("Zq")
