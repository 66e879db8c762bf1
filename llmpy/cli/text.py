"""`llmpy generate`, `llmpy score`."""

from __future__ import annotations

import json
from argparse import Namespace

from .. import RequestOutput, ScoreOutput
from .common import open_model, sampling, show, texts


def run(chosen: Namespace) -> int:
    """Runs one of the two."""
    return {"generate": _generate, "score": _score}[chosen.command](chosen)


def _generate(chosen: Namespace) -> int:
    """One prompt is streamed; several are answered together and printed in order."""
    prompts, fields = texts(chosen), sampling(chosen)
    if not prompts:
        return 0
    with open_model(chosen) as llm:
        if len(prompts) == 1 and not chosen.jsonl:
            for piece in llm.stream(prompts[0], **fields):
                show(piece)
            print()
            return 0
        for output in llm.generate(prompts, **fields):
            print(_json(output) if chosen.jsonl else f"> {output.prompt}\n{output.text}\n")
    return 0


def _score(chosen: Namespace) -> int:
    """One line per text: sum of log-probabilities, scored tokens, perplexity."""
    given = texts(chosen)
    if not given:
        return 0
    with open_model(chosen) as llm:
        for text, score in zip(given, llm.score(given), strict=True):
            counted = f"{score.sum_logprob:12.4f}  {len(score.token_logprobs):6d} tokens"
            print(_json(score) if chosen.jsonl else f"{counted}  perplexity {score.perplexity:10.4f}  {text}")
    return 0


def _json(output: RequestOutput | ScoreOutput) -> str:
    return json.dumps(output.to_dict(), ensure_ascii=False)
