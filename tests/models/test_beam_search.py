"""Beam search against transformers' generate(num_beams=): equal ids, and scores within 1e-4, on tiny models of six families."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmpy import LLM, BeamSearchParams

tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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


def with_letters(model: Any, folder: Path) -> Any:
    """A copy of a model's folder with a tokenizer whose 96 tokens behind the special ones are a character each."""
    model.model.save_pretrained(folder)
    letters = string.ascii_letters + string.digits + string.punctuation
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *letters, "\u0120", "\u010a"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_stop_strings_and_grammars_as_transformers(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("llama")
    tokenizer, small, large = with_letters(model, tmp_path), range(3, 29), range(29, 55)

    def turns(_: int, ids: Any) -> list[int]:
        return list((small, large)[(len(ids) - len(PROMPT)) % 2])

    with LLM(tmp_path, dtype="float32", device="cpu", max_model_len=64) as llm:
        texts = [one.text for one in llm.beam_search([{"prompt_token_ids": PROMPT}], BeamSearchParams(8, TOKENS))[0].sequences]
    stops = [texts[0][1:3], texts[1][-2], texts[7][2:4]]
    cases: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (8, {"stop": stops, "include_stop_str_in_output": True}, {"stop_strings": stops, "tokenizer": tokenizer}),
        (4, {"structured_outputs": {"regex": "([a-z][A-Z]){40}"}}, {"prefix_allowed_tokens_fn": turns}),
    ]
    reasons: set[Any] = set()
    with LLM(tmp_path, dtype="float32", device="cpu", max_model_len=64) as llm:
        for width, ours, theirs in cases:
            params = BeamSearchParams(width, TOKENS, early_stopping=False, **ours)
            have = llm.beam_search([{"prompt_token_ids": PROMPT}], params)[0].sequences
            with torch.no_grad():
                want = model.model.generate(
                    torch.tensor([PROMPT]), num_beams=width, num_return_sequences=width, max_new_tokens=TOKENS, do_sample=False,
                    early_stopping=False, return_dict_in_generate=True, output_scores=True, eos_token_id=2, pad_token_id=0,
                    **theirs,
                )  # fmt: skip
            for one, row in zip(have, want.sequences.tolist(), strict=True):
                n = len(PROMPT) + len(one.token_ids)
                assert one.tokens == row[:n] and set(row[n:]) <= {0, 2}
            assert [one.score for one in have] == pytest.approx(want.sequences_scores.tolist(), abs=1e-4)
            reasons.update(one.stop_reason for one in have)
    assert reasons > {None} and any(len(reason or "") == 2 for reason in reasons)
