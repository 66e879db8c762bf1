"""Four and eight ranks give the bits of one, on the CPU and on GPUs; ranks share a GPU if there are fewer GPUs than ranks."""

import json

import pytest

from llmpy import LLM, SamplingParams, devices

N_GPUS = sum(device["available"] and device["device"].startswith("cuda") for device in devices())
BASE = {
    "vocab_size": 192, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
PROMPTS = [[3, 9, 4], [(7 * i) % 180 + 5 for i in range(150)], [7] * 33, [1]]
PARAMS = [
    SamplingParams(max_tokens=12, seed=i, temperature=i % 2 * 0.8, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(autouse=True)
def cut_all(monkeypatch):
    """Cuts every matrix that can be cut; else all matrices of so small a model would be whole on each rank."""
    monkeypatch.setattr("llmpy.models.shard.default_replicate_bytes", lambda n_ranks: 0)


def outcome(path, device, n_ranks, **options):
    """The bits of prompts that are computed in chunks, and afterwards found in the prefix cache."""
    if device.startswith("cuda"):
        options["device_ids"] = [rank % N_GPUS for rank in range(n_ranks)]
    sizes = {"kv_cache_memory_bytes": "8MiB", "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    found = []
    with LLM(path, device=device, tensor_parallel_size=n_ranks, load_format="dummy", skip_tokenizer_init=True, **sizes,
             **options) as llm:  # fmt: skip
        for _ in range(2):
            for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
                one = output.outputs[0]
                columns = (one.sampled.raw, one.sampled.full, one.sampled.processed, one.logprobs.values)
                found.append([one.token_ids, output.prompt_token_logprobs.tobytes(), *(each.tobytes() for each in columns)])
        assert len(llm.ranks()) == n_ranks
    return found


@pytest.mark.parametrize(("name", "ways"), [("dense", ["auto"]), ("mixture", ["rank", "width"])])
def test_four_and_eight_ranks(tmp_path, each_device, name, ways):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **MODELS[name]}))
    wanted = outcome(tmp_path, each_device, 1)
    assert len({str(found) for found in wanted[:4]}) == 4
    for experts in ways:
        for n_ranks in (4, 8):
            assert outcome(tmp_path, each_device, n_ranks, experts=experts) == wanted, (experts, n_ranks)
