"""PoolingParams: what a request wants of a prompt's states, checked when it is made and never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .checks import as_bool, as_int
from .errors import InvalidRequestError

KINDS = ("last", "mean", "cls", "all")


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Pooling parameters of one request; None = as the model says.

    Args:
        pooling: "last" or "cls" (the last or the first token's state), "mean" over all tokens, or "all" (every token's).
        normalize: Whether an embedding is scaled to length 1.
        dimensions: Only the first so many elements of an embedding, before it is scaled (models trained for that).
        use_activation: Whether a classifier's scores become probabilities (softmax, or sigmoid for one label).

    Raises:
        TypeError: A field has a wrong type.
        InvalidRequestError: A field has a bad value; `.parameter` and `.value` tell which.
    """

    pooling: Literal["last", "mean", "cls", "all"] | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in KINDS:
            message = f"pooling must be one of 'last', 'mean', 'cls', 'all', got {self.pooling!r}."
            raise InvalidRequestError(message, parameter="pooling", value=self.pooling)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                as_bool(name, getattr(self, name))
        if self.dimensions is not None and as_int("dimensions", self.dimensions) < 1:
            message = f"dimensions must be at least 1, got {self.dimensions}."
            raise InvalidRequestError(message, parameter="dimensions", value=self.dimensions)
