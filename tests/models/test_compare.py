"""`llmpy compare` beside transformers, and `llmpy inspect`, on tiny models."""

import json
from pathlib import Path

import pytest

from llmpy import cli
from llmpy.models import Model, ModelConfig, heads, registry, usual

IDS = ",".join(str(3 + 11 * i % 90) for i in range(20))


@pytest.mark.alone  # the command takes the whole device
@pytest.mark.parametrize("case", ["llama", "gemma3", "cohere2", "phi", "granite", "stablelm-parallel"])
def test_families_agree(case, tiny, device, capsys) -> None:
    assert cli.main(["compare", str(tiny(case).directory), "--ids", IDS, "--device", device]) == 0
    shown = capsys.readouterr().out
    assert "no difference above 0.0001 in " in shown and "20 tokens; transformers" in shown
    compared = int(shown.rsplit(" in ", 1)[1].split()[0])
    assert compared >= 8 * json.loads((tiny(case).directory / "config.json").read_text())["num_hidden_layers"]
    assert "q_proj" not in shown.partition("not compared")[2]


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_files_agree(kind, tiny, gguf_of, tmp_path, capsys) -> None:
    """Rows of q and k are in pairs in these files; quantised weights are multiplied in float32 unless int8 is requested."""
    path = str(gguf_of(tiny("llama"), tmp_path / "tiny.gguf", kind))
    assert cli.main(["compare", path, "--ids", IDS, "--device", "cpu", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "no difference above 0.0001 in " in shown and "self_attn.q_proj" in shown.partition("not compared")[0]
    if kind == "Q8_0":
        assert cli.main(["compare", path, "--ids", IDS, "--device", "cpu", "--activation-dtype", "int8"]) == 0
        assert "no difference above 0.1 in " in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_model_agrees(capsys) -> None:
    assert cli.main(["compare"]) == 0
    assert "no difference above 0.0001 in 303 values" in capsys.readouterr().out


@pytest.mark.slow
def test_every_family_agrees(case, tiny, capsys) -> None:
    from transformers import CONFIG_MAPPING

    is_known = tiny(case).config.get("model_type") in CONFIG_MAPPING
    assert cli.main(["compare", str(tiny(case).directory), "--ids", IDS, "--device", "cpu"]) == (0 if is_known else 1)
    shown = capsys.readouterr()
    assert "no difference above 0.0001 in " in shown.out if is_known else "so there is nothing beside it" in shown.err


def wrong(cfg: ModelConfig, m: Model) -> None:
    """A Llama with another activation in its second layer."""
    x = m.embed("model.embed_tokens")
    for i, layer in enumerate(m.layers("model.layers", cfg.num_layers)):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps))
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v))
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + usual.mlp(cfg, layer, h, act="gelu" if i == 1 else "silu")
    heads.head(cfg, m, m.rms_norm(x, "model.norm", cfg.rms_norm_eps), "model.")


@pytest.mark.alone
def test_the_first_difference_is_named(tiny, device, capsys, monkeypatch) -> None:
    found = registry.find("LlamaForCausalLM")
    monkeypatch.setitem(registry._REGISTRY, "LlamaForCausalLM", registry.Architecture(wrong, found.defaults, found.ignore))
    assert cli.main(["compare", str(tiny("llama").directory), "--ids", IDS, "--device", device, "--all"]) == 1
    shown = capsys.readouterr().out
    assert "first difference: model.layers.1.mlp.down_proj, " in shown
    lines = [line for line in shown.splitlines() if "differs" in line]
    assert "model.layers.1.mlp.down_proj" in lines[0] and "model.layers.0" not in "".join(lines)


def test_transformers_must_be_there(tiny, capsys, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert cli.main(["compare", str(tiny("llama").directory), "--ids", IDS]) == 1
    assert "compare needs torch and transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ("3,four", "--ids: wanted token ids with commas between them, have 'four'"),
        ("", "--ids: wanted token ids with commas between them, have nothing"),
        ("3,99", "Token id 99 is out of vocabulary (size 99)"),
        ("3,4,5,6,7,8,9", "longer than the maximum model length of 6"),
    ],
)
def test_ids_are_looked_at_before_anything_runs(ids, text, tiny, capsys) -> None:
    path = str(tiny("llama").directory)
    assert cli.main(["compare", path, "--ids", ids, "--device", "cpu", "--max-model-len", "6"]) == 1
    shown = capsys.readouterr()
    assert text in shown.err and "Traceback" not in shown.err and not shown.out


def test_a_model_without_a_tokenizer_is_compared_by_ids(tiny, capsys) -> None:
    assert cli.main(["compare", str(tiny("llama").directory), "--device", "cpu"]) == 1
    assert "wanted tokenizer.json, have nothing of the kind" in (shown := capsys.readouterr().err) and "--ids" in shown


def test_inspect(tiny, capsys, tmp_path: Path) -> None:
    path = tiny("gemma2").directory
    assert cli.main(["inspect", str(path), "--weights"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "Gemma2ForCausalLM, float32", "intermediate_size        96", "4/2 heads of 256, window 8, cap 5", "cap 3",
        "model.layers.0:", "gelu_pytorch_tanh", "pre_feedforward_layernorm.weight", "model.norm.weight  [64]  float32",
        "cache groups: 2", "keep the last 8 tokens", "keep all tokens",
    ):  # fmt: skip
        assert part in shown, part
    assert cli.main(["inspect", "--model", str(tiny("llama").directory)]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.0 to 1, 2 alike:" in shown and "model.layers.1:" not in shown
    assert cli.main(["inspect", str(tiny("llama").directory), "--all"]) == 0
    assert "model.layers.1:" in capsys.readouterr().out
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert cli.main(["inspect", str(tmp_path), "--config-only"]) == 0
    assert "Gemma2ForCausalLM" in capsys.readouterr().out


def test_inspect_shows_one_number_once(tiny, gguf_of, tmp_path: Path, capsys) -> None:
    assert cli.main(["inspect", str(gguf_of(tiny("llama"), tmp_path / "tiny.gguf", "F32"))]) == 0
    shown = capsys.readouterr().out
    assert shown.count("norm_eps") == 1 and "norm_epsilon" not in shown.partition("program")[0]
