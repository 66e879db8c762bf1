"""The two files of a batch: the requests, and the answers that exist already.

Answers are in the order of their requests. Each begins with a digest of its request's line number and text. So a rerun finds
the answers of an interrupted run from the files alone, with one line in memory, and notices a changed input.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import ConfigError

ENDING = b',"error":null}\n'
"""End of an output line without an error."""


BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A request: its line number (from 1), its JSON, and its answer if that exists already."""

    number: int
    text: bytes
    answer: bytes | None = None

    @property
    def id(self) -> str:
        """The answer's id."""
        return f"batch_req_{hashlib.blake2b(b'%d %s' % self[:2], digest_size=12).hexdigest()}"

    @property
    def beginning(self) -> bytes:
        """The first bytes of the answer's line."""
        return f'{{"id":"{self.id}",'.encode()


class Counts(NamedTuple):
    """Number of answers, and of errors among them."""

    answers: int = 0
    errors: int = 0


def requests(file: Iterable[bytes]) -> Iterator[Line]:
    """The non-blank lines of an input file, read on demand."""
    texts = ((number, text.removeprefix(BOM if number == 1 else b"").strip()) for number, text in enumerate(file, 1))
    return (Line(number, text) for number, text in texts if text)


def unanswered(lines: Iterator[Line], path: Path) -> tuple[Counts, Iterator[Line]]:
    """Finds the requests without an answer in an output file. An incomplete last line is truncated.

    Args:
        lines: All requests.
        path: The output; it may be missing.

        Returns:
            Counts of the existing answers, and the requests without an answer.

        Raises:
            ConfigError: The output holds other lines than answers to these requests. The file is not changed.
    """
    if not path.exists():
        return Counts(), lines
    with path.open("r+b") as output:
        return _pass(lines, output, path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on the output; creates the file if it is missing.

    Raises:
        ConfigError: Another run holds the lock.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{path}: another run is writing it; wait for that run, or name another --output"
            raise ConfigError(message, option="output", value=str(path)) from None
        except OSError:  # a file system without locks
            pass
        yield


def with_answers(lines: Iterator[Line], path: Path) -> Iterator[Line]:
    """All requests, with their answers from an output file unless the answer is an error.

    Args:
        lines: All requests.
        path: The output.

    Raises:
        ConfigError: As `unanswered`.
    """
    with path.open("rb") as output:
        for found, line in _matched(lines, output, path):
            yield line._replace(answer=found) if found.endswith(ENDING) else line
    yield from lines


def _matched(lines: Iterator[Line], output: BinaryIO, path: Path) -> Iterator[tuple[bytes, Line]]:
    """The lines of an output file with their requests."""
    for number, found in enumerate(output, 1):
        line = next(lines, None)
        if line is None or not _answers(found, line):
            reason = "the input ends before it" if line is None else f"it does not answer line {line.number} of the input"
            message = f"{path}: line {number}: {reason}; the input has changed, or --output is another one's"
            raise ConfigError(message, option="output", value=str(path))
        yield found, line


def _pass(lines: Iterator[Line], output: BinaryIO, path: Path) -> tuple[Counts, Iterator[Line]]:
    done = Counts()
    for found, line in _matched(lines, output, path):
        if not found.endswith(b"\n"):
            output.truncate(output.seek(-len(found), os.SEEK_END))
            return done, chain([line], lines)
        done = Counts(done.answers + 1, done.errors + (not found.endswith(ENDING)))
    return done, lines


def _answers(found: bytes, line: Line) -> bool:
    """Whether a line of the output is a request's answer, or the beginning of one."""
    return found.startswith(line.beginning) or (not found.endswith(b"\n") and line.beginning.startswith(found))
