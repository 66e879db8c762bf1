"""`llmpy generate`, `llmpy score`."""

from __future__ import annotations

import json
from argparse import Namespace

from .. import LLM
from .common import open_model, sampling, show, texts


def run(chosen: Namespace) -> int:
    """Runs one of the two."""
    commands = {"generate": _generate, "score": _score}
    with open_model(chosen) as llm:
        commands[chosen.command](llm, chosen)
    return 0


def _generate(llm: LLM, chosen: Namespace) -> None:
    """One prompt is streamed; several are answered together and printed in order."""
    prompts = texts(chosen)
    if len(prompts) == 1 and not chosen.jsonl:
        for piece in llm.stream(prompts[0], **sampling(chosen)):
            show(piece)
        print()
        return
    for output in llm.generate(prompts, **sampling(chosen)):
        if chosen.jsonl:
            print(json.dumps(output.to_dict(), ensure_ascii=False))
        else:
            print(f"> {output.prompt}\n{output.text}\n")


def _score(llm: LLM, chosen: Namespace) -> None:
    """One line per text: sum of log-probabilities, scored tokens, perplexity."""
    given = texts(chosen)
    for text, score in zip(given, llm.score(given), strict=True):
        print(f"{score.sum_logprob:12.4f}  {len(score.token_logprobs):6d} tokens  perplexity {score.perplexity:10.4f}  {text}")
