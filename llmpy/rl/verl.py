"""Registers llmpy with verl as rollout "llmpy". verl imports this module through the entry point `verl.plugins`.

verl imports the module in all its processes and hides exceptions, so errors are logged here. Until verl requests the replica
or the adapter, only verl's two registries are imported: no torch, Ray or CUDA.
"""

from __future__ import annotations

import logging
from typing import Any

ADAPTER = "llmpy.rl._verl_adapter.ServerAdapter"
_logger = logging.getLogger(__name__)


def load_replica() -> type[Any]:
    """Returns the class of llmpy's replicas; verl calls this for `rollout.name=llmpy`."""
    try:
        from ._verl_adapter import LlmpyReplica
    except Exception:
        _logger.exception("llmpy's replica for verl cannot be loaded")
        raise
    return LlmpyReplica


def register() -> None:
    """Adds llmpy to verl's registries."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[("llmpy", "async")] = ADAPTER
    RolloutReplicaRegistry.register("llmpy", load_replica)


try:
    register()
except Exception:
    _logger.exception("llmpy cannot enter itself into verl's registries")
