"""Checkpoints with rows packed in every way, against the same weights as separate tensors: the same bits from files, from
updates and as dummy weights; checksums use the elements' numbers in the checkpoint."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpy import LLM, CheckpointError, SamplingParams, WeightUpdateError, architecture
from llmpy.models.pieces import Piece, whole

save_file = pytest.importorskip("safetensors.numpy").save_file
ml_dtypes = pytest.importorskip("ml_dtypes")

H, HD, V, PADDED = 32, 8, 50, 64
OPTIONS = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": "4MiB", "generation_config": "none"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
PROMPTS = [[3, 4, 5], list(range(40)), [7]]
HELD = [0.5 + i / H for i in range(H)]


def experts(m, x, pieces):
    """Experts with act(gate) * up from stacked matrices, one pair per expert."""
    total = None
    for gate, up, down in pieces:
        width = gate.rows
        both = m.emit("linear", [x], 2 * width, weights=[m.matrix("linear", [gate, up], H)])
        y = m.gated(*m.split(both, [width, width]), "silu")
        y = m.emit("linear", [y], H, weights=[m.matrix("linear", [down], width)])
        total = y if total is None else total + y
    return total


@architecture("LaidOut")
def laid_out(cfg, m):
    """A model with rows packed in every way; with `plain`, from separate tensors."""
    plain, groups, share, width = cfg.get("plain", False), cfg.get("groups", 1), cfg.get("share", 1), cfg.get("inner", 1)
    kv, n_experts = groups * HD, 2
    x = m.embed("embed")
    if plain:
        q, k, v = m.linear(x, ["q", "k", "v"], [share * kv, kv, kv], bias=True)
    else:
        q, k, v = m.linear(x, "qkv", [share * kv, kv, kv], groups=groups, bias=True)
    x = x + m.linear(m.attention(q, k, v), "o", H, bias=True, transposed=not plain)
    norm = m.vector("norm", [whole("norm", H) if plain else Piece("norms", (3, 1, H), H, H)], 1.0)
    x = m.emit("rms_norm", [x], H, weights=[norm], n_heads=1, eps=1e-6)
    held = m.vector("norm", [whole("held", H)]) if plain else m.constant(HELD)
    h = m.emit("rms_norm", [x], H, weights=[held], n_heads=1, eps=1e-6)
    pieces = []
    for e in range(n_experts):
        if plain:
            own = [whole(f"{name}.{e}", width, H) for name in ("gate", "up")] + [whole(f"down.{e}", H, width)]
        elif cfg.get("columns", False):  # [experts, in, out], gate and up by turns
            shape = n_experts, H, 2 * width
            own = [Piece("gate_up", shape, width, 2 * width * e + i, 1, 2, True) for i in (0, 1)]
            own.append(Piece("down", (n_experts, width, H), H, e * H, transposed=True))
        else:  # [experts, out, in], the gate's rows before those of `up`
            shape = n_experts, 2 * width, H
            own = [Piece("gate_up", shape, width, 2 * width * e + i * width) for i in (0, 1)]
            own.append(Piece("down", (n_experts, H, width), H, e * H))
        pieces.append(own)
    x = x + experts(m, h, pieces)
    head = m.matrix("logits", [whole("head", V, H) if plain else Piece("head", (PADDED, H), V)], H)
    m.spec["ops"].append(("logits", {"in": [x.index], "out": [], "weights": [head], "attributes": {"scale": 1.0}}))
    m.generates = True
    m.states(x)


def tensors_of(seed, groups, share, width, columns):
    """(packed, plain): the same weights under the names of either form, float32."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        return (0.3 * random.standard_normal(shape)).astype(np.float32)

    heads = groups * share
    qkv, bias, o = draw(groups, share + 2, HD, H), draw(groups, share + 2, HD), draw(heads * HD, H)
    norms, head, gate_up, down = draw(3, 1, H), draw(PADDED, H), draw(2, 2, width, H), draw(2, H, width)
    both = {"embed.weight": draw(V, H), "o.bias": draw(H)}
    parts = {"q": slice(0, share), "k": slice(share, share + 1), "v": slice(share + 1, share + 2)}
    plain = {
        **both, "o.weight": o.T, "norm": norms[1, 0], "held": np.asarray(HELD, np.float32), "head": head[:V],
        **{f"{name}.weight": qkv[:, part].reshape(-1, H) for name, part in parts.items()},
        **{f"{name}.bias": bias[:, part].reshape(-1) for name, part in parts.items()},
        **{f"{name}.{e}": gate_up[e, i] for e in (0, 1) for i, name in enumerate(("gate", "up"))},
        **{f"down.{e}": down[e] for e in (0, 1)},
    }  # fmt: skip
    packed = {
        **both, "o.weight": o, "norms": norms, "head": head,
        "qkv.weight": qkv.reshape(-1, H), "qkv.bias": bias.reshape(-1),
        "gate_up": gate_up.transpose(0, 3, 2, 1).reshape(2, H, 2 * width) if columns else gate_up.reshape(2, 2 * width, H),
        "down": down.swapaxes(1, 2) if columns else down,
    }  # fmt: skip
    return packed, plain


def save(path, tensors, kind=np.float32, **fields):
    path.mkdir(exist_ok=True)
    kind = np.dtype(kind)
    fields["dtype"] = kind.name
    save_file({name: np.ascontiguousarray(x).astype(kind) for name, x in tensors.items()}, path / "model.safetensors")
    sizes = {"vocab_size": V, "hidden_size": H, "head_dim": HD, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": fields["groups"] * fields["share"], "num_key_value_heads": fields["groups"]}
    config = {"architectures": ["LaidOut"], **sizes, **heads, **fields}
    (path / "config.json").write_text(json.dumps(config))
    return path


def outcome(llm):
    return [(out.outputs[0].token_ids, out.outputs[0].sampled.raw.tobytes()) for out in llm.generate(PROMPTS, GREEDY)]


def checksum(stored, numbers):
    """The checksum formula of csrc/base/mix.h over elements with these numbers."""
    bits = stored.reshape(-1).view(np.uint32 if stored.dtype.itemsize == 4 else np.uint16).astype(np.uint64)
    with np.errstate(over="ignore"):
        z = (numbers.reshape(-1).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z += bits * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return int((z ^ z >> np.uint64(31)).sum(dtype=np.uint64))


def used_of(name, tensor):
    """Numbers of the elements that the model holds."""
    numbers = np.arange(tensor.size).reshape(tensor.shape)
    return {"norms": numbers[1], "head": numbers[:V]}.get(name, numbers)


FORMS = st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([1, 3, 16, 70]), st.booleans())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=FORMS, stored=st.sampled_from(["float32", "bfloat16", "float16"]), dtype=st.sampled_from(["auto", "bfloat16"]))
@pytest.mark.parametrize("how", ["files", "updates"])
def test_packed_rows_are_rows(tmp_path, device, form, stored, dtype, how):
    groups, share, width, columns = form
    fields = {"groups": groups, "share": share, "inner": width, "columns": columns}
    kind = ml_dtypes.bfloat16 if stored == "bfloat16" else np.dtype(stored)
    packed, plain = tensors_of(sum(form), *form)
    plain_llm = LLM(save(tmp_path / "plain", plain, kind, plain=True, **fields), device=device, dtype=dtype, **OPTIONS)
    path = save(tmp_path / "packed", packed, kind, **fields)
    llm = LLM(path, device=device, dtype=dtype, load_format="auto" if how == "files" else "dummy", **OPTIONS)
    try:
        if how == "updates":
            other = tensors_of(1000, *form)[0]
            llm.update_weights({name: np.ascontiguousarray(x) for name, x in other.items()})
            assert outcome(llm) != outcome(plain_llm)
            # In any memory: rows reversed, columns first, every other element.
            as_stored = {n: x.astype(kind).astype(np.float32) for n, x in packed.items()}
            llm.update_weights({name: np.repeat(x[::-1], 2, -1)[..., ::2][::-1] for name, x in as_stored.items()})
            assert outcome(llm) == outcome(plain_llm)
            llm.update_weights({name: np.ascontiguousarray(x) for name, x in other.items()})
            moved = {n: np.asfortranarray(x) for n, x in as_stored.items()}
            report = llm.update_weights(moved)
            assert report.num_tensors == len(packed) == len(llm.weight_info()) and report.missing == []
            assert report.num_bytes == sum(x.nbytes for x in moved.values())
        assert outcome(llm) == outcome(plain_llm)
        have = llm.weight_checksum()
        assert set(have) == set(packed)
        assert {info["name"]: info["shape"] for info in llm.weight_info()} == {n: x.shape for n, x in packed.items()}
        for name, tensor in packed.items():
            held = np.float32 if name in ("norms", "qkv.bias", "o.bias") else ml_dtypes.bfloat16 if dtype != "auto" else kind
            values = tensor.astype(kind).astype(np.float32) + np.float32(name == "norms")
            numbers = used_of(name, tensor)
            assert have[name] == checksum(values.astype(held).reshape(-1)[numbers.reshape(-1)], numbers), name
        assert llm.compare_weights({name: x.astype(kind).astype(np.float32) for name, x in packed.items()})
        other = packed["gate_up"].copy()
        other[1, -1, -1] += 1
        assert not llm.compare_weights({"gate_up": other})
    finally:
        llm.close()
        plain_llm.close()


def test_made_up_values_go_by_the_tensors_own_rows(tmp_path, device):
    """Models with tensors of equal names and shapes get equal dummy values, for any use of the rows."""
    sums = []
    for name, groups, share, columns in (("a", 3, 2, False), ("b", 4, 1, False), ("c", 4, 1, True)):
        fields = {"groups": groups, "share": share, "inner": 5, "columns": columns}
        path = save(tmp_path / name, tensors_of(0, groups, share, 5, columns)[0], **fields)
        with LLM(path, device=device, load_format="dummy", **OPTIONS) as llm:
            sums.append(llm.weight_checksum())
    a, b, c = sums
    assert {name for name in a if a[name] != b[name]} == {"o.weight"}
    assert {name for name in b if b[name] != c[name]} == {"gate_up", "down"}


def test_a_tensor_is_checked_as_a_whole(tmp_path, device):
    form = 2, 1, 3, True
    packed, _ = tensors_of(0, *form)
    llm = LLM(save(tmp_path / "packed", packed, groups=2, share=1, inner=3, columns=True), device=device, **OPTIONS)
    before = llm.weight_checksum()
    part = packed["qkv.weight"][:16]
    with pytest.raises(WeightUpdateError, match=r"'qkv.weight': wanted \(48, 32\) float32, have \(16, 32\) float32"):
        llm.update_weights({"embed.weight": packed["embed.weight"] + 1, "qkv.weight": part}, partial=True)
    with pytest.raises(WeightUpdateError, match=r"'gate_up': wanted \(2, 32, 6\) float32, have \(2, 6, 32\) float32"):
        llm.update_weights({"gate_up": packed["gate_up"].swapaxes(1, 2)}, partial=True)
    torn = packed["qkv.weight"].copy()
    torn[-1, -1] = np.nan
    with pytest.raises(WeightUpdateError, match=r"'qkv.weight': 1 of its values are not finite"):
        llm.update_weights({"qkv.weight": torn}, partial=True, check_finite=True)
    assert llm.weight_checksum() == before
    with pytest.raises(WeightUpdateError, match=f"{len(packed) - 1} of {len(packed)} weights were not written"):
        llm.update_weights({"qkv.weight": packed["qkv.weight"]})
    llm.close()


def test_files_that_do_not_fit(tmp_path, device):
    form = 2, 1, 3, True
    packed, _ = tensors_of(0, *form)
    fields = {"groups": 2, "share": 1, "inner": 3, "columns": True}
    path = save(tmp_path / "short", {**packed, "qkv.weight": packed["qkv.weight"][:-1]}, **fields)
    with pytest.raises(CheckpointError, match=r"qkv.weight, used by linear of LaidOut: wanted \[48, 32\], have \[47, 32\]"):
        LLM(path, device=device, **OPTIONS)
