"""Programs of ranks: what the interpreter computes from them, and which rows, columns and heads each rank has."""

import json
import re
from collections import Counter
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmpy import ConfigError, UnsupportedError, _core, models
from llmpy.models.blocks import Model
from llmpy.models.config import ModelConfig
from llmpy.models.interpret import Interpreter, interpret_ranks
from llmpy.models.pieces import Part
from llmpy.models.shard import RULES, default_replicate_bytes, shard, shard_by_data
from llmpy.models.shard.weights import rows_of as weight_rows
from llmpy.models.source import Source

RANKS = (2, 3, 4, 8)
SIZES = {"replicated": None, "cut": 0}  # replicate_bytes: the default, with which tiny models replicate what they can; 0
KEYS_AND_VALUES = re.compile(r"[kv]_proj|qkv|query_key_value|c_attn|k_norm|k_layernorm|k_weight")
DENSE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 203, "hidden_size": 192, "num_hidden_layers": 2,
    "intermediate_size": 448, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
ENCODERS = {
    "BertModel": {},
    "BertForSequenceClassification": {"num_labels": 3},
    "RobertaForTokenClassification": {"num_labels": 5},
    "XLMRobertaModel": {},
}


def read(name, shape):
    """Random values of a tensor, by its name."""
    random = np.random.default_rng(list(name.encode()))
    return (1.0 * ("norm" in name.lower()) + 0.15 * random.normal(size=shape)).astype(np.float32)


def program(**config):
    """The program of a configuration, without a checkpoint."""
    files = SimpleNamespace(kind="hf", directory="tiny", weights=[], config=config)
    return models.load(files, None).spec


def ids_of(n, vocab_size=99):
    return np.random.default_rng(n).integers(3, vocab_size, n).tolist()


def names_of(spec):
    return [name for name, _ in spec["ops"]]


def refusal(spec, n_ranks, experts="rank"):
    """The text of the error for a number of ranks; None: there is none."""
    try:
        shard(spec, n_ranks, None, experts)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return None


def rows_of(weight):
    """The source and the row (a vector: the element) of each row of a weight."""
    return [
        (part.name, part.base + row // part.inner * part.stride + row % part.inner)
        for part in weight["parts"] for row in range(part.rows)
    ]  # fmt: skip


def check_rows(spec, ranks):
    """Each row is on one rank or on all, but for copies of keys and values where there are fewer kv heads than ranks."""
    copied = set()
    for number, whole in enumerate(spec["weights"]):
        own = [rank["weights"][number] for rank in ranks]
        assert all(each["rows"] == sum(part.rows for part in each["parts"]) or each["values"] for each in own)
        counts = Counter(row for each in own for row in rows_of(each))
        assert set(counts) == set(rows_of(whole))
        copied |= {name for (name, _), n in counts.items() if n not in (1, len(ranks))}
        for each in own:
            assert each["values"] is None or len(each["values"]) == 4 * each["rows"]
    n_kv_heads = min([layer[1] for layer in spec["layers"] if layer[1]], default=len(ranks))
    assert all(KEYS_AND_VALUES.search(name) for name in copied) and (not copied or n_kv_heads < len(ranks))


def check_likeness(spec, ranks):
    """Ranks have the same operations on the same values; the program's values keep their numbers; rooms fit all ranks."""
    wirings = [[(name, op["in"], op["out"], op["weights"]) for name, op in rank["ops"]] for rank in ranks]
    assert all(wiring == wirings[0] for wiring in wirings)
    of_ranks = [name for name in names_of(ranks[0]) if name not in ("gather", "combine", "experts_down")]
    assert [name.removesuffix("_up") for name in of_ranks] == names_of(spec)
    for number, (room, *values) in enumerate(zip(ranks[0]["rooms"], *(rank["values"] for rank in ranks), strict=True)):
        assert room == max(width for width, _, _ in values) and len({of for _, of, _ in values}) == 1
        assert min(width for width, _, _ in values) > 0
        if number < len(spec["values"]):
            assert room <= spec["values"][number][0] and values[0][1] == spec["values"][number][1]
    for rank in ranks:
        for _, op in rank["ops"]:
            assert not set(op["out"]) & set(op["in"])
        for width, of, offset in rank["values"]:
            assert of < 0 or offset + width <= rank["values"][of][0]


def check_states(spec, ranks):
    """A recurrent state has a piece for each column (or head) of the operation that keeps it."""
    counted = {"conv": 0, "selective_scan": 0, "ssm": 1, "delta": 3}
    for rank in ranks:
        for name, op in rank["ops"]:
            if name in counted:
                pieces, floats = rank["states"][op["attributes"]["state"]]
                assert pieces == rank["values"][op["in"][counted[name]]][0]
                assert floats == spec["states"][op["attributes"]["state"]][1]


def check(spec, ranks, read, ids, wanted="logits"):
    """All that ranks must keep, and floats equal to those of the whole program."""
    check_likeness(spec, ranks)
    check_rows(spec, ranks)
    check_states(spec, ranks)
    whole = getattr(Interpreter(spec, read), wanted)(ids)
    assert np.isfinite(whole).all() and whole.std() > 1e-3
    assert np.array_equal(interpret_ranks(ranks, read, ids, wanted), whole)


@pytest.mark.parametrize("n_ranks", RANKS)
@pytest.mark.parametrize("experts", ["rank", "width"])
def test_floats_are_those_of_the_whole_program(case, n_ranks, experts, tiny, oracle):
    model = oracle(tiny(case).directory)
    spec, ids = model.compiled.spec, ids_of(17)
    if experts == "width" and "experts" not in names_of(spec):
        return
    if refused := refusal(spec, n_ranks, experts):
        few = rf"\d+ (heads|channels|experts|inner columns|outputs).* cannot be shared by {n_ranks} ranks; 1"
        assert re.search(f"={n_ranks}: {few}", refused)
        return
    for limit in SIZES.values():
        check(spec, shard(spec, n_ranks, limit, experts), model._read, ids)


@pytest.mark.parametrize("name", ["mixtral", "deepseek3", "qwen3_next", "gpt_oss"])
def test_ranks_with_rows_of_their_own_share_only_experts(name, tiny, oracle):
    model = oracle(tiny(name).directory)
    spec = model.compiled.spec
    experts = {weight for kind, op in spec["ops"] if kind == "experts" for weight in op["weights"]}
    for n_ranks in (2, 3):
        ranks = shard_by_data(spec, n_ranks)
        check(spec, ranks, model._read, ids_of(17))
        for number, whole in enumerate(spec["weights"]):
            rows = [rank["weights"][number]["rows"] for rank in ranks]
            assert sum(rows) == whole["rows"] if number in experts else rows == [whole["rows"]] * n_ranks
        kinds = [op["attributes"]["kind"] for kind, op in ranks[1]["ops"] if kind == "gather"]
        assert kinds == ["rows", "routes"] * (len(kinds) // 2) and kinds
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=99: \d+ experts cannot be shared by 99 ranks"):
        shard_by_data(spec, 99)


REFUSED = {  # the numbers of ranks that a family refuses, apart from those above its heads
    "llama": {8}, "mamba2": {3, 4, 8}, "mamba2-bias": {8}, "mamba": {8}, "plamo2": {8}, "deepseek3-halves": {8},
    "baichuan-13b": set(), "bloom": {8}, "gemma3": {8}, "jamba-plain": {8}, "lfm2": {8}, "falcon_h1": {3, 4, 8}, "olmo2": {8},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_numbers_of_ranks_that_are_refused(name, tiny, oracle):
    spec = oracle(tiny(name).directory).compiled.spec
    assert {n for n in RANKS if refusal(spec, n)} == REFUSED[name]


@pytest.mark.parametrize("n_ranks", RANKS[:3])
@pytest.mark.parametrize("limit", SIZES)
@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoders(architecture, limit, n_ranks):
    sizes = {**DENSE, "num_key_value_heads": 12, "type_vocab_size": 2, "hidden_act": "gelu"}
    spec = program(**{**sizes, "architectures": [architecture], **ENCODERS[architecture]})
    ids, types = ids_of(9), [0] * 4 + [1] * 5
    ranks = shard(spec, n_ranks, SIZES[limit])
    whole = Interpreter(spec, read).states(ids, types)
    assert np.array_equal(interpret_ranks(ranks, read, ids, "states", types), whole)
    check_likeness(spec, ranks)
    check_rows(spec, ranks)


@pytest.mark.parametrize("n_ranks", [2, 5, 7, 8, 12])
def test_unequal_shares_and_copies_of_kv_heads(n_ranks):
    spec, ids = program(**DENSE), ids_of(11, 203)
    ranks = shard(spec, n_ranks, 0)
    check(spec, ranks, read, ids)
    heads = [rank["layers"][0][:2] for rank in ranks]
    assert heads == {
        2: [(6, 2)] * 2,
        5: [(2, 1), (1, 1), (3, 1), (3, 1), (3, 1)],
        7: [(2, 1), (1, 1), (2, 1), (1, 1), (2, 1), (1, 1), (3, 1)],
        8: [(2, 1), (1, 1)] * 4,
        12: [(1, 1)] * 12,
    }[n_ranks]


def test_the_first_ranks_have_the_larger_shares():
    spec = program(**{**DENSE, "num_key_value_heads": 12})
    assert [rank["layers"][1] for rank in shard(spec, 5)] == [(n, n, 16, 0) for n in (3, 3, 2, 2, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n_ranks", "what"),
    [
        (6, 2, 8, "6 heads over 2 kv heads cannot be shared by 8 ranks; 1, 2, 3, 4, 5 or 6 can"),
        (2, 1, 3, "2 heads over 1 kv heads cannot be shared by 3 ranks; 1 or 2 can"),
        (1, 1, 2, "1 heads over 1 kv heads cannot be shared by 2 ranks; 1 can"),
    ],
)
def test_a_rank_without_a_head_is_refused(heads, kv_heads, n_ranks, what):
    spec = program(**{**DENSE, "num_attention_heads": heads, "num_key_value_heads": kv_heads})
    with pytest.raises(ConfigError) as caught:
        shard(spec, n_ranks)
    assert str(caught.value) == f"tensor_parallel_size={n_ranks}: {what}"
    assert (caught.value.option, caught.value.value) == ("tensor_parallel_size", n_ranks)


def written(write):
    """A program that a function writes, of 4 heads of 16."""
    m = Model(ModelConfig({**DENSE, "num_attention_heads": 4}, "config.json"), None, Source(), "")
    m.states(write(m, m.embed("embed")))
    return m.finish(())


def test_heads_of_a_norm_without_attention_stay_whole():
    """6 heads of 48 columns: blocks of 64 or 16 would divide them."""
    spec = written(lambda m, x: m.linear(m.rms_norm(m.linear(x, "up", 288), "norm", 1e-6, per_head=48), "down", 192))
    ids = ids_of(5)
    for n_ranks, widths in ((4, [96, 96, 48, 48]), (8, [288] * 8)):
        ranks = shard(spec, n_ranks, 0)
        assert [rank["values"][1][0] for rank in ranks] == widths
        check(spec, ranks, read, ids, "states")


def test_columns_that_are_cut_in_parts_are_gathered_in_parts():
    """The columns of both halves are read together and each half by its own norm of heads."""

    def write(m, x):
        h = m.linear(x, "up", 192 + 96)
        a, b = m.split(h, [192, 96])
        a, b = m.rms_norm(a, "a", 1e-6, per_head=48), m.rms_norm(b, "b", 1e-6, per_head=24)
        return m.linear(h, "down", 192) + m.linear(a, "a_down", 192) + m.linear(b, "b_down", 192)

    spec, ids = written(write), ids_of(5)
    ranks = shard(spec, 3, 0)
    gathers = [op for name, op in ranks[2]["ops"] if name == "gather"]
    places = [ranks[2]["values"][op["out"][0]][1:] for op in gathers[1:3]]
    assert places == [(places[0][0], 0), (places[0][0], 192)]
    assert [op["attributes"]["first"] for op in gathers[1:3]] == [144, 72]
    check(spec, ranks, read, ids, "states")


def mixer(m, x, random, name, least):
    """A random mixer of the recurrent kinds."""
    heads, size, state = least * int(random.choice([1, 2])), int(random.choice([8, 16])), int(random.choice([4, 8]))
    kind = random.choice(["ssm", "scan", "delta"])
    groups, width = least if kind == "delta" else int(random.choice([1, least])), heads * size
    if kind == "ssm":
        gate, u, dt = m.linear(x, f"{name}in", [width, width + 2 * groups * state, heads])
        u, b, c = m.split(m.conv(u, f"{name}conv", 3, act="silu"), [width, groups * state, groups * state])
        return m.rms_norm(m.gated(gate, m.ssm(u, dt, b, c, name, groups=groups), "silu"), None, 1e-6, per_head=width // groups)
    if kind == "scan":
        width = 16 * heads
        u, gate = m.linear(x, f"{name}in", [width, width])
        u = m.conv(u, f"{name}conv", 3)
        dt, b, c = m.linear(u, f"{name}x", [4, state, state])
        y = m.selective_scan(u, m.linear(dt, f"{name}dt", width), m.rms_norm(b, None, 1e-6), c, name, dt_bias=None)
        return m.gated(gate, y, "silu")
    keys = groups * state
    q, k, v, z = m.linear(x, f"{name}in", [keys, keys, width, width], groups=groups)
    q, k, v = m.split(m.conv(m.join(q, k, v), f"{name}conv", 4), [keys, keys, width])
    b, a = m.linear(x, f"{name}ba", [heads, heads])
    return m.gated(z, m.rms_norm(m.delta(q, k, v, a, b, name, key_heads=groups), None, 1e-6, per_head=size), "silu")


def attention(m, x, random, name, least):
    """Attention with random heads, norms, sinks, slopes and a gate."""
    kv_heads = int(random.choice([1, 2, 3, 4]))
    heads = kv_heads * (-(-least // kv_heads) + int(random.choice([0, 1])))
    names = [f"{name}{kind}" for kind in ("q_proj", "k_proj", "v_proj", "gate")]
    q, k, v, gate = m.linear(x, names, [16 * heads, 16 * kv_heads, 16 * kv_heads, 16 * heads], bias=True)
    norm = random.choice(["none", "heads", "row"])
    if norm != "none":
        q = m.layer_norm(q, f"{name}q_norm", 1e-5, per_head=norm == "heads", own_weights=True)
        k = m.layer_norm(k, f"{name}k_norm", 1e-5, per_head=norm == "heads", own_weights=True)
    q, k = m.rope(q, k, m.config.rope)
    slopes = m.constant(random.normal(size=heads)) if random.random() < 0.3 else None
    y = m.attention(q, k, v, sinks=f"{name}sinks" if random.random() < 0.3 else None, slopes=slopes)
    return m.gated(gate, y, "sigmoid") if random.random() < 0.5 else y


def mlp(m, x, random, name, least):
    """A gated MLP of a random width, or a mixture with a gate of one column."""
    width = int(random.choice([40, 96, 160, 320]))
    if random.random() < 0.5:
        gate, up = m.linear(x, [f"{name}gate", f"{name}up"], [width, width])
        return m.clip(m.gated(m.scale(gate, list(random.normal(size=width))), up, "gelu"), 2.0)
    routes = m.route(x, f"{name}router", int(random.choice([8, 11])), 3, score="softmax")
    y = m.experts(x, routes, [f"{name}#gate", f"{name}#up"], f"{name}#down", 24, bias=random.random() < 0.5)
    return m.gated(m.linear(x, f"{name}one", 1), y, "sigmoid")


def random_program(seed):
    """A program of random branches, joined by a sum or a product, with norms before or behind them, for 2 to 6 ranks."""
    random = np.random.default_rng(seed)
    least = int(random.choice([2, 3, 4, 6]))
    config = {**DENSE, "hidden_size": int(random.choice([64, 80, 192])), "tie_word_embeddings": bool(random.random() < 0.5)}
    m = Model(ModelConfig(config, "config.json"), None, Source(), "")
    x = m.embed("embed")
    for i in range(4):
        kinds = random.choice([mixer, attention, mlp], size=2)
        h = m.rms_norm(x, f"{i}norm", 1e-6) if random.random() < 0.7 else x
        y = [m.linear(kind(m, h, random, f"{i}{n}", least), f"{i}{n}out", x.width) for n, kind in enumerate(kinds)]
        x = x + (y[0] + y[1] if random.random() < 0.5 else m.rms_norm(m.gated(y[0], y[1], "tanh"), f"{i}behind", 1e-6))
    m.logits(x, "head", tied_to="embed")
    return m.finish(())


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 100))])
def test_random_programs(seed):
    spec, random = random_program(seed), np.random.default_rng(seed)
    allowed = [n for n in range(2, 9) if refusal(spec, n) is None]
    assert allowed
    for n_ranks in allowed:
        check(spec, shard(spec, n_ranks, int(random.choice([0, 5000, 20000, 10**8]))), read, ids_of(7))


def test_operations_that_share_a_weight_cut_it_in_one_way():
    """Rows of one matrix by heads for attention, by blocks of 64 for a linear."""

    def write(m, x):
        q, k, v = (m.linear(x, name, 192) for name in "qkv")
        return m.linear(m.attention(q, k, v), "o", 192) + m.linear(x, "q", 192)

    with pytest.raises(UnsupportedError, match=r"=2: operations cut q\.weight in different ways"):
        shard(written(write), 2, 0)


def test_a_rank_without_an_expert_is_refused():
    mixture = {**DENSE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match="=8: 4 experts cannot be shared by 8 ranks; 1, 2, 3 or 4 can"):
        shard(program(**mixture), 8)
    ranks = shard(program(**{**mixture, "num_local_experts": 7}), 3)
    given = [next(op["attributes"] for name, op in rank["ops"] if name == "experts") for rank in ranks]
    assert [(each["first"], each["n_local"]) for each in given] == [(0, 3), (3, 2), (5, 2)]


def two_groupings(m, x):
    """The same queries for 1 kv head and for 2."""
    q, k, v, j, w = m.linear(x, list("qkvjw"), [192, 16, 16, 32, 32])
    return m.attention(q, k, v) + m.attention(q, j, w)


def joined_heads(m, x):
    """Norms over pairs of the 4 kv heads."""
    q, k, v = m.linear(x, list("qkv"), [192, 64, 64])
    return m.attention(q, m.rms_norm(k, None, 1e-6, per_head=32), v)


def divided_queries(m, x):
    """Queries of which an MLP reads the half."""
    q, k, v = m.linear(x, list("qkv"), [192, 64, 64])
    half, _ = m.split(q, [96, 96])
    return m.attention(q, k, v) + m.linear(m.act(half, "silu"), "o", 192)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (two_groupings, "value 2 has 12 heads over 1 kv heads for one operation and 12 heads over 2 kv heads for another"),
        (joined_heads, "12 heads over 4 kv heads: a norm or a rope joins heads, so that 2 parts are left"),
        (divided_queries, "an operation takes heads of value 2, of which 2 ranges are cut apart"),
    ],
)
def test_cuts_that_exclude_each_other_are_refused(write, what):
    with pytest.raises(UnsupportedError) as caught:
        shard(written(write), 6)
    assert str(caught.value) == f"tensor_parallel_size=6: {what}; set tensor_parallel_size=1"


RELEASED = json.loads(Path(__file__).with_name("released.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_released_models(name):
    """All of them can be shared by 2 ranks, which then have about half of a large model's weights."""
    config = {key: value for key, value in RELEASED[name]["config"].items() if key != "quantization_config"}
    spec = program(**config)
    for limit in SIZES.values():
        ranks = shard(spec, 2, limit)
        check_likeness(spec, ranks)
        check_states(spec, ranks)
        sizes = [sum(weight["rows"] * weight["cols"] for weight in each["weights"]) for each in (spec, *ranks)]
        assert RELEASED[name]["billions"] < 5 or max(sizes[1:]) < 0.56 * sizes[0]


def test_one_rank_has_the_program_itself():
    spec = program(**DENSE)
    assert shard(spec, 1) == [spec] and "rooms" not in spec


def test_gathers_of_a_dense_layer():
    """Attention's output, x + o, act * up, x + down; the two replicated outputs of small models need none."""
    spec = program(**{**DENSE, "tie_word_embeddings": False})
    ops = ["rms_norm", "linear", "rope", "attention", "gather", "linear", "add", "gather"]
    ops += ["rms_norm", "linear", "gated", "gather", "linear", "add", "gather"]
    assert names_of(shard(spec, 2, 0)[0]) == ["embed", "gather", *ops * 2, "rms_norm", "logits", "states"]
    large = 2 * DENSE["hidden_size"] * 2 * DENSE["intermediate_size"] - 1  # bytes of gate and up
    assert Counter(names_of(shard(spec, 2, large)[0]))["gather"] == 2 * 2


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_the_unit_of_gathered_columns(n_ranks):
    """The largest number that divides where the columns of all ranks begin and end: 3 heads of 24 columns, blocks of 64."""
    given = {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
    programs = shard(program(**given), n_ranks, 0)
    for ops in zip(*(one["ops"] for one in programs), strict=True):
        given = [op["attributes"] for _, op in ops]
        if ops[0][0] != "gather" or given[0]["kind"] != "columns":
            continue
        widths = [one["values"][op["in"][0]][0] for one, (_, op) in zip(programs, ops, strict=True)]
        ends = [each["first"] + width for each, width in zip(given, widths, strict=True)]
        assert {each["unit"] for each in given} == {gcd(*ends)} and gcd(*ends) in (48, 64)


def test_what_is_replicated():
    spec = program(**DENSE)
    large = 2 * DENSE["hidden_size"] * 2 * DENSE["intermediate_size"]
    for limit, rows in ((large - 1, 2 * 256), (large, 2 * 448)):
        weights = shard(spec, 2, limit)[0]["weights"]
        assert [each["rows"] for each in weights if each["parts"][0].name.endswith("0.mlp.gate_proj.weight")] == [rows]
    assert default_replicate_bytes(2) == 20_000_000 and default_replicate_bytes(5) == 12_500_000
    assert shard(spec, 2) == shard(spec, 2, 20_000_000)


def test_cuts_at_multiples_of_64_rows_else_of_16():
    """MXFP4 packs rows by 8; a cut that divides a pack would change what a kernel computes."""
    spec = program(**DENSE)
    for n_ranks, gates in ((2, [256, 192]), (3, [192, 128, 128]), (8, [64, 64, 64, 64, 48, 48, 48, 48])):
        ranks = shard(spec, n_ranks, 0)
        gated = next(op["out"][0] for name, op in ranks[0]["ops"] if name == "gated")
        assert [rank["values"][gated][0] for rank in ranks] == gates


def test_an_embedding_is_cut_by_ids():
    """Its rows and those of the tied logits are the same ones."""
    for tied in (False, True):
        spec = program(**{**DENSE, "tie_word_embeddings": tied})
        first, second = shard(spec, 2, 0)
        (_, embed), (_, gather) = second["ops"][:2]
        assert (embed["attributes"]["first_id"], embed["attributes"]["end_id"]) == (128, 203)
        assert gather["attributes"] == {"kind": "rows", "first": 128, "end": 203} and gather["out"] == [0]
        assert dict(second["ops"])["logits"]["attributes"]["first_id"] == 128
        assert [rank["weights"][0]["rows"] for rank in (first, second)] == [128, 75]
    assert "gather" not in names_of(shard(program(**DENSE), 2)[0])[:2]


def test_every_operation_has_a_rule():
    """Programs of one rank lack the first of these operations: shard writes them. Every rank computes all of a tower."""
    written = {"gather", "combine", "experts_up", "experts_down"}
    towers = {"pixels", "embed_taps", "rows", "group", "mean_rows", "grid_attention", "features"}
    assert set(RULES) == set(_core.operations()) - written - towers


def test_operations_without_a_rule_are_refused():
    spec = program(**DENSE)
    spec["ops"].insert(1, ("new", spec["ops"][1][1]))
    with pytest.raises(UnsupportedError, match=r"=2: operation 'new' of LlamaForCausalLM cannot .* tensor_parallel_size=1"):
        shard(spec, 2)


@pytest.mark.parametrize("inner", [1, 3, 4, 12])
def test_rows_of_parts(inner):
    """A cut anywhere takes the rows that lie there, however a part's rows are ordered in the tensor."""
    parts = [Part(name, name, 12, (64, 8), 5, inner, 2 * inner, False) for name in ("a", "b")]
    values = np.arange(24, dtype=np.float32)
    weight = {"kind": "matrix", "rows": 24, "cols": 8, "parts": parts, "offset": 0.0, "values": None, "unit_rows": False}
    constant = {**weight, "kind": "vector", "cols": 1, "parts": [], "values": values.tobytes()}
    for first in range(24):
        for end in range(first + 1, 25):
            own = weight_rows(weight, [(first, end), (0, 1)])
            assert rows_of(own) == [*rows_of(weight)[first:end], rows_of(weight)[0]] and own["rows"] == end - first + 1
            assert all(part.rows % part.inner == 0 and part.stride >= part.inner for part in own["parts"])
            found = np.frombuffer(weight_rows(constant, [(first, end)])["values"], np.float32)
            assert np.array_equal(found, values[first:end])


def wrong_column(ranks):
    """The gather of the first attention puts rank 1's columns one column too early."""
    op = next(op for name, op in ranks[1]["ops"] if name == "gather" and op["attributes"]["kind"] == "columns")
    op["attributes"]["first"] -= 1


def wrong_row(ranks):
    """Rank 1's part of a matrix begins one row too early."""
    weight = next(each for each in ranks[1]["weights"] if each["parts"][0].name.endswith("o_proj.weight"))
    weight["parts"][0] = weight["parts"][0]._replace(base=weight["parts"][0].base - 1)


def wrong_id(ranks):
    """Rank 1 gives the row of one id too few."""
    op = next(op for name, op in ranks[1]["ops"] if name == "gather" and op["attributes"]["kind"] == "rows")
    op["attributes"]["first"] += 1


def wrong_route(ranks):
    """Rank 1 gives the results of one expert too few."""
    op = next(op for name, op in ranks[1]["ops"] if name == "gather" and op["attributes"]["kind"] == "routes")
    op["attributes"]["first"] += 1


def swapped(ranks):
    """Ranks 0 and 1 have each other's queries, keys and values."""
    a, b = (next(w for w in rank["weights"] if w["parts"][0].name.endswith("q_proj.weight")) for rank in ranks)
    a["parts"], b["parts"] = b["parts"], a["parts"]


@pytest.mark.parametrize("spoil", [wrong_column, wrong_row, wrong_id, wrong_route, swapped])
def test_one_wrong_cut_is_seen(spoil):
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    spec, ids = program(**{**DENSE, **mixture, "num_key_value_heads": 12}), list(range(110, 150))
    whole = Interpreter(spec, read).logits(ids)
    ranks = shard(spec, 2, 0)
    assert np.array_equal(interpret_ranks(ranks, read, ids, "logits"), whole)
    spoil(ranks)
    assert not np.array_equal(interpret_ranks(ranks, read, ids, "logits"), whole)
