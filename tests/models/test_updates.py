"""Live updates of every family from an unchanged transformers model, and of GGUF files that can be updated."""

import shutil

import numpy as np
import pytest

from llmpy import LLM, SamplingParams, UnsupportedError, WeightUpdateError
from llmpy.weights.updates import stored_tensors

CASES = ["llama", "llama-bias", "llama-tied", "mistral", "qwen2", "qwen3", "qwen3-window", "phi3", "nemotron", "gpt2", "cohere"]
MORE = ["arcee", "exaone4", "gemma", "gemma3", "glm4", "granite", "olmo2", "olmo3", "phi3-longrope", "smollm3", "stablelm",
        "codegen", "gpt_bigcode-heads"]
MORE += ["olmo", "phi", "phi-norms", "stablelm-norms", "cohere2"]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in MORE]
OPTIONS = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "generation_config": "none"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)


def outcome(llm, prompts):
    return [
        (output.outputs[0].token_ids, output.outputs[0].sampled.raw.tobytes()) for output in llm.generate(prompts, GREEDY)
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_trainers_model(case, tiny, prompts, device):
    model = tiny(case)
    fresh = LLM(model.directory, device=device, **OPTIONS)
    llm = LLM(model.directory, device=device, load_format="dummy", **OPTIONS)
    assert llm.weight_version == "dummy"
    before = outcome(llm, prompts)
    report = llm.update_weights(model.model.named_parameters(), version="trained")
    assert report.missing == [] and report.num_tensors == len(llm.weight_info())
    assert outcome(llm, prompts) == outcome(fresh, prompts) != before
    assert llm.weight_checksum() == fresh.weight_checksum()
    # The whole state, with tied aliases and buffers; what has no weight is listed.
    state = model.model.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": 0}
    report = llm.update_weights(state)
    assert set(report.skipped) == set(state) - {info["name"] for info in llm.weight_info()}
    assert outcome(llm, prompts) == outcome(fresh, prompts)
    if device.startswith("cpu"):
        report = llm.update_weights(model.model.named_parameters(), borrow=True)
        ends = (".v_proj.weight", ".down_proj.weight")
        separate = {name for name, _ in model.model.named_parameters() if name.endswith(ends)}
        assert set(report.borrowed) >= separate and llm.memory()["weights"] < fresh.memory()["weights"]
        assert outcome(llm, prompts) == outcome(fresh, prompts) and llm.weight_checksum() == fresh.weight_checksum()
    fresh.close()
    llm.close()


def test_buffers_that_are_constants_keep_their_values(tiny, prompts, device, tmp_path):
    """Apertus: two numbers of its activation are not parameters, so an update may include or leave out them."""
    from safetensors.torch import save_file

    model = tiny("apertus").model
    buffers = [name for name, _ in model.named_buffers() if name.endswith(("beta", "eps"))]
    assert len(buffers) == 4
    shutil.copy(tiny("apertus").directory / "config.json", tmp_path)
    others = {name: 0.25 * tensor if name in buffers else 1.1 * tensor for name, tensor in model.state_dict().items()}
    save_file(others, tmp_path / "model.safetensors")
    fresh = LLM(tiny("apertus").directory, device=device, **OPTIONS)
    wanted = outcome(fresh, prompts)
    for form in ("dummy", "auto"):
        llm = LLM(tiny("apertus").directory, device=device, load_format=form, **OPTIONS)
        report = llm.update_weights(model.named_parameters())
        assert report.missing == [] and report.num_tensors == len(llm.weight_info()) - len(buffers)
        assert outcome(llm, prompts) == wanted
        llm.close()
    # Those of the file stay, until an update brings others.
    llm, other = (LLM(tmp_path, device=device, **OPTIONS) for _ in range(2))
    llm.update_weights(model.named_parameters())
    assert outcome(llm, prompts) != wanted and llm.weight_checksum(buffers) == other.weight_checksum(buffers)
    llm.update_weights(model.state_dict())
    llm.update_weights(model.named_parameters())
    assert outcome(llm, prompts) == wanted and llm.weight_checksum() == fresh.weight_checksum()
    for each in (fresh, llm, other):
        each.close()


@pytest.mark.parametrize("case", ["apertus", "bloom", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_constants_survive_deep_sleep(case, tiny, prompts, device):
    """Level 2 frees all weights, and a trainer sends only parameters afterwards. Slopes and factors of
    columns are not tensors at all."""
    model = tiny(case)
    llm = LLM(model.directory, device=device, load_format="dummy", **OPTIONS)
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(model.model.named_parameters())
    fresh = LLM(model.directory, device=device, **OPTIONS)
    assert outcome(llm, prompts) == outcome(fresh, prompts)
    llm.close()
    fresh.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_with_rows_of_length_1(dtype, tiny, prompts, device):
    """Baichuan 2: an update's head is normalised like the checkpoint's head at load."""
    model = tiny("baichuan2")
    fresh, llm = (LLM(model.directory, device=device, load_format=form, dtype=dtype, **OPTIONS) for form in ("auto", "dummy"))
    tensors = dict(stored_tensors(model.directory))
    assert llm.update_weights(tensors).missing == []
    wanted = outcome(fresh, prompts)
    assert outcome(llm, prompts) == wanted and llm.weight_checksum() == fresh.weight_checksum()
    # A head that is only longer is the same; one that is not written again is not divided again.
    head = np.frombuffer(tensors["lm_head.weight"][0].read_float32("lm_head.weight"), np.float32).reshape(99, 64)
    llm.update_weights({"lm_head.weight": 4 * head}, partial=True)
    assert outcome(llm, prompts) == wanted
    llm.update_weights({"model.norm.weight": tensors["model.norm.weight"]}, partial=True)
    assert llm.weight_checksum() == fresh.weight_checksum()
    with pytest.raises(UnsupportedError, match=r"'lm_head\.weight': its rows are divided by their lengths"):
        llm.compare_weights(tensors)
    assert llm.compare_weights(tensors, rename=lambda name: None if name == "lm_head.weight" else name).different == []
    fresh.close()
    llm.close()


def test_a_model_without_a_head(tiny, prompts, device, tmp_path):
    base = tiny("qwen3").model.model
    base.save_pretrained(tmp_path)
    fresh = LLM(tmp_path, device=device, **OPTIONS)
    llm = LLM(tmp_path, device=device, load_format="dummy", **OPTIONS)
    assert [info["name"] for info in llm.weight_info()] == [info["name"] for info in fresh.weight_info()]
    llm.update_weights(base.named_parameters())
    assert llm.embed(prompts).numpy().tobytes() == fresh.embed(prompts).numpy().tobytes()
    fresh.close()
    llm.close()


def test_gguf(tiny, gguf_of, prompts, device, tmp_path):
    model = tiny("qwen2", hidden_size=64, intermediate_size=96)
    refused = r"'model\.embed_tokens\.weight' is stored as q5_1, which updates"
    for kind, text in {"F32": None, "Q8_0": None, "Q5_1": refused}.items():
        llm = LLM(gguf_of(model, tmp_path / f"{kind}.gguf", kind), device=device, **OPTIONS)
        before = outcome(llm, prompts)
        if text is None:
            llm.update_weights(dict(model.model.named_parameters()))
        else:
            with pytest.raises(UnsupportedError, match=text):
                llm.update_weights(dict(model.model.named_parameters()))
        assert outcome(llm, prompts) == before
        llm.close()
    llm = LLM(gguf_of(tiny("llama"), tmp_path / "llama.gguf", "F32"), device=device, **OPTIONS)
    with pytest.raises(UnsupportedError, match="orders the rows of q and k"):
        llm.begin_update()
    llm.close()


MIXTURES = ["granite_moe", "glm4_moe", "ernie4_5_moe-bias", "jamba", "nemotron_h", "nemotron_h-latent", "gpt_oss", "llama4"]
MIXTURES += ["qwen3_next"]


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", *(pytest.param(case, marks=pytest.mark.slow) for case in MIXTURES)])
def test_experts_under_the_names_of_the_checkpoint_and_of_the_memory(case, tiny, prompts, device):
    """transformers stacks the experts of most families in memory; its files store them one by one."""
    from safetensors.torch import load_file

    model = tiny(case)
    fresh = LLM(model.directory, device=device, **OPTIONS)
    wanted = outcome(fresh, prompts)
    state = model.model.state_dict()
    for source in (load_file(model.directory / "model.safetensors"), state, iter(state.items())):
        llm = LLM(model.directory, device=device, load_format="dummy", **OPTIONS)
        before = outcome(llm, prompts)
        assert llm.update_weights(source).missing == []
        assert outcome(llm, prompts) == wanted != before
        assert llm.weight_checksum() == fresh.weight_checksum()
        if source is state and device.startswith("cpu"):
            assert any("experts.1." in name for name in llm.update_weights(state, borrow=True).borrowed)
            assert outcome(llm, prompts) == wanted and llm.weight_checksum() == fresh.weight_checksum()
        llm.close()
    fresh.close()


def test_half_of_the_experts_are_not_all(tiny, device):
    """A stacked tensor of too few experts, and an update without one of the two, are refused by name."""
    state = tiny("mixtral").model.state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    llm = LLM(tiny("mixtral").directory, device=device, **OPTIONS)
    with pytest.raises(WeightUpdateError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        llm.update_weights({**state, name: state[name][:2]})
    with pytest.raises(WeightUpdateError, match=r"layers\.1\.block_sparse_moe\.experts\.0\.w1\.weight"):
        llm.update_weights({other: tensor for other, tensor in state.items() if other != name})
    llm.close()
