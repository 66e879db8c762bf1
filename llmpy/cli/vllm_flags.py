"""Flags and names of `vllm serve` that have another name here, or no effect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

ALWAYS = "it is always so here"
FILES = "the model's files say it"
MODEL = "the model's architecture says what it can do"
GRAPHS = "nothing is compiled; --enforce-eager leaves CUDA graphs out"
BACKEND = "there is one backend for structured outputs"

PASSED: dict[str, tuple[int | str, str]] = {
    "--trust-remote-code": (0, "no code of a checkpoint is ever run"),
    "--enable-chunked-prefill": (0, ALWAYS),
    "--async-scheduling": (0, ALWAYS),
    "--enable-sleep-mode": (0, ALWAYS),
    "--enable-prompt-tokens-details": (0, ALWAYS),
    "--enable-force-include-usage": (0, "streams tell usage where stream_options asks for it"),
    "--enable-auto-tool-choice": (0, "calls are always looked for; --tool-call-parser says how they are written"),
    "--enable-reasoning": (0, "reasoning is always looked for; --reasoning-parser says how it is marked"),
    "--enable-request-id-headers": (0, ALWAYS),
    "--enable-server-load-tracking": (0, "/load always tells"),
    "--enable-log-requests": (0, "use --log-prompts"),
    "--disable-log-requests": (0, "prompts are not logged"),
    "--disable-log-stats": (0, "/metrics costs nothing until it is asked for"),
    "--disable-uvicorn-access-log": (0, "use --log-level warning"),
    "--disable-frontend-multiprocessing": (0, ALWAYS),
    "--disable-custom-all-reduce": (0, "GPUs of a host always gather through peer memory, several hosts over NCCL"),
    "--max-log-len": (1, "prompts are not logged"),
    "--uvicorn-log-level": (1, "use --log-level"),
    "--swap-space": (1, "preempted sequences are computed again"),
    "--task": (1, MODEL),
    "--runner": (1, MODEL),
    "--convert": (1, MODEL),
    "--tokenizer-mode": (1, FILES),
    "--config-format": (1, FILES),
    "--compilation-config": (1, GRAPHS),
    "--cuda-graph-sizes": ("+", GRAPHS),
    "--max-seq-len-to-capture": (1, GRAPHS),
    "--distributed-executor-backend": (1, "one process runs all engines and their devices of a host"),
    "--headless": (0, "with --nnodes only host 0 serves"),
    "--guided-decoding-backend": (1, BACKEND),
    "--structured-outputs-config": (1, BACKEND),
    "--chat-template-content-format": (1, "it is read from the chat template"),
    "--response-role": (1, "answers are the assistant's"),
}
"""Flags that never change an answer -> number of arguments, and the reason. They are accepted with a warning."""

MEANINGS = {
    "--api-key": "use --api-key-file: every user of the machine can read an argument",
    "--allowed-origins": "use --cors-origin",
    "--trust-request-chat-template": "use --allow-request-template",
    "--kv-events-config": "use --kv-events-address",
    "--decode-context-parallel-size": "each rank has its heads of all of a sequence; use --tensor-parallel-size",
    "--prefill-context-parallel-size": "each rank has its heads of all of a sequence; use --tensor-parallel-size",
    "--enable-eplb": "experts do not move between ranks; leave it out",
    "--eplb-config": "experts do not move between ranks; leave it out",
    "--cpu-offload-gb": "weights lie on the device; leave it out",
    "--api-server-count": "one process serves; --data-parallel-size runs several engines in it",
    "--uds": "it listens on --host and --port",
}
"""Unsupported flags that would change answers -> advice for the error."""

TOOL_PARSERS = {
    "deepseek_v3": "deepseek",
    "glm45": "glm",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "qwen3_coder": "qwen_coder",
    "qwen3_xml": "qwen_coder",
}
REASONING_PARSERS = {
    "cohere_command3": "cohere",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "openai_gptoss": "auto",
    "qwen3": "think",
    "seed_oss": "seed",
}
"""vLLM's names of parsers -> our names."""


class _Passed(argparse.Action):
    """Accepts a flag without effect and prints a warning."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        flag: str | None = None,
    ) -> None:
        given = flag or ""
        print(f"{parser.prog}: {given} does nothing: {PASSED[given.replace('--no-', '--')][1]}", file=sys.stderr)


def add_passed(parser: argparse.ArgumentParser) -> None:
    """Adds the flags without effect; the help does not list them."""
    for flag, (words, _) in PASSED.items():
        flags = [flag] if words else [flag, flag.replace("--", "--no-", 1)]
        parser.add_argument(*flags, action=_Passed, nargs=words, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def parser_name(names: dict[str, str], option: str, given: str) -> str:
    """Our name of a parser; prints a notice if the given name is vLLM's.

    Args:
        names: vLLM's names -> our names.
        option: The flag.
        given: The flag's value.
    """
    if given not in names:
        return given
    print(f"llmpy serve: {option} {given} is called {names[given]} here", file=sys.stderr)
    return names[given]
