"""llmpy on Ray (extra `ray`): a Serve application of replicas, an actor for rollouts, and one model over several machines."""

from __future__ import annotations

try:
    from ._executor import RayExecutor
    from ._rollout import Rollout, RolloutActor
    from ._serve import Front, PrefixRouter, Replica, application
except ModuleNotFoundError as error:
    if (error.name or "").startswith("llmpy"):
        raise
    raise ImportError(f"llmpy.distributed.ray needs the package {error.name}; pip install 'llmpy[ray]'") from error

__all__ = ["Front", "PrefixRouter", "RayExecutor", "Replica", "Rollout", "RolloutActor", "application"]
