"""Runs tasks on a model and counts right answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import InvalidRequestError
from .tasks import TASKS, Item

if TYPE_CHECKING:
    from .. import LLM


class Model(Protocol):
    """What a task asks of a model."""

    def logprobs(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Logprob of each continuation behind its prompt: the sum over its tokens, in nats."""

    def complete(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        """Greedy continuation of each prompt, up to a line break or `max_tokens`."""


class Result(NamedTuple):
    """The score of one task.

    Attributes:
        task: Its name.
        score: Share of right answers, 0 to 1.
        error: Standard error of the score: sqrt(score (1 - score) / items).
        answers: The model's answer to every item.
        is_right: Whether each is right.
    """

    task: str
    score: float
    error: float
    answers: list[str]
    is_right: list[bool]


class EngineModel:
    """An engine as the tasks' model.

    Args:
        llm: An engine that generates.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def logprobs(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        scores = self.llm.score([prompt for prompt, _ in pairs], [text for _, text in pairs], use_tqdm=False)
        return [score.sum_logprob for score in scores]

    def complete(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        from .. import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="\n")
        return list(self.llm.generate(list(prompts), params, use_tqdm=False).texts)


def evaluate(model: LLM | Model, tasks: Sequence[str] = tuple(TASKS), limit: int | None = None) -> list[Result]:
    """Scores a model on built-in tasks.

    Args:
        model: An engine, or another object with `logprobs` and `complete`.
        tasks: Names of tasks; default: all.
        limit: Ask the first so many items of each; None = all 100.

    Returns:
        One Result per task, in order.

    Raises:
        InvalidRequestError: There is no task of a name.

    Example:
        >>> [(one.task, one.score) for one in evaluate(llm, ["copying"])]
    """
    for name in tasks:
        if name not in TASKS:
            known = ", ".join(TASKS)
            raise InvalidRequestError(f"tasks: there is no built-in task {name!r}; have {known}", parameter="tasks", value=name)
    from .. import LLM

    asked: Model = EngineModel(model) if isinstance(model, LLM) else model
    return [_evaluate(asked, name, TASKS[name].items(limit)) for name in tasks]


def _evaluate(model: Model, name: str, items: list[Item]) -> Result:
    task = TASKS[name]
    if items and items[0].choices:
        pairs = [(item.prompt, choice) for item in items for choice in item.choices]
        logprobs = iter(model.logprobs(pairs))
        found = [{choice: next(logprobs) for choice in item.choices} for item in items]
        answers = [max(one, key=lambda choice, one=one: one[choice]) for one in found]  # type: ignore[misc]
    else:
        answers = [text.partition("\n")[0] for text in model.complete([item.prompt for item in items], task.max_tokens)]
    right = [task.is_right(answer, item.answer) for answer, item in zip(answers, items, strict=True)]
    score = sum(right) / max(len(right), 1)
    return Result(name, score, math.sqrt(score * (1 - score) / max(len(right), 1)), answers, right)
