"""The engine against the oracle: every family, rope kind and storage type, alone and in a mixed batch in chunks."""

import gguf
import numpy as np
import pytest

from llmpy import UnsupportedError, _core

BOUND = 1e-4  # of a logit, relative to the largest


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check(answer, ids, logits_of, bound):
    """Checks all prompt logprobs, and that greedy tokens are within the arithmetic's error of the best.

    A difference of logits can cause at most twice that difference of logprobs.
    """
    logits = logits_of([*ids, *answer.ids])
    allowed = 2 * bound * np.abs(logits).max()
    wanted = log_softmax(logits)
    if len(ids) > 1:
        assert np.abs(answer.table(logits.shape[1]) - wanted[: len(ids) - 1]).max() <= allowed
        assert np.allclose(answer.prompt, wanted[np.arange(len(ids) - 1), ids[1:]], rtol=0, atol=allowed)
    rows = wanted[len(ids) - 1 : -1]
    assert len(answer.ids) == len(answer.logprobs) == len(rows) > 0
    chosen = rows[np.arange(len(rows)), answer.ids]
    assert (chosen >= rows.max(-1) - allowed).all()
    assert np.abs(chosen - answer.logprobs).max() <= allowed


def same(a, b):
    """Two answers equal to the last bit."""
    return (
        a.ids == b.ids
        and a.logprobs == b.logprobs
        and np.array_equal(a.prompt, b.prompt)
        and np.array_equal(a.prompt_ids, b.prompt_ids)
        and np.array_equal(a.prompt_top, b.prompt_top)
    )


def test_engine_matches_the_oracle_alone_and_in_a_mixed_batch(case, each_device, tiny, oracle, open_engine, prompts):
    path = tiny(case).directory
    reference = oracle(path, max_model_len=128)
    with open_engine(each_device, path) as one:
        alone = [one.run([ids], top=99)[0] for ids in prompts]
    for answer, ids in zip(alone, prompts, strict=True):
        check(answer, ids, reference.logits, BOUND)
    with open_engine(each_device, path, max_num_batched_tokens=24, num_threads=1) as chunked:
        mixed = chunked.run([*prompts, *reversed(prompts)], top=99)
    for answer, wanted in zip(mixed, [*alone, *reversed(alone)], strict=True):
        assert same(answer, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints(tiny, oracle, engine, prompts, dtype):
    path = tiny("qwen2", dtype, shards=3).directory
    reference = oracle(path)
    with engine(path) as exact, engine(path, kv_dtype="auto") as narrow:
        for ids in prompts:
            check(exact.run([ids], top=99)[0], ids, reference.logits, BOUND)
            check(narrow.run([ids], top=99)[0], ids, reference.logits, {"float16": 1e-3, "bfloat16": 8e-3}[dtype])


# Unit roundoff of a type times 8: a row of these models passes through some twenty rounded steps, each of which may err by
# one; the errors are independent, so they add up to about the root of that, and the largest of a table is twice as large.
# transformers in the same type errs by 2 to 5 roundoffs on these models.
ROUNDED = {"float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}


@pytest.mark.parametrize("dtype", list(ROUNDED))
@pytest.mark.parametrize(
    "case",
    ["llama", "llama-bias", "llama-tied", "mistral", "qwen2-window", "qwen3", "qwen3-window"]
    + [pytest.param(case, marks=pytest.mark.slow) for case in ("granite", "gemma3", "glm4", "olmo3", "nemotron", "cohere2")],
)
def test_two_byte_types_err_as_transformers_does(case, dtype, tiny, engine, prompts):
    """Activations, weights and cache in a type, against float32 and beside transformers in that type."""
    model = tiny(case, dtype)
    ours, theirs, bound = [], [], ROUNDED[dtype]
    with engine(model.directory, dtype=dtype, kv_dtype=dtype) as narrow:
        for ids, answer in zip(prompts, narrow.run(prompts, top=99), strict=True):
            check(answer, ids, model.logits, bound)
            if len(ids) > 1:
                wanted = log_softmax(model.logits(ids))[:-1]
                ours.append(np.abs(answer.table(99) - wanted).max())
                theirs.append(np.abs(log_softmax(model.logits(ids, dtype))[:-1] - wanted).max())
    assert max(ours) <= 2 * max(theirs)


def test_dtype_converts_at_load(tiny, engine, oracle, prompts):
    reference = oracle(tiny("llama").directory)
    with engine(tiny("llama").directory, dtype="bfloat16", kv_dtype="float32") as model:
        check(model.run([prompts[2]], top=99)[0], prompts[2], reference.logits, 2e-2)
        assert not np.allclose(
            model.run([prompts[2]], top=99)[0].table(99), log_softmax(reference.logits(prompts[2]))[:-1], atol=1e-4
        )


BLOCK_256 = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
IQ_TYPES = ["IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"]
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
TYPES += IQ_TYPES


def sizes_for(kind: str) -> dict[str, int]:
    """Sizes of a model whose matrices can be stored in a type."""
    return BLOCK_256 if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 256 else {}


@pytest.mark.parametrize("kind", TYPES)
def test_gguf_storage_types(tiny, gguf_of, oracle, device, engine, prompts, tmp_path, kind):
    model = tiny("llama-bias", head_dim=32, **sizes_for(kind))
    path = gguf_of(model, tmp_path / "tiny.gguf", kind)
    reference = oracle(path)
    with engine(path) as exact:
        for ids in prompts[1:3]:
            check(exact.run([ids], top=99)[0], ids, reference.logits, BOUND)
    if kind in ("F32", "F16", "BF16"):
        return
    if device.startswith("cuda"):
        with pytest.raises(UnsupportedError, match="int8"):
            engine(path, activation_dtype="int8")
        return
    with engine(path, activation_dtype="int8") as fast:
        alone = [fast.run([ids], top=99)[0] for ids in prompts[1:]]
    with engine(path, activation_dtype="int8", max_num_batched_tokens=24) as chunked:
        assert all(map(same, chunked.run(prompts[1:], top=99), alone))
    for answer, ids in zip(alone, prompts[1:], strict=True):
        check(answer, ids, reference.logits, 3e-2)


@pytest.mark.parametrize("case", ["llama-bias", "gemma3", "qwen3_moe"])
def test_two_ranks_against_transformers(case, tiny, open_engine, prompts):
    model = tiny(case)
    with open_engine("cpu", model.directory, n_ranks=2, replicate_bytes=0, devices=["cpu"] * 2) as ranks:
        for ids in prompts[1:]:
            check(ranks.run([ids], top=99)[0], ids, model.logits, BOUND)


@pytest.mark.parametrize("kind", TYPES)
def test_gguf_types_of_ranks(tiny, gguf_of, open_engine, prompts, tmp_path, kind):
    """Ranks cut linears, the embedding and the head between rows; 256 columns are one block of types such as IQ4_XS."""
    path = gguf_of(tiny("llama-bias", head_dim=32, **sizes_for(kind)), tmp_path / "tiny.gguf", kind)
    for arithmetic in ("int8", "float") if kind not in ("F32", "F16", "BF16") else ("float",):
        found = []
        for n_ranks in (1, 2):
            options = {"n_ranks": n_ranks, "replicate_bytes": 0, "devices": ["cpu"] * n_ranks} if n_ranks > 1 else {}
            with open_engine("cpu", path, activation_dtype=arithmetic, **options) as ranks:
                found.append([(one.ids, one.prompt.tobytes()) for one in ranks.run(prompts, top=5)])
        assert found[0] == found[1]


@pytest.mark.parametrize("case", ["llama-llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "llama-tied"])
def test_gguf_families(case, tiny, gguf_of, oracle, engine, prompts, tmp_path):
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    path = gguf_of(tiny(case), tmp_path / "tiny.gguf", "F32", metadata=metadata if case == "llama-yarn" else None)
    reference = oracle(path)
    with engine(path) as model:
        for answer, ids in zip(model.run(prompts, top=99), prompts, strict=True):
            check(answer, ids, reference.logits, BOUND)


WIDE = {**BLOCK_256, "head_dim": 32}
MIXTURES = {
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": False, "decoder_sparse_step": 1},
    "qwen3_moe": {"mlp_only_layers": []},
    "olmoe": {"clip_qkv": None},
}


@pytest.mark.parametrize("case", MIXTURES)
def test_gguf_mixtures(case, tiny, gguf_of, oracle, engine, prompts, error_of, tmp_path):
    """Stacked experts under llama.cpp's names: the logits of transformers, then the engine."""
    model = tiny(case, **MIXTURES[case])
    path = gguf_of(model, tmp_path / "tiny.gguf", "F32")
    reference = oracle(path)
    assert error_of(reference.logits(prompts[2]), model.logits(prompts[2])) <= BOUND
    with engine(path) as ours:
        for answer, ids in zip(ours.run(prompts[1:3], top=99), prompts[1:3], strict=True):
            check(answer, ids, reference.logits, BOUND)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_quantised_experts(kind, tiny, gguf_of, oracle, device, engine, prompts, tmp_path):
    model = tiny("mixtral", **WIDE)
    path = gguf_of(model, tmp_path / "tiny.gguf", kind)
    reference = oracle(path)
    with engine(path) as exact:
        alone = [exact.run([ids], top=99)[0] for ids in prompts[1:3]]
    for answer, ids in zip(alone, prompts[1:3], strict=True):
        check(answer, ids, reference.logits, BOUND)
    with engine(path, max_num_batched_tokens=24) as chunked:
        assert all(map(same, chunked.run(prompts[1:3], top=99), alone))
    if device.startswith("cuda"):
        return
    with engine(path, activation_dtype="int8") as fast:
        alone = [fast.run([ids], top=99)[0] for ids in prompts[1:]]
    with engine(path, activation_dtype="int8", max_num_batched_tokens=24) as chunked:
        assert all(map(same, chunked.run(prompts[1:], top=99), alone))


@pytest.mark.parametrize("kind", TYPES)
def test_the_readers_agree(tiny, gguf_of, host_checkpoint, tmp_path, kind):
    """Our C reader and the gguf package give the same tensors, bit for bit."""
    model = tiny("llama-bias", head_dim=32, **sizes_for(kind))
    path = gguf_of(model, tmp_path / "tiny.gguf", kind)
    ours, theirs = _core.Checkpoint([str(path)]), host_checkpoint([path])
    assert ours.tensors() == theirs.tensors()
    assert {key: ours.metadata[key] for key in theirs.metadata} == theirs.metadata
    for name in ours.tensors():
        assert ours.read_float32(name) == theirs.read_float32(name), name
