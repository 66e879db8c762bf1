"""compare_logprobs: differences between an engine's and a trainer's logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy.typing as npt

    Doubles = npt.NDArray[np.float64]


class LogprobComparison(NamedTuple):
    """Differences of the logprobs of the same sampled tokens. d = trainer - engine, the logarithm of the ratio.

    Args:
        mean, max, p95: Mean, maximum and 95th percentile of `|d|`.
        outside: Share of ratios exp(d) outside [0.9, 1.1].
        k3: Mean of exp(d) - 1 - d, an estimate >= 0 of KL(engine || trainer) (http://joschu.net/blog/kl-approx.html).
        mean_exp: Mean of `exp |d|`.
        num_tokens: Number of compared tokens.
    """

    mean: float
    max: float
    p95: float
    outside: float
    k3: float
    mean_exp: float
    num_tokens: int


def compare_logprobs(engine: Any, trainer: Any, mask: Any = None) -> LogprobComparison:
    """Compares an engine's and a trainer's logprobs of the same tokens, in float64.

    Compare equal kinds: a trainer's log_softmax(logits / temperature) corresponds to the engine's `sampled.full`.
    `sampled.processed` differs by log(kept_mass) if top-p or top-k removed tokens.

    Args:
        engine, trainer: Logprobs of equal shape: an array, a tensor, or a sequence of them (one per sample, of any lengths).
        mask: Array of the same shape; tokens with a nonzero value are compared; None = all tokens.

    Returns:
        A LogprobComparison.

    Raises:
        InvalidRequestError: The shapes differ, there is no token to compare, or a logprob is NaN or infinite.
    """
    mine, others = _flat("engine", engine), _flat("trainer", trainer)
    _check_size("trainer", others, mine)
    if mask is not None:
        kept = _flat("mask", mask)
        _check_size("mask", kept, mine)
        mine, others = mine[kept != 0], others[kept != 0]
    if not mine.size:
        raise InvalidRequestError("compare_logprobs: wanted at least one token, have none", parameter="engine", value=0)
    for name, values in (("engine", mine), ("trainer", others)):
        if not np.isfinite(values).all():
            where = int(np.flatnonzero(~np.isfinite(values))[0])
            message = f"{name}[{where}]: wanted a finite logprob, have {values[where]}; mask it out"
            raise InvalidRequestError(message, parameter=name, value=float(values[where]))
    difference = others - mine
    ratio, distance = np.exp(difference), np.abs(difference)
    return LogprobComparison(
        mean=float(distance.mean()),
        max=float(distance.max()),
        p95=float(np.percentile(distance, 95)),
        outside=float(((ratio < 0.9) | (ratio > 1.1)).mean()),
        k3=float((np.expm1(difference) - difference).mean()),
        mean_exp=float(np.exp(distance).mean()),
        num_tokens=difference.size,
    )


def _flat(name: str, values: Any) -> Doubles:
    """All values in order, float64. A tensor is copied to the host."""
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    elif isinstance(values, list | tuple) and any(hasattr(item, "__len__") for item in values):
        return np.concatenate([_flat(name, item) for item in values])
    try:
        return np.asarray(values, np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name}: wanted numbers, have {type(values).__name__}", parameter=name) from error


def _check_size(name: str, have: Doubles, want: Doubles) -> None:
    if have.size != want.size:
        message = f"{name}: wanted {want.size} values, as engine has, have {have.size}"
        raise InvalidRequestError(message, parameter=name, value=have.size)
