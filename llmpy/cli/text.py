"""`llmpy generate`, `llmpy chat`, `llmpy score`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from .. import LLM
from .common import open_model, sampling, show, texts


def run(chosen: Namespace) -> int:
    """Runs one of the three."""
    commands = {"generate": _generate, "chat": _chat, "score": _score}
    with open_model(chosen) as llm:
        commands[chosen.command](llm, chosen)
    return 0


def _generate(llm: LLM, chosen: Namespace) -> None:
    """One prompt is streamed; several are answered together and printed in order."""
    prompts = texts(chosen.prompts)
    if len(prompts) == 1 and not chosen.json:
        for piece in llm.stream(prompts[0], **sampling(chosen)):
            show(piece)
        print()
        return
    for output in llm.generate(prompts, **sampling(chosen)):
        if chosen.json:
            print(json.dumps(output.to_dict(), ensure_ascii=False))
        else:
            print(f"> {output.prompt}\n{output.text}\n")


def _chat(llm: LLM, chosen: Namespace) -> None:
    """A conversation over standard input; Ctrl-C ends an answer, an empty line the conversation."""
    messages = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            show("> ")
        line = sys.stdin.readline()
        if not line.strip():
            return
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        try:
            for piece in llm.stream_chat(messages, **sampling(chosen)):
                show(piece)
                answer += piece
        except KeyboardInterrupt:
            if not is_terminal:
                raise
        print()
        messages.append({"role": "assistant", "content": answer})


def _score(llm: LLM, chosen: Namespace) -> None:
    """One line per text: sum of log-probabilities, scored tokens, perplexity."""
    given = texts(chosen.texts)
    for text, score in zip(given, llm.score(given), strict=True):
        print(f"{score.sum_logprob:12.4f}  {len(score.token_logprobs):6d} tokens  perplexity {score.perplexity:10.4f}  {text}")
