"""GGUF files of the families: the logits of the original checkpoint, and llama.cpp's logits of the same file."""

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from modules import load

from llmpy import LLM, CheckpointError, InvalidRequestError, SamplingParams, UnsupportedError, WeightUpdateError, models

pytest.importorskip("gguf")


adapter_files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
gguf_files = load(Path(__file__).with_name("gguf_files.py"))
KINDS = load(Path(__file__).with_name("gguf_kinds.py")).KINDS

BOUND = 1e-4
REORDERED = (
    "baichuan", "baichuan-13b", "phi-joined", "qwen3_next", "qwen3_next-joined", "bloom", "falcon-11b", "falcon-40b",
    "gpt_neox", "gpt_neox-sequential", "granite_hybrid", "granite_hybrid-nope",
)  # fmt: skip
"""Kinds with some matrices in another order than the checkpoint's."""
RENAMED = ("bamba", "bamba-whole")
"""Kinds that are loaded as a model of another class, with the names of that class."""
DEFAULT = (
    "gemma2", "olmo3", "deepseek3", "gpt_oss", "granite_hybrid", "qwen3_next", "plamo2", "falcon_h1", "llama4", "bamba", "gpt2",
    "gpt_neox", "bloom", "mpt", "falcon-40b", "internlm2-plain", "qwen", "chatglm", "minicpm-first",
)  # fmt: skip


@pytest.fixture()
def file_of(tiny, host_checkpoint, tmp_path):
    """file_of(case, dtype, **fields) -> a tiny model and its GGUF file."""

    def make(case: str, dtype: str = "F32", **fields: object) -> tuple[object, Path]:
        kind = KINDS[case]
        model = tiny(kind.case, **{**kind.fields, **fields})
        tensors = {name: x for name, (_, x) in host_checkpoint(sorted(model.directory.glob("*.safetensors")))._data.items()}
        return model, gguf_files.write(kind, model.config, tensors, tmp_path / f"{case}-{dtype}.gguf", dtype)

    return make


def each_kind(*quick: str) -> list[object]:
    """All kinds of files; those that are not quick run with `-m slow`."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in KINDS]


def linears(llm: LLM) -> list[tuple[str, int, int]]:
    """Names, rows and columns of the linears of the layers to which an adapter can be loaded."""
    found = []
    for info in llm.weight_info():
        if len(info["shape"]) != 2 or not info["name"].endswith(".weight"):
            continue
        name = info["name"].removesuffix(".weight")
        for rows, columns in (info["shape"], info["shape"][::-1]):  # GPT-2's are transposed
            tensors = {f"{name}.lora_A.weight": np.zeros((1, columns)), f"{name}.lora_B.weight": np.zeros((rows, 1))}
            with contextlib.suppress(UnsupportedError, InvalidRequestError, CheckpointError):
                llm.load_adapter("try", tensors, {"r": 1, "lora_alpha": 1})
                found.append((name, rows, columns))
                break
    return found


def prompt_logprobs(llm: LLM, ids: list[int], adapter: str | None = None) -> np.ndarray:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    return llm.generate([ids], params, lora_request=adapter)[0].prompt_token_logprobs[1:]


@pytest.mark.parametrize("case", each_kind(*DEFAULT))
def test_logits(case, file_of, oracle, prompts, error_of):
    model, path = file_of(case)
    assert error_of(oracle(path).logits(prompts[2]), model.logits(prompts[2])) <= BOUND


@pytest.mark.parametrize("arithmetic", ["int8", "float"])
def test_quantised_experts_of_ranks(arithmetic, file_of, open_engine, prompts):
    """A rank rounds the rows of weights and the inputs that one rank rounds."""
    _, path = file_of("qwen3_moe", "Q8_0")
    found = []
    for n_ranks, experts in ((1, "rank"), (2, "rank"), (3, "rank"), (2, "width")):
        options = {"n_ranks": n_ranks, "replicate_bytes": 0, "experts": experts, "devices": ["cpu"] * n_ranks}
        with open_engine("cpu", path, activation_dtype=arithmetic, **(options if n_ranks > 1 else {})) as engine:
            found.append([(one.ids, one.prompt.tobytes()) for one in engine.run(prompts, top=5)])
    assert found[0] == found[1] == found[2] == found[3]


def test_heads_by_their_norms_are_refused(file_of, host_checkpoint, files_of):
    """Only the vocabulary identifies Baichuan 2."""
    _, path = file_of("baichuan", num_hidden_layers=2)
    checkpoint = host_checkpoint([path])
    checkpoint.metadata["baichuan.vocab_size"] = 125696
    with pytest.raises(UnsupportedError, match="Baichuan 2"):
        models.load(files_of(path), checkpoint)


def test_rows_that_none_of_q_k_and_v_has(file_of, host_checkpoint, files_of):
    _, path = file_of("phi-joined")
    checkpoint = host_checkpoint([path])
    checkpoint.metadata["phi2.attention.head_count_kv"] = 2
    with pytest.raises(CheckpointError, match=r"blk.0.attn_qkv.weight: wanted \[128, 64\], have \[192, 64\]"):
        models.load(files_of(path), checkpoint)


# A separate process, because llama.cpp ends its process if it rejects a file.
LLAMA_CPP = """
import sys
import numpy as np
from llama_cpp import Llama

path, out, *ids = sys.argv[1:]
model = Llama(path, n_ctx=128, n_batch=128, logits_all=True, verbose=True, n_threads=2, swa_full=True, type_k=0, type_v=0,
              flash_attn=False)
model.eval([int(each) for each in ids])
np.save(out, model.scores[:len(ids)])
"""


def llama_cpp_logits(path: Path, ids: list[int]) -> np.ndarray:
    """llama.cpp's logits of all positions, with a float32 cache."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    out = path.with_suffix(".npy")
    command = [sys.executable, "-c", LLAMA_CPP, path, out, *map(str, ids)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return np.load(out).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, kind in KINDS.items() if kind.bound is not None])
def test_llama_cpp_reads_the_same(case, file_of, oracle, prompts, error_of):
    """The same file in llama.cpp: near logits, and equal greedy tokens unless two logits are as near as that."""
    _, path = file_of(case)
    ours, theirs = oracle(path).logits(prompts[2]), llama_cpp_logits(path, prompts[2])
    assert error_of(theirs, ours) <= KINDS[case].bound
    best, chosen = ours.max(-1), ours[np.arange(len(ours)), theirs.argmax(-1)]
    assert (best - chosen <= 2 * KINDS[case].bound * np.abs(ours).max()).all()


@pytest.mark.parametrize("case", ["deepseek3", "bamba", "gpt2", "phi-joined", pytest.param("plamo2", marks=pytest.mark.slow)])
def test_in_the_engine(case, file_of, prompts, device):
    """The engine gives the checkpoint's tokens; updates are not tested, because their tensors differ."""
    options = {"device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB", "generation_config": "none"}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    model, path = file_of(case)
    with LLM(model.directory, **options) as llm:
        wanted = [out.outputs[0].token_ids for out in llm.generate(prompts[:3], greedy)]
    with LLM(path, **options) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(prompts[:3], greedy)] == wanted
        with pytest.raises(UnsupportedError, match="in another form"):
            llm.begin_update()


ADAPTERS = {
    **{case: {None, UnsupportedError} for case in REORDERED},
    **{case: {None, CheckpointError} for case in RENAMED},
    "falcon_h1": {UnsupportedError},
    "internlm2-plain": {CheckpointError},
}
"""What loading adapters raises; None: nothing."""


@pytest.mark.parametrize("case", each_kind("llama", "internlm3", "phi3", *DEFAULT))
def test_adapters(case, file_of, prompts, tmp_path):
    """An adapter of each linear gives the logprobs that it gives with the checkpoint, or an error with the tensor's name."""
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB", "enable_lora": True}
    model, path = file_of(case)
    n_ranks = 2 if case in ("llama", "internlm3") else 1
    with LLM(model.directory, **options) as theirs, LLM(path, tensor_parallel_size=n_ranks, **options) as ours:
        base = prompt_logprobs(theirs, prompts[2])
        found = set()
        for name, rows, columns in linears(theirs):
            adapter = adapter_files.save(tmp_path / name, adapter_files.factors({name: (rows, columns)}))
            theirs.load_adapter("one", adapter)
            wanted = prompt_logprobs(theirs, prompts[2], "one")
            try:
                ours.load_adapter("one", adapter)
            except (UnsupportedError, CheckpointError) as error:
                assert f"{name}.weight" in str(error)
                found.add(type(error))
                continue
            found.add(None)
            assert np.abs(prompt_logprobs(ours, prompts[2], "one") - wanted).max() <= BOUND, name
            assert np.abs(wanted - base).max() > BOUND, name
    assert found == ADAPTERS.get(case, {None}), found


STACKED = (
    "stablelm-norms", "ernie4_5_moe", "lfm2", "glm4_moe", "llama4", "deepseek3-first", "gpt_oss", "qwen2_moe",
    "qwen2_moe-first", "qwen3_moe", "olmoe",
)  # fmt: skip
"""Kinds that have one tensor where the checkpoint has several, or another shape."""


@pytest.mark.parametrize("case", each_kind("llama", "olmo2", *DEFAULT))
def test_updates(case, file_of, host_checkpoint):
    """The checkpoint's tensors change no bit of the file's weights, or are refused."""
    model, path = file_of(case)
    tensors = {name: x for name, (_, x) in host_checkpoint(sorted(model.directory.glob("*.safetensors")))._data.items()}
    with LLM(path, device="cpu", skip_tokenizer_init=True, kv_cache_memory_bytes="8MiB") as llm:
        if llm._tap.spec["reordered"]:
            with pytest.raises(UnsupportedError, match="in another form"):
                llm.update_weights(tensors)
            return
        before = llm.weight_checksum()
        expected = pytest.raises(WeightUpdateError, match="weight '") if case in STACKED else contextlib.nullcontext()
        with expected:
            assert llm.update_weights(tensors).missing == []
        assert llm.weight_checksum() == before


@pytest.mark.parametrize(("case", "dtype", "fields"), [
    ("gpt_oss", "MXFP4", {"intermediate_size": 64}), ("deepseek3", "Q8_0", {"kv_lora_rank": 32, "qk_nope_head_dim": 32,
     "v_head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 32}), ("gpt_neox", "Q8_0", {}), ("bamba", "Q8_0", {}),
])  # fmt: skip
def test_quantised_rows(case, dtype, fields, file_of, oracle, prompts, tmp_path):
    """The engine's first tokens are those of the exact values of the blocks."""
    _, path = file_of(case, dtype, **fields)
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB", "generation_config": "none"}
    mine = oracle(path)
    with LLM(path, **options) as llm:
        for prompt in prompts[:3]:
            out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
            logits = mine.logits(prompt)[-1]
            assert logits.max() - logits[out.outputs[0].token_ids[0]] <= 0.02 * np.abs(logits).max()
