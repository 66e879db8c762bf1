"""Live updates of every family from a model of transformers as it is, and of GGUF files as far as they allow it."""

import pytest

from llmpy import LLM, SamplingParams, UnsupportedError, WeightUpdateError

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
    fresh.close()
    llm.close()


def test_buffers_that_are_weights_are_asked_for(tiny, prompts, device):
    """Apertus: two numbers of its activation are no parameters."""
    model = tiny("apertus")
    fresh, llm = (LLM(model.directory, device=device, load_format=form, **OPTIONS) for form in ("auto", "dummy"))
    with pytest.raises(WeightUpdateError, match=r"mlp.act_fn.beta.*mlp.act_fn.eps.* partial=True"):
        llm.update_weights(model.model.named_parameters())
    assert llm.update_weights(model.model.state_dict()).missing == []
    assert outcome(llm, prompts) == outcome(fresh, prompts)
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
    for kind, text in {"F32": None, "Q8_0": r"'model\.embed_tokens\.weight' is stored as q8_0, which updates"}.items():
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
    """transformers keeps the experts of most families stacked in memory, its files have them one by one."""
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
