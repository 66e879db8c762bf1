"""Converted classes of transformers: the logits are those of transformers, or of the written program, in every batch."""

from pathlib import Path

import numpy as np
import pytest
from modules import load

from llmpy import LLM
from llmpy.models import registry

helpers = load(Path(__file__).with_name("conftest.py"))

UNKNOWN = {
    "hunyuan_v1_dense": {},
    "mellum": {},
    "biogpt": {},
    "helium": {},
    "flex_olmo": {},
    "hyperclovax": {},
    "ministral": {},
    "granite_swa": {},
    "granitemoeshared": {},
    "cwm": {},
    "jais2": {},
    "bitnet": {},
    "vaultgemma": {},
    "cohere2_moe": {},
    "minimax_m2": {},
    "dots1": {},
    "solar_open": {},
    "exaone_moe": {},
    "hy_v3": {},
    "hunyuan_v1_moe": {},
    "persimmon": {},
    "nanochat": {},
    "afmoe": {},
}
"""Model types that the registry does not have -> changes of the tiny configuration. Those after the second are slow tests."""

KNOWN = {
    "qwen3_moe": {"norm_topk_prob": True},
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 6},
    "olmo2": {},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.25},
    "mixtral": {},
    "gpt_oss": {},
    "cohere2": {"num_hidden_layers": 4},
    "gpt2": {},
    "smollm3": {},
    "glm4": {},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "qwen3": {},
}
"""Model types that the registry has, likewise. Those after the first are slow tests."""
OTHER_SUMS = ("gpt_neox",)  # the class adds attention and MLP before the residual; the written function adds them in turn


def some(table: dict[str, dict[str, object]], n: int) -> list[object]:
    """The rows of a table as parameters, the first n of them in every run."""
    return [
        pytest.param(kind, changes, id=kind, marks=[] if i < n else [pytest.mark.slow])
        for i, (kind, changes) in enumerate(table.items())
    ]


@pytest.mark.parametrize(("kind", "changes"), some(UNKNOWN, 2))
def test_logits_are_those_of_transformers(kind, changes, converted) -> None:
    found = converted(kind, **changes)
    assert registry.lookup(found.raw["architectures"][0]) is None
    with LLM(found.path, **helpers.OPTIONS) as llm:
        logits = llm.tap([helpers.IDS], ["logits"])[0]["logits"].astype(np.float64)
        alone = helpers.generated(llm, [helpers.IDS])[0]
        among = helpers.generated(llm, [[4, 8], helpers.IDS, [50, 51, 52], helpers.IDS[::-1]])[1]
    mine = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = helpers.expected(found.model, helpers.IDS)
    assert np.abs(mine - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert alone == among
    with LLM(found.path, **helpers.OPTIONS, max_num_batched_tokens=5, max_num_seqs=2, enable_prefix_caching=False) as llm:
        assert helpers.generated(llm, [helpers.IDS[:3], helpers.IDS])[1] == alone


@pytest.mark.parametrize(("kind", "changes"), some(KNOWN, 1))
def test_a_converted_program_equals_the_written_one(kind, changes, converted, monkeypatch) -> None:
    found = converted(kind, **changes)
    prompts = [helpers.IDS, [9, 3], helpers.IDS[::-1]]
    with LLM(found.path, **helpers.OPTIONS) as llm:
        written = [helpers.generated(llm, prompts), llm.tap([helpers.IDS], ["logits"])[0]["logits"].tobytes()]
    monkeypatch.setattr(registry, "lookup", lambda name: None)
    with LLM(found.path, **helpers.OPTIONS) as llm:
        own = [helpers.generated(llm, prompts), llm.tap([helpers.IDS], ["logits"])[0]["logits"].tobytes()]
    if kind in OTHER_SUMS:
        a, b = (np.frombuffer(logits, np.float32) for _, logits in (own, written))
        assert 0 < np.abs(a - b).max() <= 1e-6 * np.abs(b).max()
    else:
        assert own == written
