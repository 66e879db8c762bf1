"""All error classes. Messages read "thing: wanted X, have Y" and end with the knob; all errors can be pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .outputs import RequestOutput, RequestOutputs, ScoreOutput
    from .pooling_outputs import PoolingOutputs, PoolingRequestOutput
    from .results.beam_search import BeamSearchOutput


class LlmpyError(Exception):
    """Base of all errors of this package.

    Args:
        message: The message.
        attributes: Values for attributes that the class declares; the others are None.
    """

    def __init__(self, message: str = "", **attributes: object) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)


class InvalidRequestError(LlmpyError, ValueError):
    """A request cannot run. Attributes: the parameter, its value, and the index of the prompt in the call's input."""

    parameter: str | None = None
    value: object = None
    index: int | None = None


class ChatTemplateError(InvalidRequestError):
    """There is no chat template, or it refused the messages."""


class ConfigError(LlmpyError, ValueError):
    """A constructor option has an invalid value."""

    option: str | None = None
    value: object = None


class ModelNotFoundError(LlmpyError, OSError):
    """There is no such path, repository or revision."""


class CheckpointError(LlmpyError, ValueError):
    """A file is incomplete, or a tensor is missing or has the wrong shape."""

    file: str | None = None
    tensor: str | None = None


class UnsupportedError(LlmpyError, NotImplementedError):
    """llmpy does not support something; the message names the thing and the knob. Of a class of transformers that cannot be
    converted it also has the module and the node of the traced graph."""

    module: str | None = None
    node: str | None = None


class RequestFailedError(LlmpyError, RuntimeError):
    """A request failed while it ran. The cause is chained; `outputs` holds all outputs of the call."""

    outputs: (
        RequestOutputs | Sequence[ScoreOutput] | Sequence[PoolingRequestOutput[Any]] | Sequence[BeamSearchOutput] | None
    ) = None
    output: RequestOutput | ScoreOutput | PoolingRequestOutput[Any] | BeamSearchOutput | None = None


class NonFiniteLogitsError(LlmpyError, ArithmeticError):
    """The model's logits have NaN or +inf at a position of prompt + output."""

    position: int | None = None


class NoAllowedTokenError(LlmpyError, ValueError):
    """The request's fields allow no token at a position of prompt + output."""

    position: int | None = None
    fields: tuple[str, ...] | None = None


class WeightUpdateError(LlmpyError, ValueError):
    """New weights do not fit the model."""

    unknown: Sequence[str] | None = None
    missing: Sequence[str] | None = None
    mismatched: Sequence[str] | None = None


class WeightsMissingError(WeightUpdateError):
    """The weights are incomplete or dropped; run a full update first."""


class DeviceError(LlmpyError, RuntimeError):
    """A call of the device or its driver failed."""

    operation: str | None = None
    code: int | None = None


class EngineDeadError(DeviceError):
    """The engine cannot be used after a device fault."""


class DeviceMemoryError(LlmpyError, MemoryError):
    """The device has less memory than the options need."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None


class EngineBusyError(LlmpyError, RuntimeError):
    """Another thread is using the engine."""


class EngineClosedError(LlmpyError, RuntimeError):
    """The engine was closed, or belongs to another process."""


class EngineAsleepError(LlmpyError, RuntimeError):
    """The engine is asleep."""


class EngineStuckError(LlmpyError, RuntimeError):
    """The engine or one of its helper threads has made no progress for longer than a limit."""


class QueueFullError(LlmpyError, RuntimeError):
    """The limit of waiting requests is reached."""

    num_waiting: int | None = None


if TYPE_CHECKING:

    class GenerationInterrupted(KeyboardInterrupt):
        """Ctrl-C during a call. The call's requests were aborted; `partial` holds their outputs so far.

        At run time this is KeyboardInterrupt itself, because CPython ends a script by SIGINT only for this class, and a shell
        ends its loop only then. An interrupt outside a call has no `partial`.
        """

        partial: RequestOutputs | Sequence[ScoreOutput] | PoolingOutputs[Any] | Sequence[BeamSearchOutput]

else:
    GenerationInterrupted = KeyboardInterrupt


def with_partial(error: KeyboardInterrupt, partial: Any) -> None:
    """Sets `partial` of an interruption unless it is set already."""
    if not hasattr(error, "partial"):
        error.partial = partial  # type: ignore[attr-defined]


def interrupted(
    partial: RequestOutputs | Sequence[ScoreOutput] | PoolingOutputs[Any] | Sequence[BeamSearchOutput],
) -> KeyboardInterrupt:
    """The KeyboardInterrupt of a call.

    Args:
        partial: Outputs of the call's requests so far.
    """
    error = KeyboardInterrupt("interrupted")
    with_partial(error, partial)
    return error
