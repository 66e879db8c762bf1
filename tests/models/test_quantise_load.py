"""`quantization=` against the same model with the values that plain NumPy rounds, stored in float32."""

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from packed_files import LAYOUTS, SORTED, answers, change, is_packed, open_llm, quantise, quantise_fp8

from llmpy import (
    LLM,
    AsyncEngine,
    CheckpointError,
    ConfigError,
    SamplingParams,
    UnsupportedError,
    WeightsMissingError,
    WeightUpdateError,
)  # fmt: skip
from llmpy.convert import k_quants

SIZES = {"hidden_size": 128, "intermediate_size": 256}  # of whole groups
RAGGED = {"hidden_size": 160, "intermediate_size": 288}  # 128 + 32 and 2 * 128 + 32 columns
WHOLE = {"hidden_size": 192, "intermediate_size": 320}  # blocks of 64
Tensors = dict[str, np.ndarray]


def blocks_of(w: np.ndarray, size: int) -> np.ndarray:
    return np.pad(w.astype(np.float32), [(0, 0), (0, -w.shape[1] % size)]).reshape(len(w), -1, size)


def fp8(w: np.ndarray) -> np.ndarray:
    w = w.astype(np.float32)
    scales = np.abs(w).max(-1, keepdims=True) / np.float32(448)
    return (w / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales


def int8(w: np.ndarray) -> np.ndarray:
    blocks = blocks_of(w, 128)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(blocks / scales) * scales).reshape(len(w), -1)[:, : w.shape[1]]


def int4(w: np.ndarray, size: int = 128) -> np.ndarray:
    blocks = blocks_of(w, size)
    least, most = np.minimum(blocks.min(-1, keepdims=True), 0), np.maximum(blocks.max(-1, keepdims=True), 0)
    scales = ((most - least) / np.float32(15)).astype(ml_dtypes.bfloat16).astype(np.float32)
    zeros = np.minimum(np.rint(-least / scales), 15)
    numbers = np.clip(np.rint(blocks / scales) + zeros, 0, 15)
    return ((numbers - zeros) * scales).reshape(len(w), -1)[:, : w.shape[1]]


def by_gguf(kind: gguf.GGMLQuantizationType, w: np.ndarray) -> np.ndarray:
    """Of whole blocks; other columns stay in floats."""
    return w if w.shape[1] % 32 else gguf.dequantize(gguf.quantize(w.astype(np.float32), kind), kind)


NF4 = np.array([
    -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
], np.float32)  # fmt: skip


def nf4(w: np.ndarray) -> np.ndarray:
    """Of whole blocks; other columns stay in floats."""
    if w.shape[1] % 64:
        return w
    blocks = w.astype(np.float32).reshape(len(w), -1, 64)
    scales = np.abs(blocks).max(-1, keepdims=True)
    return (NF4[np.searchsorted((NF4[1:] + NF4[:-1]) / 2, blocks / scales)] * scales).reshape(w.shape)


OWN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp8": fp8, "int8": int8, "int4": int4, "int4_g32": lambda w: int4(w, 32),
}  # fmt: skip
def q4_k(w: np.ndarray) -> np.ndarray:
    """Q5_0 where blocks of 256 do not fit."""
    kind = gguf.GGMLQuantizationType.Q4_K
    if w.shape[1] % 256:
        return by_gguf(gguf.GGMLQuantizationType.Q5_0, w)
    return gguf.dequantize(k_quants.quantise(w.astype(np.float32), "q4_k"), kind)


ROUND = OWN | {"nf4": nf4, "q4_k": q4_k} | {
    name: partial(by_gguf, gguf.GGMLQuantizationType[name.upper()]) for name in ("q8_0", "q5_0", "q4_1", "q4_0")
}
def sizes(scheme: str) -> dict[str, int]:
    return {"nf4": WHOLE, "q4_k": {"hidden_size": 256, "intermediate_size": 320}}.get(scheme, RAGGED)


FLOAT = {"activation_dtype": "float", "dtype": "float32"}


def tensors_of(path: Path) -> Tensors:
    (file,) = path.glob("*.safetensors")
    return safetensors.numpy.load_file(file)


def rounded(source: Path, to: Path, scheme: str) -> Path:
    """The model with rounded linears in float32."""
    shutil.copytree(source, to)
    (file,) = source.glob("*.safetensors")
    tensors = tensors_of(source)
    made = {name: ROUND[scheme](w) if is_packed(name, w) else w for name, w in tensors.items()}
    safetensors.numpy.save_file({name: np.ascontiguousarray(w) for name, w in made.items()}, to / file.name)
    return to


@pytest.mark.parametrize("scheme", ROUND)
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_bits(tiny, tmp_path: Path, prompts, scheme: str, case: str) -> None:
    """The exact values; the bits of one rank and one thread, and of two ranks."""
    source = tiny(case, **(sizes(scheme) if case == "llama" else {})).directory
    wanted = answers(rounded(source, tmp_path / "plain", scheme), prompts, **FLOAT)
    assert answers(source, prompts, quantization=scheme, **FLOAT) == wanted
    assert answers(source, prompts, quantization=scheme, tensor_parallel_size=2, **FLOAT) == wanted


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_types(tiny, scheme: str) -> None:
    """Linears alone are quantised, in bfloat16 files as well."""
    wanted = {"fp8": "fp8", "int4": "int4_g128"}[scheme]
    with open_llm(tiny("llama", dtype="bfloat16").directory, quantization=scheme) as llm:
        types = {info["name"]: info["dtype"] for info in llm.weight_info()}
    assert {name for name, kind in types.items() if kind == wanted} == {name for name in types if "_proj" in name}
    assert types["lm_head.weight"] == types["model.embed_tokens.weight"] == "float32"


@pytest.mark.parametrize("scheme", ROUND)
@pytest.mark.parametrize("ranks", [1, 2])
def test_update(tiny, prompts, scheme: str, ranks: int) -> None:
    """An update gives the bits and the checksums of a load of the same weights."""
    old, new = (tiny("llama", **sizes(scheme), rms_norm_eps=eps).directory for eps in (1e-5, 1e-6))
    tensors = {name: w * np.float32(1.25) if w.ndim == 2 else w for name, w in tensors_of(new).items()}
    options = {"quantization": scheme, "tensor_parallel_size": ranks, **FLOAT}
    with open_llm(old, **options) as llm:
        before = llm.weight_checksum()
        llm.update_weights(tensors.items())
        updated = llm.weight_checksum()
    assert updated != before
    change_to = old.parent / f"{old.name}-{scheme}-{ranks}"
    shutil.copytree(old, change_to)
    (file,) = change_to.glob("*.safetensors")
    safetensors.numpy.save_file(tensors, file)
    with open_llm(change_to, **options) as llm:
        assert llm.weight_checksum() == updated
        llm.update_weights(change_to)
        assert llm.weight_checksum() == updated
    with open_llm(change_to, **options) as llm:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name][3, 5] = np.nan
        with pytest.raises(WeightUpdateError, match=r"up_proj.*1 of its values are not finite"):
            llm.update_weights([(name, tensors[name])], partial=True)
        assert llm.weight_checksum() == updated


@pytest.mark.parametrize(
    "scheme", [*OWN, "q4_0", "fp8 file", "gptq-32", "gptq-8", "awq", "rows-asym", "rows-8-64", "int8-tensor"]
)
def test_sleep_without_weights(tiny, tmp_path: Path, prompts, scheme: str) -> None:
    """A full update after sleep(2) gives the bits and the checksums that it gives without the sleep."""
    source = tiny("llama", **sizes(scheme)).directory
    options = {"quantization": scheme} if scheme in ROUND else {}
    path = source
    if scheme == "fp8 file":
        path = quantise_fp8(source, tmp_path / "fp8")
    elif scheme in LAYOUTS:
        path = quantise(tiny("llama", **SIZES).directory, tmp_path / "made", LAYOUTS[scheme]) / "packed"
        source = tmp_path / "made/plain"
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)

    def state(llm: LLM) -> tuple[dict[str, int], list[bytes]]:
        outputs = llm.generate([prompt[:20] for prompt in prompts], params, use_tqdm=False)
        return llm.weight_checksum(), [output.outputs[0].logprobs.values.tobytes() for output in outputs]

    with open_llm(path, **options) as llm:
        llm.update_weights(source)
        wanted = state(llm)
        for _ in range(2):
            llm.sleep(2)
            assert llm.memory()["weights"] == 0
            llm.wake_up()
            with pytest.raises(WeightsMissingError):
                llm.generate([[1, 2]], params, use_tqdm=False)
            llm.update_weights(source)
            assert state(llm) == wanted


def test_updates_while_requests_run(tiny, prompts, device: str) -> None:
    """A check of values uses the threads or the stream of steps, so steps stop before it."""
    path = tiny("llama", **sizes("fp8")).directory
    tensors = list(tensors_of(path).items())
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def run() -> None:
        engine = AsyncEngine(path, quantization="fp8", skip_tokenizer_init=True, kv_cache_memory_bytes=32 << 20, device=device)

        async def ask(number: int) -> None:
            for turn in range(8):
                async for _ in engine.generate(prompts[2][:50], params, request_id=f"{number}-{turn}"):
                    pass

        asked = [asyncio.ensure_future(ask(number)) for number in range(4)]
        for _ in range(20):
            await engine.update_weights(tensors)
            await asyncio.sleep(0.01)
        await asyncio.gather(*asked)
        engine.close()

    asyncio.run(run())


def test_a_check_without_values(tiny) -> None:
    """Tensors that come later have names, types and shapes alone."""
    with open_llm(tiny("llama", **SIZES).directory, quantization="fp8") as llm, llm.begin_update(partial=True) as update:
        name, shape = "model.layers.0.mlp.up_proj.weight", (SIZES["intermediate_size"], SIZES["hidden_size"])
        update.check_memory([(name, 0, "bfloat16", shape, None)])
        with pytest.raises(WeightUpdateError, match="wanted"):
            update.check_memory([(name, 0, "bfloat16", shape[::-1], None)])
        update.abort()


def test_sleep_of_what_takes_no_updates(tiny, tmp_path: Path) -> None:
    path = quantise(tiny("llama", **SIZES).directory, tmp_path / "made", SORTED["gptq"]) / "packed"
    wanted = r"sleep\(level=2\) drops the weights.*act-order.*use level=1"
    with open_llm(path) as llm, pytest.raises(UnsupportedError, match=wanted):
        llm.sleep(2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", OWN)
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_update_from_the_device(tiny, cuda: str, case: str, scheme: str, dtype: str) -> None:
    """Tensors of the device are rounded there, with the bits and the checksums of tensors of the host."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    sizes = {"hidden_size": 192, "intermediate_size": 320} if case == "llama" else {}
    path = tiny(case, **sizes).directory
    host = {name: torch.from_numpy(w * np.float32(1.25)).to(torch.bfloat16) for name, w in tensors_of(path).items()}
    device = {name: tensor.to(cuda) for name, tensor in host.items()}
    device = {name: t.t().contiguous().t() if t.ndim == 2 and "down" in name else t for name, t in device.items()}
    with open_llm(path, device=cuda, dtype=dtype, quantization=scheme) as llm:
        assert llm.compare_weights(path)
        llm.update_weights(host)
        wanted = llm.weight_checksum()
        llm.update_weights(path)
        assert llm.weight_checksum() != wanted and not llm.compare_weights(device)
        llm.update_weights(device)
        assert llm.weight_checksum() == wanted and llm.compare_weights(device)
        for bad in (float("nan"), 2.0**101):
            name = next(name for name in device if "_proj" in name or ".w1." in name)
            spoiled = device[name].clone()
            spoiled[3, 5] = bad
            with pytest.raises(WeightUpdateError, match="1 of its values are not finite or beyond"):
                llm.update_weights([(name, spoiled)], partial=True)
        assert llm.weight_checksum() == wanted


@pytest.mark.parametrize("scheme", [scheme for scheme in ROUND if scheme not in OWN])
def test_other_types(tiny, device: str, prompts, scheme: str) -> None:
    """Floats of files and of the host are rounded to types of other engines; tensors of a GPU are refused by name."""
    torch = pytest.importorskip("torch")
    path = tiny("llama", **sizes(scheme)).directory
    host = {name: torch.from_numpy(w * np.float32(1.25)) for name, w in tensors_of(path).items()}
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()

    def state(llm: LLM) -> tuple[dict[str, int], list[bytes]]:
        outputs = llm.generate([prompt[:20] for prompt in prompts], params, use_tqdm=False)
        return llm.weight_checksum(), [output.outputs[0].logprobs.values.tobytes() for output in outputs]

    with open_llm(path, device=device, dtype="bfloat16" if is_cuda else "float32", quantization=scheme) as llm:
        old = state(llm)
        assert llm.compare_weights(path)
        llm.update_weights(host)
        assert state(llm) != old and llm.compare_weights(host) and not llm.compare_weights(path)
        name = next(name for name in host if "_proj" in name)
        if is_cuda:
            with pytest.raises(UnsupportedError, match=r"cuda rounds to .* on the host; wanted a tensor in host memory"):
                llm.update_weights([(name, host[name].to(device))], partial=True)
        llm.update_weights(path)
        assert state(llm) == old


@pytest.mark.parametrize("scheme", ROUND)
def test_dummies(tiny, prompts, scheme: str) -> None:
    """Dummy weights are quantised, the same for any number of ranks."""
    options = {"quantization": scheme, "load_format": "dummy", **FLOAT}
    source = tiny("llama", **sizes(scheme)).directory
    assert answers(source, prompts, **options) == answers(source, prompts, tensor_parallel_size=2, **options)
    with open_llm(source, **options) as llm:
        types = {"q4_k": {"q4", "q5"}}.get(scheme, {scheme.partition("_")[0]})
        assert {info["dtype"].partition("_")[0] for info in llm.weight_info()} == {*types, "float32"}


@pytest.mark.parametrize("layout", ["awq", "gptq-32", "rows", "fp8"])
def test_quantised_checkpoint(tiny, tmp_path: Path, prompts, layout: str) -> None:
    """The name of the checkpoint's own scheme changes nothing; another one is an error that names both."""
    source = tiny("llama", **SIZES).directory
    if layout == "fp8":
        path, method = quantise_fp8(source, tmp_path / "fp8"), "fp8"
    else:
        path = quantise(source, tmp_path / "made", LAYOUTS[layout]) / "packed"
        method = str(LAYOUTS[layout].config["quant_method"])
    assert answers(path, prompts, quantization=method) == answers(path, prompts)
    for other in {"awq", "gptq", "compressed-tensors", "bitsandbytes"} - {method}:
        with pytest.raises(ConfigError, match=f"quantization='{other}' needs a checkpoint of that scheme.*has {method}"):
            open_llm(path, quantization=other)
        with pytest.raises(ConfigError, match=f"quantization='{other}'.*has no quantization_config"):
            open_llm(source, quantization=other)
    with pytest.raises(ConfigError, match=r"'nf4' needs columns in multiples of 64; the model's linears have 160, 288"):
        open_llm(tiny("llama", **RAGGED).directory, quantization="nf4")
    for other in {"fp8", "int8"} - {method}:
        with pytest.raises(ConfigError, match=f"quantization=.{other}. needs weights of floats.*has {method}: "):
            open_llm(path, quantization=other)


def test_not_finite(tiny, tmp_path: Path) -> None:
    path = tmp_path / "nan"
    shutil.copytree(tiny("llama").directory, path)
    change(path, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"][0].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*wanted finite values"):
        open_llm(path, quantization="int8")
