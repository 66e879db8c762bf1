"""For any configuration or metadata, loading quickly gives a program or one of our errors."""

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpy import LlmpyError, models


def names(text):
    return st.sampled_from(text.split())


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(-(2**63), 2**64),
    st.floats(),
    st.sampled_from(
        ["", "yarn", "llama3", "dynamic", "linear", "full_attention", "silu", [], [4], [4, 2], {}, {"a": {}}]
    ),
)
JSON_VALUES = VALUES | st.just(10**400)
FIELDS = names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps hidden_act max_position_embeddings "
    "tie_word_embeddings attention_bias mlp_bias sliding_window use_sliding_window max_window_layers "
    "layer_types architectures eos_token_id rope_theta rope_scaling rope_parameters "
    "partial_rotary_factor original_max_position_embeddings quantization_config dtype sliding_window_pattern no_rope_layers "
    "no_rope_layer_interval residual_multiplier logits_scaling query_pre_attn_scalar rope_local_base_freq hidden_activation"
)
ROPE = st.dictionaries(
    names(
        "rope_type type rope_theta factor low_freq_factor high_freq_factor "
        "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim attention_factor "
        "truncate partial_rotary_factor short_factor long_factor full_attention sliding_attention"
    ),
    JSON_VALUES,
)
FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def loads_or_refuses(files, checkpoint):
    try:
        compiled = models.load(files, checkpoint)
        assert compiled.config.max_position_embeddings >= 1 and compiled.config.eos_token_ids is not None
    except LlmpyError as error:
        assert str(error)


@pytest.mark.parametrize(
    "case", ["llama-yarn", "mistral", "qwen3-window", "phi3-longrope", "gemma3", "granite", "smollm3", "cohere2"]
)
@given(changes=st.dictionaries(FIELDS, JSON_VALUES, max_size=3), rope=st.none() | ROPE)
@FAST
def test_configurations(tiny, files_of, host_checkpoint, case, changes, rope):
    files = files_of(tiny(case).directory)
    checkpoint = host_checkpoint(files.weights)
    files.config = {**copy.deepcopy(files.config), **changes, **({} if rope is None else {"rope_parameters": rope})}
    loads_or_refuses(files, checkpoint)


KEYS = names(
    "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon attention.sliding_window rope.freq_base rope.dimension_count "
    "rope.scaling.type rope.scaling.factor rope.scale_linear vocab_size "
    "rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.yarn_beta_fast "
    "expert_count"
)


@given(changes=st.dictionaries(KEYS, VALUES, max_size=3), drop=st.none() | KEYS)
@FAST
def test_metadata(tiny, gguf_of, files_of, host_checkpoint, tmp_path_factory, changes, drop):
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    if not path.exists():
        gguf_of(tiny("llama"), path, "F32")
    checkpoint = host_checkpoint([path])
    checkpoint.metadata.pop(f"llama.{drop}", None)
    checkpoint.metadata |= {f"llama.{key}": value for key, value in changes.items()}
    loads_or_refuses(files_of(path), checkpoint)
