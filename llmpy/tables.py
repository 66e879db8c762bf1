"""Outputs as tables of pandas or Arrow, one row per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from .outputs import RequestOutputs


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
    "num_cached_tokens": "int64",
    "weight_version": "string",
    "first_token_latency": "double",
    "error": "string",
}
"""The columns and their Arrow types, whatever the values are."""


def columns(outputs: RequestOutputs) -> dict[str, list[Any]]:
    """The table's columns by name."""
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
        "error": [None if output.error is None else str(output.error) for output, _ in rows],
    }


def to_pandas(outputs: RequestOutputs) -> pandas.DataFrame:
    """The outputs as a DataFrame."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install 'llmpy[data]'") from error
    floats = {name: "float64" for name, kind in TYPES.items() if kind == "double"}
    return pandas.DataFrame(columns(outputs)).astype(floats)


def to_arrow(outputs: RequestOutputs) -> pyarrow.Table:
    """The outputs as an Arrow table; stop reasons and versions become text."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("to_arrow() needs pyarrow: pip install 'llmpy[data]'") from error
    values = columns(outputs)
    for name in ("stop_reason", "weight_version"):
        values[name] = [None if value is None else str(value) for value in values[name]]
    lists = {"list<int32>": pyarrow.list_(pyarrow.int32()), "list<float>": pyarrow.list_(pyarrow.float32())}
    schema = pyarrow.schema([(name, lists.get(kind) or pyarrow.type_for_alias(kind)) for name, kind in TYPES.items()])
    return pyarrow.table(values, schema=schema)
