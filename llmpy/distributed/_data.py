"""Ray Data: a class for `Dataset.map_batches`. This module does not import Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..async_engine import AsyncEngine
from ..errors import LlmpyError
from ..outputs import RequestOutput
from ..sampling_params import RequestOutputKind

Batch = dict[str, Any]


class LLMPredictor:
    """Answers the prompts of a dataset; `Dataset.map_batches` makes actors of this class.

    Every actor has one engine, which works on several batches at once. Rows are passed on as soon as they are answered, so a
    long answer does not delay other rows. The order of rows changes.

    Args:
        model: Hub id, or a path that every machine has.
        column: The column with the prompts: texts or token ids.
        sampling: Fields of SamplingParams.
        engine: Options of AsyncEngine.
    """

    def __init__(self, model: str, *, column: str = "prompt", sampling: Mapping[str, Any] | None = None, **engine: Any) -> None:
        self._engine = AsyncEngine(model, **engine)
        self._column = column
        self._sampling = {"logprobs": 0, **(sampling or {}), "n": 1, "output_kind": RequestOutputKind.FINAL_ONLY}

    async def __call__(self, batch: Batch) -> AsyncIterator[Batch]:
        """Answers a batch.

        Args:
            batch: Columns, as Ray Data gives them with `batch_format="numpy"`.

        Returns:
            Batches of the rows with five more columns: `text`, `token_ids`, `logprobs` (of the sampled tokens),
            `finish_reason`, and `error`, which is empty unless the prompt cannot be run.
        """
        tasks = {asyncio.ensure_future(self._answer(prompt)): row for row, prompt in enumerate(batch[self._column])}
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                yield _rows(batch, [tasks[task] for task in done], [task.result() for task in done])
        finally:
            for task in waiting:  # the reader has stopped
                task.cancel()

    async def _answer(self, prompt: Any) -> RequestOutput | LlmpyError:
        try:
            given = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
            return await self._engine.generate(given, **self._sampling)
        except LlmpyError as error:
            return error


def _rows(batch: Batch, rows: Sequence[int], answers: Sequence[RequestOutput | LlmpyError]) -> Batch:
    """Some rows of a batch with their answers."""
    samples = [None if isinstance(answer, LlmpyError) else answer.outputs[0] for answer in answers]
    return {
        **{name: [values[row] for row in rows] for name, values in batch.items()},
        "text": ["" if sample is None else sample.text for sample in samples],
        "token_ids": _ragged([[] if sample is None else sample.token_ids for sample in samples], np.int64),
        "logprobs": _ragged([[] if sample is None else sample.token_logprobs for sample in samples], np.float32),
        "finish_reason": ["" if sample is None else sample.finish_reason for sample in samples],
        "error": [str(answer) if isinstance(answer, LlmpyError) else "" for answer in answers],
    }


def _ragged(values: Sequence[Any], dtype: type) -> np.ndarray[Any, Any]:
    """A column of arrays with different lengths."""
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = np.asarray(value, dtype)
    return column
