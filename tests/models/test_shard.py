"""Programs of ranks: what the interpreter computes from them, and which rows, columns and heads each rank has."""

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from llmpy import ConfigError, UnsupportedError, _core, models
from llmpy.models.blocks import Model
from llmpy.models.config import ModelConfig
from llmpy.models.interpret import Interpreter, interpret_ranks
from llmpy.models.pieces import Part
from llmpy.models.shard import RULES, default_replicate_bytes, shard
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


def refusal(spec, n_ranks):
    """The text of the error for a number of ranks; None: there is none."""
    try:
        shard(spec, n_ranks)
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
    assert [name for name in names_of(ranks[0]) if name not in ("gather", "combine")] == names_of(spec)
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


@pytest.mark.parametrize("n_ranks", RANKS)
def test_floats_are_those_of_the_whole_program(case, n_ranks, tiny, oracle):
    model = oracle(tiny(case).directory)
    spec, ids = model.compiled.spec, ids_of(17)
    if refused := refusal(spec, n_ranks):
        few = rf"\d+ (heads|channels|experts).* cannot be shared by {n_ranks} ranks; 1"
        assert re.search(f"={n_ranks}: {few}", refused)
        return
    whole = model.logits(ids)
    for limit in SIZES.values():
        ranks = shard(spec, n_ranks, limit)
        assert np.array_equal(interpret_ranks(ranks, model._read, ids, "logits"), whole)
        check_likeness(spec, ranks)
        check_rows(spec, ranks)


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
    assert np.array_equal(interpret_ranks(ranks, read, ids, "logits"), Interpreter(spec, read).logits(ids))
    check_likeness(spec, ranks)
    check_rows(spec, ranks)
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
        assert np.array_equal(interpret_ranks(ranks, read, ids, "states"), Interpreter(spec, read).states(ids))


def test_operations_that_share_a_weight_cut_it_in_one_way():
    """Rows of one matrix by heads for attention, by blocks of 64 for a linear."""

    def write(m, x):
        q, k, v = (m.linear(x, name, 192) for name in "qkv")
        return m.linear(m.attention(q, k, v), "o", 192) + m.linear(x, "q", 192)

    with pytest.raises(UnsupportedError, match=r"=2: operations cut q\.weight in different ways"):
        shard(written(write), 2, 0)


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
    assert set(RULES) == set(_core.operations())


def test_operations_without_a_rule_are_refused():
    spec = program(**DENSE)
    spec["ops"].insert(1, ("new", spec["ops"][1][1]))
    with pytest.raises(UnsupportedError, match="=2: operation 'new' of LlamaForCausalLM cannot .* tensor_parallel_size=1"):
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


def swapped(ranks):
    """Ranks 0 and 1 have each other's queries, keys and values."""
    a, b = (next(w for w in rank["weights"] if w["parts"][0].name.endswith("q_proj.weight")) for rank in ranks)
    a["parts"], b["parts"] = b["parts"], a["parts"]


@pytest.mark.parametrize("spoil", [wrong_column, wrong_row, wrong_id, swapped])
def test_one_wrong_cut_is_seen(spoil):
    spec, ids = program(**{**DENSE, "num_key_value_heads": 12}), list(range(110, 150))
    whole = Interpreter(spec, read).logits(ids)
    ranks = shard(spec, 2, 0)
    assert np.array_equal(interpret_ranks(ranks, read, ids, "logits"), whole)
    spoil(ranks)
    assert not np.array_equal(interpret_ranks(ranks, read, ids, "logits"), whole)
