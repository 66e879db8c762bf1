"""`llmpy demo`: a model answers a batch of prompts, the first one streamed; then prints tokens and speeds."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence

from .. import LLM, RequestOutput
from .common import model_path, open_model, show

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Rewrite in the past tense: I walk to the market and buy bread.",
    "List the four seasons.",
    "Write a short Python function that checks whether a number is even.",
)
"""Questions that the demo model answers completely and correctly, on every instruction set."""


def run(chosen: Namespace) -> int:
    """Answers the prompts and prints the table."""
    chosen.model = model_path(chosen)  # the time until ready excludes the download
    started = time.perf_counter()
    with open_model(chosen) as llm:
        print(f"{llm!r}\nready after {time.perf_counter() - started:.2f} s")
        prompts = chosen.prompts or list(PROMPTS)
        first = _stream(llm, prompts[0], chosen.max_tokens)
        rest = _together(llm, prompts[1:], chosen.max_tokens)
        print(_table(first, rest))
        print(f"model: {llm.config.model}")
    return 0


def _stream(llm: LLM, prompt: str, max_tokens: int) -> RequestOutput:
    """Streams one answer."""
    print(f"\n> {prompt}")
    if llm.tokenizer.chat_template is None:
        pieces = llm.stream(prompt, temperature=0.0, max_tokens=max_tokens)
    else:
        pieces = llm.stream_chat([{"role": "user", "content": prompt}], temperature=0.0, max_tokens=max_tokens)
    output = None
    for piece in pieces:
        show(piece)
        output = piece.output
    print()
    assert output is not None  # every stream has a last chunk, which may be empty
    return output


def _together(llm: LLM, prompts: list[str], max_tokens: int) -> Sequence[RequestOutput]:
    """Answers prompts in one batch."""
    if not prompts:
        return []
    if llm.tokenizer.chat_template is None:
        outputs = llm.generate(prompts, temperature=0.0, max_tokens=max_tokens)
    else:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, temperature=0.0, max_tokens=max_tokens)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {prompt}\n{output.text}")
    return outputs


def _table(first: RequestOutput, rest: Sequence[RequestOutput]) -> str:
    """Tokens, cache hits and speeds of the streamed request and of the batch."""
    names = ("", "requests", "prompt tokens", "from cache", "output tokens", "prompt tok/s", "output tok/s")
    rows = [names, ("streamed", *_row([first]))]
    if rest:
        rows.append(("together", *_row(rest)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n" + "\n".join(lines)


def _row(outputs: Sequence[RequestOutput]) -> tuple[str, ...]:
    """The cells of one row."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    made = sum(len(output.token_ids) for output in outputs)
    times = [output.metrics for output in outputs if output.metrics is not None]
    began = [one.scheduled_ts for one in times if one.scheduled_ts is not None]
    answered = [one.first_token_ts for one in times if one.first_token_ts is not None]
    ended = [one.last_token_ts for one in times if one.last_token_ts is not None]
    reading = _speed(prompt - cached, max(answered, default=0.0) - min(began, default=0.0))
    writing = _speed(made - len(outputs), max(ended, default=0.0) - min(answered, default=0.0))
    return str(len(outputs)), str(prompt), str(cached), str(made), reading, writing


def _speed(tokens: int, seconds: float) -> str:
    """Tokens per second."""
    return f"{tokens / seconds:.1f}" if tokens > 0 and seconds > 0 else "-"
