"""Reads the arguments of `score` and `chat`: pairs of prompt and completion, conversations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import as_float, as_int
from ..errors import InvalidRequestError, LlmpyError
from ..inputs import Prompt, listed, parse, parse_ids
from ..sampling_params import GREEDY_BELOW, SamplingParams
from .frontend import Frontend, at

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


def score_params(temperature: object, logprobs: object, max_logprobs: int) -> SamplingParams:
    """Checked SamplingParams with the two parameters of scoring."""
    value, count = as_float("temperature", temperature), as_int("logprobs", logprobs)
    if not (math.isfinite(value) and value > 0):
        message = f"temperature must be a finite number greater than zero, got {value}."
        raise InvalidRequestError(message, parameter="temperature", value=value)
    if value < GREEDY_BELOW:
        message = f"temperature must be at least {GREEDY_BELOW} to score, got {value}."
        raise InvalidRequestError(message, parameter="temperature", value=value)
    if count > max_logprobs:
        message = f"Requested prompt logprobs of {count}, which is greater than max allowed: {max_logprobs}"
        raise InvalidRequestError(message, parameter="logprobs", value=count)
    return SamplingParams(temperature=value, logprobs=count)


def pair(
    frontend: Frontend, prompts: Sequence[object], completions: Sequence[object]
) -> tuple[list[Prompt | LlmpyError], list[int]]:
    """Joined sequences of prompts and completions, and the index of each completion's first token."""
    if len(prompts) != len(completions):
        raise InvalidRequestError(
            f"The lengths of prompts ({len(prompts)}) and completions ({len(completions)}) must be the same. "
            "To score several completions of one prompt, pass that prompt alone, not in a list.",
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
    if completion.media is not None:
        raise InvalidRequestError("a completion has no images; put them into the prompt", parameter="completions")
    if prompt.ids is None and completion.ids is None and prompt.media is None and frontend.tokenizer is not None:
        text = (prompt.text or "") + (completion.text or "")
        frontend.check_text(text)
        ids, start = _tokenize_pair(frontend.tokenizer, text, len(prompt.text or ""))
        _check_border(start, len(ids))
        return Prompt(text, parse_ids(ids), salt=prompt.salt), start
    first = frontend.prompts([prompt])[0]
    second = frontend.prompts([completion], special_tokens=False)[0]
    for part in (first, second):
        error = part if isinstance(part, LlmpyError) else part.error
        if error is not None:
            return error, 1
    assert isinstance(first, Prompt) and isinstance(second, Prompt) and first.ids is not None and second.ids is not None
    joined = np.concatenate([first.ids, second.ids])
    _check_border(len(first.ids), len(joined))
    made = Prompt(None, parse_ids(joined), salt=prompt.salt)
    made.items, made.images = first.items, first.images
    return made, len(first.ids)


def _check_border(start: int, length: int) -> None:
    """Refuses a completion that has no token, or a first token without a logprob."""
    if start == length:
        message = "The completion has no token behind the prompt, so there is nothing to score. Give it some text."
        raise InvalidRequestError(message, parameter="completions", value=start)
    if start < 1:
        message = (
            "The completion begins in token 0, which has no logprob because no token stands before it. Give a prompt of at "
            "least one whole token, such as the text of the beginning-of-sequence or end-of-sequence token."
        )
        raise InvalidRequestError(message, parameter="start", value=start)


def _tokenize_pair(tokenizer: Tokenizer, text: str, prompt_chars: int) -> tuple[list[int], int]:
    """Ids of the whole text, and the index of the first token that ends after the prompt."""
    ids, ends = tokenizer.encode_with_ends(text)
    return ids, next((index for index, end in enumerate(ends) if end > prompt_chars), len(ids))


def render(
    tokenizer: Tokenizer, conversation: list[dict[str, Any]], how: Mapping[str, Any], placeholder: str | None = None
) -> Prompt:
    """Renders one conversation as text, with message contents in the form that the template reads.

    Args:
        tokenizer: The model's tokenizer.
        conversation: The messages.
        how: Arguments of rendering.
        placeholder: What stands for an image in a text; None: the model takes no images.
    """
    from ..text import chat
    from ..text.chat_images import refuse_images, take_images

    template = chat.choose(tokenizer.chat_templates, how["chat_template"], how["tools"] is not None)
    chat.check_reads(template, how)
    given = chat.with_content(conversation)
    if placeholder is None:
        refuse_images(given)
    messages, images = take_images(given)
    messages = chat.conversation(messages, template, placeholder)
    prompt = Prompt(str(tokenizer.apply_chat_template(messages, tokenize=False, **how)), None)
    prompt.media = images
    return prompt


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """The conversations of a chat call: a str, an iterable of messages, or an iterable of either."""
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"messages must be a list of dicts or a str, but is of type {type(messages).__name__}")
    items = listed(messages)
    if items and all(isinstance(item, Mapping) for item in items):
        return [[dict(item) for item in items]]
    found = []
    for item in items:
        parts = item if isinstance(item, str) else _messages(item)
        found += conversations(parts) if len(parts) else [[]]
    return found


def _messages(conversation: object) -> list[Any]:
    """The messages of one conversation, checked."""
    if isinstance(conversation, Iterable) and not isinstance(conversation, Mapping | bytes):
        parts = listed(conversation)
        if all(isinstance(part, Mapping) for part in parts):
            return parts
    raise TypeError(f"a conversation is a list of dicts, but has one of type {type(conversation).__name__}")
