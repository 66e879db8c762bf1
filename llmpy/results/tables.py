"""Converts outputs to pandas or Arrow: one row for each sample of a generation, scored sequence or pooled prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas
    import pyarrow

    from ..outputs import RequestOutput, ScoreOutput
    from ..pooling_outputs import PoolingRequestOutput

Columns = dict[str, list[Any]]
TYPES = {
    "index": "int64",
    "sample": "int64",
    "prompt": "string",
    "text": "string",
    "token_ids": "list<int32>",
    "token_logprobs": "list<float>",
    "cumulative_logprob": "double",
    "finish_reason": "string",
    "stop_reason": "string",
    "num_prompt_tokens": "int64",
    "num_tokens": "int64",
    "start": "int64",
    "sum_logprob": "double",
    "perplexity": "double",
    "ranks": "list<int32>",
    "data": "list<float>",
    "num_cached_tokens": "int64",
    "weight_version": "string",
    "first_token_latency": "double",
    "error": "string",
}
"""The columns of all tables and their Arrow types, which do not depend on the values."""


def columns(outputs: Sequence[RequestOutput]) -> Columns:
    """The columns of a generation by name."""
    rows = [(output, sample) for output in outputs for sample in output.outputs]
    return {
        "index": [output.index for output, _ in rows],
        "sample": [sample.index for _, sample in rows],
        "prompt": [output.prompt for output, _ in rows],
        "text": [sample.text for _, sample in rows],
        "token_ids": [sample.token_ids_array for _, sample in rows],
        "token_logprobs": [sample.token_logprobs for _, sample in rows],
        "cumulative_logprob": [sample.cumulative_logprob for _, sample in rows],
        "finish_reason": [sample.finish_reason for _, sample in rows],
        "stop_reason": [sample.stop_reason for _, sample in rows],
        "num_prompt_tokens": [len(output.prompt_token_ids_array) for output, _ in rows],
        "num_tokens": [len(sample.token_ids_array) for _, sample in rows],
        "num_cached_tokens": [output.num_cached_tokens for output, _ in rows],
        "weight_version": [output.weight_version for output, _ in rows],
        "first_token_latency": [output.metrics and output.metrics.first_token_latency for output, _ in rows],
        "error": [_error(output) for output, _ in rows],
    }


def _score_columns(outputs: Sequence[ScoreOutput]) -> Columns:
    return {
        "index": [output.index for output in outputs],
        "num_tokens": [len(output.token_ids_array) for output in outputs],
        "start": [output.start for output in outputs],
        "sum_logprob": [output.sum_logprob for output in outputs],
        "perplexity": [output.perplexity for output in outputs],
        "token_ids": [output.token_ids_array for output in outputs],
        "token_logprobs": [output.token_logprobs for output in outputs],
        "ranks": [output.ranks for output in outputs],
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        "weight_version": [output.weight_version for output in outputs],
        "error": [_error(output) for output in outputs],
    }


def _pooling_columns(outputs: Sequence[PoolingRequestOutput[Any]]) -> Columns:
    return {
        "index": [output.index for output in outputs],
        "prompt": [output.prompt for output in outputs],
        "num_prompt_tokens": [len(output.prompt_token_ids_array) for output in outputs],
        "data": [output.outputs.data for output in outputs],
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        "weight_version": [output.weight_version for output in outputs],
        "error": [_error(output) for output in outputs],
    }


def _error(output: RequestOutput | ScoreOutput | PoolingRequestOutput[Any]) -> str | None:
    return None if output.error is None else str(output.error)


def _columns(outputs: Any) -> Columns:
    """The columns of a list of outputs, chosen by the kind of its outputs."""
    from ..outputs import ScoreOutputs
    from ..pooling_outputs import PoolingOutputs

    kinds: dict[type, Callable[[Any], Columns]] = {ScoreOutputs: _score_columns, PoolingOutputs: _pooling_columns}
    make = next((found for kind, found in kinds.items() if isinstance(outputs, kind)), columns)
    return make(outputs)


def to_pandas(outputs: Any) -> pandas.DataFrame:
    """The outputs as a DataFrame."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install 'llmpy[data]'") from error
    values = _columns(outputs)
    frame: pandas.DataFrame = pandas.DataFrame(values)
    return frame.astype({name: "float64" for name in values if TYPES[name] == "double"})


def to_arrow(outputs: Any) -> pyarrow.Table:
    """The outputs as an Arrow table. Stop reasons and versions become text; states of several tokens become one list."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("to_arrow() needs pyarrow: pip install 'llmpy[data]'") from error
    values = _columns(outputs)
    for name in ("stop_reason", "weight_version"):
        if name in values:
            values[name] = [None if value is None else str(value) for value in values[name]]
    if "data" in values:
        values["data"] = [array.ravel() for array in values["data"]]
    lists = {"list<int32>": pyarrow.list_(pyarrow.int32()), "list<float>": pyarrow.list_(pyarrow.float32())}
    schema = pyarrow.schema([(name, lists.get(TYPES[name]) or pyarrow.type_for_alias(TYPES[name])) for name in values])
    return pyarrow.table(values, schema=schema)
