"""Programs as data, error texts, registration, and errors in a configuration or a checkpoint."""

import copy
import json

import numpy as np
import pytest

from llmpy import CheckpointError, ConfigError, UnsupportedError, architecture, models
from llmpy.models import registry
from llmpy.models.blocks import Model
from llmpy.models.config import ModelConfig
from llmpy.models.interpret import Interpreter
from llmpy.models.source import Source

SIZES = {
    "architectures": ["Toy"],
    "vocab_size": 10,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def toy(tensors=None, **fields):
    return Model(ModelConfig({**SIZES, **fields}, "config.json"), tensors, Source(), "toy.safetensors")


def test_a_program_as_plain_data():
    m = toy()
    x = m.embed("embed", scale=4.0)
    (layer,) = m.layers("layers", 1)
    q, k, v = layer.linear(x, ["q", "k", "v"], [16, 8, 8], bias=True)
    q = layer.rms_norm(q, "q_norm", 1e-6, per_head=True, offset=1.0)
    q, k = layer.rope(q, k, m.config.rope)
    y = x + layer.linear(layer.attention(q, k, v, window=8, scale=0.5, softcap=30.0), "o", 16)
    m.logits(layer.gated_mlp(y, "gate", "up", "down", 24, act="relu2"), "head", tied_to="embed", scale=2.0)
    spec = m.finish(())
    assert [name for name, _ in spec["ops"]] == [
        *("embed", "linear", "rms_norm", "rope", "attention", "linear", "add"),
        *("linear", "gated", "linear", "logits", "states"),
    ]
    assert spec["values"][:5] == [(16, -1, 0), (32, -1, 0), (16, 1, 0), (8, 1, 16), (8, 1, 24)]
    assert spec["ops"][1][1] == {"in": [0], "out": [1], "weights": [1, 2], "attributes": {}}
    assert spec["ops"][2][1] == {"in": [2], "out": [5], "weights": [3], "attributes": {"n_heads": 4, "eps": 1e-6}}
    assert spec["ops"][3][1] == {"in": [5, 3], "out": [6, 7], "weights": [], "attributes": {"rope": 0, "head_dim": 4}}
    given = {"layer": 0, "chunk": 0, "scale": 0.5, "softcap": 30.0}
    assert spec["ops"][4][1] == {"in": [6, 7, 4], "out": [8], "weights": [], "attributes": given}
    assert spec["ops"][8][1]["attributes"] == {"act": "relu2"}
    assert spec["ops"][-2][1] == {"in": [15], "out": [], "weights": [7], "attributes": {"scale": 2.0, "softcap": 0.0}}
    assert spec["ops"][-1][1]["in"] == [15]
    parts = [("layers.0.q", 16), ("layers.0.k", 8), ("layers.0.v", 8)]
    matrix, bias, norm = spec["weights"][1:4]
    assert matrix == {
        "kind": "matrix",
        "rows": 32,
        "cols": 16,
        "parts": [(f"{name}.weight", f"{name}.weight", n, (n, 16), 0, n, n, False, None) for name, n in parts],
        "offset": 0.0,
        "values": None,
        "unit_rows": False,
    }
    assert bias["kind"] == "vector" and [part.rows for part in bias["parts"]] == [16, 8, 8]
    assert (norm["rows"], norm["cols"], norm["offset"]) == (4, 1, 1.0)
    assert spec["layers"] == [(4, 2, 4, 8)] and spec["vocab_size"] == 10 and len(spec["ropes"]) == 1
    assert np.frombuffer(spec["ropes"][0]["inv_freq"], np.float32).tolist() == pytest.approx([1.0, 0.01])


def test_a_tied_head_is_the_embedding():
    m = toy(tie_word_embeddings=True)
    m.logits(m.embed("embed"), "head", tied_to="embed")
    spec = m.finish(())
    assert len(spec["weights"]) == 1 and spec["ops"][-2][1]["weights"] == [0]


MISTAKES = {
    r"linear layers.0.q\|k .*wanted one width for each name, have \[16\]": lambda m, f, x: f.linear(
        x, ["q", "k"], [16]
    ),
    r"linear layers.0.q\|k .*wanted one width for each name, have 16": lambda m, f, x: f.linear(x, ["q", "k"], 16),
    r"linear layers.0.qkv .*wanted widths of one tensor in 3 equal groups, have \[9, 8\]": lambda m, f, x: f.linear(
        x, "qkv", [9, 8], groups=3
    ),
    r"split layers.0 .*wanted widths of 16 in all, have \[8, 9\]": lambda m, f, x: f.split(x, [8, 9]),
    "wanted equal widths, have 16 and 8": lambda m, f, x: x + f.linear(x, "q", 8),
    "wanted a value, have list": lambda m, f, x: f.rms_norm([x], "norm", 1e-6),
    "the value belongs to another program": lambda m, f, x: x + toy().embed("e"),
    "rms_norm layers.0.norm .*wanted a row of heads of 4, have 6": lambda m, f, x: f.rms_norm(
        f.linear(x, "q", 6), "norm", 1e-6, per_head=True
    ),
    "attention layers.0 .*have 16, 16, 8": lambda m, f, x: f.attention(x, x, f.linear(x, "v", 8)),
    "attention layers.0 .*have 16, 12, 12": lambda m, f, x: f.attention(x, f.linear(x, "k", 12), f.linear(x, "v", 12)),
    "wanted a window of at least 0, have -1": lambda m, f, x: f.attention(x, x, x, window=-1),
    "frequencies turn more than head_dim 4": lambda m, f, x: f.rope(x, x, models.Rope(np.ones(3, np.float32))),
    "gated layers.0 .*have 16 and 8": lambda m, f, x: f.gated(x, f.linear(x, "u", 8), "silu"),
    "wanted sizes of at least 1": lambda m, f, x: f.linear(x, "q", 0),
    "the tensor is used already": lambda m, f, x: f.rms_norm(f.rms_norm(x, "norm", 1e-6), "norm", 1e-6),
    "logits .*wanted m.logits.*as the last operation, have embed": lambda m, f, x: m.finish(()),
    "there is no embedding other": lambda m, f, x: m.logits(x, "head", tied_to="other"),
}


@pytest.mark.parametrize("text", list(MISTAKES))
def test_mistakes_in_an_architecture_function(text):
    m = toy(tie_word_embeddings=True)
    x = m.embed("embed")
    (layer,) = m.layers("layers", 1)
    with pytest.raises(CheckpointError, match=text):
        MISTAKES[text](m, layer, x)


def test_an_unknown_activation_is_named():
    m = toy()
    x = m.embed("embed")
    with pytest.raises(UnsupportedError, match=r"activation 'mish'; known: silu"):
        m.gated(x, x, "mish")


def load(tiny, host_checkpoint, files_of, case="llama", change=None, **options):
    """Loads a tiny model after a change to its tensors or configuration."""
    files = files_of(tiny(case).directory)
    checkpoint = host_checkpoint(files.weights)
    files.config = copy.deepcopy(files.config)
    if change:
        change(files.config, checkpoint._data)
    return models.load(files, checkpoint, **options)


def drop(name):
    return lambda config, tensors: tensors.pop(name)


def reshape(name, *shape):
    return lambda config, tensors: tensors.update({name: ("float32", np.zeros(shape, np.float32))})


def configure(**fields):
    return lambda config, tensors: config.update(fields)


NORM, Q = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
BROKEN = [
    ("llama", drop(Q), CheckpointError, rf"{Q}, needed by linear of Llama.*wanted \[64, 64\], have nothing"),
    ("llama", reshape(Q, 64, 63), CheckpointError, rf"{Q}, used by linear.*wanted \[64, 64\], have \[64, 63\]"),
    ("llama", reshape(NORM, 1, 64), CheckpointError, rf"{NORM}, used by rms_norm.*wanted \[64\], have \[1, 64\]"),
    ("llama", reshape("model.extra.bias", 3), CheckpointError, r"model.extra.bias \[3\] has no place in Llama"),
    ("llama", drop("lm_head.weight"), CheckpointError, r"lm_head.weight, needed by logits"),
    ("llama-bias", configure(mlp_bias=False), CheckpointError, r"mlp.*bias.*has no place"),
    ("qwen2", drop("model.layers.0.self_attn.k_proj.bias"), CheckpointError, r"k_proj.bias.*wanted \[32\]"),
    ("llama", configure(num_hidden_layers=3), CheckpointError, r"layers\.2\.input_layernorm.weight.*have nothing"),
    ("llama", configure(num_hidden_layers=1), CheckpointError, r"layers\.1\..*has no place"),
    ("llama", configure(hidden_size=None), CheckpointError, "hidden_size: wanted int, have nothing; hf_overrides"),
    ("llama", configure(hidden_size=True), CheckpointError, "hidden_size: wanted int, have True"),
    ("llama", configure(rms_norm_eps="x"), CheckpointError, "rms_norm_eps: wanted float, have 'x'"),
    ("llama", configure(num_attention_heads=0), CheckpointError, "num_attention_heads: wanted 1 to 2147483647, have 0"),
    ("llama", configure(architectures=["LlamaForX"]), UnsupportedError, "'LlamaForX' is not supported; similar: Llama"),
    ("llama", configure(architectures=None), CheckpointError, "architectures: wanted a list with one name, have None"),
    ("llama", configure(num_key_value_heads=-2), CheckpointError, "num_key_value_heads: wanted 1 to .*have -2"),
    ("llama", configure(rope_parameters={"rope_theta": 0}), CheckpointError, "rope_theta .*wanted a number above 0"),
    (
        "llama",
        configure(rope_parameters={"rope_type": "yarn", "rope_theta": 1}),
        CheckpointError,
        "give no frequencies",
    ),
    ("llama", configure(hidden_act="mish"), UnsupportedError, "mish"),
    ("llama", configure(quantization_config={"quant_method": "hqq"}), UnsupportedError, "quant_method 'hqq'"),
    ("llama", configure(rope_parameters={"rope_type": "mrope"}), UnsupportedError, "rope_type 'mrope'"),
    ("llama", configure(rope_parameters={"rope_type": "longrope"}), CheckpointError, "short_factor .*wanted a list of 8"),
    (
        "llama", configure(rope_parameters={"rope_type": "longrope", "short_factor": [1] * 7 + [0]}), CheckpointError,
        "rope field short_factor .*wanted numbers above 0, have 0",
    ),
    ("gemma3", configure(use_bidirectional_attention=True), UnsupportedError, "use_bidirectional_attention=True is not supp"),
    ("llama", configure(final_logit_softcapping=30.0), UnsupportedError, "final_logit_softcapping=30.0 is not supp"),
    ("llama", configure(logits_scaling=8.0), UnsupportedError, "logits_scaling=8.0 is not supported by Llama.*, only 1.0"),
    ("granite", configure(logits_scaling=0.0), CheckpointError, "logits_scaling: wanted a number above 0, have 0.0"),
    ("olmo", configure(clip_qkv=-1.0), CheckpointError, "clip_qkv: wanted a number above 0, have -1.0"),
    ("llama", configure(logit_scale=0.5), UnsupportedError, "logit_scale=0.5 is not supported by Llama"),
    ("gemma2", configure(query_pre_attn_scalar=0), CheckpointError, "query_pre_attn_scalar: wanted a number above 0, have 0"),
    ("granite", configure(residual_multiplier=0.0), CheckpointError, "residual_multiplier: wanted a number above 0, have 0.0"),
    ("smollm3", configure(no_rope_layers=[1, 2, 1, 1]), CheckpointError, "no_rope_layers: wanted a list of 4 of 0 or 1"),
    ("smollm3", configure(layer_types=["chunked_attention"] * 4), UnsupportedError, "'chunked_attention'"),
    ("phi3-longrope", configure(intermediate_size=95), CheckpointError, r"gate_up_proj.*wanted \[190, 64\], have \[192, 64\]"),
    ("llama", configure(rope_parameters={"rope_type": "linear"}), CheckpointError, "rope field factor .*have nothing"),
    ("llama", configure(rope_parameters=3), CheckpointError, "rope_parameters: wanted an object, have 3"),
    ("llama", configure(rope_parameters={"full_attention": {}}), UnsupportedError, "per layer type"),
    ("llama", configure(partial_rotary_factor=0.01), CheckpointError, "rope turns 0 of the 16"),
    ("llama", configure(eos_token_id="x"), CheckpointError, "eos_token_id"),
    ("qwen2", configure(layer_types=["chunked_attention"] * 2), UnsupportedError, "'chunked_attention'"),
    ("qwen2", configure(layer_types=["full_attention"]), CheckpointError, "layer_types: wanted a list of 2"),
]


@pytest.mark.parametrize(("case", "change", "error", "text"), BROKEN, ids=[text for *_, text in BROKEN])
def test_checkpoints_that_do_not_fit(tiny, host_checkpoint, files_of, case, change, error, text):
    with pytest.raises(error, match=text) as caught:
        _ = load(tiny, host_checkpoint, files_of, case, change).config.eos_token_ids
    if error is CheckpointError:
        assert caught.value.file and caught.value.file in str(caught.value)
        assert caught.value.tensor is None or caught.value.tensor in str(caught.value)


def test_hf_overrides(tiny, host_checkpoint, files_of):
    plain = load(tiny, host_checkpoint, files_of)
    assert plain.config.eos_token_ids == [2]
    changed = load(tiny, host_checkpoint, files_of, hf_overrides={"eos_token_id": [5, 6], "rms_norm_eps": 0.5})
    assert changed.config.eos_token_ids == [5, 6] and changed.config.rms_norm_eps == 0.5
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    called = load(tiny, host_checkpoint, files_of, hf_overrides=lambda config: {**config, **linear})
    assert np.allclose(called.config.rope.inv_freq, plain.config.rope.inv_freq / 2)
    assert called.config.max_position_embeddings == 256
    with pytest.raises(ConfigError, match="hf_overrides must return"):
        load(tiny, host_checkpoint, files_of, hf_overrides=lambda config: None)


@pytest.mark.parametrize(("given", "want"), [("bfloat16", "bfloat16"), (None, "float32")])
def test_without_a_checkpoint_nothing_is_checked(tiny, files_of, given, want):
    files = files_of(tiny("llama").directory, dtype=given, intermediate_size=7)
    compiled = models.load(files, None)
    assert compiled.config.dtype == want
    assert [w["rows"] for w in compiled.spec["weights"] if "gate" in w["parts"][0][0]] == [14, 14]


USERS_FILE = '''
"""A user's family: Llama with one norm, other tensor names, and a scaled embedding."""
from llmpy import architecture

@architecture("SomebodysForCausalLM", defaults={"twist": 2.0}, ignore=("notes.*",))
def somebodys(cfg, m):
    x = m.embed("emb", scale=cfg.get("twist", 1.0))
    for layer in m.layers("blocks", cfg.num_layers):
        h = layer.rms_norm(x, "norm", 1e-5, offset=1.0)
        q, k, v = layer.linear(h, ["q", "k", "v"], [64, 32, 32])
        q, k = layer.rope(q, k, cfg.rope)
        a = layer.linear(layer.attention(q, k, v), "o", 64)
        x = x + a + layer.gated_mlp(h, "gate", "up", "down", 96, act="gelu_pytorch_tanh")
    m.logits(x, "head", tied_to="emb")
'''


def test_a_family_in_a_users_file(load_module, host_checkpoint, files_of, tmp_path):
    from safetensors.numpy import save_file

    try:
        load_module(USERS_FILE)
        random, tensors = np.random.default_rng(0), {"notes.a": np.zeros(3, np.float32)}
        shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "norm": (64,)}
        shapes |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
        for i in range(2):
            tensors |= {f"blocks.{i}.{n}.weight": random.normal(0, 0.2, s).astype("f4") for n, s in shapes.items()}
        tensors |= {f"{n}.weight": random.normal(0, 1, (99, 64)).astype("f4") for n in ("emb", "head")}
        save_file(tensors, tmp_path / "model.safetensors")
        config = {
            **{"architectures": ["SomebodysForCausalLM"], "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "max_position_embeddings": 64},
        }
        (tmp_path / "config.json").write_text("{}")
        files = files_of(tmp_path, **config)
        checkpoint = host_checkpoint(files.weights)
        spec = models.load(files, checkpoint).spec
        logits = Interpreter(spec, lambda name, shape: tensors[name]).logits([3, 4, 5])
        assert np.allclose(logits, by_hand(tensors, [3, 4, 5]), rtol=1e-6, atol=1e-9)
    finally:
        registry._REGISTRY.pop("SomebodysForCausalLM", None)


def by_hand(tensors, ids):
    """The same model written by hand, one head at a time."""
    w = {name: value.astype(float) for name, value in tensors.items()}
    x = 2.0 * w["emb.weight"][ids]
    n = len(ids)
    for i in range(2):
        p = f"blocks.{i}."
        h = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * (w[p + "norm.weight"] + 1)
        q, k, v = (h @ w[f"{p}{name}.weight"].T for name in "qkv")
        out = np.zeros((n, 64))
        for head in range(4):
            qh, kh, vh = q[:, head * 16 :][:, :16], k[:, head // 2 * 16 :][:, :16], v[:, head // 2 * 16 :][:, :16]
            turn = np.exp(1j * np.arange(n)[:, None] * 10000.0 ** (-np.arange(8) / 8))
            qc, kc = (qh[:, :8] + 1j * qh[:, 8:]) * turn, (kh[:, :8] + 1j * kh[:, 8:]) * turn
            for row in range(n):
                s = np.exp([(qc[row] * kc[j].conj()).sum().real / 4 for j in range(row + 1)])
                out[row, head * 16 :][:16] = s / s.sum() @ vh[: row + 1]
        g, u = h @ w[p + "gate.weight"].T, h @ w[p + "up.weight"].T
        g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
        x = x + out @ w[p + "o.weight"].T + (g * u) @ w[p + "down.weight"].T
    return x @ w["head.weight"].T


def test_registration():
    with pytest.raises(TypeError, match="wants the names"):
        architecture(lambda cfg, m: None)
    try:
        first = architecture("Twice", "TwiceToo")(lambda cfg, m: None)
        assert registry.find("Twice").build is first is registry.find("TwiceToo").build
        second = architecture("Twice")(lambda cfg, m: None)
        assert registry.find("Twice").build is second
    finally:
        registry._REGISTRY.pop("Twice", None)
        registry._REGISTRY.pop("TwiceToo", None)


PLUGIN = """
from llmpy import architecture

@architecture("{name}")
def pluggedin(cfg, m):
    m.states(m.embed("emb"))
"""


def install(directory, package, entries, text):
    """Installs a package like an installer."""
    (directory / f"{package}.py").write_text(text)
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
    (info / "entry_points.txt").write_text(f"[llmpy.architectures]\n{lines}")


def test_an_installed_package_brings_architectures(tmp_path, monkeypatch):
    names = {name: f"plugged_{name.lower()}" for name in ("OneForX", "TwoForX", "ThreeForX")}
    install(tmp_path, names["OneForX"], {"OneForX": names["OneForX"]}, PLUGIN.format(name="OneForX"))
    install(tmp_path, names["TwoForX"], {"TwoForX": names["TwoForX"]}, "import nothing_of_this_name")
    install(tmp_path, names["ThreeForX"], {"ThreeForX": names["ThreeForX"]}, PLUGIN.format(name="OtherForX"))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert "OneForX" not in registry.names()
        assert registry.find("OneForX").build.__name__ == "pluggedin" and "OneForX" in registry.names()
        with pytest.raises(UnsupportedError, match=r"'plugged_twoforx' of group .* cannot be imported: .*nothing_of_this_name"):
            registry.find("TwoForX")
        with pytest.raises(UnsupportedError, match=r"'plugged_threeforx' of group .* registers no function of this name"):
            registry.find("ThreeForX")
    finally:
        for name in ("OneForX", "OtherForX"):
            registry._REGISTRY.pop(name, None)


def test_a_missing_operation_names_itself(tiny, host_checkpoint, files_of, monkeypatch):
    def build(cfg, m):
        m.states(m.layers("model.layers", 1).__next__().fourier(m.embed("model.embed_tokens")))

    monkeypatch.setitem(registry._REGISTRY, "LlamaForCausalLM", registry.Architecture(build))
    with pytest.raises(UnsupportedError, match=r"operation 'fourier' is not in the vocabulary; known: .*rms_norm.* docs/"):
        load(tiny, host_checkpoint, files_of)


RELAID = '''
"""A Llama checkpoint with other names: q, k and v of each key head together, and transposed matrices of the MLP."""
from llmpy import architecture

@architecture("RelaidForCausalLM")
def relaid(cfg, m):
    q, kv, eps = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim, cfg.rms_norm_eps
    x = m.embed("words")
    for block in m.layers("stack", cfg.num_layers):
        h = block.rms_norm(x, "before.weight", eps, offset=1.0)
        parts = block.linear(h, "qkv", [q, kv, kv], groups=cfg.num_key_value_heads)
        turned = block.rope(parts[0], parts[1], cfg.rope)
        x = x + block.linear(block.attention(*turned, parts[2]), "out", cfg.hidden_size)
        h = block.rms_norm(x, "between.weight", eps, offset=1.0)
        gate, up = block.linear(h, "wide", [cfg.intermediate_size] * 2, transposed=True)
        x = x + block.linear(block.gated(gate, up, "silu"), "narrow", cfg.hidden_size, transposed=True)
    m.logits(m.rms_norm(x, "last.weight", eps), "answers", tied_to="words")
'''


def test_a_users_file_with_other_names_and_layouts(load_module, tiny, engine, tmp_path):
    """A user's file gives the same bits as the original model, without rebuilding the package."""
    from safetensors.numpy import load_file, save_file

    source = tiny("llama").directory
    old, new = load_file(source / "model.safetensors"), {}
    for i in range(2):
        name = f"model.layers.{i}"
        parts = [old[f"{name}.self_attn.{part}_proj.weight"].reshape(2, -1, 64) for part in "qkv"]
        new[f"stack.{i}.qkv.weight"] = np.concatenate(parts, 1).reshape(-1, 64)
        new[f"stack.{i}.out.weight"] = old[f"{name}.self_attn.o_proj.weight"]
        wide = np.concatenate([old[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        new[f"stack.{i}.wide.weight"] = np.ascontiguousarray(wide.T)
        new[f"stack.{i}.narrow.weight"] = np.ascontiguousarray(old[f"{name}.mlp.down_proj.weight"].T)
        for mine, theirs in {"before": "input_layernorm", "between": "post_attention_layernorm"}.items():
            new[f"stack.{i}.{mine}.weight"] = old[f"{name}.{theirs}.weight"] - 1
    new |= {"words.weight": old["model.embed_tokens.weight"], "answers.weight": old["lm_head.weight"]}
    save_file({**new, "last.weight": old["model.norm.weight"]}, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["RelaidForCausalLM"]}))
    ids = np.random.default_rng(3).integers(3, 99, 40).tolist()
    try:
        load_module(RELAID)
        with engine(source) as first, engine(tmp_path) as second:
            a, b = (one.run([ids], top=99)[0] for one in (first, second))
        assert a.ids == b.ids and np.abs(a.table(99) - b.table(99)).max() <= 1e-5  # weights less 1 plus 1 lose a bit
    finally:
        registry._REGISTRY.pop("RelaidForCausalLM", None)
