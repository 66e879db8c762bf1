"""Names of the public API that are not built yet. Making one raises UnsupportedError; nothing pretends."""

from __future__ import annotations

from .errors import UnsupportedError


class _Later:
    """A class that cannot be made yet."""

    _instead = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not supported yet{self._instead}")


class AsyncEngine(_Later):
    """The engine for asyncio and servers."""

    _instead = "; use LLM, whose add_request() and step() a server can drive"


class BeamSearchParams(_Later):
    """Parameters of beam search."""

    _instead = "; use SamplingParams(n=...)"


class BeamSearchSequence(_Later):
    """One beam."""


class BeamSearchOutput(_Later):
    """The beams of a prompt."""


class PoolingParams(_Later):
    """Parameters of embed(), encode() and classify()."""


class PoolingRequestOutput(_Later):
    """Output of encode()."""


class EmbeddingRequestOutput(_Later):
    """Output of embed()."""


class StructuredOutputsParams(_Later):
    """A grammar, schema or regular expression that the output must follow."""

    _instead = "; use allowed_token_ids, or check the text and ask again"


class LoRARequest(_Later):
    """An adapter."""

    _instead = "; merge the adapter into the checkpoint"
