"""Law 2 at the sizes of real models, where a CUDA device uses its fast kernels: many rows, long contexts, all batch sizes.

test_exactness.py compares everything on tiny models. Here a request alone must equal the same request among a hundred others,
while sequences come and go, so that steps of all sizes occur, with and without graphs, in chunks, cached and preempted.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from llmpy import LLM, RequestOutput, SamplingParams, hardware

COMMON = {
    "num_hidden_layers": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 8192,
}  # fmt: skip
MODELS = {
    "llama-bfloat16": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 2048,
        "intermediate_size": 7168, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-bfloat16": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-float16": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "hidden_size": 576,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "deepseek2-bfloat16": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16", "hidden_size": 1024,
        "intermediate_size": 2048, "moe_intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "topk_method": "greedy", "tie_word_embeddings": False,
    },
    "qwen3_moe-bfloat16": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 1024,
        "intermediate_size": 2048, "moe_intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "gpt_oss-mxfp4": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 1152,
        "intermediate_size": 576, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
    },
}  # fmt: skip
HYBRIDS = {
    "qwen3_next-bfloat16": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16", "hidden_size": 1024,
        "intermediate_size": 2048, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 16, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
    },
    "plamo2-bfloat16": {
        "architectures": ["Plamo2ForCausalLM"], "model_type": "plamo2", "torch_dtype": "bfloat16", "hidden_size": 2048,
        "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 1, "hidden_size_per_head": 128,
        "mamba_num_heads": 32, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_step": 2, "attention_window_size": 2048,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
OPTIONS = [
    {},
    {"enforce_eager": True},
    {"max_num_batched_tokens": 300},
    {"max_num_seqs": 37, "block_size": 32},
    {"kv_cache_memory_bytes": 48 << 20, "max_model_len": 4096},
]
CHOSEN = [0, 1, 7, 30, 64, 99, 100]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """A hundred prompts of 1 to 700 tokens, half of them behind a common beginning, and a long one."""
    rng = np.random.default_rng(5)
    head = rng.integers(3, 8192, 200).tolist()
    lengths = [*rng.integers(1, 700, 100).tolist(), 3100]
    prompts = [(head if i % 2 else []) + rng.integers(3, 8192, n).tolist() for i, n in enumerate(lengths)]
    common = {"logprobs": 2, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.8 * (i % 3), top_p=0.9, seed=i, max_tokens=6 + 7 * i % 41, **common)
        for i in range(len(prompts))
    ]
    return prompts, params


def bits(output: RequestOutput) -> tuple[bytes, ...]:
    sample = output.outputs[0]
    return tuple(part.tobytes() for part in (sample.token_ids_array, *sample.sampled, sample.logprobs.values))


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), MODELS[request.param])


def write(path: Path, config: dict[str, object]) -> Path:
    (path / "config.json").write_text(json.dumps(COMMON | config))
    return path


def open_llm(path: Path, device: str, **options: object) -> LLM:
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "device": device, "max_model_len": 4096}
    sizes = {"kv_cache_memory_bytes": 2 << 30, "max_num_batched_tokens": 4096, "max_num_seqs": 128}
    return LLM(path, **(defaults | sizes | options))


@pytest.fixture(scope="module")
def alone(model: Path, cuda: str) -> dict[int, tuple[bytes, ...]]:
    """Outputs of some of the requests alone."""
    prompts, params = requests()
    with open_llm(model, cuda, enable_prefix_caching=False) as llm:
        return {i: bits(llm.generate([prompts[i]], [params[i]], use_tqdm=False)[0]) for i in CHOSEN}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_request_among_a_hundred(
    options: dict[str, object], model: Path, cuda: str, alone: dict[int, tuple[bytes, ...]]
) -> None:
    prompts, params = requests()
    with open_llm(model, cuda, **options) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert {i: bits(outputs[i]) for i in CHOSEN} == alone
        assert llm.stats().allocations_since_warmup == 0
        llm.check()


@pytest.mark.slow
def test_a_crowd_again_and_again(model: Path, cuda: str) -> None:
    """Races appear once in a few hundred rounds; a hundred requests must have the same bits in each of 1000 rounds."""
    prompts, params = requests()
    with open_llm(model, cuda, enable_prefix_caching=False) as llm:
        first = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        for _ in range(1000):
            again = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
            assert [i for i, (a, b) in enumerate(zip(first, again, strict=True)) if a != b] == []


@pytest.mark.slow
@pytest.mark.parametrize("config", [*MODELS, *HYBRIDS])
def test_few_requests_again_and_again(config: str, cuda: str, tmp_path: Path) -> None:
    """Kernels for few sequences read pages of earlier steps before their wait: pages that other requests had change no bit."""
    rng, model = np.random.default_rng(6), write(tmp_path, (MODELS | HYBRIDS)[config])
    prompts = [rng.integers(3, 8192, n).tolist() for n in rng.integers(1, 900, 64)]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    with open_llm(model, cuda, enable_prefix_caching=False, max_model_len=1024, kv_cache_memory_bytes=48 << 20) as llm:
        first = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        for _ in range(10_000):
            chosen = rng.choice(64, rng.integers(1, 9), replace=False).tolist()
            outputs = llm.generate([prompts[i] for i in chosen], params, use_tqdm=False)
            assert [i for i, output in zip(chosen, outputs, strict=True) if bits(output) != first[i]] == []


def test_without_cublaslt(model: Path, cuda: str, alone: dict[int, tuple[bytes, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows by the kernels of this backend alone: the same bits."""
    monkeypatch.setattr(hardware, "cublaslt_library", lambda: "")
    prompts, params = requests()
    with open_llm(model, cuda) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert {i: bits(outputs[i]) for i in CHOSEN} == alone


def test_score_equals_generate(model: Path, cuda: str) -> None:
    prompts, params = requests()
    with open_llm(model, cuda) as llm:
        outputs = [llm.generate(prompts, params, use_tqdm=False)[i] for i in CHOSEN]
        scores = llm.score([prompts[i] + out.token_ids for i, out in zip(CHOSEN, outputs, strict=True)], use_tqdm=False)
        for i, out, score in zip(CHOSEN, outputs, scores, strict=True):
            assert score.token_logprobs[len(prompts[i]) - score.start :].tobytes() == out.outputs[0].sampled.raw.tobytes()


@pytest.mark.parametrize("name", [*MODELS, *HYBRIDS])
def test_drafts_change_no_bit(name: str, cuda: str, tmp_path: Path) -> None:
    """Steps with drafts replay graphs, except with recurrent states. Half of the samples choose between two ids."""
    config, rng = write(tmp_path, (MODELS | HYBRIDS)[name]), np.random.default_rng(9)
    prompts = [rng.integers(3, 8192, n).tolist() for n in rng.integers(1, 900, 20)]
    common = {"max_tokens": 24, "logprobs": 2, "ignore_eos": True}
    narrow = {"temperature": 1.0, "allowed_token_ids": [5, 6]}
    params = [SamplingParams(seed=i, **common, **(narrow if i % 2 else {"temperature": 0.0})) for i in range(20)]
    with open_llm(config, cuda, enable_prefix_caching=False, max_model_len=1024) as llm:
        wanted = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    for source in ({"method": "suffix", "k": 4}, {"method": "ngram", "k": 7, "min": 1}):
        with open_llm(config, cuda, speculative_config=source, max_model_len=1024) as llm:
            for n in (1, 2, 3, 8, 20, 1, 8):
                outputs = llm.generate(prompts[:n], params[:n], use_tqdm=False)
                assert [bits(output) for output in outputs] == wanted[:n]
            stats, steps = llm.stats(), llm.step_log(4096)
            assert 0 < stats.accepted_rows < stats.draft_rows
            assert stats.allocations_since_warmup == 0
            with_drafts = [step for step in steps if step.draft_rows and step.rows <= 64 and not step.prompt_rows]
            assert with_drafts and all(step.replayed for step in with_drafts) == (name in MODELS)
            llm.check()


@pytest.mark.parametrize("name", [*MODELS, "qwen3_next-bfloat16"])
def test_drafts_by_a_second_model_change_no_bit(name: str, cuda: str, tmp_path: Path) -> None:
    """A model that drafts for itself is always right; a hybrid has another drafter."""
    (tmp_path / "drafter").mkdir()
    config, rng = write(tmp_path, (MODELS | HYBRIDS)[name]), np.random.default_rng(9)
    drafter = config if name in MODELS else write(tmp_path / "drafter", MODELS["llama-bfloat16"])
    prompts = [rng.integers(3, 8192, n).tolist() for n in rng.integers(1, 900, 20)]
    common = {"max_tokens": 24, "logprobs": 2, "ignore_eos": True}
    params = [SamplingParams(seed=i, temperature=float(i % 3 > 0), **common) for i in range(18)]
    params += [SamplingParams(seed=i, allowed_token_ids=[5, 6], **common) for i in range(2)]
    with open_llm(config, cuda, enable_prefix_caching=False, max_model_len=1024) as llm:
        wanted = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    source = {"method": "draft", "model": str(drafter), "k": 4}
    with open_llm(config, cuda, speculative_config=source, max_model_len=1024) as llm:
        for n in (1, 2, 3, 8, 20, 1, 8):
            outputs = llm.generate(prompts[:n], params[:n], use_tqdm=False)
            assert [bits(output) for output in outputs] == wanted[:n]
        stats = llm.stats()
        assert 0 < stats.accepted_rows <= stats.draft_rows
        assert (stats.accepted_rows == stats.draft_rows) == (name in MODELS)
        assert stats.allocations_since_warmup == 0
        llm.check()


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama-bfloat16", "eagle3"), ("qwen3-bfloat16", "eagle"), ("llama-float16", "medusa"), ("qwen3_next-bfloat16", "mtp")],
)
def test_drafts_by_a_head_change_no_bit(name: str, method: str, cuda: str, tmp_path: Path) -> None:
    """Heads with random weights, some of whose drafts are accepted, because few ids are allowed."""
    (tmp_path / "head").mkdir()
    model = (MODELS | HYBRIDS)[name]
    config, rng = write(tmp_path, model), np.random.default_rng(9)
    of_head = {"num_hidden_layers": 1, "draft_vocab_size": 4096, "medusa_num_heads": 3}
    of_head["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = write(tmp_path / "head", model | of_head)
    prompts = [rng.integers(3, 8192, n).tolist() for n in rng.integers(1, 900, 20)]
    common = {"max_tokens": 24, "logprobs": 2, "ignore_eos": True, "allowed_token_ids": [5, 6, 7]}
    params = [SamplingParams(seed=i, temperature=float(i % 2), **common) for i in range(20)]
    with open_llm(config, cuda, enable_prefix_caching=False, max_model_len=1024) as llm:
        wanted = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    source = {"method": method, "k": 3} | ({} if method == "mtp" else {"model": str(head)})
    with open_llm(config, cuda, speculative_config=source, max_model_len=1024) as llm:
        for n in (1, 2, 3, 8, 20, 1, 8):
            outputs = llm.generate(prompts[:n], params[:n], use_tqdm=False)
            assert [bits(output) for output in outputs] == wanted[:n]
        stats = llm.stats()
        assert 0 < stats.accepted_rows < stats.draft_rows
        assert stats.allocations_since_warmup == 0
        llm.check()
