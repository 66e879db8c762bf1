"""One model over several hosts, one process a host: which ranks a process has, and what must be equal on all hosts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core, environment, hardware
from ..errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..models import Spec

logger = logging.getLogger("llmpy")

TAIL_BYTES = 1 << 16
"""Bytes at the end of each file of weights that hosts compare."""

_OWN_OPTIONS = ("device", "devices", "isa", "library", "cublaslt", "num_threads", "kv_cache_bytes", "step_timeout_s")
"""Options of the core that may differ between hosts. All hosts take the least cache of any. The instruction set is compared by
itself."""


class Followed(SystemExit):
    """Host 0 has closed the model of which this process, a host from 1 on, has computed a part.

    The constructor of an engine raises it there. It ends the process with status 0, unless the program catches it.
    """

    def __init__(self) -> None:
        super().__init__(0)


def ranks_here(config: EngineConfig) -> range:
    """The numbers of the ranks of this process; without hosts those of all ranks."""
    ranks, count, host = config.tensor_parallel_size, config.nnodes, config.node_rank or 0
    return range(ranks * host // count, ranks * (host + 1) // count)


def resolve(config: EngineConfig) -> EngineConfig:
    """Fills in this host's number and the address of host 0 from the variables that torchrun sets.

    Args:
        config: Options with a chosen device.

    Raises:
        ConfigError: Neither an option nor a variable says one of these.
        UnsupportedError: Replicas.
    """
    if config.nnodes == 1:
        return config
    count = f"nnodes={config.nnodes}"
    if config.data_parallel_size > 1:
        raise UnsupportedError(f"{count}: replicas of several hosts are not supported yet; set data_parallel_size=1")
    host, address, port = config.node_rank, config.master_addr, config.master_port
    if host is None:
        host, size = environment.torchrun_rank()
        if size != config.nnodes or not 0 <= host < size:
            raise ConfigError(
                f"{count}: wanted node_rank, or the variables RANK and WORLD_SIZE={config.nnodes} (torchrun --nnodes "
                f"{config.nnodes} --nproc-per-node 1), have WORLD_SIZE={size}",
                option="node_rank",
                value=None,
            )
    if address is None and (address := environment.torchrun_address()) is None:
        raise ConfigError(f"{count}: wanted master_addr or MASTER_ADDR, the address of host 0", option="master_addr")
    if port is None and (port := environment.torchrun_port()) is None:
        raise ConfigError(f"{count}: wanted master_port, or MASTER_PORT, the port before it", option="master_port")
    return config.replace(node_rank=host, master_addr=address, master_port=port)


def announce(config: EngineConfig) -> None:
    """Logs what this host waits for, and warns if any process of the network can join.

    Args:
        config: Options that `resolve` has filled in.
    """
    if config.nnodes == 1:
        return
    place, ranks = f"{config.master_addr}:{config.master_port}", ranks_here(config)
    if config.node_rank:
        logger.info("host %d of %d computes the ranks %d to %d for host 0 at %s", config.node_rank, config.nnodes, ranks.start,
                    ranks.stop - 1, place)  # fmt: skip
        return
    logger.info("host 0 of %d waits at %s for the other hosts", config.nnodes, place)
    if not environment.hosts_token() and not _is_loopback(str(config.master_addr)):
        logger.warning("LLMPY_HOSTS_TOKEN is not set: every process that reaches %s can join", place)


def _is_loopback(address: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def core_option(
    config: EngineConfig, options: dict[str, Any], programs: Sequence[Spec], weights: Sequence[Path]
) -> tuple[Any, ...] | None:
    """The core's option `hosts`.

    Args:
        config: Options that `resolve` has filled in.
        options: The other options of the core.
        programs: The program of each rank of all hosts.
        weights: Files of weights.

    Returns:
        None: there are no other hosts.
    """
    if config.nnodes == 1:
        return None
    import hashlib

    token = hashlib.sha256(environment.hosts_token().encode()).digest()
    return (
        config.master_addr,
        config.master_port,
        config.node_rank,
        config.nnodes,
        environment.hosts_timeout(),
        token,
        b"".join(_digests(config, options, programs, weights)),
        ranks_here(config).start,
        config.tensor_parallel_size,
        (hardware.nccl_library() or None) if hardware.kind_of(str(config.device)) != "cpu" else None,
    )


def _digests(config: EngineConfig, options: dict[str, Any], programs: Sequence[Spec], weights: Sequence[Path]) -> list[bytes]:
    """Digests of what must be equal on all hosts, in the order of `enum wire_digest` in csrc/program/wire.h."""
    import hashlib

    from .. import __version__

    isa = options["isa"] if options["isa"] != "auto" else next(iter(_core.cpu_isas()), "")
    if hardware.kind_of(str(config.device)) != "cpu":
        isa = hardware.name_and_uuid(str(config.device))[0]
    compared = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    compared |= {"tensor_parallel_size": config.tensor_parallel_size, "experts": config.experts}
    text = json.dumps(programs, default=lambda value: value.hex() if isinstance(value, bytes) else repr(value))
    model = hashlib.blake2b(text.encode(), digest_size=8)
    for path in weights:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - TAIL_BYTES, 0))
            model.update(b"%d:" % size + file.read())
    texts = (__version__, isa, json.dumps(compared, sort_keys=True))
    return [*(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in texts), model.digest()]
