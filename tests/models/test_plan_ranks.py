"""Plans of ranks: the same steps and places on all ranks, and memory that is free when other ranks store into it."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from modules import load

from llmpy import UnsupportedError, _core
from llmpy.models.pieces import Part
from llmpy.models.shard import shard, shard_by_data

cuts = load(Path(__file__).with_name("test_shard.py"))

RELEASED = json.loads(Path(__file__).with_name("released.json").read_text())
ROWS = 3
GATHERED_SUMS = 8 + 16 + 32 + 64 + 128 + 256 + 512 + 1024 + 2048
FUSIONS = {
    "none": (0, False), "cpu": (7, True), "gathered sums": (GATHERED_SUMS, True), "cuda": (GATHERED_SUMS + 32768 + 65536, True),
}  # fmt: skip


def runs(place):
    """The ranges of the arena that a place covers, one for each row."""
    if place is None:
        return []
    offset, width, stride = place
    return [(offset + row * stride, offset + row * stride + width) for row in range(ROWS)]


def overlap(a, b):
    return any(x < end and y > start for start, end in runs(a) for x, y in runs(b))


def is_gather(step):
    return step["text"].startswith("gather")


def without_name(step):
    """The text of a step but for the weight's name, of which a rank may have other parts."""
    return re.sub(r" \S+\.\S+", "", step["text"])


def places(step):
    return [*step["reads"], *step["writes"]]


def others_columns(whole, own):
    """The columns of a gathered value that other ranks store."""
    if own is None or not overlap(whole, own):
        return [whole]
    (offset, width, stride), (start, own_width, _) = whole, own
    sides = ((offset, start - offset, stride), (start + own_width, offset + width - start - own_width, stride))
    return [side for side in sides if side[1]]


def check_stores(steps, kinds):
    """Between two meetings, no step reads or writes memory that other ranks may store into."""
    gathers = [i for i, step in enumerate(steps) if is_gather(step)]
    assert len(gathers) == len(kinds)
    for (before, at), kind in zip(pairwise([0, *gathers]), kinds, strict=True):
        whole, own = steps[at]["writes"][0], own_place(steps[at])
        stored = others_columns(whole, own) if kind == "columns" else []
        for i in range(before, at + 1):
            used = steps[i]["reads"] if i == at else places(steps[i])
            if kind != "columns":  # its own rows, or results of routes, lie there before
                used = [place for place in used if place != steps[at]["reads"][0]]
                stored = [whole]
            assert not any(overlap(each, place) for each in stored for place in used), (steps[at], steps[i])


def own_place(step):
    """Where a rank's own columns of a gathered value lie: its input, or the sum that the step computes first."""
    return step["writes"][1] or step["reads"][0]


def check_likeness(plans):
    """The same steps in memory of the same shape; a rank's columns of a value may begin elsewhere."""
    (arena, first), *others = plans
    for size, steps in others:
        assert size == arena and len(steps) == len(first)
        for a, b in zip(first, steps, strict=True):
            assert (without_name(a), a["on_selected"]) == (without_name(b), b["on_selected"])
            for place, other in zip(places(a), places(b), strict=True):
                assert (place is None) == (other is None)
                assert place is None or (place[2] == other[2] and abs(place[0] - other[0]) < place[2])
            assert not is_gather(a) or a["writes"][0] == b["writes"][0]


def check_places(steps, ranks_spec):
    """A value that a step only gathers lies in the gathered one, at its first column."""
    gathers = [op for name, op in ranks_spec["ops"] if name == "gather"]
    values = ranks_spec["values"]
    for step, op in zip((step for step in steps if is_gather(step)), gathers, strict=True):
        own, whole = own_place(step), step["writes"][0]
        is_range = op["attributes"]["kind"] == "columns" and "n_chosen" not in op["attributes"]
        first = op["attributes"]["first"] if is_range else 0
        if values[op["in"][0]][1] < 0:
            assert own == (whole[0] + first, values[op["in"][0]][0], whole[2])


def check(ranks, fusions):
    plans = [_core.plan(rank, *FUSIONS[fusions], ROWS) for rank in ranks]
    check_likeness(plans)
    gathers = [op["attributes"] for name, op in ranks[0]["ops"] if name == "gather"]
    kinds = ["parts" if "n_chosen" in given else given["kind"] for given in gathers]
    for (_, steps), rank in zip(plans, ranks, strict=True):
        check_stores(steps, kinds)
        check_places(steps, rank)
    return plans


def first_layers(config):
    """A configuration with so few layers that all kinds of layers are there."""
    lists = [len(value) for value in config.values() if isinstance(value, list)]
    return config if lists else {**config, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_released_models(name):
    config = {key: value for key, value in RELEASED[name]["config"].items() if key != "quantization_config"}
    spec = cuts.program(**first_layers(config))
    for n_ranks in (2, 3):
        ranks = [] if cuts.refusal(spec, n_ranks) else shard(spec, n_ranks, 0)
        for fusions in FUSIONS if ranks else ():
            check(ranks, fusions)


FAMILIES = {
    "dense": {}, "norms behind branches": {"architectures": ["Gemma2ForCausalLM"]},
    "mixture": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 9, "num_experts_per_tok": 2},
    "layer norms": {"architectures": ["GPTNeoXForCausalLM"], "num_key_value_heads": 12},
    "norms of q and k": {"architectures": ["Olmo2ForCausalLM"]},
    "encoder": {"architectures": ["BertModel"], "hidden_act": "gelu"},
}  # fmt: skip


@pytest.mark.parametrize("fusions", FUSIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, fusions):
    spec = cuts.program(**{**cuts.DENSE, **FAMILIES[name]})
    for n_ranks in (2, 3, 5, 8):
        for limit in cuts.SIZES.values():
            for experts in ("rank", "width"):
                if not cuts.refusal(spec, n_ranks, experts):
                    check(shard(spec, n_ranks, limit, experts), fusions)


@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed):
    spec, random = cuts.random_program(seed), np.random.default_rng(seed)
    for n_ranks in range(2, 9):
        if cuts.refusal(spec, n_ranks) is None:
            for fusions in FUSIONS:
                check(shard(spec, n_ranks, int(random.choice([0, 5000, 20000]))), fusions)


MIXTURE = {**cuts.DENSE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


def test_results_of_routes_lie_in_the_gathered_value():
    """So `experts` writes them there, and the gather copies none on its own rank."""
    for ranks in (shard(cuts.program(**MIXTURE), 4, 0), shard(cuts.program(**MIXTURE), 3, 0)):
        for _, steps in check(ranks, "none"):
            names = [step["text"].split()[0].rstrip(",") for step in steps]
            at = names.index("experts")
            assert names[at : at + 3] == ["experts", "gather", "combine"]
            experts, gather, combine = steps[at : at + 3]
            assert experts["writes"][0] == gather["reads"][0] == gather["writes"][0] == combine["reads"][0]
            assert gather["reads"][1] == combine["reads"][1] == experts["reads"][1] and experts["writes"][0][1] == 2 * 192


@pytest.mark.parametrize("fusions", FUSIONS)
def test_rows_of_all_ranks(fusions):
    """A rank's rows lie in the gathered value, and rows are selected behind the last mixture."""
    ranks = shard_by_data(cuts.program(**MIXTURE), 3)
    for _, steps in check(ranks, fusions):
        names = [step["text"].split()[0].rstrip(",") for step in steps]
        n_layers = names.count("experts")
        assert n_layers == 2 and names.count("gather") == 2 * n_layers and names.count("route") == n_layers
        last = len(names) - names[::-1].index("experts")
        assert names[last : last + 2] == ["gather", "select"] and not any(step["on_selected"] for step in steps[:last])
        for i, step in enumerate(steps):
            if is_gather(step):
                assert step["reads"][0] == step["writes"][0], i


def test_a_gather_sums_the_results_of_routes():
    """The sum is of a place of its own, into which no other rank stores."""
    for _, steps in check(shard(cuts.program(**MIXTURE), 3, 0), "cuda"):
        gathers = [step for step in steps if step["text"].startswith("gather, combine")]
        assert len(gathers) == 2 and not [step for step in steps if step["text"].startswith("combine")]
        whole, _, _, combined = gathers[0]["writes"]
        assert whole[1] == 2 * combined[1] and not overlap(whole, combined)


def test_a_sum_its_gather_and_the_norm_are_one_step():
    """Two in a layer; the embedding and the inputs of o and down are gathered alone."""
    spec = cuts.program(**cuts.DENSE)
    (_, steps), _ = check(shard(spec, 2, 0), "gathered sums")
    fused = [step for step in steps if step["text"].startswith("gather of add, rms_norm ")]
    assert len(fused) == 2 * 2 and sum(is_gather(step) for step in steps) == 4 + 1 + 2 * 2
    (whole, own, normed, _), (a, b) = fused[0]["writes"], fused[0]["reads"][:2]
    assert own == (whole[0], 128, whole[2]) and normed[1] == whole[1] == 192
    assert a[1] == b[1] == 128 and not overlap(a, b) and not overlap(whole, a) and not overlap(whole, b)
    plain = check(shard(spec, 2, 0), "none")[0][1]
    assert sum(is_gather(step) for step in plain) == sum(is_gather(step) for step in steps)


def test_a_linear_computes_the_sum_that_is_gathered():
    """Its sum lies in the gathered value, so it can store it to all ranks."""
    spec = cuts.program(**cuts.DENSE)
    for _, steps in check(shard(spec, 2, 0), "cuda"):
        sums = [i for i, step in enumerate(steps) if " + residual" in step["text"]]
        assert len(sums) == 2 * 2
        for i in sums:
            linear, gather = steps[i : i + 2]
            assert gather["text"].startswith("gather, rms_norm ") and linear["writes"][0] == gather["reads"][0]
    whole, _ = check(shard(spec, 2, 1 << 40), "cuda")  # every rank has all of these matrices, so nothing gathers the sums
    assert not [step for step in whole[1] if " + residual" in step["text"]]


def test_a_value_of_two_segments_is_gathered_twice():
    """Both gathers write ranges of one value, each from a range of the rank's value, which cannot lie there."""

    def write(m, x):
        h = m.linear(x, "up", 192 + 96)
        a, b = m.split(h, [192, 96])
        a, b = m.rms_norm(a, "a", 1e-6, per_head=48), m.rms_norm(b, "b", 1e-6, per_head=24)
        return m.linear(h, "down", 192) + m.linear(a, "a_down", 192) + m.linear(b, "b_down", 192)

    for _, steps in check(shard(cuts.written(write), 3, 0), "none"):
        first, second = [step["writes"][0] for step in steps if is_gather(step)][1:3]
        assert second[0] - first[0] == first[1] == 192 and first[2] == second[2] == 288


def gather_of(spec, kind):
    return next(op for name, op in spec["ops"] if name == "gather" and op["attributes"]["kind"] == kind)


def gathers(which, **changes):
    return lambda spec: gather_of(spec, which)["attributes"].update(changes)


def attributes_of(name, **changes):
    return lambda spec: next(op for each, op in spec["ops"] if each == name)["attributes"].update(changes)


def whole_again(spec):
    del spec["rooms"]


def no_room(spec):
    spec["rooms"][gather_of(spec, "columns")["out"][0]] -= 1


def short_rooms(spec):
    spec["rooms"].pop()


def into_itself(spec):
    gather = gather_of(spec, "columns")
    gather["out"] = gather["in"]


WRONG = {
    "only the program of a rank gathers": whole_again,
    "a value has room for its columns": no_room,
    "a value has room for its columns, and more": short_rooms,
    "the gathered value is another one than the rank's own": into_itself,
    "a rank's columns are among the gathered ones": gathers("columns", first=97),
    "a rank's columns begin and end at multiples of the unit": gathers("columns", unit=5),
    "a rank's columns begin and end at multiples": gathers("rows", unit=1),
    "a rank has rows of at least one token id": gathers("rows", end=0),
    "a range of token ids has rows in the matrix": attributes_of("embed", end_id=129),
    "a range of token ids has rows": attributes_of("embed", first_id=128),
    "or has a rank's rows of it": attributes_of("logits", first_id=76),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_programs_are_refused(message):
    spec = shard(cuts.program(**cuts.DENSE), 2, 0)[0]
    _core.plan(spec, 0, False, ROWS)
    WRONG[message](spec)
    with pytest.raises(ValueError, match=message):
        _core.plan(spec, 0, False, ROWS)


WRONG_MIXTURES = {
    "only a rank has some of the experts": attributes_of("experts", is_by_route=False),
    "only a rank has some of the experts, and gives": attributes_of("experts", first=3),
    "up and down are matrices of parts for each expert": attributes_of("experts", n_local=3),
    "input, matrices and output fit each other": attributes_of("experts", n_local=1),
    "input, matrices and output fit each": attributes_of("experts", n_chosen=5),
    "results of at least one expert": gathers("routes", end=0),
    "there are routes, and equally many parts": gathers("routes", n_chosen=0),
    "there are routes, and equally many parts of": gathers("routes", n_chosen=3),
    "there are routes": lambda spec: gather_of(spec, "routes")["in"].pop(),
    "there is a result for each route": attributes_of("combine", n_chosen=1),
}


@pytest.mark.parametrize("message", WRONG_MIXTURES)
def test_wrong_mixtures_are_refused(message):
    spec = shard(cuts.program(**MIXTURE), 2, 0)[0]
    _core.plan(spec, 0, False, ROWS)
    WRONG_MIXTURES[message](spec)
    with pytest.raises(ValueError, match=message):
        _core.plan(spec, 0, False, ROWS)


def parts(**changes):
    def change(spec):
        gathers = [op["attributes"] for name, op in spec["ops"] if name == "gather"]
        next(given for given in gathers if "n_chosen" in given).update(changes)

    return change


WRONG_WIDTHS = {
    "up is a matrix of parts for each expert": attributes_of("experts_up", n_experts=3),
    "input, matrix and output fit each other": attributes_of("experts_up", first=300),
    "the routes are of as many experts, and the scratch has room": attributes_of("experts_up", n_chosen=1),
    "down is a matrix of parts for each expert": attributes_of("experts_down", n_experts=3),
    "input, matrix and output fit": attributes_of("experts_down", n_chosen=1),
    "a rank's columns of a part are among": parts(end=449),
    "a rank's columns of a part are among those": parts(n_chosen=5),
}


@pytest.mark.parametrize("message", WRONG_WIDTHS)
def test_wrong_parts_of_experts_are_refused(message):
    spec = shard(cuts.program(**MIXTURE), 2, 0, "width")[0]
    _core.plan(spec, 0, False, ROWS)
    WRONG_WIDTHS[message](spec)
    with pytest.raises(ValueError, match=message):
        _core.plan(spec, 0, False, ROWS)


def test_results_that_two_gathers_read_are_refused():
    """They lie in one gathered value only."""
    spec = shard(cuts.program(**MIXTURE), 2, 0)[0]
    at = next(i for i, (_, op) in enumerate(spec["ops"]) if op["attributes"].get("kind") == "routes")
    spec["values"].append(spec["values"][spec["ops"][at][1]["out"][0]])
    spec["rooms"].append(spec["values"][-1][0])
    spec["ops"].insert(at + 1, ("gather", {**spec["ops"][at][1], "out": [len(spec["values"]) - 1]}))
    with pytest.raises(UnsupportedError, match="gather: wanted rows or results of a value that no other gather reads"):
        _core.plan(spec, 0, False, ROWS)


def test_ranges_are_gathered_in_order():
    spec = {
        "values": [(8, -1, 0), (8, -1, 0), (16, -1, 0), (8, 2, 0), (8, 2, 8), (16, -1, 0)], "rooms": [8, 8, 16, 8, 8, 16],
        "ropes": [], "layers": [], "vocab_size": 4, "weights": [
            {"kind": "matrix", "rows": 4, "cols": 8, "parts": [Part("embed", "embed", 4, (4, 8), 0, 4, 4, False)]},
        ],
    }  # fmt: skip
    embed = ("embed", {"in": [], "out": [0], "weights": [0], "attributes": {"scale": 1.0}})
    parts = [("gather", {"in": [0], "out": [out], "weights": [], "attributes": {"kind": "columns"}}) for out in (3, 4)]
    end = [("act", {"in": [2], "out": [5], "weights": [], "attributes": {"act": "silu"}})]
    end.append(("states", {"in": [5], "out": [], "weights": [], "attributes": {}}))
    _core.plan({**spec, "ops": [embed, *parts, *end]}, 0, False, ROWS)
    with pytest.raises(ValueError, match="ranges of a value are written in the order of their columns"):
        _core.plan({**spec, "ops": [embed, *parts[::-1], *end]}, 0, False, ROWS)
    with pytest.raises(ValueError, match=r"operation 2 \(act\): wanted that inputs are written before they are read"):
        _core.plan({**spec, "ops": [embed, parts[0], *end]}, 0, False, ROWS)
