"""`llmpy generate`, `llmpy score`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .common import open_model, sampling, show, texts

if TYPE_CHECKING:
    from .. import LLM, RequestOutput, ScoreOutput


def run(chosen: Namespace) -> int:
    """Runs `generate` or `score`."""
    return {"generate": _generate, "score": _score}[chosen.command](chosen)


def _generate(chosen: Namespace) -> int:
    """Streams one prompt; answers several together and prints them in order."""
    prompts, fields = texts(chosen), sampling(chosen)
    with open_model(chosen) as llm:
        if len(prompts) == 1 and fields.get("n", 1) == 1 and not chosen.jsonl:
            for piece in llm.stream_chat(prompts[0], **fields) if chosen.chat else llm.stream(prompts[0], **fields):
                show(piece)
            print()
            return 0
        _print_done(lambda: _outputs(llm, chosen, prompts, fields), _is_done, lambda output: _answer(output, prompts, chosen))
    return 0


def _outputs(llm: LLM, chosen: Namespace, prompts: list[str], fields: dict[str, Any]) -> Iterable[RequestOutput]:
    return llm.chat(prompts, **fields) if chosen.chat else llm.generate(prompts, **fields)


def _is_done(output: RequestOutput) -> bool:
    return all(sample.finish_reason not in (None, "abort") for sample in output.outputs)


def _answer(output: RequestOutput, prompts: list[str], chosen: Namespace) -> str:
    """The prompt and its samples as text, or the output as JSON."""
    if chosen.jsonl:
        return _json(output)
    shown = "\n".join(f"[{sample.index}] {sample.text}" for sample in output.outputs) if chosen.n else output.text
    return f"> {prompts[output.index]}\n{shown}\n"


def _score(chosen: Namespace) -> int:
    """Prints one line per text: sum of log-probabilities, scored tokens, perplexity."""
    given = texts(chosen)
    with open_model(chosen) as llm:

        def line(score: ScoreOutput) -> str:
            counted = f"{score.sum_logprob:12.4f}  {len(score.token_logprobs):6d} tokens"
            return _json(score) if chosen.jsonl else f"{counted}  perplexity {score.perplexity:10.4f}  {given[score.index]}"

        _print_done(lambda: llm.score(given), _is_scored, line)
    return 0


def _is_scored(score: ScoreOutput) -> bool:
    return score.error is None and len(score.token_logprobs) == len(score.token_ids_array) - score.start


def _print_done(call: Callable[[], Iterable[Any]], is_done: Callable[[Any], bool], line: Callable[[Any], str]) -> None:
    """Prints the outputs of a call; after Ctrl-C prints the complete outputs and raises the interruption again."""
    try:
        for output in call():
            print(line(output))
    except KeyboardInterrupt as error:
        partial = getattr(error, "partial", None) or []
        done = [output for output in partial if is_done(output)]
        for output in done:
            print(line(output))
        if partial:
            print(f"\ninterrupted: {len(done)} of {len(partial)} are complete and printed", file=sys.stderr)
        raise


def _json(output: RequestOutput | ScoreOutput) -> str:
    return json.dumps(output.to_dict(), ensure_ascii=False)
