"""Names of the public API that are not built yet. Using one raises UnsupportedError; nothing pretends."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import UnsupportedError


class _Later:
    """A class that cannot be made yet."""

    _instead = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not supported yet{self._instead}")


class BeamSearchParams(_Later):
    """Parameters of beam search."""

    _instead = "; use SamplingParams(n=...)"


class BeamSearchSequence(_Later):
    """One beam."""


class BeamSearchOutput(_Later):
    """The beams of a prompt."""


class LoRARequest(_Later):
    """An adapter."""

    _instead = "; merge the adapter into the checkpoint"


class LaterCalls:
    """Ways to run LLM that are not built yet."""

    def enqueue(self, *args: object, **kwargs: object) -> NoReturn:
        """Queues prompts."""
        _refuse("enqueue()", "use add_request()")

    def enqueue_chat(self, *args: object, **kwargs: object) -> NoReturn:
        """Queues conversations."""
        _refuse("enqueue_chat()", "use add_request()")

    def wait_for_completion(self, *args: object, **kwargs: object) -> NoReturn:
        """Waits for what was queued."""
        _refuse("wait_for_completion()", "use step()")

    def beam_search(self, *args: object, **kwargs: object) -> NoReturn:
        """Beam search."""
        _refuse("beam_search()", "use generate() with n")

    def similarity(self, *args: object, **kwargs: object) -> NoReturn:
        """Similarity of pairs."""
        _refuse("similarity()", "generate() and score() are")


class LaterMethods:
    """Methods of LLM and AsyncEngine that are not built yet. One that is awaited raises when it is called."""


    def tap(self, *args: Any, **kwargs: Any) -> Any:
        """Intermediate tensors."""
        _refuse("AsyncEngine.tap()", "LLM.tap() is")

    def get_metrics(self, *args: object, **kwargs: object) -> NoReturn:
        """Metrics under other names."""
        _refuse("get_metrics()", "use stats()")

    def collective_rpc(self, *args: object, **kwargs: object) -> NoReturn:
        """Calls on all ranks."""
        _refuse("collective_rpc()", "there is one rank: call the methods of LLM")

    def apply_model(self, *args: object, **kwargs: object) -> NoReturn:
        """There is no module tree to apply a function to."""
        raise UnsupportedError("apply_model(): there is no module tree; see program(), weight_info() and tap()")


def _refuse(name: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{name} is not supported yet; {instead}")
