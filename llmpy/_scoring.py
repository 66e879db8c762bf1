"""What `score` and `chat` make of their arguments: pairs of prompt and completion, conversations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._frontend import Frontend, at
from .checks import as_float, as_int
from .errors import InvalidRequestError, LlmpyError
from .inputs import Prompt, parse, parse_ids
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


def score_params(temperature: object, logprobs: object, max_logprobs: int) -> SamplingParams:
    """The two parameters that scoring has, checked."""
    value, count = as_float("temperature", temperature), as_int("logprobs", logprobs)
    if not (math.isfinite(value) and value > 0):
        message = f"temperature must be a finite number greater than zero, got {value}."
        raise InvalidRequestError(message, parameter="temperature", value=value)
    if count > max_logprobs:
        message = f"Requested prompt logprobs of {count}, which is greater than max allowed: {max_logprobs}"
        raise InvalidRequestError(message, parameter="logprobs", value=count)
    return SamplingParams(temperature=value, logprobs=count)


def pair(
    frontend: Frontend, prompts: Sequence[object], completions: Sequence[object]
) -> tuple[list[Prompt | LlmpyError], list[int]]:
    """Whole sequences of prompts and completions, and where the completions begin."""
    if len(prompts) != len(completions):
        raise InvalidRequestError(
            f"The lengths of prompts ({len(prompts)}) and completions ({len(completions)}) must be the same.",
            parameter="completions",
        )
    sequences: list[Prompt | LlmpyError] = []
    starts = []
    for index, (first, second) in enumerate(zip(prompts, completions, strict=True)):
        try:
            sequence, start = _join(frontend, parse(first), parse(second))
        except LlmpyError as error:
            sequence, start = at(error, index), 1
        sequences.append(sequence)
        starts.append(start)
    return sequences, starts


def _join(frontend: Frontend, prompt: Prompt, completion: Prompt) -> tuple[Prompt | LlmpyError, int]:
    if prompt.ids is None and completion.ids is None and frontend.tokenizer is not None:
        text = (prompt.text or "") + (completion.text or "")
        ids, start = _tokenize_pair(frontend.tokenizer, text, len(prompt.text or ""))
        return Prompt(text, parse_ids(ids), salt=prompt.salt), start
    first = frontend.prompts([prompt])[0]
    second = frontend.prompts([completion], special_tokens=False)[0]
    for part in (first, second):
        if isinstance(part, LlmpyError):
            return part, 1
    assert isinstance(first, Prompt) and isinstance(second, Prompt) and first.ids is not None and second.ids is not None
    return Prompt(None, parse_ids(np.concatenate([first.ids, second.ids])), salt=prompt.salt), len(first.ids)


def _tokenize_pair(tokenizer: Tokenizer, text: str, prompt_chars: int) -> tuple[list[int], int]:
    """Ids of the whole text, and the first token that ends behind the prompt."""
    ids, ends = tokenizer.encode_with_ends(text)
    start = next((index for index, end in enumerate(ends) if end > prompt_chars), len(ids))
    return ids, max(start, 1)


def render(tokenizer: Tokenizer, conversation: list[dict[str, Any]], how: Mapping[str, Any]) -> Prompt:
    """One conversation as text, its content as the template reads it."""
    from . import chat

    template = chat.choose(tokenizer.chat_templates, how["chat_template"], how["tools"] is not None)
    messages = chat.conversation(conversation, template)
    return Prompt(str(tokenizer.apply_chat_template(messages, tokenize=False, **how)), None)


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """The conversations of a chat call: a str, a list of messages, or a sequence of either."""
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    if not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts or a str, but is of type {type(messages).__name__}")
    if messages and all(isinstance(message, Mapping) for message in messages):
        return [[dict(message) for message in messages]]
    found = []
    for item in messages:
        if isinstance(item, str) or (isinstance(item, Sequence) and all(isinstance(part, Mapping) for part in item)):
            found += conversations(item) if len(item) else [[]]
        else:
            raise TypeError(f"a conversation is a list of dicts, but has one of type {type(item).__name__}")
    return found
