"""Every error raised on purpose. Messages read "thing: wanted X, have Y" and end with the knob; all errors pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .outputs import RequestOutput, RequestOutputs, ScoreOutput
    from .pooling_outputs import PoolingOutputs, PoolingRequestOutput


class LlmpyError(Exception):
    """Base of all errors of this package.

    Args:
        message: What was wrong.
        attributes: Values for the attributes that the class declares; those not given are None.
    """

    def __init__(self, message: str = "", **attributes: object) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)


class InvalidRequestError(LlmpyError, ValueError):
    """A request that cannot run: the parameter, its value, and the place of the prompt in the call's input."""

    parameter: str | None = None
    value: object = None
    index: int | None = None


class ChatTemplateError(InvalidRequestError):
    """There is no chat template, or it refused the messages."""


class ConfigError(LlmpyError, ValueError):
    """A constructor option with a value that cannot be."""

    option: str | None = None
    value: object = None


class ModelNotFoundError(LlmpyError, OSError):
    """No such path, repository or revision."""


class CheckpointError(LlmpyError, ValueError):
    """A torn file, a missing tensor, or one of the wrong shape."""

    file: str | None = None
    tensor: str | None = None


class UnsupportedError(LlmpyError, NotImplementedError):
    """Something that llmpy does not do; the message names the thing and the knob."""


class RequestFailedError(LlmpyError, RuntimeError):
    """A request failed while it ran. The cause is chained; `outputs` holds the whole call's outputs."""

    outputs: RequestOutputs | Sequence[ScoreOutput] | Sequence[PoolingRequestOutput[Any]] | None = None
    output: RequestOutput | ScoreOutput | PoolingRequestOutput[Any] | None = None


class NonFiniteLogitsError(LlmpyError, ArithmeticError):
    """The model's logits held NaN or +inf at a position of prompt + output."""

    position: int | None = None


class NoAllowedTokenError(LlmpyError, ValueError):
    """The request's fields left no token to choose from at a position of prompt + output."""

    position: int | None = None
    fields: tuple[str, ...] | None = None


class WeightUpdateError(LlmpyError, ValueError):
    """Weights that were offered do not fit the model."""

    unknown: Sequence[str] | None = None
    missing: Sequence[str] | None = None
    mismatched: Sequence[str] | None = None


class WeightsMissingError(WeightUpdateError):
    """The weights are torn or dropped; a full update has to come first."""


class DeviceError(LlmpyError, RuntimeError):
    """A call of the device or of its driver failed."""

    operation: str | None = None
    code: int | None = None


class EngineDeadError(DeviceError):
    """Use of an engine after a device fault."""


class DeviceMemoryError(LlmpyError, MemoryError):
    """The device has less memory than the options ask for."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None


class EngineBusyError(LlmpyError, RuntimeError):
    """Another thread is driving the engine."""


class EngineClosedError(LlmpyError, RuntimeError):
    """The engine was closed, or belongs to another process."""


class EngineAsleepError(LlmpyError, RuntimeError):
    """The engine sleeps."""


class EngineStuckError(LlmpyError, RuntimeError):
    """The engine, or a thread beside it, has made no progress for longer than a limit."""


class QueueFullError(LlmpyError, RuntimeError):
    """The limit of waiting requests is reached."""

    num_waiting: int | None = None


if TYPE_CHECKING:

    class GenerationInterrupted(KeyboardInterrupt):
        """Ctrl-C during a call. Its requests were aborted; `partial` holds what they had produced.

        At run time this is KeyboardInterrupt itself: for no subclass of it does CPython end a script by SIGINT, which a
        shell's loop heeds. An interrupt outside a call has no `partial`.
        """

        partial: RequestOutputs | Sequence[ScoreOutput] | PoolingOutputs[Any]

else:
    GenerationInterrupted = KeyboardInterrupt


def with_partial(error: KeyboardInterrupt, partial: Any) -> None:
    """Gives an interruption of a call what its requests had produced, unless it has that already."""
    if not hasattr(error, "partial"):
        error.partial = partial  # type: ignore[attr-defined]


def interrupted(partial: RequestOutputs | Sequence[ScoreOutput] | PoolingOutputs[Any]) -> KeyboardInterrupt:
    """The KeyboardInterrupt of a call.

    Args:
        partial: What its requests had produced.
    """
    error = KeyboardInterrupt("interrupted")
    with_partial(error, partial)
    return error
