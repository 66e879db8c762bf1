"""Makes llmpy known to verl as rollout "llmpy". verl imports this module through the entry point `verl.plugins`.

verl loads the module in every process of its own and hides what it raises, so errors are logged here. Nothing but verl's two
registries is imported before verl asks for the replica or the adapter: no torch, Ray or CUDA on our account.
"""

from __future__ import annotations

import logging
from typing import Any

ADAPTER = "llmpy.rl._verl_adapter.ServerAdapter"
_logger = logging.getLogger(__name__)


def load_replica() -> type[Any]:
    """The class of llmpy's replicas; verl calls it when a run is configured with `rollout.name=llmpy`."""
    try:
        from ._verl_adapter import LlmpyReplica
    except Exception:
        _logger.exception("llmpy's replica for verl cannot be loaded")
        raise
    return LlmpyReplica


def register() -> None:
    """Enters llmpy into verl's registries."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[("llmpy", "async")] = ADAPTER
    RolloutReplicaRegistry.register("llmpy", load_replica)


try:
    register()
except Exception:
    _logger.exception("llmpy cannot enter itself into verl's registries")
