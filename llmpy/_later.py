"""Names of the public API that are not implemented yet. Using one raises UnsupportedError with an alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from .advice import LATER, plain
from .errors import UnsupportedError


class _Later:
    """A class that is not implemented yet."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse(type(self).__name__)


class BeamSearchParams(_Later):
    """Parameters of beam search."""


class BeamSearchSequence(_Later):
    """One beam."""


class BeamSearchOutput(_Later):
    """The beams of a prompt."""


class LaterCalls:
    """Methods of LLM that are not implemented yet."""

    def beam_search(self, *args: object, **kwargs: object) -> NoReturn:
        """Beam search."""
        _refuse("beam_search")

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
    called = name if name[0].isupper() and "." not in name else f"{name}()"
    hint = f"; {plain(LATER[name])}" if name in LATER else ""
    raise UnsupportedError(f"{called} is not supported yet{hint}")
