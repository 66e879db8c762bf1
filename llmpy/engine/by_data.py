"""Attention by data (`enable_dp_attention`): what it does not work with yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import hardware
from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..models import Spec

KINDS = {"cpu"}
"""Kinds of devices that were tried."""


def programs(config: EngineConfig, spec: Spec) -> list[Spec]:
    """The program of each rank.

    Args:
        config: Options with a chosen device.
        spec: The whole program.

    Raises:
        ConfigError: The program has no experts, or fewer than ranks.
        UnsupportedError: Another option does not work with it yet.
    """
    from ..models.shard import shard_by_data

    method = config.speculative_config and config.speculative_config["method"]
    others = {
        f"device={config.device!r}": hardware.kind_of(str(config.device)) not in KINDS,
        f"nnodes={config.nnodes}": config.nnodes > 1,
        "host_cache_bytes": bool(config.host_cache_bytes),
        "kv_connector": config.kv_connector is not None,
        f"speculative_config of the method {method!r}": method not in (None, "ngram", "suffix"),
        "models that take images": bool(spec.get("towers")),
    }
    for what, is_given in others.items():
        if is_given:
            raise UnsupportedError(f"enable_dp_attention=True is not supported yet with {what}; leave one of them out")
    return shard_by_data(spec, config.tensor_parallel_size)
