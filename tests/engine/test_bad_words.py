"""Sequences of ids that are never completed, of every length: the ids before the last decide whether the last is banned."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmpy import LLM

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(device: str, tiny_model: Callable[[str, str], Path]) -> Iterator[LLM]:
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 64, "device": device}
    with LLM(tiny_model("llama", "float32"), **options) as llm:
        yield llm


def drawn(llm: LLM, prior: list[int] | None = None, **fields: object) -> list[int]:
    """Twelve ids after the prompt, including prior output."""
    prompt = {"prompt_token_ids": PROMPT, **({"output_token_ids": prior} if prior else {})}
    params = {"seed": 3, "temperature": 1.5, "max_tokens": 12, "ignore_eos": True, "use_tqdm": False, **fields}
    return [*(prior or []), *llm.generate([prompt], **params)[0].token_ids]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 12])
def test_the_last_id_of_a_bad_word_is_banned_behind_all_others(length: int, llm: LLM) -> None:
    free = drawn(llm)
    for start in range(0, 13 - length, 3):
        word = free[start : start + length]
        given = drawn(llm, bad_token_ids=[word])
        first = next(at for at in range(13 - length) if free[at : at + length] == word)
        assert given[: first + length - 1] == free[: first + length - 1]
        assert given[first + length - 1] != word[-1]
        assert all(given[at : at + length] != word for at in range(13 - length))


@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_a_word_of_which_one_id_differs_bans_nothing(length: int, llm: LLM) -> None:
    free = drawn(llm)
    for place in range(length - 1):
        words = []
        for start in range(13 - length):
            word = free[start : start + length]
            word[place] = next(other for other in range(3, 131) if other not in free)
            words.append(word)
        assert drawn(llm, bad_token_ids=words) == free


def test_given_output_takes_part_in_a_bad_word(llm: LLM) -> None:
    free = drawn(llm)
    for cut in (1, 3, 4, 5):
        rest = drawn(llm, free[:cut], bad_token_ids=[free[:6]])
        assert rest[:5] == free[:5]
        assert rest[5] != free[5]
