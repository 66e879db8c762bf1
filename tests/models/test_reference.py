"""The programs, run by the NumPy interpreter, against transformers in float32 with eager attention."""

import shutil

import numpy as np
import pytest
import transformers

from llmpy.models.config import ModelConfig
from llmpy.models.registry import find

BOUND = 1e-4  # relative to the largest logit


def test_logits_match_transformers(case, tiny, oracle, prompts, error_of):
    model = tiny(case)
    limit = {"max_model_len": 70} if case == "llama-dynamic" else {}
    mine = oracle(model.directory, **limit)
    for ids in prompts[-1:] if limit else prompts:
        assert error_of(mine.logits(ids), model.logits(ids)) <= BOUND


def test_dynamic_rope_within_the_trained_length_is_plain(tiny, oracle, prompts, error_of):
    model = tiny("llama-dynamic")
    mine = oracle(model.directory)
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND
    assert mine.compiled.config.max_position_embeddings == 48


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_and_shards(tiny, oracle, prompts, error_of, dtype):
    model = tiny("qwen2", dtype, shards=3)
    assert len(list(model.directory.glob("*.safetensors"))) >= 3
    mine = oracle(model.directory)
    assert mine.compiled.config.dtype == dtype
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


@pytest.mark.parametrize("case", ["llama", "llama-linear", "llama-llama3", "llama-yarn", "mistral"])
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
    mine = oracle(model.directory, old)
    assert error_of(mine.logits(prompts[2]), model.logits(prompts[2])) <= BOUND


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


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_a_configuration_leaves_out(family):
    """A config.json with nothing but the sizes: what is absent must mean what transformers takes it to mean."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = getattr(transformers, f"{family}Config").from_dict(sizes)
    found = find(f"{family}ForCausalLM")
    mine = ModelConfig({**found.defaults, **sizes, "architectures": [f"{family}ForCausalLM"]}, "config.json")
    for name in ("rms_norm_eps", "hidden_act", "tie_word_embeddings", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert mine.rope.inv_freq[1] == pytest.approx(theirs.rope_parameters["rope_theta"] ** (-2 / mine.head_dim))
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        assert mine.get(name, False) == getattr(theirs, name, False), name
    if family == "Mistral":
        assert mine.get("sliding_window", 0) == theirs.sliding_window
    if family.startswith("Qwen"):
        assert list(mine.layer_windows()) == [0, 0]
        assert mine.get("max_window_layers", 0) == theirs.max_window_layers
