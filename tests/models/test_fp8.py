"""FP8 checkpoints of every layout, written here, against the same model with the exact values in float32."""

import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from malformed_files import check_changes
from packed_files import LAYOUTS as LAYOUTS_OF_ROWS
from packed_files import answers, change, configure, open_llm

from llmpy import CheckpointError, SamplingParams, UnsupportedError, _core

Tensors = dict[str, np.ndarray]
RAGGED = {"hidden_size": 160, "intermediate_size": 288}  # 128 + 32 and 2 * 128 + 32 columns and rows
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
        "input_activations": {"type": "float", "num_bits": 8, "dynamic": True},
    }},
}  # fmt: skip
GROUPS = {**COMPRESSED, "config_groups": {"group_0": {
    "targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 128},
}}}  # fmt: skip
BLOCKS = {**FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
# Name: the ending of the scales' names, their type, quantization_config.
LAYOUTS = {
    "blocks": ("_scale_inv", np.float32, BLOCKS),
    "tensor": ("_scale", np.float32, FP8),
    "rows": ("_scale", ml_dtypes.bfloat16, COMPRESSED),
    "one": ("_scale", np.float32, COMPRESSED), "groups": ("_scale", ml_dtypes.bfloat16, GROUPS),
}


def scales_of(layout: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    n = -(-cols // 128)
    shape = {"blocks": (-(-rows // 128), n), "tensor": (), "rows": (rows, 1), "one": (1,), "groups": (rows, n)}[layout]
    return np.asarray(rng.uniform(1e-4, 4e-4, shape))


def spread(scales: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """A scale for every weight."""
    if scales.ndim == 2 and scales.shape != (rows, 1):
        scales = scales if len(scales) == rows else scales.repeat(128, 0)[:rows]
        scales = scales.repeat(128, 1)[:, :cols]
    return np.broadcast_to(scales.astype(np.float32), (rows, cols))


def quantise(source: Path, to: Path, layout: str) -> Path:
    """Writes `source` with random FP8 linears to to/packed, and with their values in float32 to to/plain."""
    ending, kind, scheme = LAYOUTS[layout]
    rng = np.random.default_rng(5)
    for name in ("packed", "plain"):
        shutil.copytree(source, to / name)
    (file,) = source.glob("*.safetensors")
    packed: Tensors = {}
    plain: Tensors = {}
    for name, value in safetensors.numpy.load_file(file).items():
        if value.ndim != 2 or "embed" in name or "lm_head" in name or ".gate.weight" in name:
            packed[name] = plain[name] = value
            continue
        scales = scales_of(layout, *value.shape, rng).astype(kind)
        stored = (250 * rng.standard_normal(value.shape)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        packed[name], packed[f"{name}{ending}"] = stored, scales
        plain[name] = stored.astype(np.float32) * spread(scales, *value.shape)
    safetensors.numpy.save_file(packed, to / "packed" / file.name)
    safetensors.numpy.save_file(plain, to / "plain" / file.name)
    configure(to / "packed", quantization_config=scheme)
    return to


@pytest.fixture
def make(tiny, tmp_path: Path) -> Callable[..., Path]:
    return lambda layout="blocks", case="llama", **fields: quantise(
        tiny(case, **({**RAGGED, **fields} if case == "llama" else fields)).directory, tmp_path, layout
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(make: Callable[..., Path], layout: str, prompts, device: str) -> None:
    """Exact values, fewer bytes, and the bits of float32 weights: alone, in a batch and in chunks."""
    path = make(layout)
    (file,) = (path / "packed").glob("*.safetensors")
    reader = _core.Checkpoint([str(file)])
    exact = safetensors.numpy.load_file(path / "plain" / file.name)
    for name, value in exact.items():
        assert (reader.tensors()[name][0] == "fp8") == (".layers." in name and value.ndim == 2)
        read = np.frombuffer(reader.read_float32(name), np.float32).reshape(value.shape)
        assert read.tobytes() == value.astype(np.float32).tobytes()
    options = {"dtype": "float32", "device": device}
    wanted = answers(path / "plain", prompts, **options)
    assert answers(path / "packed", prompts, **options) == wanted
    assert answers(path / "packed", prompts, **options, max_num_batched_tokens=16, max_num_seqs=2) == wanted
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], **options) == [one]


@pytest.mark.parametrize("case", ["qwen3", "phi3", "gemma2", "glm4", "olmo2", "mixtral", "qwen2_moe", "deepseek2", "deepseek3"])
def test_families(make: Callable[..., Path], case: str, prompts, device: str) -> None:
    """Fused parts in the file or here, norms beside them, experts."""
    path = make("blocks", case)
    options = {"dtype": "float32", "device": device}
    assert answers(path / "packed", prompts, **options) == answers(path / "plain", prompts, **options)


# Of stacked experts [n, rows, columns], or of Llama 4 [n, columns, rows]: what has a scale.
STACKED = [
    ("granite_moe", "blocks"), ("granite_moe", "rows"), ("granite_moe", "matrices"), ("granite_moe", "one"),
    ("granite_moe", "int8"),
    ("llama4", "columns"), ("llama4", "columns-turned"), ("llama4", "matrices"), ("llama4", "one"),
]  # fmt: skip


def quantise_stacked(source: Path, to: Path, kind: str) -> Path:
    """Writes `source` with random FP8 experts to to/packed, and with their values in float32 to to/plain."""
    rng = np.random.default_rng(5)
    for name in ("packed", "plain"):
        shutil.copytree(source, to / name)
    (file,) = source.glob("*.safetensors")
    plain: Tensors = safetensors.numpy.load_file(file)
    packed = dict(plain)
    for name, value in plain.items():
        if value.ndim != 3:
            continue
        n, rows, cols = value.shape
        blocks = (n, rows // 128, cols // 128) if rows % 128 + cols % 128 == 0 else (n, 1, 1)
        shape = {
            "blocks": blocks, "rows": (n, rows, 1), "matrices": (n,), "one": (), "columns": (n, 1, cols),
            "columns-turned": (n, cols, 1), "int8": (n, rows, 1),
        }[kind]  # fmt: skip
        scales = np.asarray(rng.uniform(1e-4, 4e-4, shape)).astype(np.float32)
        numbers = (250 * rng.standard_normal(value.shape)).clip(-448, 448)
        stored = (numbers / 4).astype(np.int8) if kind == "int8" else numbers.astype(ml_dtypes.float8_e4m3fn)
        packed[name], packed[f"{name}_scale"] = stored, scales
        wide = scales.repeat(rows // shape[1], 1).repeat(cols // shape[2], 2) if kind == "blocks" else scales
        wide = scales.reshape(n, 1, cols) if kind == "columns-turned" else wide
        wide = scales.reshape(n, 1, 1) if kind == "matrices" else wide
        plain[name] = stored.astype(np.float32) * wide
    safetensors.numpy.save_file(packed, to / "packed" / file.name)
    safetensors.numpy.save_file(plain, to / "plain" / file.name)
    scheme = {"quant_method": "fbgemm_fp8"} if "columns" in kind else COMPRESSED
    configure(to / "packed", quantization_config=LAYOUTS_OF_ROWS["int8"].config if kind == "int8" else scheme)
    return to


@pytest.mark.parametrize(("case", "kind"), STACKED)
def test_stacked_experts(tiny, tmp_path: Path, case: str, kind: str, prompts, device: str) -> None:
    """Exact values, whatever has a scale, also where the file has the matrices transposed; alone and on ranks."""
    sizes = {"hidden_size": 128, "intermediate_size": 64} if case == "granite_moe" else {}
    path = quantise_stacked(tiny(case, **sizes).directory, tmp_path, kind)
    options = {"dtype": "float32", "device": device}
    wanted = answers(path / "plain", prompts, **options)
    assert answers(path / "packed", prompts, **options) == wanted
    assert answers(path / "packed", prompts[:1], **options) == wanted[:1]
    if device == "cpu":
        assert answers(path / "packed", prompts, **options, tensor_parallel_size=2) == wanted
        with open_llm(path / "packed") as llm:
            wanted = "int8_g128" if kind == "int8" else "fp8"
            assert [info["dtype"] for info in llm.weight_info() if len(info["shape"]) == 3].count(wanted) > 1


UP = "model.layers.0.block_sparse_moe.input_linear.weight"  # [4, 128, 128]


@pytest.mark.parametrize(("value", "error", "text"), [
    (None, CheckpointError, rf"{UP} \(compressed-tensors\): wanted a tensor {UP}_scale"),
    (torch.ones(4, 3, 1), CheckpointError, rf"{UP}_scale \(c.*\): wanted a shape of .*\[4, 128, 1\].* have \[4, 3, 1\]"),
    (torch.ones(4, 1, 128), CheckpointError, f"{UP}_scale.*wanted a scale for each row"),
    (torch.full((4, 128, 1), torch.nan), CheckpointError, f"{UP}_scale.*wanted finite scales"),
    (torch.ones(4, dtype=torch.int32), UnsupportedError, rf"{UP}_scale \(compressed-tensors\): scales of type int32"),
], ids=range(5))  # fmt: skip
def test_malformed_stacks(tiny, tmp_path: Path, value: torch.Tensor | None, error: type[Exception], text: str) -> None:
    path = quantise_stacked(tiny("granite_moe", hidden_size=128, intermediate_size=64).directory, tmp_path, "rows") / "packed"
    name = f"{UP}_scale"
    change(path, lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    with pytest.raises(error, match=text):
        open_llm(path)


def test_experts_of_llama4_one_by_one(tiny, tmp_path: Path, prompts, device: str) -> None:
    """As files of compressed-tensors have them, in floats and in FP8."""
    source = tiny("llama4").directory
    path = tmp_path / "apart"
    shutil.copytree(source, path)

    def part(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name, value in tensors.items() if value.ndim == 3]:
            stem, value = name.rpartition(".")[0], tensors.pop(name)
            for e, matrix in enumerate(value):
                halves = matrix.chunk(2, 1) if "gate_up" in name else [matrix]
                names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                tensors |= {f"{stem}.{e}.{each}.weight": half.T.contiguous() for each, half in zip(names, halves, strict=True)}

    change(path, part)
    options = {"dtype": "float32", "device": device}
    assert answers(path, prompts, **options) == answers(source, prompts, **options)
    packed = quantise(path, tmp_path / "fp8", "rows")
    assert answers(packed / "packed", prompts, **options) == answers(packed / "plain", prompts, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounded_activations(make: Callable[..., Path], layout: str, prompts, cuda: str) -> None:
    """CUDA rounds 16-bit activations to FP8 unless it is told not to; the logprobs of both are near float32's."""
    path = make(layout)
    prompts = [prompt[:50] for prompt in prompts if len(prompt) > 1]
    values: dict[str, list[np.ndarray]] = {}
    for name, options in {
        "exact": {"dtype": "float32"}, "fp8": {}, "float": {"activation_dtype": "float"}, "named": {"activation_dtype": "fp8"},
    }.items():  # fmt: skip
        with open_llm(path / "packed", device=cuda, **{"dtype": "bfloat16", **options}) as llm:
            assert llm.config.activation_dtype == {"exact": "float", "named": "fp8"}.get(name, name)
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            values[name] = [o.prompt_token_logprobs[1:] for o in outputs]
    for exact, rounded, floats, named in zip(*(values[name] for name in ("exact", "fp8", "float", "named")), strict=True):
        assert named.tobytes() == rounded.tobytes() and floats.tobytes() != rounded.tobytes()
        assert np.abs(floats - exact).max() < 0.1 and np.abs(rounded - exact).max() < 0.5


@pytest.mark.parametrize("case", ["mixtral", "deepseek3", "phi3"])
def test_rounded_activations_of_families(make: Callable[..., Path], case: str, prompts, cuda: str) -> None:
    """Experts and latent attention beside linears: equal bits alone and in a batch."""
    path = make("blocks", case)
    wanted = answers(path / "packed", prompts, device=cuda, dtype="bfloat16")
    for prompt, one in zip(prompts, wanted, strict=True):
        assert answers(path / "packed", [prompt], device=cuda, dtype="bfloat16") == [one]


def test_refused_arithmetic(make: Callable[..., Path], cuda: str) -> None:
    path = make("blocks")
    with pytest.raises(UnsupportedError, match="dtype bfloat16 or float16"):
        open_llm(path / "packed", device=cuda, dtype="float32", activation_dtype="fp8")


def test_the_cpu_rounds_no_activations_to_fp8(make: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedError, match="have fp8; set activation_dtype to 'auto'"):
        open_llm(make("blocks") / "packed", activation_dtype="fp8")


@pytest.mark.parametrize("option", ["modules_to_not_convert", "ignored_layers"])
def test_modules_in_floats(make: Callable[..., Path], option: str, prompts, device: str) -> None:
    """Any module may stay in float, also one of several that are multiplied at once; dummies have the types of the modules."""
    path, left = make(), ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp"]
    plain = safetensors.torch.load_file(next((path / "plain").glob("*.safetensors")))

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv") and name.startswith(tuple(left))]:
            del tensors[name]
            tensors[name.removesuffix("_scale_inv")] = plain[name.removesuffix("_scale_inv")]

    change(path / "packed", restore)
    configure(path / "packed", quantization_config={**BLOCKS, option: ["lm_head", *left]})
    options: dict[str, object] = {"dtype": "float32", "device": device}
    assert answers(path / "packed", prompts, **options) == answers(path / "plain", prompts, **options)
    for load_format in ("auto", "dummy"):
        with open_llm(path / "packed", load_format=load_format, **options) as llm:
            types = {info["name"].split(".", 2)[-1]: info["dtype"] for info in llm.weight_info()}
        assert types["0.self_attn.q_proj.weight"] == types["1.mlp.down_proj.weight"] == "float32"
        assert types["1.self_attn.q_proj.weight"] == types["0.mlp.down_proj.weight"] == "fp8"


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_ranks(make: Callable[..., Path], case: str, prompts) -> None:
    """Ranks cut rows inside a block and take its scale."""
    path = make("blocks", case)
    ranks = {"tensor_parallel_size": 2, "dtype": "float32"}
    assert answers(path / "packed", prompts, **ranks) == answers(path / "plain", prompts, dtype="float32")


def test_memory_and_types(make: Callable[..., Path]) -> None:
    """An FP8 matrix takes 132 bytes for 128 columns of a row; lm_head and the embedding keep their type."""
    path = make("blocks", hidden_size=128, intermediate_size=256, vocab_size=16)
    with open_llm(path / "packed") as llm, open_llm(path / "plain") as plain:
        types = {info["name"]: info["dtype"] for info in llm.weight_info()}
        packed_bytes, plain_bytes = (each.ranks()[0]["weights_bytes"] for each in (llm, plain))
        values = sum(np.prod(info["shape"]) for info in plain.weight_info() if types[info["name"]] == "fp8")
        assert types[WEIGHT] == "fp8" and types["lm_head.weight"] == "float32"
        assert plain_bytes - packed_bytes == values * 4 - values // 128 * 132


WEIGHT = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"
INPUT = WEIGHT.replace("weight", "input_scale")


@pytest.mark.parametrize(("name", "value", "error", "text"), [
    (SCALE, None, CheckpointError, rf"{WEIGHT} \(fp8\): wanted a tensor {SCALE}"),
    (SCALE, torch.ones(3, 2), CheckpointError, rf"{SCALE} \(fp8\): wanted a shape of \[2, 3\], .* have \[3, 2\]"),
    (SCALE, torch.full((2, 3), torch.nan), CheckpointError, f"{SCALE}.*wanted finite scales"),
    (SCALE, torch.full((2, 3), torch.inf), CheckpointError, f"{SCALE}.*wanted finite scales"),
    (SCALE, torch.ones(2, 3, dtype=torch.int32), UnsupportedError, rf"{SCALE} \(fp8\): scales of type int32"),
    (WEIGHT, torch.full((160, 288), torch.nan).to(torch.float8_e4m3fn), CheckpointError, f"{WEIGHT}.*have a NaN"),
    (WEIGHT, torch.ones(160, 288), CheckpointError, rf"{SCALE} \(fp8\): wanted a weight {WEIGHT}"),
    (INPUT, torch.zeros(1), CheckpointError, f"{INPUT}: wanted a scale from"),
    (INPUT, torch.ones(1, dtype=torch.int32), CheckpointError, f"{INPUT}: wanted one number of type"),
], ids=range(9))  # fmt: skip
def test_malformed(make: Callable[..., Path], name: str, value: torch.Tensor | None, error: type[Exception], text: str) -> None:
    path = make("blocks")
    change(path / "packed", lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    with pytest.raises(error, match=text) as caught:
        open_llm(path / "packed")
    if error is CheckpointError:
        assert caught.value.tensor in (WEIGHT, SCALE, INPUT)
        assert Path(caught.value.file or "").suffix == ".safetensors"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_changed_tensors(make: Callable[..., Path], layout: str) -> None:
    path = make(layout, hidden_size=128, intermediate_size=320, num_hidden_layers=1, vocab_size=64) / "packed"
    check_changes(path, "model.layers.0.mlp.down_proj", str(LAYOUTS[layout][2]["quant_method"]))


@pytest.mark.parametrize("kind", ["blocks", "rows", "int8"])
def test_changed_stacks(tiny, tmp_path: Path, kind: str) -> None:
    source = tiny("granite_moe", hidden_size=128, intermediate_size=64, num_hidden_layers=1, vocab_size=64).directory
    check_changes(quantise_stacked(source, tmp_path, kind) / "packed", UP, "compressed-tensors")


@pytest.mark.parametrize(("scheme", "text"), [
    ({**FP8, "activation_scheme": "token"}, "activation_scheme 'token' is not supported; wanted 'dynamic' or 'static'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"\(modelopt\): quant_algo 'NVFP4'"),
    ({**FP8, "weight_block_size": [64, 64]}, r"\(fp8\): weight_block_size \[64, 64\]"),
    ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({**COMPRESSED, "format": "marlin-24"}, r"\(compressed-tensors\): format 'marlin-24'"),
    ({**COMPRESSED, "format": "pack-quantized"}, r"config_groups\['group_0'\]: weights .* for format 'pack-quantized'"),
    ({**COMPRESSED, "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}}}, r"config_groups\['g'\]: weights"),
    ({**COMPRESSED, "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "group"}}}}, "group_size"),
])  # fmt: skip
def test_unsupported_options(make: Callable[..., Path], scheme: dict[str, object], text: str) -> None:
    path = make("blocks")
    configure(path / "packed", quantization_config=scheme)
    with pytest.raises(UnsupportedError, match=text):
        open_llm(path / "packed")


@pytest.mark.parametrize(("layout", "ending", "scheme"), [
    ("tensor", "input_scale", {**FP8, "activation_scheme": "static"}),
    ("tensor", "activation_scale", {**FP8, "activation_scheme": "static"}),
    ("tensor", "input_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ("rows", "input_scale_ub", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    ("one", "input_scale", {**COMPRESSED, "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"},
        "input_activations": {"type": "float", "num_bits": 8, "dynamic": False, "strategy": "tensor"}}}}),
])  # fmt: skip
def test_static_scales(make: Callable[..., Path], layout: str, ending: str, scheme: dict[str, object], prompts) -> None:
    """Static scales of activations change nothing: activations are in float, or have scales of their own."""
    path = make(layout) / "packed"
    wanted = answers(path, prompts)
    configure(path, quantization_config=scheme)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "weight_scale" in name]:
            tensors[name.replace("weight_scale", ending)] = torch.tensor(0.02)

    change(path, edit)
    assert answers(path, prompts) == wanted


@pytest.mark.parametrize("layout", ["blocks", "rows"])
def test_dummies_and_updates(make: Callable[..., Path], layout: str, prompts) -> None:
    """Dummies have the types of the checkpoint. Updates round floats as quantisation at load does."""
    path = make(layout)
    (file,) = (path / "plain").glob("*.safetensors")
    floats = safetensors.numpy.load_file(file)
    with open_llm(path / "packed") as llm:
        types = {info["name"]: info["dtype"] for info in llm.weight_info()}
        llm.update_weights(floats.items())
        updated = llm.weight_checksum()
    with open_llm(path / "plain", quantization="fp8") as llm:
        assert llm.weight_checksum() == updated
    with open_llm(path / "packed", load_format="dummy") as llm:
        assert {info["name"]: info["dtype"] for info in llm.weight_info()} == types


def test_an_update_by_rows_of_a_model_in_blocks(tiny, tmp_path: Path, device: str) -> None:
    """Kernels that read one scale for 64 rows leave the recorded steps when an update gives each row another scale."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    path = quantise(tiny("llama", dtype="bfloat16", **sizes).directory, tmp_path, "blocks")
    floats = safetensors.numpy.load_file(next((path / "plain").glob("*.safetensors")))
    unlike = {name: w * np.float32(2) ** (np.arange(len(w))[:, None] % 4).astype(np.float32) if "_proj" in name else w
              for name, w in floats.items()}  # fmt: skip
    prompts = [[1 + n % 90, 5, 7 + n // 90] for n in range(120)]
    wanted = []
    for is_eager in (True, False):
        with open_llm(path / "packed", device=device, max_num_seqs=120, enforce_eager=is_eager) as llm:
            sampling = SamplingParams(temperature=0, max_tokens=3, logprobs=1)
            made = [llm.generate(prompts, sampling, use_tqdm=False)]
            llm.update_weights(unlike.items())
            made.append(llm.generate(prompts, sampling, use_tqdm=False))
        tokens = [[(o.outputs[0].token_ids_array.tobytes(), o.outputs[0].logprobs.values.tobytes()) for o in outputs]
                  for outputs in made]  # fmt: skip
        assert tokens[0] != tokens[1]
        wanted = wanted or tokens
        assert tokens == wanted
