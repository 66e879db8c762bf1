"""`llmpy convert --to gguf-TYPE` of directories with safetensors: the logits and the ids of the directory."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from packed_files import LAYOUTS, change, open_llm, quantise

from llmpy import LLM, CheckpointError, UnsupportedError
from llmpy.convert import convert

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
FLOAT = {"activation_dtype": "float", "dtype": "float32"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "rope_theta": None}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "attention_bias": False}),
    "experts": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [], "attention_bias": False}),
    "yarn": ("qwen3", {"rope_parameters": YARN, "attention_bias": False}),
}


def logits_of(path: Path, ids: list[int], **options: object) -> np.ndarray:
    with open_llm(path, **FLOAT, **options) as llm:
        return llm.tap([ids], ["logits"])[0]["logits"]


def error_of(have: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(have - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", CASES)
def test_logits(tiny, tmp_path: Path, prompts, name: str) -> None:
    """Files of llama have rows of q and k, and so sums of scores, in another order."""
    case, changes = CASES[name]
    source = tiny(case, dtype="bfloat16", shards=2, **changes).directory
    out = convert(str(source), tmp_path / "out.gguf", "gguf-f32")
    wanted = logits_of(source, prompts[3])
    assert error_of(logits_of(out, prompts[3]), wanted) < 3e-6


def test_types(tiny, tmp_path: Path, prompts) -> None:
    """Matrices have gguf-py's bytes; a quantised checkpoint gives its exact values."""
    source = tiny("qwen3", hidden_size=128, intermediate_size=256, attention_bias=False).directory
    out = convert(str(source), tmp_path / "out.gguf", "gguf-q8_0")
    exact = {each.name: each for each in gguf.GGUFReader(convert(str(source), tmp_path / "f32.gguf", "gguf-f32")).tensors}
    kinds = set()
    for each in gguf.GGUFReader(out).tensors:
        values = exact[each.name].data
        kinds.add(each.tensor_type)
        is_matrix = each.tensor_type == gguf.GGMLQuantizationType.Q8_0
        assert is_matrix == (values.ndim == 2)
        assert np.array_equal(each.data, gguf.quantize(values, each.tensor_type) if is_matrix else values)
    assert len(kinds) == 2
    packed = quantise(source, tmp_path / "made", LAYOUTS["awq"])
    made = convert(str(packed / "packed"), tmp_path / "awq.gguf", "gguf-f32")
    assert np.array_equal(logits_of(made, prompts[2]), logits_of(packed / "plain", prompts[2]))


def directory_with(tiny, to: Path, pre: tokenizers.pre_tokenizers.PreTokenizer, settings: Mapping[str, object]) -> Path:
    """A model with a small byte-level vocabulary."""
    shutil.copytree(tiny("qwen2", vocab_size=400, use_sliding_window=False).directory, to)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = pre, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=390, special_tokens=["<s>", "</s>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["the cat sat on the mat 12345 12 123", "don't stop", "  def f(x):\n    return x\n"] * 3, trainer)
    made.add_tokens(["<tool>"])
    if settings.get("add_bos_token"):
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(to / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}", **settings}
    (to / "tokenizer_config.json").write_text(json.dumps(named))
    return to


QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN2.replace(r"|\p{N}| ", r"|\p{N}{1,3}| ")


def split(pattern: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    steps = tokenizers.pre_tokenizers
    cut = steps.Split(tokenizers.Regex(pattern), "isolated")
    return steps.Sequence([cut, steps.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(("kind", "pattern", "adds_bos"), [("qwen2", QWEN2, False), ("llama-bpe", LLAMA, True)])
def test_vocabulary(tiny, tmp_path: Path, kind: str, pattern: str, adds_bos: bool) -> None:
    source = directory_with(tiny, tmp_path / "model", split(pattern), {"add_bos_token": adds_bos})
    out = convert(str(source), tmp_path / "out.gguf", "gguf-q4_0" if adds_bos else "gguf-f16")
    assert gguf.GGUFReader(out).fields["tokenizer.ggml.pre"].contents() == kind
    with LLM(source, device="cpu", kv_cache_memory_bytes="8MiB") as wanted, LLM(
        out, device="cpu", kv_cache_memory_bytes="8MiB"
    ) as have:
        for text in ("the cat sat 12345 times, don't\n\n  def", "<tool> the</s>", "é 中"):
            assert have.tokenizer.encode(text) == wanted.tokenizer.encode(text)
        assert {*have.tokenizer.eos_token_ids} == {*wanted.tokenizer.eos_token_ids}
        assert have.tokenizer.chat_templates == wanted.tokenizer.chat_templates
        assert have.tokenizer.encode("a")[0] == 0 or not adds_bos


def test_errors(tiny, tmp_path: Path) -> None:
    """Other families, windows, other words and vocabularies are refused, and nothing is written."""
    out = tmp_path / "out.gguf"
    cut = tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.WhitespaceSplit(), split(QWEN2)])
    refused = {
        tiny("mixtral").directory: "is a MixtralForCausalLM; wanted LlamaForCausalLM",
        tiny("qwen3_moe", norm_topk_prob=False, mlp_only_layers=[]).directory: "norm_topk_prob False cannot be written",
        tiny("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[1]).directory: "mlp_only_layers True cannot be written",
        tiny("qwen3", attention_bias=True).directory: "attention_bias True cannot be written for qwen3",
        tiny("mistral", sliding_window=16).directory: "sliding_window 16 cannot be written for llama",
        directory_with(tiny, tmp_path / "cut", cut, {}): "no kind of pre-tokenizer of GGUF gives its ids",
    }
    for source, text in refused.items():
        with pytest.raises(UnsupportedError, match=text):
            convert(str(source), out, "gguf-q8_0")
    (tmp_path / "cut/tokenizer.json").write_text(
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()
    )
    (tmp_path / "cut/tokenizer_config.json").write_text("{}")
    source = tmp_path / "nan"
    shutil.copytree(tiny("qwen2").directory, source)
    change(source, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"][0].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight: wanted finite values"):
        convert(str(source), out, "gguf-q8_0")
    assert not out.exists()
    with pytest.raises(UnsupportedError, match="wanted byte-level BPE, have WordLevel"):
        convert(str(tmp_path / "cut"), out, "gguf-q8_0")
