"""compare_logprobs against a plain computation."""

import math

import numpy as np
import pytest

from llmpy import InvalidRequestError
from llmpy.rl import compare_logprobs

ENGINE = [-0.5, -1.0, -2.0, -3.0]
TRAINER = [-0.5, -1.2, -1.9, -3.05]


def test_figures() -> None:
    found = compare_logprobs(ENGINE, TRAINER)
    d = [0.0, -0.2, 0.1, -0.05]
    size = sorted(map(abs, d))
    assert found.mean == pytest.approx(sum(size) / 4)
    assert found.max == pytest.approx(0.2)
    assert found.p95 == pytest.approx(size[2] + 0.85 * (size[3] - size[2]))
    assert found.outside == 0.5  # exp(-0.2) = 0.819, exp(0.1) = 1.105
    assert found.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 4)
    assert found.mean_exp == pytest.approx(sum(math.exp(x) for x in size) / 4)
    assert found.num_tokens == 4


def test_forms_are_one() -> None:
    """Arrays, tensors of any type and lists of unlike lengths are the same numbers."""
    torch = pytest.importorskip("torch")
    whole = compare_logprobs(ENGINE, TRAINER)
    trainer = torch.tensor(TRAINER, dtype=torch.float64, requires_grad=True)
    assert compare_logprobs(np.array(ENGINE).reshape(2, 2), trainer) == whole
    assert compare_logprobs([ENGINE[:1], ENGINE[1:]], [np.array(TRAINER[:1]), trainer[1:]]) == whole
    rounded = compare_logprobs(torch.tensor(ENGINE, dtype=torch.bfloat16), ENGINE)
    assert rounded.max == 0 and rounded.k3 == 0  # these four are bfloat16 numbers


def test_mask() -> None:
    found = compare_logprobs(ENGINE, [-0.5, math.nan, -1.9, 7.0], mask=[[1, 0], [True, False]])
    assert found.num_tokens == 2 and found.max == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1.0], [-1.0, -2.0]), "trainer: wanted 1 values, as engine has, have 2"),
        (([-1.0], [-1.0], [1, 1]), "mask: wanted 1 values, as engine has, have 2"),
        (([], []), "wanted at least one token"),
        (([-1.0], [-1.0], [0]), "wanted at least one token"),
        (([-1.0, -2.0], [-1.0, math.nan]), r"trainer\[1\]: wanted a finite logprob, have nan"),
        (([-math.inf], [-1.0]), r"engine\[0\]: wanted a finite logprob, have -inf"),
        ((["x"], [-1.0]), "engine: wanted numbers"),
    ],
)
def test_refusals(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        compare_logprobs(*arguments)
