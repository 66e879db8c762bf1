"""Configurations of the shapes and in the spellings of released models: parameters, which agree with the published sizes,
the longest sequence, windows and ropes.
"""

from types import SimpleNamespace

import pytest

from llmpy import models

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Family, parameters, sizes, length served, windows, number of ropes, the other fields.
RELEASED = {
    "gemma-3-1b": (
        "Gemma3",
        999885952,
        (262144, 1152, 6912, 26, 4, 1, 32768),
        32768,
        [0, 512],
        2,
        {
            "head_dim": 256,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
            "attention_bias": False,
        },
    ),
    "SmolLM3": (
        "SmolLM3",
        3075098624,
        (128256, 2048, 11008, 36, 16, 4, 65536),
        65536,
        [0],
        1,
        {
            "rope_theta": 5000000.0,
            "rope_scaling": None,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "no_rope_layer_interval": 4,
            "layer_types": ["full_attention"] * 36,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "hidden_act": "silu",
            "mlp_bias": False,
        },
    ),
    "Phi-4-mini": (
        "Phi3",
        3836021760,
        (200064, 3072, 8192, 32, 24, 8, 131072),
        131072,
        [262144],
        1,
        {
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "lm_head_bias": False,
        },
    ),
    "OLMo-2-7B": (
        "Olmo2",
        7298617344,
        (100352, 4096, 11008, 32, 32, 32, 4096),
        4096,
        [0],
        1,
        {"rope_theta": 500000, "rope_scaling": None},
    ),
    "OLMo-3-7B": (
        "Olmo3",
        7298011136,
        (100278, 4096, 11008, 32, 32, 32, 65536),
        65536,
        [0, 4096],
        2,
        {
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "sliding_window": 4096,
        },
    ),
    "GLM-4-9B-0414": (
        "Glm4",
        9400279040,
        (151552, 4096, 13696, 40, 32, 2, 32768),
        32768,
        [0],
        1,
        {
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "attention_bias": True,
            "rms_norm_eps": 1e-05,
            "hidden_act": "silu",
        },
    ),
    "StableLM-2-1.6B": (
        "StableLm",
        1644515328,
        (100352, 2048, 5632, 24, 32, 32, 4096),
        4096,
        [0],
        1,
        {
            "rope_theta": 10000,
            "partial_rotary_factor": 0.25,
            "layer_norm_eps": 1e-05,
            "use_qkv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "Seed-OSS-36B": (
        "SeedOss",
        36151104512,
        (155136, 5120, 27648, 64, 80, 8, 524288),
        524288,
        [0],
        1,
        {
            "head_dim": 128,
            "rope_theta": 10000000.0,
            "rope_scaling": {"rope_type": "default"},
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
    ),
    "EXAONE-4.0-1.2B": (
        "Exaone4",
        1279391488,
        (102400, 2048, 4096, 30, 32, 8, 65536),
        65536,
        [0],
        1,
        {
            "head_dim": 64,
            "rope_theta": 1000000,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
    ),
    "EXAONE-4.0-32B": (
        "Exaone4",
        32003216384,
        (102400, 5120, 27392, 64, 40, 8, 131072),
        131072,
        [0, 4096],
        1,
        {"head_dim": 128, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    ),
    "Nemotron-Mini-4B": (
        "Nemotron",
        4190509056,
        (256000, 3072, 9216, 32, 24, 8, 4096),
        4096,
        [0],
        1,
        {"head_dim": 128, "norm_eps": 1e-05, "partial_rotary_factor": 0.5, "rope_theta": 10000, "hidden_act": "relu2"},
    ),
    "AFM-4.5B": (
        "Arcee",
        4619184640,
        (128004, 2560, 18432, 36, 20, 4, 65536),
        81920,
        [0],
        1,
        {
            "head_dim": 128,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 20.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
            },
            "hidden_act": "relu2",
        },
    ),
    "Gemma-2b": (
        "Gemma",
        2506172416,
        (256000, 2048, 16384, 18, 8, 1, 8192),
        8192,
        [0],
        1,
        {"head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "rope_theta": 10000.0},
    ),
    "granite-3.3-2b": (
        "Granite",
        2533539840,
        (49159, 2048, 8192, 40, 32, 8, 131072),
        131072,
        [0],
        1,
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "command-r7b": (
        "Cohere2",
        8028033024,
        (256000, 4096, 14336, 32, 32, 8, 8192),
        8192,
        [0, 4096],
        1,
        {
            "logit_scale": 0.25,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 50000,
            "layer_norm_eps": 1e-05,
            "layer_switch": 4,
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
        },
    ),
    "gemma-2-9b": (
        "Gemma2",
        9241705984,
        (256000, 3584, 14336, 42, 16, 8, 8192),
        8192,
        [0, 4096],
        1,
        {
            "head_dim": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "phi-2": (
        "Phi",
        2779683840,
        (51200, 2560, 10240, 32, 32, 32, 2048),
        2048,
        [0],
        1,
        {"partial_rotary_factor": 0.4, "rope_theta": 10000.0, "hidden_act": "gelu_new", "layer_norm_eps": 1e-05,
         "qk_layernorm": False},
    ),
    "OLMo-7B": (
        "Olmo",
        6888095744,
        (50304, 4096, 11008, 32, 32, 32, 2048),
        2048,
        [0],
        1,
        {"clip_qkv": None, "rope_theta": 10000.0},
    ),
    "Phi-4": (
        "Phi3",
        14659507200,
        (100352, 5120, 17920, 40, 40, 10, 16384),
        16384,
        [0],
        1,
        {"original_max_position_embeddings": 16384, "rope_theta": 250000, "rope_scaling": None, "sliding_window": None},
    ),
}


@pytest.mark.parametrize("name", list(RELEASED))
def test_released_models(name):
    family, n_parameters, sizes, length, windows, n_ropes, fields = RELEASED[name]
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "torch_dtype": "bfloat16",
        **dict(zip(SIZES, sizes, strict=True)),
        **fields,
    }
    compiled = models.load(SimpleNamespace(kind="hf", directory="hub", weights=[], config=config), None)
    assert sum(weight["rows"] * weight["cols"] for weight in compiled.spec["weights"]) == n_parameters
    assert compiled.config.max_position_embeddings == length
    assert sorted({window for *_, window in compiled.spec["layers"]}) == windows
    assert len(compiled.spec["ropes"]) == n_ropes


@pytest.mark.parametrize(
    ("total", "hidden", "layers", "heads", "kv_heads", "mamba_heads", "inner"),
    [(1291441920, 2048, 16, 16, 1, 32, 8192), (9118372864, 4096, 32, 32, 4, 64, 16384)],
)
def test_plamo2_in_closed_form(total, hidden, layers, heads, kv_heads, mamba_heads, inner):
    """Its parameters and the bytes of its states, counted from the formulas of its layers: half of them recur."""
    size, states, taps, vocab = 128, 64, 4, 100000
    width, rank = mamba_heads * size, max(64, hidden // 16)
    mamba = 3 * width * hidden + width * taps + width * (rank + 2 * states) + rank * mamba_heads + 3 * mamba_heads
    mamba += rank + 2 * states
    attention = 2 * (heads + kv_heads) * size * hidden + (heads + kv_heads) * size
    both = 3 * hidden * inner + 4 * hidden
    assert layers // 2 * (mamba + attention + 2 * both) + vocab * hidden + hidden == total
    config = {
        "architectures": ["Plamo2ForCausalLM"], "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "mamba_num_heads": mamba_heads,
        "intermediate_size": inner,
    }  # fmt: skip
    spec = models.load(SimpleNamespace(kind="hf", directory="hub", weights=[], config=config), None).spec
    assert sum(weight["rows"] * weight["cols"] for weight in spec["weights"]) == total
    assert sum(pieces * floats for pieces, floats in spec["states"]) == layers // 2 * width * (states + taps - 1)
