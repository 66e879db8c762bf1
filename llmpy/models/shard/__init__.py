"""Tensor parallelism as a pass over a finished program: one program for each rank. No sum is cut.

A matrix is cut along its outputs only. A value is whole (every rank has all of its columns) or cut (each rank has its own
columns). Where an operation wants a whole value and has a cut one, a `gather` operation stands right before it. A gather copies
columns, so all numbers of ranks give equal results.
"""

from ...errors import ConfigError, UnsupportedError
from ..program import Spec
from .columns import Columns, Links
from .ranks import Ranks
from .rules import RULES, write_experts

GATHER_BYTES = 10_000_000
"""Bytes of weights that a device reads in the time of a gather."""


def default_replicate_bytes(n_ranks: int) -> int:
    """The size of a matrix at which reading all of it takes as long as reading a share of it and gathering the result."""
    return GATHER_BYTES * n_ranks // max(n_ranks - 1, 1)


def shard(spec: Spec, n_ranks: int, replicate_bytes: int | None = None, experts: str = "rank") -> list[Spec]:
    """Cuts a program into one program for each rank.

    All ranks have the same operations and values in the same order; sizes, ranges of columns and rows of weights differ. Values
    keep their numbers, new ones are appended. `rooms` of a result are the values' largest widths over all ranks.

    Args:
        spec: The program; it is not changed.
        n_ranks: Number of ranks, at least 1.
        replicate_bytes: Matrices with outputs that are wanted whole, and embeddings, are computed by every rank if they have
            at most so many bytes (2 for each element). None: `default_replicate_bytes`.
        experts: "rank": a rank has whole experts of a mixture; "width": columns of all experts; "auto": "width" for mixtures
            with fewer than 8 experts a rank, if they are wide enough.

    Returns:
        The programs, by rank; for one rank the program itself.

    Raises:
        ConfigError: a rank would have no head, group, block of channels or expert.
        UnsupportedError: an operation of the program cannot be cut.
    """
    if n_ranks == 1:
        return [spec]
    for name, _ in spec["ops"]:
        if name not in RULES:
            raise UnsupportedError(
                f"tensor_parallel_size={n_ranks}: operation {name!r} of {spec['architecture']} cannot be shared by ranks; "
                "set tensor_parallel_size=1"
            )
    links = Links(n_ranks, experts)
    for name, op in spec["ops"]:
        RULES[name].link(spec, op, links)
    limit = default_replicate_bytes(n_ranks) if replicate_bytes is None else replicate_bytes
    ranks = Ranks(spec, Columns(spec, links, n_ranks), n_ranks, limit, experts)
    for name, op in spec["ops"]:
        RULES[name].write(ranks, name, op)
    return ranks.finish()


def shard_by_data(spec: Spec, n_ranks: int) -> list[Spec]:
    """Gives each rank the whole program for sequences of its own, and a share of the experts.

    Rows of all ranks are gathered before the experts are chosen. Each rank computes the results of its experts for all rows,
    gathers those of the other ranks, and adds up those of its own rows in the order of the routes.

    Args:
        spec: The program; it is not changed.
        n_ranks: Number of ranks, at least 2.

    Returns:
        The programs, by rank, as those of `shard`.

    Raises:
        ConfigError: the program has no experts, or fewer than ranks.
    """
    counts = [op["attributes"]["n_experts"] for name, op in spec["ops"] if name == "experts"]
    if not counts:
        raise ConfigError(
            f"enable_dp_attention=True wants a mixture of experts, which ranks share; {spec['architecture']} has none",
            option="enable_dp_attention",
            value=True,
        )
    links = Links(n_ranks, "rank", counted=[(f"{n} experts", n) for n in counts])
    ranks = Ranks(spec, Columns(spec, links, n_ranks), n_ranks, 0, "rank")
    for name, op in spec["ops"]:
        if name == "route":
            ranks.keep(op["weights"])
            ranks.emit(name, op, [ranks.rows(op["in"][0])])
        elif name == "experts":
            write_experts(ranks, name, op, ranks.rows(op["in"][0]), op["in"][1])
        else:
            ranks.copy(name, op)
    return ranks.finish()
