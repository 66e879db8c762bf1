"""GGUF files of older families, written as llama.cpp's converter writes them: names from the gguf package, rows of q, k and v
sorted, matrices turned, and the metadata of each family."""

import numpy as np
import pytest

from llmpy import LLM, SamplingParams, UnsupportedError

gguf = pytest.importorskip("gguf")

BOUND = 1e-4
# case: general.architecture, metadata besides the usual, the groups of q, k and v in its one tensor or 0
FAMILIES = {
    "gpt2": ("gpt2", {}, 0),
    "gpt_bigcode": ("starcoder", {"attention.head_count_kv": 1}, 0),
    "starcoder2": ("starcoder2", {"attention.sliding_window": 8}, 0),
    "gpt_neox": ("gptneox", {"rope.dimension_count": 4, "use_parallel_residual": True}, 4),
    "gpt_neox-sequential": ("gptneox", {"rope.dimension_count": 4, "use_parallel_residual": False}, 4),
    "bloom": ("bloom", {"embedding_length": 96, "feed_forward_length": 384, "attention.head_count": 6,
                        "attention.head_count_kv": 6}, 6),
    "mpt": ("mpt", {"embedding_length": 96, "feed_forward_length": 384, "attention.head_count": 6,
                    "attention.head_count_kv": 6, "attention.clamp_kqv": 0.5, "attention.max_alibi_bias": 8.0}, 0),
    "falcon": ("falcon", {"attention.head_count_kv": 1}, 1),
    "falcon-40b": ("falcon", {"attention.head_count_kv": 2}, 2),
    "falcon-11b": ("falcon", {"attention.head_count_kv": 2}, 2),
    "internlm2-plain": ("internlm2", {}, 0),
    "qwen": ("qwen", {"feed_forward_length": 192}, 0),
    "chatglm": ("chatglm", {"rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16}, 0),
}


def converted(case, name, values, cfg):
    """(name for the table of names, values) as the converter has them; several for one tensor."""
    if case == "gpt2" and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and name.endswith("weight"):
        return [(name, values.T)]
    groups = FAMILIES[case][2]
    if groups and "query_key_value" in name:
        heads = values.reshape(groups, -1, 16, *values.shape[1:])
        parts = heads[:, :-2], heads[:, -2], heads[:, -1]
        return [(name, np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts]))]
    if "wqkv" in name:  # q, k and v apart, q and k in the order of interleaved rope
        n_heads, n_kv = cfg["num_attention_heads"], cfg["num_key_value_heads"]
        heads = values.reshape(n_kv, n_heads // n_kv + 2, -1, values.shape[1])
        q, k, v = heads[:, :-2].reshape(-1, values.shape[1]), heads[:, -2].reshape(-1, values.shape[1]), heads[:, -1]

        def turned(x, n):
            return x.reshape(n, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)

        parts = {"wq": turned(q, n_heads), "wk": turned(k, n_kv), "wv": v.reshape(-1, values.shape[1])}
        return [(name.replace("wqkv", part), x) for part, x in parts.items()]
    return [(name, values)]


def write(case, model, host_checkpoint, path, kind="F32"):
    arch, more, _ = FAMILIES[case]
    cfg = model.config
    n_layers = 2
    found = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), n_layers)
    writer = gguf.GGUFWriter(path, arch)
    eps = "attention.layer_norm_rms_epsilon" if arch in ("internlm2", "qwen", "chatglm") else "attention.layer_norm_epsilon"
    values = {
        "block_count": n_layers, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2 if arch in ("starcoder2", "internlm2", "chatglm") else 4,
        eps: 1e-3 if arch == "starcoder2" else 1e-6 if arch in ("internlm2", "qwen") else 1e-5, "vocab_size": 99, **more,
    }  # fmt: skip
    if arch == "chatglm":
        values[eps] = cfg["layernorm_epsilon"]
    for key, value in values.items():
        {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}[type(value)](f"{arch}.{key}", value)
    for name, (_, tensor) in host_checkpoint(sorted(model.directory.glob("*.safetensors")))._data.items():
        for new, x in converted(case, name, tensor, cfg):
            if "rotary_pos_emb" in new:
                continue
            new = new.removeprefix("transformer.") if arch in ("bloom", "chatglm") else new
            gguf_name = found.get_name(new, try_suffixes=(".weight", ".bias"))
            assert gguf_name, new
            dtype = gguf.GGMLQuantizationType[kind if x.ndim > 1 else "F32"]
            writer.add_tensor(gguf_name, gguf.quants.quantize(np.ascontiguousarray(x), dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", FAMILIES)
def test_logits(case, tiny, host_checkpoint, oracle, prompts, error_of, tmp_path):
    model = tiny(case)
    mine = oracle(write(case, model, host_checkpoint, tmp_path / "tiny.gguf"))
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox"])
def test_in_the_engine(case, tiny, host_checkpoint, prompts, device, tmp_path):
    """Quantised rows, too; weights of such a file are not replaced by those of a checkpoint with another order."""
    options = {"device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": "8MiB", "generation_config": "none"}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    model = tiny(case)
    with LLM(model.directory, **options) as llm:
        wanted = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy)]
    with LLM(write(case, model, host_checkpoint, tmp_path / "f32.gguf"), **options) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, greedy)] == wanted
        with pytest.raises(UnsupportedError, match="orders the rows"):
            llm.begin_update()
    with LLM(write(case, model, host_checkpoint, tmp_path / "q8.gguf", "Q8_0"), **options) as llm:
        assert all(len(out.outputs[0].token_ids) == 8 for out in llm.generate(prompts, greedy))
