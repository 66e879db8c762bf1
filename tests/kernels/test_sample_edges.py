"""The sampler beyond its fast paths: candidate lists that are too short, and greedy sampling in one pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from binding import Backend

Array = np.ndarray
Open = Callable[..., Backend]
ID, PROCESSED_VALUE, PROCESSED = 0, 4, 2
VOCAB = 9000


def kept(open_backend: Open, logits: Array, targets: list[int], **truncation: Any) -> list[bool]:
    """Whether each of the tokens can be sampled; a removed one has a processed logprob of -inf."""
    tasks = [{"is_score": 1, "target": i, "wants_logprobs": 1, "mode": PROCESSED, **truncation} for i in targets]
    results = open_backend(2, vocab_size=len(logits)).sample(logits[None], tasks)
    return [bool(result[PROCESSED_VALUE] > -np.inf) for result in results]


def descending(step: float) -> Array:
    """Token i lies i * step nats below the most probable one."""
    return (-step * np.arange(VOCAB)).astype(np.float32)


@pytest.mark.parametrize("last", [20, 47, 48, 49, 80, 160, 320])
def test_min_p_reaches_as_far_as_it_says(last: int, open_backend: Open) -> None:
    """min_p far below e^-12, the end of the first candidate list (token 48, for tokens a quarter of a nat apart)."""
    min_p = float(np.exp(-0.25 * (last + 0.5)))
    assert kept(open_backend, descending(0.25), [0, last, last + 1, last + 40], min_p=min_p) == [True, True, False, False]


@pytest.mark.parametrize("order", ["first", "last"])
def test_min_p_is_taken_of_the_most_probable_token(order: str, open_backend: Open) -> None:
    """For any position of the most probable token, and with any other options."""
    logits = descending(0.25) if order == "first" else descending(0.25)[::-1].copy()
    targets = [i if order == "first" else VOCAB - 1 - i for i in (0, 70, 90)]
    for more in ({}, {"top_k": 5000}, {"top_p": 0.9999999}):
        found = kept(open_backend, logits, targets, min_p=float(np.exp(-20.0)), **more)
        assert found[0] and not found[2]
        assert found[1] or "top_p" in more


@pytest.mark.parametrize("top_k", [3, 49, 50, 2000, 8999])
def test_top_k_reaches_beyond_the_first_candidates(top_k: int, open_backend: Open) -> None:
    """Tokens are a quarter of a nat apart, so 49 are within 12 nats."""
    assert kept(open_backend, descending(0.25), [top_k - 1, top_k], top_k=top_k) == [True, False]


def test_top_p_counts_the_mass_of_all_tokens(open_backend: Open) -> None:
    """One token, and 8,999 equal ones 12.5 nats below, which together have 3.2 % of the mass."""
    logits = np.full(VOCAB, -12.5, np.float32)
    logits[17] = 0
    share = (VOCAB - 1) * np.exp(-12.5) / (1 + (VOCAB - 1) * np.exp(-12.5))
    assert 0.03 < share < 0.035
    for top_p, all_kept in ((1 - share - 1e-3, False), (1 - share + 1e-3, True)):
        assert kept(open_backend, logits, [17, 16, 8999], top_p=top_p) == [True, all_kept, all_kept]


def mask_without(ids: list[int]) -> list[int]:
    bits = np.ones(-(-VOCAB // 32) * 32, bool)
    bits[ids] = False
    return [int(word) for word in np.packbits(bits, bitorder="little").view(np.int32)]


def greedy(open_backend: Open, logits: Array, more: dict[str, Any], **limits: Any) -> list[int]:
    """The greedy id without logprobs (sampled in one pass if possible) and with logprobs."""
    found = []
    for threads, wants in ((1, 0), (3, 0), (1, 1)):
        task = {"is_greedy": 1, "wants_logprobs": wants, **more}
        found.append(open_backend(threads, vocab_size=VOCAB).sample(logits[None], [task], **limits)[0][ID])
    return found


def test_greedy_draws_in_one_pass_take_what_is_allowed(open_backend: Open) -> None:
    logits = np.random.default_rng(5).standard_normal(VOCAB).astype(np.float32)
    best, second = (int(i) for i in np.argsort(-logits)[:2])
    assert greedy(open_backend, logits, {}) == [best] * 3
    for more, limits in (
        ({"banned": [best]}, {}),
        ({"mask": mask_without([best])}, {}),
        ({"bias": [(best, -np.inf)]}, {}),
        ({}, {"banned": np.array([best], np.int32)}),
    ):
        assert greedy(open_backend, logits, more, **limits) == [second] * 3
    below = int(np.argmax(logits[:best]))
    assert greedy(open_backend, logits, {}, vocab_limit=best) == [below] * 3


@pytest.mark.parametrize("places", [(0, 1), (3, 4, 5), (4094, 4095, 4096), (4095, 8999), (8998, 8999)])
def test_of_equal_logits_a_greedy_draw_takes_the_lowest_id(places: tuple[int, ...], open_backend: Open) -> None:
    logits = np.random.default_rng(6).uniform(-1, 1, VOCAB).astype(np.float32)
    logits[list(places)] = 2
    assert greedy(open_backend, logits, {}) == [places[0]] * 3


@pytest.mark.parametrize("best", [0, 4095, 4096, 8191, 8192, 8999])
def test_draws_reach_every_chunk_of_the_vocabulary(best: int, open_backend: Open) -> None:
    """One token with all the mass is sampled at any position; with equal tokens every chunk gets its share of samples."""
    logits = np.full(VOCAB, -60, np.float32)
    logits[best] = 0
    tasks = [{"seed": seed} for seed in range(200)]
    for threads in (1, 3):
        backend = open_backend(threads, vocab_size=VOCAB)
        assert {result[ID] for result in backend.sample(logits[None], tasks)} == {best}
        drawn = np.array([result[ID] for result in backend.sample(np.zeros((1, VOCAB), np.float32), tasks)])
        assert np.histogram(drawn, [0, 4096, 8192, VOCAB])[0].min() >= 5  # of 18 in the last one, on average
