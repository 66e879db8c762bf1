"""Fields that a path does not support: fields that would change the answer are refused, a header lists the others.

A field of completions or chat completions counts as changing the answer on other text paths unless `HARMLESS` lists it.
`UNSUPPORTED` lists fields of other servers that no path here supports.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import msgspec

from ..sampling_params import ROWS
from .errors import HttpError
from .protocol import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    MessagesRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
)

Kind = type[msgspec.Struct]

TALK: tuple[Kind, ...] = (ChatRequest, ResponsesRequest, MessagesRequest)
TEXT: tuple[Kind, ...] = (*TALK, CompletionRequest, GenerateRequest)
POOLED: tuple[Kind, ...] = (EmbeddingRequest, PoolingRequest, ClassifyRequest, ScoreRequest, RerankRequest)
PROMPTED: tuple[Kind, ...] = (*TEXT, *POOLED, TokenizeRequest)

EMPTY: tuple[Any, ...] = (None, "", [], {})
OFF: tuple[Any, ...] = (*EMPTY, False)

HARMLESS = frozenset(("model", "stream", "user", "stream_options", "priority", "cache_salt", "request_id", "stream_interval"))
"""Fields of completions and chat completions that never change the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (None, *row.off) for name, row in ROWS.items() if row.off},
    "best_of": (None, 1),
    "length_penalty": (None, 1),
    "parallel_tool_calls": (None, True),
    "add_generation_prompt": (None, True),
    "response_format": (*EMPTY, {"type": "text"}),
    "tool_choice": (*EMPTY, "auto", "none"),
    "truncation": (*EMPTY, "disabled"),
}
"""Values of these fields that do not change the answer; for other fields `OFF`."""
SPELLINGS: dict[Kind, dict[str, str]] = {
    CompletionRequest: {"messages": "prompt", "max_completion_tokens": "max_tokens"},
    ChatRequest: {"prompt": "messages"},
    ResponsesRequest: {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "include",
    },
    MessagesRequest: {"stop": "stop_sequences", "max_completion_tokens": "max_tokens", "reasoning_effort": "thinking"},
}
"""Body -> field of another path -> the field's name in this body."""


class Unsupported(NamedTuple):
    """A field that no path supports.

    Args:
        kinds: Bodies for which the field would change the answer.
        neutral: Values that do not change the answer.
        advice: Advice for the error message.
    """

    kinds: tuple[Kind, ...]
    neutral: tuple[Any, ...] = OFF
    advice: str = "leave it out"


_PENALTY = "use repetition_penalty, presence_penalty or frequency_penalty"
_NUCLEUS = "use top_p, top_k or min_p"
_ADAPTER = "an adapter's name is a model name: use model"
_LENGTH = "use max_tokens"
_CUT = "shorten the prompt"
_BEAMS = "use /v1/completions or /v1/chat/completions"
_NO_BEAMS: tuple[Kind, ...] = (ResponsesRequest, MessagesRequest, GenerateRequest)

UNSUPPORTED: dict[str, Unsupported] = {
    "use_beam_search": Unsupported(_NO_BEAMS, advice=_BEAMS),
    "length_penalty": Unsupported(_NO_BEAMS, NEUTRAL["length_penalty"], _BEAMS),
    "early_stopping": Unsupported(_NO_BEAMS, advice=_BEAMS),
    "logits_processors": Unsupported(TEXT, advice="use logit_bias, allowed_token_ids or bad_words"),
    "vllm_xargs": Unsupported(TEXT),
    "extra_args": Unsupported(TEXT),
    "functions": Unsupported(TEXT, advice="use tools"),
    "function_call": Unsupported(TEXT, (*EMPTY, "none", "auto"), "use tool_choice"),
    "modalities": Unsupported(TEXT, (*EMPTY, ["text"])),
    "audio": Unsupported(TEXT, (None,)),
    "web_search_options": Unsupported(TEXT, (None,)),
    "thinking_token_budget": Unsupported(TEXT, (None,), _LENGTH),
    "repetition_detection": Unsupported(TEXT),
    "suffix": Unsupported(TEXT),
    "logprob_token_ids": Unsupported(TEXT, advice="use logprobs"),
    "truncate_prompt_tokens": Unsupported(PROMPTED, (None,), _CUT),
    "truncation_side": Unsupported(PROMPTED, advice=_CUT),
    "mm_processor_kwargs": Unsupported(PROMPTED),
    "media_io_kwargs": Unsupported(PROMPTED),
    "lora_request": Unsupported(PROMPTED, advice=_ADAPTER),
    "lora_path": Unsupported(PROMPTED, advice=_ADAPTER),
    "lora": Unsupported(PROMPTED, advice=_ADAPTER),
    "adapter": Unsupported(PROMPTED, advice=_ADAPTER),
    "guided_json": Unsupported(TEXT, EMPTY, "use structured_outputs={'json': ...}"),
    "guided_regex": Unsupported(TEXT, EMPTY, "use structured_outputs={'regex': ...}"),
    "guided_choice": Unsupported(TEXT, EMPTY, "use structured_outputs={'choice': ...}"),
    "guided_grammar": Unsupported(TEXT, EMPTY, "use structured_outputs={'grammar': ...}"),
    "guided_whitespace_pattern": Unsupported(TEXT, advice="use structured_outputs={'regex': ...}"),
    "guided_decoding": Unsupported(TEXT, EMPTY, "use structured_outputs"),
    "regex": Unsupported(TEXT, advice="use structured_outputs={'regex': ...}"),
    "ebnf": Unsupported(TEXT, advice="use structured_outputs={'grammar': ...}"),
    "grammar": Unsupported(TEXT, advice="use structured_outputs={'grammar': ...}"),
    "json_schema": Unsupported(TEXT, advice="use response_format"),
    "max_new_tokens": Unsupported(TEXT, (None,), _LENGTH),
    "n_predict": Unsupported(TEXT, (None, -1), _LENGTH),
    "num_predict": Unsupported(TEXT, (None, -1), _LENGTH),
    "repeat_penalty": Unsupported(TEXT, (None, 1), _PENALTY),
    "dry_multiplier": Unsupported(TEXT, (None, 0), _PENALTY),
    "typical_p": Unsupported(TEXT, (None, 1), _NUCLEUS),
    "tfs_z": Unsupported(TEXT, (None, 1), _NUCLEUS),
    "top_a": Unsupported(TEXT, (None, 0), _NUCLEUS),
    "mirostat": Unsupported(TEXT, (None, 0), _NUCLEUS),
    "xtc_probability": Unsupported(TEXT, (None, 0), _NUCLEUS),
    "dynatemp_range": Unsupported(TEXT, (None, 0), "use temperature"),
    "conversation": Unsupported((ResponsesRequest,), advice="use previous_response_id"),
    "mcp_servers": Unsupported((MessagesRequest,), advice="use tools"),
    "container": Unsupported((MessagesRequest,)),
    "messages": Unsupported(POOLED, advice="render the conversation to text"),
    "chat_template": Unsupported((*POOLED, TokenizeRequest)),
    "documents": Unsupported((TokenizeRequest,)),
    "reasoning_effort": Unsupported((TokenizeRequest,), advice="use chat_template_kwargs"),
    "dimensions": Unsupported(POOLED, (None,), "use /v1/embeddings"),
    "normalize": Unsupported(POOLED, (None, True), "use /pooling"),
    "softmax": Unsupported(POOLED, (None,), "use use_activation"),
    "activation": Unsupported(POOLED, (None,), "use use_activation"),
    "embed_dtype": Unsupported(POOLED, (None, "float32"), "use encoding_format"),
    "endianness": Unsupported(POOLED, (None, "native", "little")),
    "input_type": Unsupported(POOLED, advice="write the model's instruction into the text"),
    "instruction": Unsupported(POOLED, advice="write the model's instruction into the text"),
    "max_tokens_per_doc": Unsupported(POOLED, (None,), _CUT),
}
"""Unsupported fields of OpenAI, Anthropic, vLLM, SGLang and llama.cpp that would change the answer."""

_CHANGING = frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)) - HARMLESS


def check_fields(given: Mapping[str, Any], known: Container[str], kind: Kind, place: str, prefix: str = "") -> list[str]:
    """Checks the fields of a request that its path does not support.

    Args:
        given: All fields of the request.
        known: Names of the path's fields.
        kind: The path's body.
        place: The path, for errors.
        prefix: Prefix of the names, for fields of a nested object.

    Returns:
        The names of the ignored fields, sorted.

    Raises:
        HttpError: 400, an unsupported field would change the answer.
    """
    passed = []
    for name in sorted(name for name in given if name not in known):
        wrong = _unsupported(name, kind)
        if wrong is None:
            passed.append(prefix + name)
        elif given[name] not in wrong.neutral:
            raise HttpError(400, f"{prefix}{name} is not supported on {place}; {wrong.advice}", prefix + name)
    return passed


def _unsupported(name: str, kind: Kind) -> Unsupported | None:
    """The rule for a field that a body does not have; None: the field does not change the answer."""
    found = UNSUPPORTED.get(name)
    if found is not None and kind in found.kinds:
        return found
    if kind in TEXT and name in _CHANGING:
        spelling = "sampling_params" if kind is GenerateRequest else SPELLINGS.get(kind, {}).get(name)
        return Unsupported(TEXT, NEUTRAL.get(name, OFF), f"use {spelling}" if spelling else "leave it out")
    return None
