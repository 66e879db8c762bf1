"""Caches of e4m3 and int8: how many tokens they hold, what they cost in loss, and which attention has none."""

import json
from pathlib import Path

import pytest

from llmpy import LLM, UnsupportedError

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:3500]


@pytest.fixture(scope="module")
def loss_and_blocks(demo_model: Path) -> dict[str, tuple[float, int]]:
    found = {}
    for dtype in ("float32", "fp8", "fp8_e4m3", "int8"):
        options = {"kv_cache_dtype": dtype, "kv_cache_memory_bytes": "128MiB", "max_model_len": 1024}
        with LLM(demo_model, device="cpu", **options) as llm:
            scored = llm.score([TEXT])[0]
            assert llm.config.kv_cache_dtype == dtype.removesuffix("_e4m3")
            found[dtype] = -scored.sum_logprob / len(scored.token_logprobs), llm.stats().kv_blocks_total
    return found


def test_blocks_are_counted_from_bytes(loss_and_blocks: dict[str, tuple[float, int]]) -> None:
    """A token's head of 64 values has 4 * 64, 64 and 64 + 4 bytes; one page is reserved."""
    blocks = {dtype: n + 1 for dtype, (_, n) in loss_and_blocks.items()}
    per_page = 30 * 2 * 3 * 16  # layers, keys and values, heads, tokens
    assert blocks["float32"] == (128 << 20) // (per_page * 256)
    assert blocks["fp8"] == blocks["fp8_e4m3"] == (128 << 20) // (per_page * 64)
    assert blocks["int8"] == (128 << 20) // (per_page * 68)


def test_loss(loss_and_blocks: dict[str, tuple[float, int]]) -> None:
    """Nats a token against a cache of float32: fp8 0.0121 and 0.0112, int8 0.0026 and 0.0071 with AVX-512 and with AVX2."""
    loss = {dtype: value for dtype, (value, _) in loss_and_blocks.items()}
    assert loss["fp8"] == loss["fp8_e4m3"] and 0 < abs(loss["fp8"] - loss["float32"]) < 0.02
    assert 0 < abs(loss["int8"] - loss["float32"]) < 0.01


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_latents_have_no_such_cache(dtype: str, tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 131, "hidden_size": 64,
        "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"kv_cache_dtype='{dtype}'.*latents.*use 'auto'"):
        LLM(tmp_path, load_format="dummy", device="cpu", skip_tokenizer_init=True, kv_cache_dtype=dtype)
