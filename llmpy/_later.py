"""Names of the public API that are not implemented yet. Using one raises UnsupportedError with an alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from .advice import LATER, plain
from .errors import UnsupportedError


class LaterCalls:
    """Methods of LLM that are not implemented yet."""

    def similarity(self, *args: object, **kwargs: object) -> NoReturn:
        """Similarity of pairs."""
        _refuse("similarity")


class LaterMethods:
    """Methods of LLM and AsyncEngine that are not implemented yet. Coroutine methods raise when called."""

    def tap(self, *args: Any, **kwargs: Any) -> Any:
        """Intermediate tensors."""
        _refuse("AsyncEngine.tap")

    def get_metrics(self, *args: object, **kwargs: object) -> NoReturn:
        """Metrics under other names."""
        _refuse("get_metrics")

    def collective_rpc(self, *args: object, **kwargs: object) -> NoReturn:
        """Calls on all ranks."""
        _refuse("collective_rpc")

    def apply_model(self, *args: object, **kwargs: object) -> NoReturn:
        """A function over the module tree."""
        _refuse("apply_model")


def _refuse(name: str) -> NoReturn:
    hint = f"; {plain(LATER[name])}" if name in LATER else ""
    raise UnsupportedError(f"{name}() is not supported yet{hint}")
