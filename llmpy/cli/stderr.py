"""Standard error for a server: writes never fail and never block."""

from __future__ import annotations

import contextlib
import io
import os
import select
from typing import TextIO

PIECE_BYTES = 512
"""Bytes that a ready pipe or terminal accepts without blocking (POSIX's PIPE_BUF is at least this)."""


class Lines(io.TextIOBase):
    """Writes without blocking. Data that a full or closed pipe does not accept is dropped; a later line tells how much.

    Args:
        stream: Standard error; None: the process has none, so all data is dropped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._fd = -1
        self._dropped = 0
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._fd = -1 if stream is None else stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._fd < 0:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def write(self, text: str) -> int:
        """Writes text, or drops it."""
        if self._fd < 0:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if self._stream is not None:
                    self._stream.write(text)
            return len(text)
        data = text.encode("utf-8", "backslashreplace")
        if self._dropped:
            notice = f"\n({self._dropped} bytes of the log are lost: standard error was full)\n".encode()
            if self._put(notice) < len(notice):
                self._dropped += len(data)
                return len(text)
            self._dropped = 0
        self._dropped += len(data) - self._put(data)
        return len(text)

    def _put(self, data: bytes) -> int:
        """Writes without blocking; returns the number of written bytes."""
        poll, done = select.poll(), 0
        poll.register(self._fd, select.POLLOUT)
        with contextlib.suppress(OSError):
            while done < len(data) and any(event & select.POLLOUT for _, event in poll.poll(0)):
                done += os.write(self._fd, data[done : done + PIECE_BYTES])
        return done
