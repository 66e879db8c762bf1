"""The command line, on the demo model."""

import io
import json
import os
import re
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


def test_module() -> None:
    assert in_process("-m", "llmpy", "version").stdout.startswith("llmpy 0.")
    assert in_process("-m", "llmpy").returncode == 2


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cpu: ")
    assert re.search(r"^  memory +\d+\.\d GiB$", shown, re.MULTILINE)
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
    assert run("generate", *options, "-p", "The capital of France is") == 0
    assert capsys.readouterr().out.startswith(" Paris")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The capital of France is\n\nThe capital of Italy is\n"))
    assert run("generate", str(demo_model), "--jsonl", *options) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == ["The capital of France is", "The capital of Italy is"]
    assert [one["outputs"][0]["text"].split()[0].strip(".,") for one in found] == ["Paris", "Rome"]


def test_chat(demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["What is the capital of Italy?", "", "And of \\", "France?", "/stats", f"/save {tmp_path / 'talk.json'}", "/sing"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    options = ("--max-tokens", "12", "--temperature", "0", "--max-model-len", "256", "--system", "Answer with one word.")
    assert run("chat", *options) == 0
    italy, france, stats, engine, saved, unknown = capsys.readouterr().out.splitlines()
    assert "Rome" in italy and "Paris" in france
    assert " tokens/s, first after " in stats and "of them cached" in stats and engine.startswith("LLM(SmolLM2")
    assert saved.startswith("5 messages written") and unknown.startswith("/sing: no such command")
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert talk[3]["content"] == "And of \nFrance?" and talk[4]["content"] == france


def test_chat_goes_on_with_a_file(
    demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    talk = [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
    ]
    first, second, torn = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "torn.md"
    first.write_text(json.dumps(talk))
    torn.write_text("**user**")
    lines = [f"/load {torn}", "/load", "/load absent.json", f"/load {first}", "/system", "And two?", f"/save {second}"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert run("chat", "--max-tokens", "3", "--temperature", "0", "--max-model-len", "256") == 0
    shown = capsys.readouterr()
    assert "3 messages read from" in shown.out and "system message: Answer with one word." in shown.out
    wanted = "torn.md: wanted a JSON list of messages with role and content, as /save FILE.json writes it"
    for problem in (wanted, "/load: wanted the name of a file", "No such file or directory"):
        assert problem in shown.out + shown.err
    saved = json.loads(second.read_text())
    assert saved[:4] == [*talk, {"role": "user", "content": "And two?"}] and len(saved) == 5


def test_chat_without_a_home(demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder and without an entry in /etc/passwd, as in some containers."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LLMPY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?"))
    options = ("--max-tokens", "12", "--temperature", "0", "--max-model-len", "256")
    assert run("chat", str(demo_model), *options) == 0
    assert "Paris" in capsys.readouterr().out


CLOSED = [("demo", "--max-tokens", "2"), ("chat", "--max-tokens", "2"), ("generate", "-p", "Hi", "--max-tokens", "2")]


@pytest.mark.parametrize("words", CLOSED, ids=lambda words: words[0])
def test_closed_standard_files(words: tuple[str, ...], demo_model: Path) -> None:
    """Standard input, output and error closed before the start, as by a service manager."""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "llmpy", *words, "--model", str(demo_model)]
    assert subprocess.run(command, timeout=300).returncode == 0


def test_score(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("score", "--max-model-len", "256", "-p", "The capital of France is Paris.", "-p", "France Paris the of is capital.")
        == 0
    )
    likely, unlikely = (float(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert 0 > likely > unlikely


def test_score_as_json(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("score", "--max-model-len", "256", "--jsonl", "-p", "The capital of France is Paris.") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["start"] == 1 and len(made["token_logprobs"]) == len(made["token_ids"]) - 1 and made["perplexity"] > 1


def test_inspect(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "--weights", "--max-model-len", "256") == 0
    shown = capsys.readouterr().out
    for part in ("SmolLM2-135M-Instruct.Q4_1", "LlamaForCausalLM", "30 alike", "model.norm.weight", "134,515,008 parameters"):
        assert part in shown
