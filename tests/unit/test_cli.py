"""The command line, on the demo model."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmpy import cli


def run(*words: str) -> int:
    return cli.main(list(words))


def in_process(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=120)


def test_help_is_quick_and_imports_little() -> None:
    script = (
        "import sys, time; start = time.process_time(); from llmpy import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "spent = time.process_time() - start\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'tqdm', 'llmpy.llm', 'huggingface_hub'} & set(sys.modules)\n"
        "print(spent, sorted(heavy), file=sys.stderr)"
    )
    runs = [in_process("-c", script) for _ in range(3)]
    assert all("demo" in one.stdout and one.stderr.endswith(" []\n") for one in runs), runs[0]
    assert min(float(one.stderr.split()[0]) for one in runs) < 0.1


def test_module_and_wrong_commands() -> None:
    assert in_process("-m", "llmpy", "version").stdout.startswith("llmpy 0.")
    wrong = in_process("-m", "llmpy", "sing")
    assert wrong.returncode == 2
    assert "invalid choice" in wrong.stderr
    with pytest.raises(SystemExit):
        run()


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cpu: ")
    assert "memory_bytes" in shown
    assert "cuda" in shown


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("demo", "--model", str(tmp_path / "absent")) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"llmpy: model: {tmp_path / 'absent'} is neither a file nor a directory")
    assert shown.err.count("\n") == 1


def test_demo(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--max-tokens", "4", "--max-model-len", "256") == 0
    shown = capsys.readouterr().out
    assert shown.count("\n> ") == 4
    head, streamed, together, model = shown.splitlines()[-4:]
    assert "output tok/s" in head
    assert streamed.split()[:2] == ["streamed", "1"]
    assert together.split()[:2] == ["together", "3"]
    assert together.split()[4] == "12"
    assert int(together.split()[3]) > 0  # the system message, cached by the first prompt
    assert model == f"model: {demo_model}"


def test_demo_with_own_prompt(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--model", str(demo_model), "--max-tokens", "3", "--max-model-len", "256", "Say hello") == 0
    shown = capsys.readouterr().out
    assert "> Say hello" in shown
    assert "together" not in shown


def test_generate(demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--max-tokens", "2", "--temperature", "0", "--max-model-len", "256")
    assert run("generate", *options, "The capital of France is") == 0
    assert capsys.readouterr().out.startswith(" Paris")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The capital of France is\n\nThe capital of Italy is\n"))
    assert run("generate", "--json", *options) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == ["The capital of France is", "The capital of Italy is"]
    assert [one["outputs"][0]["text"].split()[0].strip(".,") for one in found] == ["Paris", "Rome"]


def test_chat(demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of Italy?\nAnd of France?\n\nnever read\n"))
    options = ("--max-tokens", "12", "--temperature", "0", "--max-model-len", "256", "--system", "Answer with one word.")
    assert run("chat", *options) == 0
    answers = capsys.readouterr().out.splitlines()
    assert "Rome" in answers[0]
    assert "Paris" in answers[1]


def test_score(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("score", "--max-model-len", "256", "The capital of France is Paris.", "France Paris the of is capital.") == 0
    likely, unlikely = (float(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert 0 > likely > unlikely


def test_inspect(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "--weights", "--max-model-len", "256") == 0
    shown = capsys.readouterr().out
    for part in ("SmolLM2-135M-Instruct.Q4_1", "LlamaForCausalLM", "30 alike", "model.norm.weight", "134,515,008 parameters"):
        assert part in shown
