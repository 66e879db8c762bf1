"""Progress bars of calls and loads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from types import TracebackType

    UseTqdm: TypeAlias = "bool | Callable[..., Any] | None"

PATIENCE_S = 0.5
REFRESH_S = 0.1


class _Bar(Protocol):
    def update(self, n: int) -> object: ...
    def close(self) -> object: ...


class Progress:
    """A bar over the prompts of a call, with input and output speeds. It shows nothing if no bar is wanted.

    Args:
        use_tqdm: True, False, a callable like tqdm, or None: a bar if there is more than one prompt, the call takes longer
            than 0.5 s, and stderr is a terminal or a notebook's.
        total: Prompts of the call.
        counts: Returns the prompt and output tokens computed so far.
    """

    def __init__(self, use_tqdm: UseTqdm, total: int, counts: Callable[[], tuple[int, int]]) -> None:
        self._make = _maker(use_tqdm, total)
        self._delay = PATIENCE_S if use_tqdm is None else 0.0
        self._total = total
        self._counts = counts
        self._bar: _Bar | None = None
        self._done = 0
        self._shown = 0
        self._start = self._refreshed = time.perf_counter()
        self._base = counts() if self._make else (0, 0)

    def __enter__(self) -> Progress:
        if self._make is not None and not self._delay:
            self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            try:
                self._refresh()
            finally:
                self._bar.close()

    def update(self, done: int) -> None:
        """Adds `done` finished prompts to the bar. Cheap."""
        self._done += done
        if self._make is None:
            return
        now = time.perf_counter()
        if self._bar is None and now - self._start >= self._delay and self._done < self._total:
            self._open()
        if self._bar is not None and now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._refresh()

    def _open(self) -> None:
        assert self._make is not None
        self._bar = self._make(
            total=self._total,
            desc="Processed prompts",
            unit="it",
            dynamic_ncols=True,
            postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
        )
        if hasattr(self._bar, "set_counts"):
            self._bar.set_counts(*self._base)
        _backdate(self._bar, self._start)

    def _refresh(self) -> None:
        assert self._bar is not None
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        counts = self._counts()
        speeds = [(now - base) / elapsed for now, base in zip(counts, self._base, strict=True)]
        if hasattr(self._bar, "set_counts"):
            self._bar.set_counts(*counts)
        elif hasattr(self._bar, "set_postfix_str"):
            self._bar.set_postfix_str(f"est. speed input: {speeds[0]:.2f} toks/s, output: {speeds[1]:.2f} toks/s")
        if self._done > self._shown:
            self._bar.update(self._done - self._shown)
            self._shown = self._done


class LoadBar:
    """A bar over the bytes of weights during a load. Entering it gives the callback. A successful load ends at 100 %.

    Args:
        use_tqdm: As for Progress, but None means: a bar if the load takes longer than 0.5 s and stderr is a terminal or
            a notebook's.
    """

    def __init__(self, use_tqdm: UseTqdm) -> None:
        self._make = _maker(use_tqdm, 2)
        self._delay = PATIENCE_S if use_tqdm is None else 0.0
        self._start = time.perf_counter()
        self._bar: _Bar | None = None
        self._shown = self._total = 0

    def __enter__(self) -> Callable[[int, int], None]:
        return self._update

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if self._bar is None:
            return
        try:
            if kind is None and self._shown < self._total:  # the model does not read all tensors of a file
                self._bar.update(self._total - self._shown)
        finally:
            self._bar.close()

    def _update(self, done: int, total: int) -> None:
        if self._make is None:
            return
        self._total = total
        if self._bar is None and done < total and time.perf_counter() - self._start >= self._delay:
            self._bar = self._make(total=total, desc="Loading weights", unit="B", unit_scale=True, dynamic_ncols=True)
            _backdate(self._bar, self._start)
        if self._bar is not None and done > self._shown:
            self._bar.update(done - self._shown)
            self._shown = done


def _backdate(bar: _Bar, start: float) -> None:
    """Makes the times and rates of a late bar count from the start of the call, by setting tqdm's attributes."""
    late = time.perf_counter() - start
    for name in ("start_t", "last_print_t"):
        if hasattr(bar, name):
            setattr(bar, name, getattr(bar, name) - late)


def _maker(use_tqdm: UseTqdm, total: int) -> Callable[..., _Bar] | None:
    """The callable that makes the bar, or None for no bar."""
    if use_tqdm is False or (use_tqdm is None and (total < 2 or not (_in_notebook() or _is_terminal()))):
        return None
    if callable(use_tqdm):
        return use_tqdm
    if use_tqdm not in (True, None):
        raise TypeError(f"use_tqdm must be a bool, a callable like tqdm or None, but is of type {type(use_tqdm).__name__}")
    return bar_class()


def bar_class() -> Callable[..., Any]:
    """A bar with a chart of throughput in a notebook, else tqdm's."""
    if _in_notebook():
        from ..notebook import LiveBar

        return LiveBar
    from tqdm import tqdm

    found: Callable[..., Any] = tqdm
    return found


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    active = shell.get_ipython() if shell is not None and hasattr(shell, "get_ipython") else None
    return active is not None and hasattr(active, "kernel")


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
