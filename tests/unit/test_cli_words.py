"""The command line without a model: help, unknown words, files of options, statuses, streams."""

import io
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llmpy import __version__, cli, devices, hardware
from llmpy.cli import common
from llmpy.cli.parser import reader
from llmpy.cli.serve import _options, read_keys
from llmpy.cli.vllm_flags import MEANINGS, PASSED, REASONING_PARSERS, TOOL_PARSERS, parser_name

COMMANDS = list(cli._parser("")._subparsers._group_actions[0].choices)
HEAVY = ("numpy", "tokenizers", "jinja2", "tqdm", "asyncio", "llmpy.llm", "huggingface_hub", "starlette", "uvicorn")
MEASURED = """
import sys, time
from llmpy import cli
try: cli.main(sys.argv[2:])
except SystemExit: pass
print(time.process_time(), [name for name in sys.argv[1].split() if name in sys.modules], file=sys.stderr)
"""


REFERENCE = "import asyncio, time; print(time.process_time())"


def python(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, check=True)


def shown_within(most: float, *words: str) -> str:
    """What a process with these words prints; from the interpreter's start it takes so many times the processor's time that
    one takes which imports asyncio: on any machine, in one of some attempts."""
    times = []
    for _ in range(10):
        found = python(MEASURED, " ".join(HEAVY), *words)
        seconds, _, loaded = found.stderr.partition(" ")
        assert loaded == "[]\n", f"{words} needs none of {loaded}"
        times.append((float(seconds), float(python(REFERENCE).stdout)))
        if times[-1][0] < most * times[-1][1]:
            return found.stdout
    pytest.fail(f"{words} and the reference: {times}")


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS), ["bench", "throughput"], ["bench", "serve"]], ids=" ".join
)
def test_help_is_quick_and_imports_little(words: list[str]) -> None:
    assert shown_within(1.75, *words, "--help").startswith(" ".join(["usage: llmpy", *words]))


def test_version_is_quick() -> None:
    assert shown_within(0.9, "--version") == f"llmpy {__version__}\n"


def test_every_option_has_help() -> None:
    """Engine options have the help text of EngineConfig."""
    shown = python(MEASURED, "", "serve", "--help").stdout
    assert "--max-num-seqs VALUE  Most running sequences;" in shown
    entries = shown.partition("\nengine:")[2].split("\n  --")[1:]
    assert len(entries) > 30 and not [entry for entry in entries if len(entry.split()) < 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["genrate"], "'generate'"),
        (["serve", "--max-modellen", "5"], "llmpy serve: unknown option '--max-modellen'; did you mean '--max-model-len'?"),
        (["bench", "throughput", "--input"], "'--input-len'"),
        (["bench", "latancy"], "'latency'"),
        (["serve", "--api-key", "secret"], "use --api-key-file"),
        (["devices", "--zzz"], "unknown option '--zzz'"),
        (["serve", "model", "other"], "unknown word 'other'"),
        (["serve", "--port", "x"], "invalid int value"),
    ],
)
def test_what_is_unknown_is_status_2_and_names_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    shown = capsys.readouterr()
    assert ended.value.code == 2 and message in shown.err and shown.out == ""


def test_no_word_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and not [name for name in COMMANDS if f"    {name}" not in shown.err]


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--max-tokens", "0"],
        ["inspect", "--max-model-len", "-1"],
        ["run-batch", "--window", "0"],
        ["bench", "latency", "--runs", "0"],
        ["bench", "latency", "--warmups", "-1"],
        ["bench", "serve", "--num-prompts", "some"],
        ["bench", "serve", "--request-rate", "0"],
        ["bench", "sweep", "--rates", "nan"],
    ],
)
def test_numbers_that_mean_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2 and f"have {words[-1]!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "no/model", "-p", "a", "--temperature", "-1"], "temperature must be non-negative"),
        (["generate", "no/model", "-f", "no/file"], "No such file or directory: 'no/file'"),
        (["serve", "no/model", "--port", "99999"], "--port: wanted 0 to 65535, have 99999"),
        (["serve", "no/model", "--host", "256.1.1.1"], "--host 256.1.1.1 --port 8000: "),
        (["serve", "no/model", "--tool-call-parser", "none of them"], "tool_call_parser: wanted one of auto, none, hermes"),
        (["complete", "--url", "nowhere:port", "-p", "a"], "--url: wanted http://HOST:PORT, have 'nowhere:port'"),
        (["bench", "serve", "--base-url", "nowhere:port"], "--base-url: wanted http://HOST:PORT, have 'nowhere:port'"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith("llmpy: ") and message in told and "no/model" not in told


def test_a_port_in_use_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "no/model", "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"llmpy: --host 127.0.0.1 --port {port}: Address already in use\n"


def test_no_text_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert cli.main(["generate", "no/model"]) == 1
    assert capsys.readouterr().err == "llmpy: there is no text; give -p TEXT, -f FILE, or lines of standard input\n"


def options_of(command: str) -> set[str]:
    parsers = cli._parser(command)._subparsers._group_actions[0].choices
    return set(parsers[command]._option_string_actions)


def test_flags_of_vllm_lead_to_ours() -> None:
    """Advice on vLLM's flags in messages and on its page names our flags."""
    ours = options_of("serve")
    assert not ours & set(MEANINGS) and not MEANINGS.keys() & PASSED.keys()
    page = (Path(__file__).parents[2] / "docs/use/coming-from-vllm.md").read_text().partition("## The server")[2]
    right = [row.split("|")[2] for row in page.splitlines() if row.startswith("| `--")]
    named = re.findall(r"--[a-z-]+", " ".join([*MEANINGS.values(), *(why for _, why in PASSED.values()), *right]))
    assert len(right) > 15 and not set(named) - ours


@pytest.mark.parametrize("flag", PASSED)
def test_flags_of_vllm_that_change_nothing_are_taken(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    follow = ["3"] if PASSED[flag][0] else []
    for given in [flag] if follow else [flag, flag.replace("--", "--no-", 1)]:
        chosen = cli._parser("serve").parse_args(["serve", given, *follow, "--port", "7", "--", "here"])
        told = capsys.readouterr().err
        assert (chosen.port, chosen.model) == (7, "here") and not hasattr(chosen, flag[2:].replace("-", "_"))
        assert told.count("\n") == 1 and told.startswith(f"llmpy serve: {given} does nothing: ")
    assert flag not in cli._parser("serve").format_help()


def test_names_of_parsers_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    from llmpy.server.formats import FORMATS, REASONING

    assert {*TOOL_PARSERS.values()} <= {*FORMATS} and {*REASONING_PARSERS.values()} <= {*REASONING, "auto"}
    assert not {*TOOL_PARSERS} & {*FORMATS} and not {*REASONING_PARSERS} & {*REASONING}
    words = ["serve", "--tool-call-parser", "llama3_json", "--reasoning-parser", "deepseek_r1"]
    made = _options(cli._parser("serve").parse_args(words))
    assert (made["tool_call_parser"], made["reasoning_parser"]) == ("llama3", "think")
    told = capsys.readouterr().err
    assert "--tool-call-parser llama3_json is called llama3 here" in told and "deepseek_r1 is called think here" in told
    assert parser_name(TOOL_PARSERS, "--tool-call-parser", "hermes") == "hermes" and capsys.readouterr().err == ""


def test_files_of_keys_that_others_may_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    for mode, is_told in ((0o600, False), (0o400, False), (0o644, True), (0o640, True)):
        path.chmod(mode)
        assert read_keys(path) == ("one",)
        assert (f"chmod 600 {path}" in capsys.readouterr().err) == is_told, mode


def test_the_processor_is_told_where_a_gpu_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if devices()[1]["available"]:
        pytest.skip("there is a GPU")
    monkeypatch.delenv("LLMPY_DEVICE", raising=False)
    caplog.set_level("INFO", "llmpy")
    node = tmp_path / "nvidia0"
    monkeypatch.setattr(hardware, "NODES", (str(node),))
    assert hardware.choose(None) == "cpu" and not caplog.records
    node.touch()
    assert hardware.choose(None) == "cpu" and "using the CPU" in caplog.text


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Any]:
    """Options of `serve` with a file and words."""

    def parsed(text: str, *words: str) -> Any:
        path = tmp_path / "options.toml"
        path.write_text(text)
        return cli._parser("serve").parse_args(["serve", "--config", str(path), *words])

    return parsed


def test_options_from_a_file(parse: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        model = "here"
        port = 9000
        max-model-len = 4096
        enable_prefix_caching = false
        banned_token_ids = [1, 2]
        hf_overrides = {rope_theta = 5.0}
        served-model-name = ["a", "b"]
    """
    chosen = parse(text)
    assert (chosen.model, chosen.port, chosen.max_model_len, chosen.enable_prefix_caching) == ("here", 9000, 4096, False)
    assert (chosen.served_model_name, chosen.hf_overrides) == (["a", "b"], {"rope_theta": 5.0})
    assert list(chosen.banned_token_ids) == [1, 2]
    chosen = cli._parser("serve").parse_args(["serve", "there", "--config", str(tmp_path / "options.toml")])
    assert chosen.model == "there"
    chosen = parse(text, "there", "--port", "1", "--enable-prefix-caching")
    assert (chosen.model, chosen.port, chosen.enable_prefix_caching) == ("there", 1, True)
    wrong_ones = {
        "max-modellen = 1": "'--max-model-len'",
        "port = ": "Invalid value",
        "port = 'x'": "invalid int",
    }
    for wrong, message in wrong_ones.items():
        with pytest.raises(SystemExit):
            parse(wrong)
        assert message in capsys.readouterr().err


def test_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from a file\n\nanother\n")
    for words, wanted in [
        (["-p", "a", "--prompt", "b"], ["a", "b"]),
        ([], ["line", "last"]),
        (["-f", "-"], ["line", "last"]),
        (["-p", "a", "--file", str(tmp_path / "file")], ["a", "from a file", "another"]),
    ]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("line\n\nlast"))
        assert common.texts(cli._parser("score").parse_args(["score", "model", *words])) == wanted


def test_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from llmpy import UnsupportedError
    from llmpy.cli import machine

    for error in (UnsupportedError("no"), OSError("gone"), ImportError("lost"), KeyboardInterrupt()):
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        monkeypatch.setattr(machine, "run", Mock(side_effect=error))
        assert cli.main(["devices"]) == status
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err == ("\n" if status == 130 else f"llmpy: {error}\n")


def test_interrupted(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    """Ctrl-C while a model generates: results so far on stdout, nothing of Python's on stderr."""
    model = write_model(tmp_path, max_position_embeddings=65536)
    command = [sys.executable, "-m", "llmpy", "generate", str(model), "--device", "cpu", "--max-tokens", "60000", "-p", "abc"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and b"Traceback" not in errors, errors


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("port: 9000", "options.toml: wanted TOML, such as max-model-len = 4096, have another form: "),
        ("prot = 9000", "options.toml: unknown option 'prot'; did you mean '--port'?"),
        ("zq = 1", "options.toml: unknown option 'zq'"),
    ],
)
def test_errors_of_a_file_of_options_name_it(
    parse: Callable[..., Any], text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(text)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("word", "length"), [("4k", 4000), ("2K", 2048), ("300", 300)])
def test_lengths_as_words(word: str, length: int) -> None:
    assert cli._parser("inspect").parse_args(["inspect", "--max-model-len", word]).max_model_len == length
    with pytest.raises(SystemExit):
        cli._parser("inspect").parse_args(["inspect", "--max-model-len", f"x{word}"])


def test_a_store_is_a_name_or_json() -> None:
    read = reader("Connector | Mapping[str, Any] | str | None")
    assert read("package:make") == "package:make" and read('{"name": "peer", "bytes": 7}') == {"name": "peer", "bytes": 7}
    with pytest.raises(ValueError, match="Expecting"):
        reader("Mapping[str, int] | None")("package:make")
