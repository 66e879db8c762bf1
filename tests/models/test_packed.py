"""GPTQ, AWQ, pack-quantized and INT8 checkpoints, written here, against the same model with the exact values in float32."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from packed_files import LAYOUTS, answers, configure, is_packed, open_llm, quantise

from llmpy import CheckpointError, SamplingParams, UnsupportedError, _core

RAGGED = {"hidden_size": 160, "intermediate_size": 288}  # 128 + 32 and 2 * 128 + 32 columns and rows


@pytest.fixture
def make(tiny, tmp_path: Path) -> Callable[..., Path]:
    return lambda layout="gptq", case="llama", **fields: quantise(
        tiny(case, **({**RAGGED, **fields} if case == "llama" else fields)).directory, tmp_path, LAYOUTS[layout]
    )


def scheme(layout: str) -> str:
    method = str(LAYOUTS[layout].config["quant_method"])
    return "gptq_v2" if LAYOUTS[layout].config.get("checkpoint_format") == "gptq_v2" else method


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(make: Callable[..., Path], layout: str, prompts, device: str) -> None:
    """Exact values, and the bits of float32 weights: alone, in a batch and in chunks."""
    options: dict[str, object] = {"dtype": "float32", "device": device}
    path = make(layout)
    (file,) = (path / "packed").glob("*.safetensors")
    reader = _core.Checkpoint([str(file)], scheme=scheme(layout))
    exact = safetensors.numpy.load_file(path / "plain" / file.name)
    for name, value in exact.items():
        bits = LAYOUTS[layout].bits
        assert reader.tensors()[name][0].startswith(f"int{bits}_g") == (".layers." in name and value.ndim == 2)
        read = np.frombuffer(reader.read_float32(name), np.float32).reshape(value.shape)
        assert np.array_equal(read, value.astype(np.float32))
    wanted = answers(path / "plain", prompts, **options)
    assert answers(path / "packed", prompts, **options) == wanted
    assert answers(path / "packed", prompts, **options, max_num_batched_tokens=16, max_num_seqs=2) == wanted
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], **options) == [one]


@pytest.mark.parametrize("layout", ["gptq-32", "awq-32", "rows-32", "int8"])
@pytest.mark.parametrize("case", ["qwen3", "phi3", "gemma2", "glm4", "mixtral", "qwen2_moe"])
def test_families(make: Callable[..., Path], layout: str, case: str, prompts, device: str) -> None:
    """Fused parts in the file or here, norms and biases beside them, experts."""
    options: dict[str, object] = {"dtype": "float32", "device": device}
    path = make(layout, case)
    assert answers(path / "packed", prompts, **options) == answers(path / "plain", prompts, **options)


@pytest.mark.parametrize("layout", ["gptq-32", "gptq-8-32", "awq-32"])
def test_gpt2(tiny, tmp_path: Path, layout: str, prompts) -> None:
    """Conv1D: a file of floats has the columns first, a packed one the rows. Updates, which give columns first, are refused."""
    source = tiny("gpt2").directory
    path = quantise(source, tmp_path, LAYOUTS[layout], lambda name, value: ".c_" in name and value.ndim == 2)
    wanted = answers(path / "plain", prompts, dtype="float32")
    assert answers(path / "packed", prompts, dtype="float32") == wanted
    assert answers(path / "packed", prompts, dtype="float32", tensor_parallel_size=2) == wanted
    with open_llm(path / "packed") as llm, pytest.raises(UnsupportedError, match="stores weights in another form"):
        llm.update_weights(path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gptq-32", "int8"])
def test_all_families(tiny, tmp_path: Path, layout: str, case: str, prompts) -> None:
    """All linears that quantisation at load rounds, and that the file stores one by one."""
    source = tiny(case).directory
    with open_llm(source, quantization="int4_g32") as llm:
        linears = {info["name"] for info in llm.weight_info() if info["dtype"] == "int4_g32"}
    path = quantise(source, tmp_path, LAYOUTS[layout], lambda name, value: name in linears and value.ndim == 2)
    batch = prompts[:3]  # the shortest model takes 48 tokens
    assert answers(path / "packed", batch, dtype="float32") == answers(path / "plain", batch, dtype="float32")


@pytest.mark.parametrize("layout", ["gptq", "gptq-32", "awq", "rows-asym"])
@pytest.mark.parametrize("case", ["llama", "phi3", "mixtral", "deepseek2"])
def test_bfloat16_activations(make: Callable[..., Path], layout: str, case: str, prompts, cuda: str) -> None:
    """CUDA multiplies bfloat16 activations on tensor cores by default: equal bits in any batch, as near float32's as a model of
    bfloat16 with the same values."""
    path = make(layout, case, hidden_size=192, intermediate_size=320) if case == "llama" else make(layout, case)
    options = {"device": cuda, "dtype": "bfloat16"}
    wanted = answers(path / "packed", prompts, **options)
    assert answers(path / "packed", prompts, **options, max_num_batched_tokens=16, max_num_seqs=2) == wanted
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], **options) == [one]
    if case != "llama":
        return
    prompts = [prompt[:50] for prompt in prompts if len(prompt) > 1]
    ways = {"exact": {"dtype": "float32"}, "rounded": {}, "auto": {}, "float": {"activation_dtype": "float"}}
    values: dict[str, np.ndarray] = {}
    for name, more in ways.items():
        with open_llm(path / ("plain" if name == "rounded" else "packed"), **{**options, **more}) as llm:
            assert name == "rounded" or llm.config.activation_dtype == {"exact": "float"}.get(name, name)
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            values[name] = np.concatenate([o.prompt_token_logprobs[1:] for o in outputs])
    errors = {name: np.sqrt(np.mean((value - values["exact"]) ** 2)) for name, value in values.items()}
    assert 0 < errors["auto"] < 1.25 * errors["rounded"] and 0 < errors["float"] < 1.25 * errors["rounded"]
    if layout != "rows-asym":  # weights without groups: bfloat16 alone errs by 0.16
        assert all(np.abs(values[name] - values["exact"]).max() < 0.1 for name in ("auto", "float"))


@pytest.mark.parametrize("layout", ["gptq", "gptq-32", "rows-asym", "int8"])
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_int8_activations_on_the_cpu(make: Callable[..., Path], layout: str, case: str, prompts) -> None:
    """Equal bits in any batch and on ranks, near those of float activations, and other bits."""
    path, options = make(layout, case) / "packed", {"dtype": "float32", "activation_dtype": "int8", "device": "cpu"}
    wanted = answers(path, prompts, **options)
    assert answers(path, prompts, **options, max_num_batched_tokens=16, max_num_seqs=2) == wanted
    assert answers(path, prompts, **options, tensor_parallel_size=2) == wanted
    values = []
    for activations in ("int8", "float"):
        with open_llm(path, **{**options, "activation_dtype": activations}) as llm:
            how = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            values.append(np.concatenate([o.prompt_token_logprobs[1:] for o in llm.generate(prompts, how, use_tqdm=False)]))
    assert 0 < np.abs(values[0] - values[1]).mean() < 0.1


@pytest.mark.parametrize("layout", ["gptq-32", "awq-32", "rows-asym", "int8"])
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_ranks(make: Callable[..., Path], layout: str, case: str, prompts) -> None:
    """Ranks take rows of a word that other ranks use, too."""
    path = make(layout, case)
    ranks = {"tensor_parallel_size": 2, "dtype": "float32"}
    assert answers(path / "packed", prompts, **ranks) == answers(path / "plain", prompts, dtype="float32")


def test_memory(make: Callable[..., Path]) -> None:
    """4 bits and a header of 4 bytes for 128 columns of a row."""
    path = make("awq", hidden_size=128, intermediate_size=256, vocab_size=16)
    with open_llm(path / "packed") as llm, open_llm(path / "plain") as plain:
        types = {info["name"]: info["dtype"] for info in llm.weight_info()}
        packed_bytes, plain_bytes = (each.ranks()[0]["weights_bytes"] for each in (llm, plain))
        values = sum(np.prod(info["shape"]) for info in plain.weight_info() if types[info["name"]] == "int4_g128")
        assert types["lm_head.weight"] == "float32"
        assert plain_bytes - packed_bytes == values * 4 - values // 128 * 68


def is_attention(name: str, value: np.ndarray) -> bool:
    return is_packed(name, value) and "self_attn" in name


def is_mlp(name: str, value: np.ndarray) -> bool:
    return is_packed(name, value) and "mlp" in name


def twice(source: Path, to: Path, first: str, second: str, config: dict[str, object]) -> tuple[Path, Path]:
    """A model with the linears of attention in one layout and those of the MLP in another, and its values in float32."""
    quantise(source, to / "a", LAYOUTS[first], is_attention)
    packed = quantise(to / "a" / "packed", to / "b", LAYOUTS[second], is_mlp) / "packed"
    configure(packed, quantization_config=config)
    return packed, quantise(to / "a" / "plain", to / "c", LAYOUTS[second], is_mlp) / "plain"


def test_several_groups(tiny, tmp_path: Path, prompts) -> None:
    """Each group of config_groups has its own format, bits and columns of a group."""
    groups = {}
    for layout, target in (("rows-32", "re:.*self_attn.*"), ("int8", "down_proj"), ("int8", "Linear")):
        (group,) = LAYOUTS[layout].config["config_groups"].values()  # type: ignore[attr-defined]
        groups[target] = {**group, "targets": [target], "format": LAYOUTS[layout].config["format"]}
    config = {**LAYOUTS["int8"].config, "format": "mixed-precision", "config_groups": groups}
    packed, plain = twice(tiny("llama").directory, tmp_path, "rows-32", "int8", config)
    assert answers(packed, prompts, dtype="float32") == answers(plain, prompts, dtype="float32")


def test_dynamic(tiny, tmp_path: Path, prompts) -> None:
    """`dynamic` of GPTQ gives modules other bits and groups, and leaves some in float."""
    dynamic = {"-:.*lm_head.*": {}, "+:.*mlp.*": {"bits": 8, "group_size": 32, "sym": True}}
    config = {**LAYOUTS["gptq-column"].config, "dynamic": dynamic}
    packed, plain = twice(tiny("llama").directory, tmp_path, "gptq-column", "gptq-8-32", config)
    assert answers(packed, prompts, dtype="float32") == answers(plain, prompts, dtype="float32")
    configure(packed, quantization_config={**config, "dynamic": {}})
    with pytest.raises(CheckpointError, match=r"mlp.*scales \(gptq\): wanted a shape of .* by quantization_config"):
        open_llm(packed)


@pytest.mark.parametrize(("layout", "file", "scheme"), [
    ("gptq", "quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": None}),
    ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}),
    ("rows", "", {}),
])  # fmt: skip
def test_older_files(make: Callable[..., Path], layout: str, file: str, scheme: dict[str, object], prompts) -> None:
    """A scheme in a file beside config.json; or in config.json, called compression_config."""
    path = make(layout)
    wanted = answers(path / "plain", prompts, dtype="float32")
    own = None if file else {key: value for key, value in LAYOUTS[layout].config.items() if key != "quant_method"}
    configure(path / "packed", quantization_config=None, compression_config=own)
    if file:
        (path / "packed" / file).write_text(json.dumps(scheme))
    assert answers(path / "packed", prompts, dtype="float32") == wanted


@pytest.mark.parametrize("layout", ["gptq-32", "awq", "rows", "int8"])
def test_head(tiny, tmp_path: Path, layout: str, prompts, device: str) -> None:
    """lm_head may be quantised, and any module may stay in float."""
    options: dict[str, object] = {"dtype": "float32", "device": device}
    source = tiny("llama", vocab_size=160).directory
    path = quantise(source, tmp_path, LAYOUTS[layout], lambda name, _: "lm_head" in name or "q_proj" in name)
    with open_llm(path / "packed", **options) as llm:
        types = {info["name"]: info["dtype"] for info in llm.weight_info()}
    assert types["lm_head.weight"].startswith("int") and types["model.layers.0.mlp.up_proj.weight"] == "float32"
    assert answers(path / "packed", prompts, **options) == answers(path / "plain", prompts, **options)
