"""Facts that a plan must not change: a norm's eps, the half of a linear that is the gate, the computed rows."""

import json
import shutil

import numpy as np
import pytest

from llmpy.models import registry

BOUND = 1e-4  # of a logit, relative to the largest


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check(answer, ids, reference):
    """Greedy tokens and their logprobs against the oracle, and the prompt's logprobs where there are any."""
    logits = reference.logits([*ids, *answer.ids])
    allowed = 2 * BOUND * np.abs(logits).max()
    wanted = log_softmax(logits)
    rows = wanted[len(ids) - 1 : -1]
    chosen = rows[np.arange(len(rows)), answer.ids]
    assert (chosen >= rows.max(-1) - allowed).all()
    assert np.abs(chosen - answer.logprobs).max() <= allowed
    if len(answer.prompt):
        assert np.abs(answer.prompt - wanted[np.arange(len(ids) - 1), ids[1:]]).max() <= allowed


@pytest.mark.parametrize("eps", [0.5, 3.0])
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2"])
def test_a_fused_norm_keeps_its_eps(case, eps, tiny, oracle, engine, prompts, tmp_path):
    path = shutil.copytree(tiny(case).directory, tmp_path / case)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": eps}))
    reference = oracle(path, max_model_len=128)
    with engine(path) as llm:
        for ids in prompts[:3]:
            check(llm.run([ids], top=1)[0], ids, reference)


def without_prompt_logprobs(llm, ids):
    """Ids and logprobs of a request that needs only the last row's logits."""
    params = {"temperature": 0.0, "max_tokens": 8, "seed": 0, "logprobs": 0}
    llm.engine.submit(np.asarray(ids, np.int32).tobytes(), params)
    found, values = [], []
    while llm.engine.has_unfinished():
        llm.engine.run(1000)
        for output in llm.engine.take(False):
            found += np.frombuffer(output["ids"], np.int32).tolist()
            values += np.frombuffer(output["logprobs"][0], np.float32).tolist()
    return found, values


@pytest.mark.parametrize("case", ["llama", "mistral", "phi", "mamba2", "jamba-plain"])
def test_rows_are_left_out_only_behind_what_crosses_rows(case, tiny, engine, prompts):
    """Keys, values and states of every row are needed, even if only the last row's logits are wanted."""
    with engine(tiny(case).directory) as llm:
        for ids in prompts:
            every_row = llm.run([ids], max_tokens=8, top=1)[0]
            assert without_prompt_logprobs(llm, ids) == (every_row.ids, every_row.logprobs)


SWAPPED = '''
"""A Llama with the upper half first in its MLP."""
from llmpy import architecture

@architecture("SwappedForCausalLM")
def swapped(cfg, m):
    q, kv, eps = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim, cfg.rms_norm_eps
    x = m.embed("model.embed_tokens")
    for block in m.layers("model.layers", cfg.num_layers):
        h = block.rms_norm(x, "input_layernorm.weight", eps)
        a, b, c = (block.linear(h, f"self_attn.{name}_proj", width) for name, width in (("q", q), ("k", kv), ("v", kv)))
        a, b = block.rope(a, b, cfg.rope)
        x = x + block.linear(block.attention(a, b, c), "self_attn.o_proj", cfg.hidden_size)
        h = block.rms_norm(x, "post_attention_layernorm.weight", eps)
        up, gate = block.linear(h, "mlp.up_gate", [cfg.intermediate_size] * 2)
        x = x + block.linear(block.gated(gate, up, "silu"), "mlp.down_proj", cfg.hidden_size)
    m.logits(m.rms_norm(x, "model.norm.weight", eps), "lm_head", tied_to="model.embed_tokens")
'''


def test_the_gate_may_lie_behind_its_factor(load_module, tiny, engine, prompts, tmp_path):
    """The product of two halves of one linear is fused only if the gate is the first half."""
    from safetensors.numpy import load_file, save_file

    source = tiny("llama").directory
    weights = load_file(source / "model.safetensors")
    for layer in range(2):
        up, gate = (weights.pop(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("up", "gate"))
        weights[f"model.layers.{layer}.mlp.up_gate.weight"] = np.concatenate([up, gate])
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SwappedForCausalLM"]}))
    try:
        load_module(SWAPPED)
        with engine(source) as plain, engine(tmp_path) as swapped:
            first, second = (llm.run(prompts, top=1) for llm in (plain, swapped))
        for a, b in zip(first, second, strict=True):
            assert (a.ids, a.logprobs, a.prompt.tolist()) == (b.ids, b.logprobs, b.prompt.tolist())
    finally:
        registry._REGISTRY.pop("SwappedForCausalLM", None)
