"""`llmpy chat` in a pseudo-terminal and `llmpy complete`, against a server."""

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from llmpy import AsyncEngine
from llmpy.cli import main
from llmpy.cli.common import show
from llmpy.cli.remote import Server
from llmpy.cli.terminal import Terminal as Shown
from llmpy.server import build_app

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A command in a new terminal, which it controls.

    Args:
        words: Words of the command line after `llmpy`.
        variables: Further variables of the environment.
    """

    def __init__(self, *words, **variables):
        self._end, other = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", **variables}
        command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "llmpy", *words]
        self._process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self.text = ""

    def expect(self, pattern, seconds=60):
        """Reads until a pattern matches, and drops the text up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert select.select([self._end], [], [], max(0, deadline - time.monotonic()))[0], f"no {pattern!r}: {self.text!r}"
            self.text += os.read(self._end, 4096).decode(errors="replace")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def leave_line(self):
        """Sends Ctrl-C until a new prompt appears, because Python's readline loses an interrupt just before it waits."""
        for _ in range(60):
            self.send("\x03")
            with contextlib.suppress(AssertionError):
                return self.expect("> ", 1)
        raise AssertionError(f"no prompt: {self.text!r}")

    def send(self, text):
        """Types text once the line editor reads keys, that is, when the terminal is in raw mode."""
        deadline = time.monotonic() + 60
        while termios.tcgetattr(self._end)[3] & termios.ICANON:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.write(self._end, text.encode())

    def interrupt(self):
        """Sends Ctrl-C at once, because the random model may end its answer soon."""
        os.write(self._end, b"\x03")

    def wait(self):
        """The exit status."""
        try:
            return self._process.wait(60)
        finally:
            os.close(self._end)


@pytest.fixture
def terminal(url, tmp_path):
    """Starts `llmpy chat` at the server; its history is kept in a folder of the test."""
    return lambda *words, **variables: Terminal(
        "chat", "--url", url, "--temperature", "0", *words, LLMPY_CACHE_DIR=str(tmp_path), **variables
    )


def test_a_talk(terminal, url, http, tmp_path):
    talk = terminal("--max-tokens", "6", "--system", "Be brief.")
    assert "/help" in talk.expect("> ")
    talk.send("hello\r")
    talk.expect("> ")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    body = {"messages": said, "temperature": 0, "max_tokens": 6}
    wanted = http.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    talk.send(f"/save {tmp_path}/talk.json\r")
    assert "3 messages" in talk.expect("messages written")
    assert json.loads((tmp_path / "talk.json").read_text()) == [*said, {"role": "assistant", "content": wanted}]
    talk.send("/stats\r")
    assert "6 tokens, " in talk.expect("of them cached")
    talk.send("/system Sing.\r/reset\r")
    assert "system message: Sing." in talk.expect("forgotten")
    talk.send('"""one\rtwo"""\r/he\t\r')
    talk.expect("Ctrl-D ends")
    talk.send("\x1b[A\x1b[A" + "\x15" + f"/save {tmp_path}/talk.md\r")
    talk.expect("messages written.*\n.*> ")
    assert (tmp_path / "talk.md").read_text().startswith("**system**\n\nSing.\n\n**user**\n\none\ntwo\n\n**assistant**\n\n")
    talk.send("\x04")
    assert talk.wait() == 0
    again = terminal()
    again.expect("> ")
    again.send("\x1b[A\x1b[A\r")  # the line before the last one of the talk before
    again.expect("Ctrl-D ends.*\n.*> ")
    again.leave_line()
    again.send("\x04")
    assert again.wait() == 0


def test_an_interrupt_stops_the_answer_alone(terminal, until_idle):
    talk = terminal("--max-tokens", "16000")
    talk.expect("> ")
    talk.send("count\r")
    talk.expect("count\r\n")
    talk.expect(r"(?s)\S.{40}")
    talk.interrupt()
    talk.expect(r"\[stopped\]")
    until_idle()
    talk.expect("> ")
    talk.send("half a li\x03")
    talk.expect("> ")
    talk.send("/stats\r")
    assert " tokens, " in talk.expect("of them cached[^>]*> ")
    talk.send("\x04")
    assert talk.wait() == 0


def test_an_answer_is_asked_again_or_forgotten(terminal, tmp_path):
    talk = terminal("--max-tokens", "4")
    talk.expect("> ")

    def saved():
        talk.send(f"/save {tmp_path}/talk.json\r")
        talk.expect("messages written[^>]*> ")
        return json.loads((tmp_path / "talk.json").read_text())

    talk.send("/undo\r")
    talk.expect("nothing has been answered yet[^>]*> ")
    talk.send("/retry\r")
    talk.expect("nothing has been answered yet[^>]*> ")
    for text in ("one", "two"):
        talk.send(f"{text}\r")
        talk.expect(f"{text}\r\n")
        talk.expect("> ")
    first = saved()
    assert [message["role"] for message in first] == ["user", "assistant"] * 2
    talk.send("/retry\r")
    talk.expect("/retry\r\n")
    talk.expect("> ")
    assert saved() == first  # at temperature 0
    talk.send("/undo\r")
    talk.expect("forgotten: two[^>]*> ")
    assert saved() == first[:2]
    talk.send("\x04")
    assert talk.wait() == 0


def test_settings_are_set(terminal):
    talk = terminal("--max-tokens", "4")
    talk.expect("> ")
    for line, told in {
        "/set": "max_tokens 4, temperature 0.0",
        "/set max-tokens 7": "temperature 0.0, max_tokens 7",
        "/set colour red": "colour is no setting; there are max_tokens, temperature",
        "/set temperature -1": "temperature must be non-negative",
        "/set temperature": "max_tokens 7; the rest",
        "/set temperature 0": "max_tokens 7, temperature 0",
    }.items():
        talk.send(f"{line}\r")
        assert told in talk.expect(f"{re.escape(told)}[^>]*> ")
    talk.send("hello\r")
    talk.expect("hello\r\n")
    talk.expect("> ")
    talk.send("/stats\r")
    assert "7 tokens, " in talk.expect("of them cached[^>]*> ")
    talk.send("\x04")
    assert talk.wait() == 0


def test_lines_typed_while_an_answer_runs_are_kept(terminal, until_idle):
    talk = terminal("--max-tokens", "16000")
    talk.expect("> ")
    talk.send("count\r")
    talk.expect("count\r\n")
    talk.expect(r"(?s)\S.{40}")
    os.write(talk._end, b"/system Sing.\r/he")
    talk.interrupt()
    talk.expect(r"\[stopped\]")
    talk.expect("system message: Sing.[^>]*> ")
    talk.send("lp\r")
    talk.expect("Ctrl-D ends")
    talk.send("\x04")
    assert talk.wait() == 0
    until_idle()


def test_a_talk_that_outgrows_the_context_goes_on(serve_small, tmp_path):
    talk = Terminal("chat", "--url", serve_small, "--temperature", "0", "--max-tokens", "8", LLMPY_CACHE_DIR=str(tmp_path))
    talk.expect("> ")
    for i in range(8):
        talk.send(f"question {i}\r")
        talk.expect(f"question {i}\r\n")
        before = talk.expect("> (?!.*> )")
        assert "400" not in before
        if "no longer fit the context and were left out" in before:
            break
    else:
        raise AssertionError("nothing was left out")
    talk.send("\x04")
    assert talk.wait() == 0


@pytest.fixture
def serve_small(tmp_path_factory, write_model, running):
    model = write_model(tmp_path_factory.mktemp("small"), max_position_embeddings=128)
    with contextlib.closing(AsyncEngine(model, device="cpu", kv_cache_memory_bytes="16MiB")) as small:
        server = running(build_app(small, served_model_name=("small",)))
        yield server.url
        server.stop()


def test_a_talk_with_a_model_of_this_process_goes_on(tmp_path_factory, write_model, monkeypatch, capsys):
    model = write_model(tmp_path_factory.mktemp("small"), max_position_embeddings=128)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"question {i}\n" for i in range(8))))
    assert main(["chat", "--device", "cpu", "--max-tokens", "8", "--temperature", "0", str(model)]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 8


def test_errors_of_a_server_do_not_steer_the_terminal():
    class Hostile(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "a\\u001b]0;title\\u0007b"}]}')

        def do_POST(self):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no\\u001b[31m\\u009b2J"}}')

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hostile) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{other.server_port}")
        assert server.model == "a]0;titleb" and not server.is_llmpy
        with pytest.raises(OSError, match="400") as refused:
            list(server.stream("/chat/completions", messages=[]))
        other.shutdown()
    assert str(refused.value).endswith("400: no[31m2J")


def test_notes_do_not_steer_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Shown()
    shown.note("a\x1b[31m")
    shown.problem("b\x1b]0;c\x07")
    assert capsys.readouterr().out == "a[31m\nb]0;c\n"


def test_colour_is_for_terminals_that_want_it(terminal):
    for variables, wanted in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        talk = terminal(**variables)
        text = talk.expect("> ")
        talk.send("/help\r")
        text += talk.expect("> ")
        assert bool(COLOUR.search(text)) == wanted, variables
        talk.send("\x04")
        assert talk.wait() == 0


def test_models_do_not_steer_the_terminal(monkeypatch, capsys):
    """A remote model may write control sequences for titles, the clipboard or colours; they are removed."""
    said = "a\x1b]52;c;aGk=\x07b\x1b[31m\x9b2Jc\r\td\n"
    Shown().show(said)
    show(said)
    assert capsys.readouterr().out == said * 2  # of a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Shown().show(said)
    show(said)
    assert capsys.readouterr().out == "a]52;c;aGk=b[31m2Jc\td\n" * 2


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"data": []}'])
def test_a_server_of_something_else(answer):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(OSError, match="no list of models"):
            Server(f"http://127.0.0.1:{other.server_port}")


def test_complete_brings_the_key(serve, http, tmp_path):
    keyed = serve(api_keys=("sesame",)).url
    plain = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    (tmp_path / "key").write_text("sesame\n")

    def run(*words, url=keyed, **variables):
        command = [sys.executable, "-m", "llmpy", "complete", "--url", url, "--max-tokens", "5", "--temperature", "0"]
        return subprocess.run([*command, "-p", "hello", *words], capture_output=True, env={**plain, **variables}, timeout=300)

    headers = {"authorization": "Bearer sesame"}
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    wanted = http.post(f"{keyed}/v1/completions", json=body, headers=headers).json()["choices"][0]["text"]
    for one in (run("--api-key-file", str(tmp_path / "key")), run(OPENAI_API_KEY="sesame")):
        assert (one.returncode, one.stdout.decode()) == (0, wanted + "\n"), one.stderr
    several = run("you there", OPENAI_API_KEY="sesame").stdout.decode()
    assert several.startswith(f"> hello\n{wanted}\n") and "\n> you there\n" in several
    refused = run()
    assert refused.returncode == 1 and b"401: wanted a valid key" in refused.stderr and refused.stderr.count(b"\n") == 1
    absent = run(url="http://127.0.0.1:9")
    assert absent.returncode == 1 and absent.stderr.startswith(b"llmpy: http://127.0.0.1:9: ")
    assert b"Traceback" not in absent.stderr
