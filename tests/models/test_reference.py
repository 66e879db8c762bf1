"""The programs, run by the NumPy interpreter, against transformers in float32 with eager attention."""

import shutil

import numpy as np
import pytest
import transformers

from llmpy import CheckpointError, UnsupportedError
from llmpy.models.config import ModelConfig
from llmpy.models.registry import find

BOUND = 1e-4  # relative to the largest logit


def test_logits_match_transformers(case, tiny, oracle, prompts, error_of):
    model = tiny(case)
    limit = {"max_model_len": 70} if case == "llama-dynamic" else {}
    mine = oracle(model.directory, **limit)
    # Frequencies that depend on the longest served sequence are compared with transformers' at that length.
    for ids in {"llama-dynamic": prompts[3:], "phi3-longrope": prompts[2:]}.get(case, prompts):
        assert error_of(mine.logits(ids), model.logits(ids)) <= BOUND


def test_dynamic_rope_within_the_trained_length_is_plain(tiny, oracle, prompts, error_of):
    model = tiny("llama-dynamic")
    mine = oracle(model.directory)
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND
    assert mine.compiled.config.max_position_embeddings == 48


def test_longrope_within_the_trained_length_takes_the_short_factors(tiny, oracle, prompts, error_of):
    model = tiny("phi3-longrope")
    short, long = (oracle(model.directory, max_model_len=length) for length in (16, 17))
    assert error_of(short.logits(prompts[1]), model.logits(prompts[1])) <= BOUND
    assert error_of(long.logits(prompts[1]), model.logits(prompts[1])) > 100 * BOUND
    assert short.compiled.config.max_position_embeddings == long.compiled.config.max_position_embeddings == 128


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_and_shards(tiny, oracle, prompts, error_of, dtype):
    model = tiny("qwen2", dtype, shards=3)
    assert len(list(model.directory.glob("*.safetensors"))) >= 3
    mine = oracle(model.directory)
    assert mine.compiled.config.dtype == dtype
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


@pytest.mark.parametrize("case", ["llama", "llama-linear", "llama-llama3", "llama-yarn", "mistral", "phi3-longrope"])
def test_fields_of_transformers_4(case, tiny, oracle, prompts, error_of):
    """The same model with rope_theta, rope_scaling and "type", as most files on the hub have them."""
    model = tiny(case)
    config = model.config
    scaling = {("type" if key == "rope_type" else key): value for key, value in config.pop("rope_parameters").items()}
    old = {
        "rope_parameters": None,
        "rope_theta": scaling.pop("rope_theta"),
        "rope_scaling": None if scaling["type"] == "default" else scaling,
    }
    if case == "phi3-longrope":
        scaling["type"] = "su"
        old |= {name: scaling.pop(name) for name in ("partial_rotary_factor", "original_max_position_embeddings")}
    mine = oracle(model.directory, old)
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


@pytest.mark.parametrize("case", ["gemma3", "olmo3"])
def test_ropes_of_two_kinds_in_fields_of_transformers_4(case, tiny, oracle, prompts, error_of):
    model = tiny(case)
    full = model.config["rope_parameters"]["full_attention"]
    old = {"rope_parameters": None, "rope_theta": full.pop("rope_theta"), "rope_scaling": full}
    mine = oracle(model.directory, old | ({"rope_local_base_freq": 10000.0} if case == "gemma3" else {}))
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


def test_lengths_that_count_the_scaling_of_the_rope(tiny, oracle):
    """Gemma 3's length includes rope scaling; Llama's does not."""
    for case, length in {"gemma3": 128, "llama-linear": 512}.items():
        assert oracle(tiny(case).directory).compiled.config.max_position_embeddings == length


def test_factors_of_granite_with_a_branch_of_any_size(tiny, oracle, prompts):
    """Rows are kept divided by the branches' factor: the same function for every factor, eps included."""
    for eps in (1e-6, 0.5):
        model = tiny("granite", residual_multiplier=0.3, rms_norm_eps=eps)
        mine, theirs = oracle(model.directory).logits(prompts[1]), model.logits(prompts[1])
        assert np.abs(mine - theirs).max() <= BOUND * np.abs(theirs).max()


def test_internlm3_is_llama_with_other_names_of_its_flags(tiny, oracle, prompts, error_of):
    model = tiny("llama-bias")
    fields = {"architectures": ["InternLM3ForCausalLM"], "attention_bias": None, "mlp_bias": None}
    mine = oracle(model.directory, {**fields, "qkv_bias": True, "bias": True})
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND
    with pytest.raises(CheckpointError, match=r"self_attn\..*bias \[.*has no place in InternLM3"):
        oracle(model.directory, {**fields, "qkv_bias": False, "bias": True})


def test_minicpm_is_granite_with_other_factors(tiny, oracle, prompts, error_of):
    model = tiny("granite", attention_multiplier=0.25, residual_multiplier=1.4 / 2**0.5, logits_scaling=4.0)
    fields = {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 2, "scale_depth": 1.4, "dim_model_base": 16}
    mine = oracle(model.directory, fields)
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND
    with pytest.raises(UnsupportedError, match=r"sparse_config=.* is not supported by MiniCPM"):
        oracle(model.directory, {**fields, "sparse_config": {"kernel_size": 32}})


def test_yarn_without_a_factor_takes_the_ratio_of_lengths(tiny, oracle):
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    directory = tiny("llama-yarn").directory
    config = oracle(directory, {"rope_parameters": parameters}).compiled.config
    given = oracle(directory, {"rope_parameters": {**parameters, "factor": 4.0}}).compiled.config
    assert np.array_equal(config.rope.inv_freq, given.rope.inv_freq)
    assert config.max_position_embeddings == given.max_position_embeddings == 128


def test_a_head_stored_beside_a_tied_one_is_ignored(tiny, oracle, prompts, error_of, tmp_path):
    from safetensors.numpy import load_file, save_file

    model = tiny("llama-tied")
    tensors = load_file(model.directory / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = np.full((99, 64), 9, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(model.directory / "config.json", tmp_path)
    assert error_of(oracle(tmp_path).logits(prompts[1]), model.logits(prompts[1])) <= BOUND


def test_gpt2_as_it_was_released(tiny, oracle, prompts, error_of, tmp_path):
    """GPT-2's original checkpoint: names without a prefix, and masks."""
    from safetensors.numpy import load_file, save_file

    model = tiny("gpt2")
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(model.directory / "model.safetensors").items()}
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 128, 128), np.float32), "h.1.attn.masked_bias": np.float32([-1e4])}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(model.directory / "config.json", tmp_path)
    assert error_of(oracle(tmp_path).logits(prompts[1]), model.logits(prompts[1])) <= BOUND


FAMILIES = (
    "Arcee Cohere Cohere2 Ernie4_5 Ernie4_5_Moe Exaone4 Gemma Gemma2 Gemma3 Glm Glm4 Glm4Moe Granite GraniteMoe Llama Mistral "
    "Mixtral Nemotron Olmo2 Olmo3 Olmoe Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 StableLm"
)


@pytest.mark.parametrize("family", FAMILIES.split())
def test_what_a_configuration_leaves_out(family):
    """A config.json with only the sizes: absent fields must have transformers' defaults."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = getattr(transformers, f"{'Gemma3Text' if family == 'Gemma3' else family}Config").from_dict(sizes)
    found = find(f"{family}ForCausalLM")
    mine = ModelConfig({**found.defaults, **sizes, "architectures": [f"{family}ForCausalLM"]}, "config.json")
    eps = {"StableLm": "layer_norm_eps", "Cohere": "layer_norm_eps", "Cohere2": "layer_norm_eps", "Nemotron": "norm_eps"}
    assert mine.need(eps.get(family, "rms_norm_eps"), float) == getattr(theirs, eps.get(family, "rms_norm_eps"))
    for name in ("tie_word_embeddings", "max_position_embeddings"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.num_key_value_heads == (theirs.num_key_value_heads or 4)
    if "Gemma" not in family:
        assert mine.hidden_act == theirs.hidden_act
    assert mine.head_dim == (getattr(theirs, "head_dim", None) or 16)
    full = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    n_dims = int(mine.head_dim * full.get("partial_rotary_factor", 1))
    assert mine.rope.inv_freq[1] == pytest.approx(full["rope_theta"] ** (-2 / n_dims))
    assert (mine.raw.get("logit_scale") or 1) == (getattr(theirs, "logit_scale", None) or 1)
    given = ("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "original_max_position_embeddings")
    for name in given:
        assert (mine.raw.get(name) or 256) == (getattr(theirs, name, None) or 256), name
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        assert mine.get(name, False) == getattr(theirs, name, False), name
    if family in ("Mistral", "Olmo3", "Exaone4", "Gemma2", "Gemma3", "Cohere2"):
        assert mine.get("sliding_window", 0) == theirs.sliding_window
    if family.startswith("Qwen") and family != "Qwen3Moe":
        assert list(mine.layer_windows()) == [0, 0]
        assert mine.get("max_window_layers", 0) == theirs.max_window_layers
