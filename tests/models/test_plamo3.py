"""PLaMo 3, which transformers lacks: against our own plain reference, and against Gemma 3 with the same weights."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from modules import load

from llmpy import CheckpointError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
FAR = {"rope_scaling_factor": 4.0, "initial_context_length": 32, "sliding_window": [None, 8, 8, None]}


def reference() -> ModuleType:
    return load(Path(__file__).with_name("plamo3_reference.py"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, object]]:
    def make(**fields: object) -> tuple[Path, object]:
        model, directory = reference().Plamo3({**SIZES, **fields}, seed=len(fields)), tmp_path_factory.mktemp("plamo3")
        model.save(directory)
        return directory, model

    return make


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({**FAR, "tie_word_embeddings": False}, id="far"), {"scale_embedding": True, "sliding_window_pattern": 8}],
)
def test_the_program_is_the_reference(fields, made, oracle, prompts, error_of) -> None:
    directory, model = made(**fields)
    mine = oracle(directory)
    assert mine.compiled.config.max_position_embeddings == 128
    for ids in prompts:
        assert error_of(mine.logits(ids), model.logits(ids)) <= 1e-6


@pytest.mark.parametrize("fields", [{}, {**FAR, "tie_word_embeddings": False}], ids=["plain", "far"])
def test_the_engine_is_the_reference(fields, made, engine, prompts, error_of) -> None:
    """Logprobs alone and in a mixed batch in chunks, the same bits."""
    directory, model = made(**fields)
    with engine(directory) as one:
        alone = [one.run([ids], top=99)[0] for ids in prompts]
    for ids, answer in zip(prompts, alone, strict=True):
        logits = model.logits([*ids, *answer.ids])
        wanted = logits - logits.max(-1, keepdims=True)
        wanted = wanted - np.log(np.exp(wanted).sum(-1, keepdims=True))
        rows, allowed = wanted[len(ids) - 1 : -1], 2e-4 * np.abs(logits).max()
        if len(ids) > 1:
            assert np.abs(answer.table(99) - wanted[: len(ids) - 1]).max() <= allowed
        assert (rows[np.arange(len(rows)), answer.ids] >= rows.max(-1) - allowed).all()
    with engine(directory, max_num_batched_tokens=24, num_threads=1) as chunked:
        mixed = chunked.run(list(reversed(prompts)), top=99)
    for answer, other in zip(alone, reversed(mixed), strict=True):
        assert answer.ids == other.ids and answer.logprobs == other.logprobs
        assert np.array_equal(answer.prompt_top, other.prompt_top)


def test_gemma3_with_the_same_weights(made, prompts, error_of) -> None:
    """Gemma 3 adds 1 to all its norms and scales the embedding: with weights less that, and silu, it is PLaMo 3."""
    _, model = made()
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "pad_token_id": 0, "bos_token_id": 1}, num_hidden_layers=4, head_dim=24, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8, hidden_activation="silu",
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    theirs = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    parts = {
        "input_layernorm": "pre_mixer_norm", "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm", "post_feedforward_layernorm": "post_mlp_norm",
        "self_attn.q_norm": "mixer.q_norm", "self_attn.k_norm": "mixer.k_norm", "self_attn.o_proj": "mixer.o_proj",
        "mlp.down_proj": "mlp.down_proj",
    }  # fmt: skip
    w, state = model.stored, {}
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = w["model.embed_tokens.weight"]
    state["model.norm.weight"] = w["model.norm.weight"]
    for i in range(4):
        for name, mine in parts.items():
            value = w[f"model.layers.layers.{i}.{mine}.weight"]
            state[f"model.layers.{i}.{name}.weight"] = value + (reference().OFFSETS.get(mine, 1.0) - 1) * (value.ndim == 1)
        qkv = np.split(w[f"model.layers.layers.{i}.mixer.qkv_proj.weight"], [96, 144])
        gate_up = np.split(w[f"model.layers.layers.{i}.mlp.gate_up_proj.weight"], 2)
        for name, value in zip("qkv", qkv, strict=True):
            state[f"model.layers.{i}.self_attn.{name}_proj.weight"] = value
        for name, value in zip(("gate", "up"), gate_up, strict=True):
            state[f"model.layers.{i}.mlp.{name}_proj.weight"] = value
    theirs.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()})
    theirs.model.embed_tokens.embed_scale.fill_(1.0)
    for ids in prompts:
        with torch.no_grad():
            logits = theirs(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
        assert error_of(model.logits(ids), logits) <= 1e-4


def test_windows_of_layers_are_checked(made, oracle) -> None:
    directory, _ = made()
    with pytest.raises(CheckpointError, match="sliding_window: wanted a window or null for each of 4 layers"):
        oracle(directory, {"sliding_window": [8, None]})
