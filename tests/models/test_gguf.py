"""GGUF files of the tiny models: names, metadata and row order, then every storage type."""

import numpy as np
import pytest

from llmpy import CheckpointError, UnsupportedError, _core, models

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


def test_parts_of_a_split_file_are_one_model(tiny, gguf_of, tmp_path):
    model = tiny("llama")
    whole = _core.Checkpoint([gguf_of(model, tmp_path / "whole.gguf", "Q8_0")])
    gguf_of(model, tmp_path / "part.gguf", "Q8_0", part_tensors=8)
    paths = sorted(tmp_path.glob("part-*.gguf"))
    parts = _core.Checkpoint(paths)
    assert len(paths) == 3
    assert {key: value for key, value in parts.metadata.items() if not key.startswith("split.")} == whole.metadata
    assert sorted(parts.tensors()) == sorted(whole.tensors())
    assert all(parts.read_float32(name) == whole.read_float32(name) for name in whole.tensors())
    for some, text in [
        (paths[:2], "part 1 of 2, have part 1 of 3"),
        (paths[1:2], "part 1 of 1, have part 2 of 3"),
        ([paths[0], paths[2], paths[1]], "part 2 of 3, have part 3 of 3"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            _core.Checkpoint(some)
    content = paths[0].read_bytes()
    at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    paths[0].write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count: wanted 99 tensors in all parts, have"):
        _core.Checkpoint(paths)


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
        ("llama.block_count", 2**62, CheckpointError, "block_count: wanted 1 to [0-9]+, the number of tensors, have 46"),
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
