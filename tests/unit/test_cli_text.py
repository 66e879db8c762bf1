"""`llmpy generate` and `llmpy score` on the demo model: samples, schemas, chats, logprobs, and output after Ctrl-C."""

import io
import json
import sys
from pathlib import Path

import pytest

from llmpy import LLM, cli

FRANCE = "The capital of France is"
OPTIONS = ("--max-tokens", "2", "--temperature", "0", "--max-model-len", "256")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_samples_and_logprobs(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-tokens", "2", "--min-p", "0.05", "--seed", "3", "--max-model-len", "256", "--presence-penalty", "0.5")
    assert cli.main(["generate", *options, "-p", FRANCE, "-n", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"> {FRANCE}" and shown[1].startswith("[0] ") and shown[2].startswith("[1] ")
    assert cli.main(["generate", *options, "-p", FRANCE, "-n", "2", "--logprobs", "1", "--jsonl"]) == 0
    (found,) = lines(capsys)
    assert [len(sample["logprobs"]) for sample in found["outputs"]] == [2, 2]
    assert (found["sampling_params"]["min_p"], found["sampling_params"]["presence_penalty"]) == (0.05, 0.5)


def test_schema_and_chat(demo_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "schema.json").write_text('{"enum": ["Paris", "Rome"]}')
    options = ("--max-tokens", "9", "--temperature", "0", "--max-model-len", "256")
    for schema in (str(tmp_path / "schema.json"), '{"enum": ["Paris", "Rome"]}'):
        assert cli.main(["generate", *options, "-p", FRANCE, "--json-schema", schema]) == 0
        assert json.loads(capsys.readouterr().out) in ("Paris", "Rome")
    assert cli.main(["generate", *options, "--chat", "--jsonl", "-p", FRANCE]) == 0
    assert "<|im_start|>user" in str(lines(capsys)[0]["prompt"])
    assert cli.main(["generate", *options, "--chat", "-p", FRANCE, "-p", "Hi"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"> {FRANCE}\n") and "\n> Hi\n" in shown and "<|im_start|>" not in shown


def test_no_text_is_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("generate", "score"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
        assert cli.main([command]) == 1
        assert "there is no text; give -p TEXT" in capsys.readouterr().err


def test_what_contradicts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--model", "a", "b", "-p", "x"])
    assert ended.value.code == 2 and "the model is named twice, as 'b' and by --model" in capsys.readouterr().err
    assert cli.main(["generate", "-p", "x", "--logprobs", "3"]) == 1
    assert "--jsonl" in capsys.readouterr().err
    assert cli.main(["generate", "-p", "x", "--json-schema", "no/file"]) == 1
    assert "no/file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "score"])
def test_ctrl_c_keeps_what_is_done(
    demo_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Ctrl-C while the second of two prompts runs."""
    real = getattr(LLM, command)

    def interrupted(llm: LLM, texts: list[str], **fields: object) -> object:
        error = KeyboardInterrupt()
        outputs = real(llm, texts, **fields)
        if command == "generate":
            outputs[1].outputs[0].finish_reason = "abort"
        else:
            outputs[1].token_logprobs = outputs[1].token_logprobs[:1]
        error.partial = outputs  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(LLM, command, interrupted)
    options = OPTIONS if command == "generate" else OPTIONS[-2:]
    assert cli.main([command, "--device", "cpu", "-p", FRANCE, "-p", "A B C", *options]) == 130
    shown = capsys.readouterr()
    assert FRANCE in shown.out and "A B C" not in shown.out
    assert "interrupted: 1 of 2 are complete" in shown.err
