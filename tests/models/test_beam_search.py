"""Beam search against transformers' generate(num_beams=): equal ids, and scores within 1e-4, on tiny models of six families."""

from collections.abc import Callable
from typing import Any

import pytest

from llmpy import LLM, BeamSearchParams

torch = pytest.importorskip("torch")

FAMILIES = ["llama", "qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "olmo2", "phi3", "glm"))]
PROMPT = [5, 17, 40, 3, 88, 61, 9]
TOKENS = 10
CASES: list[tuple[int, float, bool | str]] = [
    (1, 1.0, "never"), (2, 1.0, "never"), (4, 0.0, False), (8, 1.0, "never"), (4, 2.0, True), (8, -0.7, False),
    (4, 0.4, "never"),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, tiny: Callable[..., Any]) -> None:
    model = tiny(family)
    ends = 0
    with LLM(model.directory, skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64) as llm:
        for width, penalty, early in CASES:
            params = BeamSearchParams(width, TOKENS, length_penalty=penalty, early_stopping=early)
            have = llm.beam_search([PROMPT], params)[0].sequences
            with torch.no_grad():
                want = model.model.generate(
                    torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=TOKENS, do_sample=False,
                    length_penalty=penalty, early_stopping=early, return_dict_in_generate=True, output_scores=True,
                    eos_token_id=2, pad_token_id=0,
                )  # fmt: skip
            assert len(have) == width
            for i, one in enumerate(have):
                ids = want.sequences[i, len(PROMPT) :].tolist()
                ids = ids[: ids.index(2) + 1] if 2 in ids else ids
                assert one.token_ids == ids, (family, width, penalty, early, i)
                ends += one.finish_reason == "stop"
                if width > 1:  # transformers is greedy with one beam, without scores
                    assert one.score == pytest.approx(float(want.sequences_scores[i]), abs=1e-4)
    assert ends or family != "llama"
