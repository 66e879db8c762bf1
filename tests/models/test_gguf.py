"""GGUF files of the tiny models: names, metadata and row order, then every storage type."""

import numpy as np
import pytest

from llmpy import CheckpointError, UnsupportedError, models

BOUND = 1e-4
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
}
METADATA = {
    "llama-linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "llama-yarn": YARN,
}


@pytest.mark.parametrize(
    "case",
    ["llama", "llama-bias", "llama-linear", "llama-llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "llama-tied"],
)
def test_float_files_give_the_logits_of_transformers(case, tiny, gguf_of, oracle, prompts, error_of, tmp_path):
    model = tiny(case, **({"hidden_act": "silu"} if case == "llama-tied" else {}))
    mine = oracle(gguf_of(model, tmp_path / "tiny.gguf", "F32", metadata=METADATA.get(case)))
    assert mine.compiled.config.dtype == "float32"
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


def test_the_old_spelling_of_linear_scaling(tiny, gguf_of, oracle, tmp_path):
    old = oracle(gguf_of(tiny("llama"), tmp_path / "a.gguf", "F32", metadata={"llama.rope.scale_linear": 4.0}))
    new = oracle(gguf_of(tiny("llama"), tmp_path / "b.gguf", "F32", metadata=METADATA["llama-linear"]))
    assert np.array_equal(old.compiled.config.rope.inv_freq, new.compiled.config.rope.inv_freq)
    assert new.compiled.config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("key", "value", "error", "text"),
    [
        ("llama.expert_count", 8, CheckpointError, "expert_used_count: wanted int, have nothing"),
        ("llama.expert_group_count", 8, UnsupportedError, "expert_group_count"),
        ("llama.final_logit_softcapping", 30.0, UnsupportedError, "final_logit_softcapping"),
        ("llama.rope.dimension_sections", [4, 2, 2, 0], UnsupportedError, "dimension_sections"),
        ("llama.rope.scaling.type", "longrope", CheckpointError, "short_factor"),
        ("llama.vocab_size", 98, CheckpointError, r"token_embd.weight.*wanted \[98, 64\], have \[99, 64\]"),
        ("llama.block_count", "two", CheckpointError, "block_count: wanted int, have 'two'"),
        ("llama.feed_forward_length", 0, CheckpointError, "intermediate_size: wanted 1 to 2147483647, have 0"),
        ("llama.attention.head_count", 0, CheckpointError, "have 0"),
        ("general.architecture", "rwkv6", UnsupportedError, "'rwkv6' is not supported; docs/use/models.md lists"),
    ],
)
def test_metadata_that_does_not_fit(tiny, gguf_of, host_checkpoint, files_of, tmp_path, key, value, error, text):
    path = gguf_of(tiny("llama"), tmp_path / "tiny.gguf", "F32")
    checkpoint = host_checkpoint([path])
    checkpoint.metadata[key] = value
    with pytest.raises(error, match=text) as caught:
        models.load(files_of(path), checkpoint)
    assert str(path) in str(caught.value) or isinstance(caught.value, UnsupportedError)


def test_a_missing_key_is_named(tiny, gguf_of, host_checkpoint, files_of, tmp_path):
    path = gguf_of(tiny("llama"), tmp_path / "tiny.gguf", "F32")
    checkpoint = host_checkpoint([path])
    del checkpoint.metadata["llama.embedding_length"]
    with pytest.raises(CheckpointError, match=r"llama\.embedding_length: wanted int, have nothing") as caught:
        models.load(files_of(path), checkpoint)
    assert caught.value.file == str(path)
