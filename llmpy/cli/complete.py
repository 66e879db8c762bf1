"""`llmpy complete`: continues prompts at a running server, streamed."""

from __future__ import annotations

from argparse import Namespace

from .common import sampling, show, texts
from .remote import open_server


def run(chosen: Namespace) -> int:
    """Continues one prompt after another; prints the prompts if there are several."""
    chosen.prompt += chosen.words
    prompts = texts(chosen)
    server = open_server(chosen)
    for prompt in prompts:
        if len(prompts) > 1:
            print(f"> {prompt}")
        for made in server.stream("/completions", prompt=prompt, **sampling(chosen)):
            for choice in made["choices"]:
                show(choice["text"])
        print("\n" if len(prompts) > 1 else "")
    return 0
