"""How each operation is cut: by column if operations.def says so, else by its row of RULES."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ... import _core
from ..program import Operands, Spec
from .columns import BLOCKS, Asked, Links, blocks, even
from .ranks import ELEMENT_BYTES, Ranks

Link = Callable[[Spec, Operands, Links], None]
Write = Callable[[Ranks, str, Operands], None]


class Rule(NamedTuple):
    """What `shard` does with an operation.

    Attributes:
        link: Adds what the operation says of the columns that it reads and writes.
        write: Writes the operation for all ranks.
    """

    link: Link
    write: Write


def _width(spec: Spec, value: int) -> int:
    return spec["values"][value][0]


def _no_link(spec: Spec, op: Operands, links: Links) -> None:
    """For operations on whole values."""


def _copy(ranks: Ranks, name: str, op: Operands) -> None:
    ranks.copy(name, op)


def _write_embed(ranks: Ranks, name: str, op: Operands) -> None:
    """A large matrix of tokens, or one that the logits share, is cut by rows; each rank writes the rows of its own ids."""
    (weight,), out = op["weights"], op["out"][0]
    given, cut = ranks.spec["weights"][weight], blocks(ranks.spec["weights"][weight]["rows"], ranks.n_ranks)
    is_tied = any(each == "logits" and other["weights"][0] == weight for each, other in ranks.spec["ops"])
    is_large = given["rows"] * given["cols"] * ELEMENT_BYTES > ranks.replicate_bytes
    if op["attributes"]["source"] != "tokens" or cut is None or not (is_tied or is_large):
        return ranks.copy(name, op)
    ranges = cut.ranges
    ranks.cut_rows(weight, [[each] for each in ranges])
    own = ranks.new_root(_width(ranks.spec, out))
    ranks.emit(name, op, [], lambda rank: {"first_id": ranges[rank][0], "end_id": ranges[rank][1]}, [own])
    ranks.emit_new("gather", [own], [out], lambda rank: {"kind": "rows", "first": ranges[rank][0], "end": ranges[rank][1]})


def _write_linear(ranks: Ranks, name: str, op: Operands) -> None:
    """Columns that are asked by head are cut. The others are cut if their rows of the matrix are large, else replicated."""
    x, out, columns = ranks.whole(op["in"][0]), op["out"][0], ranks.columns
    segments = columns.segments(out)
    free = sum(segment.width for segment in segments if not columns.is_asked(segment))
    is_large = free * _width(ranks.spec, op["in"][0]) * ELEMENT_BYTES > ranks.replicate_bytes
    ranks.put(out, [
        columns.is_asked(segment) or (is_large and columns.cut(segment) is not None) for segment in segments
    ])  # fmt: skip
    for weight in op["weights"]:
        ranks.cut_like(weight, out)
    ranks.emit(name, op, [x])


def _write_logits(ranks: Ranks, name: str, op: Operands) -> None:
    """Each rank makes the logits of its ids."""
    x, rows = ranks.whole(op["in"][0]), ranks.spec["weights"][op["weights"][0]]["rows"]
    cut = blocks(rows, ranks.n_ranks)
    if cut is None:
        return ranks.copy(name, op)
    ranges = cut.ranges
    for weight in op["weights"]:
        ranks.cut_rows(weight, [[each] for each in ranges])
    ranks.emit(name, op, [x], lambda rank: {"first_id": ranges[rank][0]})


def _alike(ranks: Ranks, values: Sequence[int], out: int) -> list[int]:
    """The inputs of an operation on columns, and the output's cut.

    A segment is cut if an input has it cut alone. A whole one is cut if an operation asks for it by head: each rank then works
    on its own columns. Columns that are neither all cut nor one segment cannot be ranges of whole values: they are gathered.
    """
    columns = ranks.columns
    segments = columns.segments(out)
    states = [[False] * len(segments) if ranks.has_whole(value) else ranks.is_cut(value) for value in values]
    wanted = [any(each) for each in zip(*states, strict=True)]
    if len(segments) == 1 and (wanted[0] or columns.is_asked(segments[0])):
        ranks.put(out, [True])
        return [ranks.own(value) for value in values]
    if any(state != wanted for state in states) or not any(wanted):
        wanted, values = [False] * len(segments), [ranks.whole(value) for value in values]
    ranks.put(out, wanted)
    return list(values)


def _link_alike(spec: Spec, op: Operands, links: Links) -> None:
    links.alike += [(value, op["out"][0]) for value in op["in"] if _width(spec, value) == _width(spec, op["out"][0])]


def _write_alike(ranks: Ranks, name: str, op: Operands) -> None:
    """Operations on columns. A gate of one column is whole."""
    out = op["out"][0]
    width = _width(ranks.spec, out)
    found = iter(_alike(ranks, [value for value in op["in"] if _width(ranks.spec, value) == width], out))
    inputs = [next(found) if _width(ranks.spec, value) == width else ranks.whole(value) for value in op["in"]]
    for weight in op["weights"]:
        if op["attributes"].get("act") == "scale":
            ranks.cut_like(weight, out)
    ranks.emit(name, op, inputs)


def _write_conv(ranks: Ranks, name: str, op: Operands) -> None:
    inputs = _alike(ranks, op["in"], op["out"][0])
    for weight in op["weights"]:
        ranks.cut_like(weight, op["out"][0])
    ranks.cut_state(op["attributes"]["state"], op["out"][0])
    ranks.emit(name, op, inputs)


def _link_norm(spec: Spec, op: Operands, links: Links) -> None:
    """A norm of a row (also one over all heads of q) wants it whole; a norm of heads works on whole heads."""
    if op["attributes"]["n_heads"] > 1:
        links.alike.append((op["in"][0], op["out"][0]))
        links.heads.append((op["out"][0], op["attributes"]["n_heads"]))


def _write_norm(ranks: Ranks, name: str, op: Operands) -> None:
    n_heads, out = op["attributes"]["n_heads"], op["out"][0]
    if n_heads == 1:
        return ranks.copy(name, op)
    inputs = _alike(ranks, op["in"], out)
    for weight in op["weights"]:
        if weight >= 0 and ranks.spec["weights"][weight]["rows"] == _width(ranks.spec, out):
            ranks.cut_like(weight, out)
    ranks.emit(name, op, inputs, lambda rank: {"n_heads": ranks.count(out, rank, n_heads)})


def _link_rope(spec: Spec, op: Operands, links: Links) -> None:
    given = op["attributes"]
    sizes = (given["head_dim"], given.get("k_head_dim", 0) or given["head_dim"])
    for x, out, size in zip(op["in"], op["out"], sizes, strict=True):
        links.alike.append((x, out))
        links.heads.append((out, _width(spec, out) // size))


def _write_rope(ranks: Ranks, name: str, op: Operands) -> None:
    inputs = [_alike(ranks, [x], out)[0] for x, out in zip(op["in"], op["out"], strict=True)]
    ranks.emit(name, op, inputs)


def _heads(spec: Spec, op: Operands) -> tuple[int, int]:
    """The heads and kv heads of an attention."""
    given = op["attributes"]
    n_heads, n_kv_heads = spec["layers"][given["layer"]][:2] if "layer" in given else (given["n_heads"], given["n_kv_heads"])
    return n_heads, n_kv_heads


def _link_attention(spec: Spec, op: Operands, links: Links) -> None:
    (q, k, v), (n_heads, n_kv_heads) = op["in"], _heads(spec, op)
    what = f"{n_heads} heads over {n_kv_heads} kv heads"
    links.asked.append(Asked(what, (q, op["out"][0]), n_heads, (k, v), n_kv_heads, has_copies=True))


def _write_attention(ranks: Ranks, name: str, op: Operands) -> None:
    out, given, (n_heads, n_kv_heads) = op["out"][0], op["attributes"], _heads(ranks.spec, op)
    inputs, k = [ranks.own(value) for value in op["in"]], op["in"][1]
    ranks.put(out, [True])
    for weight in op["weights"]:
        ranks.cut_like(weight, out)

    def own_heads(rank: int) -> tuple[int, int]:
        return ranks.share(out, rank, n_heads), ranks.share(k, rank, n_kv_heads)

    if "layer" in given:
        ranks.set_layer(given["layer"], own_heads)
        return ranks.emit(name, op, inputs)
    ranks.emit(name, op, inputs, lambda rank: dict(zip(("n_heads", "n_kv_heads"), own_heads(rank), strict=True)))


def _link_head_linear(spec: Spec, op: Operands, links: Links) -> None:
    n_heads = op["attributes"]["n_heads"]
    links.asked.append(Asked(f"{n_heads} heads", (op["in"][0], op["out"][0]), n_heads))


def _write_head_linear(ranks: Ranks, name: str, op: Operands) -> None:
    out, n_heads, x = op["out"][0], op["attributes"]["n_heads"], ranks.own(op["in"][0])
    ranks.put(out, [True])
    ranks.cut_like(op["weights"][0], out)
    ranks.emit(name, op, [x], lambda rank: {"n_heads": ranks.share(out, rank, n_heads)})


def _link_latent_attention(spec: Spec, op: Operands, links: Links) -> None:
    n_heads = spec["layers"][op["attributes"]["layer"]][0]
    links.asked.append(Asked(f"{n_heads} heads", (*op["in"][:2], op["out"][0]), n_heads))


def _write_latent_attention(ranks: Ranks, name: str, op: Operands) -> None:
    """Every rank has the latents and the rope keys of all rows."""
    out, layer = op["out"][0], op["attributes"]["layer"]
    inputs = [*(ranks.own(value) for value in op["in"][:2]), *(ranks.whole(value) for value in op["in"][2:])]
    ranks.put(out, [True])
    n_heads = ranks.spec["layers"][layer][0]
    ranks.set_layer(layer, lambda rank: (ranks.share(out, rank, n_heads), 0))
    ranks.emit(name, op, inputs)


def _link_ssm(spec: Spec, op: Operands, links: Links) -> None:
    (x, dt, b, c), n_groups = op["in"], op["attributes"]["n_groups"]
    n_heads, many = _width(spec, dt), (x, dt, op["out"][0])
    if n_groups == 1:
        return links.asked.append(Asked(f"{n_heads} heads", many, n_heads))
    links.asked.append(Asked(f"{n_heads} heads in {n_groups} groups", many, n_heads, (b, c), n_groups))


def _write_ssm(ranks: Ranks, name: str, op: Operands) -> None:
    out, n_groups = op["out"][0], op["attributes"]["n_groups"]
    shared = ranks.whole if n_groups == 1 else ranks.own
    _write_recurrence(ranks, name, op, [*map(ranks.own, op["in"][:2]), *map(shared, op["in"][2:])], {
        "n_groups": lambda rank: 1 if n_groups == 1 else ranks.share(out, rank, n_groups)
    })  # fmt: skip


def _link_selective_scan(spec: Spec, op: Operands, links: Links) -> None:
    x, dt = op["in"][:2]
    what = f"{_width(spec, x)} channels in blocks of {BLOCKS[-1]}"
    links.asked.append(Asked(what, (x, dt, op["out"][0]), 0))


def _write_selective_scan(ranks: Ranks, name: str, op: Operands) -> None:
    _write_recurrence(ranks, name, op, [*map(ranks.own, op["in"][:2]), *map(ranks.whole, op["in"][2:])], {})


def _link_delta(spec: Spec, op: Operands, links: Links) -> None:
    q, k, *of_values = op["in"]
    n_heads, n_keys = _width(spec, op["in"][3]), op["attributes"]["n_key_heads"]
    what = f"{n_heads} heads over {n_keys} key heads"
    links.asked.append(Asked(what, (*of_values, op["out"][0]), n_heads, (q, k), n_keys))


def _write_delta(ranks: Ranks, name: str, op: Operands) -> None:
    out, n_keys = op["out"][0], op["attributes"]["n_key_heads"]
    inputs = [ranks.own(value) for value in op["in"]]
    _write_recurrence(ranks, name, op, inputs, {"n_key_heads": lambda rank: ranks.share(out, rank, n_keys)})


def _write_recurrence(
    ranks: Ranks, name: str, op: Operands, inputs: list[int], shares: dict[str, Callable[[int], int]]
) -> None:
    """An operation by head that cuts all its weights and its state, and has attributes that count heads."""
    out = op["out"][0]
    ranks.put(out, [True])
    for weight in op["weights"]:
        ranks.cut_like(weight, out)
    ranks.cut_state(op["attributes"]["state"], out)
    ranks.emit(name, op, inputs, lambda rank: {field: of(rank) for field, of in shares.items()})


EXPERTS_A_RANK = 8
"""With fewer experts, the rank with the most routes has much more work than the others."""


def _inner(spec: Spec, op: Operands) -> int:
    """The inner width of an expert."""
    return spec["weights"][op["weights"][1]]["cols"]


def _is_by_width(spec: Spec, op: Operands, n_ranks: int, experts: str) -> bool:
    """Whether ranks have columns of all experts."""
    is_wide = min(_inner(spec, op), _width(spec, op["out"][0])) >= BLOCKS[-1] * n_ranks
    is_few = op["attributes"]["n_experts"] < EXPERTS_A_RANK * n_ranks
    return experts == "width" or (experts == "auto" and is_few and is_wide)


def _link_experts(spec: Spec, op: Operands, links: Links) -> None:
    if not _is_by_width(spec, op, links.n_ranks, links.experts):
        n_experts = op["attributes"]["n_experts"]
        return links.counted.append((f"{n_experts} experts", n_experts))
    for width, what in ((_inner(spec, op), "inner columns"), (_width(spec, op["out"][0]), "outputs")):
        links.counted.append((f"{width} {what} of an expert in blocks of {BLOCKS[-1]}", -(-width // BLOCKS[-1])))


def _write_experts(ranks: Ranks, name: str, op: Operands) -> None:
    if _is_by_width(ranks.spec, op, ranks.n_ranks, ranks.experts):
        return _write_experts_by_width(ranks, op)
    _write_experts_by_rank(ranks, name, op)


def _write_experts_by_width(ranks: Ranks, op: Operands) -> None:
    """A rank has inner columns and outputs of every expert. What goes down is gathered before."""
    (out, scratch), given = op["out"], op["attributes"]
    up, down, *biases = op["weights"]
    of_up, of_down = [up, *biases[:1]], [down, *biases[1:]]
    inner, n_experts, n_chosen = _inner(ranks.spec, op), given["n_experts"], given["n_chosen"]
    cut = blocks(inner, ranks.n_ranks)
    if cut is None:
        raise AssertionError(f"a cut of {inner} inner columns that have fewer blocks than ranks")
    x, routes = (ranks.whole(value) for value in op["in"])
    n_halves = ranks.spec["weights"][up]["rows"] // (n_experts * inner)
    halves = [half * inner for half in range(n_experts * n_halves)]
    own, whole = (ranks.new_root(n_chosen * inner) for _ in range(2))
    ranks.put(out, [ranks.columns.cut(segment) is not None for segment in ranks.columns.segments(out)])
    width = _width(ranks.spec, out)
    for weight in of_up:
        ranks.cut_rows(weight, [[(half + first, half + end) for half in halves] for first, end in cut.ranges])
    outputs = [ranks.rows_like(out, width, rank) for rank in range(ranks.n_ranks)]
    for weight in of_down:
        ranks.cut_rows(weight, [
            [(e * width + first, e * width + end) for e in range(n_experts) for first, end in own] for own in outputs
        ])  # fmt: skip
    kept = {field: given[field] for field in ("n_experts", "n_chosen", "form", "act", "is_input_scaled", "limit")}
    firsts = [first for first, _ in cut.ranges]
    ranks.emit_new("experts_up", [x, routes], [own, scratch], lambda rank: {**kept, "first": firsts[rank]}, of_up)
    ranks.emit_new("gather", [own], [whole], lambda rank: {
        "kind": "columns", "first": cut.ranges[rank][0], "end": cut.ranges[rank][1], "n_chosen": n_chosen,
    })  # fmt: skip
    behind = ranks.new_root(_width(ranks.spec, scratch))
    kept_down = {field: given[field] for field in ("n_experts", "n_chosen", "is_input_scaled")}
    ranks.emit_new("experts_down", [whole, routes], [out, behind], lambda rank: kept_down, of_down)


def _write_experts_by_rank(ranks: Ranks, name: str, op: Operands) -> None:
    """All ranks have all rows, and add up the results of all routes."""
    routes = ranks.whole(op["in"][1])
    write_experts(ranks, name, op, ranks.whole(op["in"][0]), routes)


def write_experts(ranks: Ranks, name: str, op: Operands, x: int, routes: int) -> None:
    """A rank has whole experts and computes the results of the routes to them."""
    (out, scratch), given = op["out"], op["attributes"]
    n_experts, n_chosen = given["n_experts"], given["n_chosen"]
    experts = even(n_experts, ranks.n_ranks).ranges
    for weight in op["weights"]:
        each = ranks.spec["weights"][weight]["rows"] // n_experts
        ranks.cut_rows(weight, [[(first * each, end * each)] for first, end in experts])
    own, whole = (ranks.new_root(n_chosen * _width(ranks.spec, out)) for _ in range(2))
    ranks.emit(name, op, [x, routes], lambda rank: {
        "first": experts[rank][0], "n_local": experts[rank][1] - experts[rank][0], "is_by_route": True,
    }, [own, scratch])  # fmt: skip
    ranks.emit_new("gather", [own, routes], [whole], lambda rank: {
        "kind": "routes", "first": experts[rank][0], "end": experts[rank][1], "n_chosen": n_chosen,
    })  # fmt: skip
    scaled = given["is_input_scaled"]
    ranks.emit_new("combine", [whole, routes], [out], lambda rank: {"n_chosen": n_chosen, "is_input_scaled": scaled})


_WHOLE = Rule(_no_link, _copy)
_ALIKE = Rule(_link_alike, _write_alike)

RULES = dict.fromkeys(_core.operations_by_column(), _ALIKE) | {
    "embed": Rule(_no_link, _write_embed),
    "linear": Rule(_no_link, _write_linear),
    "rms_norm": Rule(_link_norm, _write_norm),
    "rope": Rule(_link_rope, _write_rope),
    "attention": Rule(_link_attention, _write_attention),
    "logits": Rule(_no_link, _write_logits),
    "states": _WHOLE,
    **dict.fromkeys(("take", "concat", "keep", "kept", "carry", "splice"), _WHOLE),
    "layer_norm": Rule(_link_norm, _write_norm),
    "row_attention": Rule(_link_attention, _write_attention),
    "conv": Rule(_link_alike, _write_conv),
    "ssm": Rule(_link_ssm, _write_ssm),
    "selective_scan": Rule(_link_selective_scan, _write_selective_scan),
    "delta": Rule(_link_delta, _write_delta),
    "route": _WHOLE,
    "experts": Rule(_link_experts, _write_experts),
    "head_linear": Rule(_link_head_linear, _write_head_linear),
    "latent_attention": Rule(_link_latent_attention, _write_latent_attention),
}
"""The rules by the operations' names."""
