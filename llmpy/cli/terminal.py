"""The terminal of a conversation: colours, line history, input of several lines."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

QUOTES = '"""'
HISTORY_LINES = 1000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters of terminals, except tab and line feed."""


def is_terminal(file: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; `file` is None if it was closed before Python started."""
    return file is not None and file.isatty()


def harmless(text: str) -> str:
    """A model's text for standard output; for a terminal, without control characters."""
    return plain(text) if is_terminal(sys.stdout) else text


def plain(text: str) -> str:
    """A text of another program, such as a server's error, without control characters."""
    return _CONTROL.sub("", text)


@contextlib.contextmanager
def keeping_typed_lines() -> Iterator[None]:
    """Keeps Ctrl-C from discarding typed but unread lines inside the block."""
    if not is_terminal(sys.stdin):
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    kept = [*before[:3], before[3] | termios.NOFLSH, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, kept)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class Terminal:
    """Standard input and output.

    Args:
        history: File of the typed lines; None = no history.
        words: Words that the tab key completes.
    """

    def __init__(self, history: Path | None = None, words: tuple[str, ...] = ()) -> None:
        self.is_interactive = is_terminal(sys.stdin)
        is_dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._has_colour = is_terminal(sys.stdout) and not is_dumb
        self._history = history
        self._words = words

    def __enter__(self) -> Terminal:
        if self.is_interactive:
            self._open_history()
        return self

    def __exit__(self, *unused: object) -> None:
        if not (self.is_interactive and self._history):
            return
        import readline

        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.write_history_file(self._history)
        except OSError as error:
            self.note(f"the history was not saved: {error}")

    def _open_history(self) -> None:
        import readline  # from here on input() edits lines

        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims("")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        if self._history is not None:
            with contextlib.suppress(OSError):  # the file is missing or not readable
                readline.read_history_file(self._history)

    def _complete(self, begin: str, number: int) -> str | None:
        found = [word for word in self._words if begin and word.startswith(begin)]
        return found[number] if number < len(found) else None

    def _painted(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._has_colour else text

    def show(self, text: str, dim: bool = False) -> None:
        """Prints a piece of text at once."""
        text = harmless(text)
        print(self._painted("2", text) if dim else text, end="", flush=True)

    def note(self, text: str) -> None:
        """Prints a line that is not part of the conversation."""
        print(self._painted("2", harmless(text)), flush=True)

    def problem(self, text: str) -> None:
        """Prints a line about an error."""
        print(self._painted("31", harmless(text)), flush=True)

    def _line(self, mark: str) -> str:
        if not self.is_interactive:
            line = sys.stdin.readline() if sys.stdin is not None else ""
            if not line:
                raise EOFError
            return line.rstrip("\n")
        # \001 and \002 tell the line editor that the characters between them have no width.
        return input(f"\001\033[1;36m\002{mark}\001\033[0m\002" if self._has_colour else mark)

    def read(self) -> str:
        r"""Reads the next input: a line, or several if they end with a backslash or are between triple quotes.

        Raises:
            EOFError: The input has ended.
        """
        text = self._line("> ")
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._line("… ")
            return text.rstrip().removesuffix(QUOTES).strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._line("… ")
        return text
