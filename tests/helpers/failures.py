"""Failures on purpose."""

from typing import Any

import pytest


class PanicError(BaseException):
    """An error like a panic of a Rust library: it is no Exception."""


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Any, times: int = 1) -> list[int]:
    """Makes a function raise `times` times, then work again; returns a list with the number of failures left."""
    real, left = getattr(owner, name), [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return left
