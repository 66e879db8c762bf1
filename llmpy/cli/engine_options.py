"""The options of `serve`, `bench` and `run-batch`. They are separate from the commands, so that --help needs few imports.

Every option of an engine is a flag: `max_model_len` is --max-model-len.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from .imports import add_import
from .parser import Parser, count, positive, reader
from .vllm_flags import add_passed

LEVELS = ("debug", "info", "warning", "error")
LEFT_OUT = ("model", "hf_token")
"""Options without a flag: the model is a word; the token comes from the environment, as every user can read arguments."""


def add_options(command: str, parser: Parser) -> None:
    """Adds the options of a command.

    Args:
        command: Name of the command.
        parser: Parser of the command.
    """
    if command == "bench":
        from .bench_options import add_bench_options

        add_bench_options(parser)
        return
    if command == "route":
        _route(parser)
        return
    add_engine_options(parser)
    {"serve": _serve, "run-batch": _batch}[command](parser)


def add_model(parser: ArgumentParser) -> None:
    """Adds the model as a word."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, .gguf file or hub id (default: the demo model)")


def _serve(parser: ArgumentParser) -> None:
    add_model(parser)
    _listening(parser)
    parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names that requests may use")
    add_lora_modules(parser)
    parser.add_argument("--tool-call-parser", default="auto", metavar="NAME", help="auto (default), none, or a format's name")
    parser.add_argument("--reasoning-parser", default="auto", metavar="NAME", help="auto (default), none, or a format's name")
    parser.add_argument("--allow-request-template", action="store_true", help="requests may bring a chat template")
    parser.add_argument("--allow-image-urls", action="store_true", help="fetch images of requests from http(s) URLs")
    parser.add_argument("--image-domains", nargs="+", default=(), metavar="NAME", help="fetch them only from these hosts")
    parser.add_argument("--metrics-compat", choices=("vllm", "none"), default="vllm", help="vllm (default): also its names")
    parser.add_argument("--log-prompts", action="store_true", help="bodies of requests go to the log")
    parser.add_argument("--stuck-timeout", type=float, default=300.0, metavar="S", help="/health fails after such a standstill")
    parser.add_argument("--keep-responses", type=int, default=0, metavar="N", help="responses that can be asked for again")
    parser.add_argument("--render-only", action="store_true", help="tokenise and render for others; no weights, no device")
    parser.add_argument("--control", action="store_true", help="paths to pause, put to sleep and update the engine")
    parser.add_argument("--control-key-file", type=Path, metavar="FILE", help="keys for these; needed beyond this machine")
    parser.add_argument("--reject-when-asleep", action="store_true", help="503 while the engine sleeps, instead of waiting")
    parser.add_argument(
        "--kv-events-address", nargs="?", const="tcp://lo:5557", metavar="ADDRESS",
        help="publish what the prefix cache holds over ZeroMQ (default address tcp://lo:5557; lo, *: bind, others: connect)",
    )  # fmt: skip
    parser.add_argument("--kv-events-replay-address", metavar="ADDRESS", help="where readers ask for events they have missed")
    parser.add_argument("--kv-events-format", choices=("map", "array"), default="map", help="array: for older routers")
    parser.add_argument("--role", choices=("prefill", "decode", "both"), default="both", help="both (default), or one half")
    parser.add_argument("--salt-by-key", action="store_true", help="requests of unlike keys share no cached block")
    add_passed(parser)


def _listening(parser: ArgumentParser) -> None:
    """Adds what every HTTP server has."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port (default 8000; 0 = any free one)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one per line; without it none is needed")
    parser.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate (PEM): the server speaks TLS alone")
    parser.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its key, unless it is in the same file")
    parser.add_argument("--ssl-keyfile-password-file", type=Path, metavar="FILE", help="the key's password")
    parser.add_argument("--ssl-ca-certs", type=Path, metavar="FILE", help="clients need a certificate that one of these signed")
    parser.add_argument("--max-body-bytes", type=int, default=16 << 20, metavar="N", help="longest body (default 16 MiB)")
    parser.add_argument("--max-connections", type=int, default=16384, metavar="N", help="beyond them 503 (default 16384)")
    parser.add_argument("--stream-timeout", type=float, default=60.0, metavar="S", help="seconds a frame may stay unread")
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="info (default); warning: no line per request")
    parser.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S", help="seconds for what runs at the end")
    parser.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="browsers there may call")


def _route(parser: Parser) -> None:
    parser.usage = "%(prog)s [options] URL [URL ...]"
    parser.add_config()
    parser.add_argument("urls", nargs="*", metavar="URL", help="engines: http://HOST:PORT[,EVENTS[,REPLAY]]")
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="engines that only compute prompts")
    parser.add_argument("--decode", nargs="+", default=[], metavar="URL", help="engines that go on behind them")
    parser.add_argument("--policy", choices=("prefix", "load", "round-robin"), default="prefix", help="default: prefix")
    parser.add_argument("--poll", type=positive, default=1.0, metavar="S", help="seconds between two looks at an engine")
    _listening(parser)


def _batch(parser: ArgumentParser) -> None:
    parser.usage = "%(prog)s -i FILE -o FILE [options] [MODEL]"
    add_model(parser)
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="requests, one JSON object per line; - = stdin")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="answers in this order; goes on where it ends")
    parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names that requests may use")
    add_lora_modules(parser)
    parser.add_argument("--retry-errors", action="store_true", help="ask again what has an error in the output")
    parser.add_argument("--window", type=count, default=512, metavar="N", help="most requests in flight (default 512)")


def add_lora_modules(parser: ArgumentParser, text: str = "adapters to load, with --enable-lora") -> None:
    """Adds the adapters to load at the start."""
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help=text)


def add_engine_options(parser: Parser) -> None:
    """Adds the flags of the engine; an option that is not given keeps the engine's default."""
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.add_config()
    add_import(parser)
    group = parser.add_argument_group("engine", "options of EngineConfig; mappings are given as JSON, lists with commas")
    texts = descriptions()
    for field in fields(EngineConfig):
        if field.name in LEFT_OUT:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            group.add_argument(flag, action=BooleanOptionalAction, default=SUPPRESS, help=texts[field.name])
        else:
            group.add_argument(flag, type=reader(str(field.type)), default=SUPPRESS, metavar="VALUE", help=texts[field.name])
    group.add_argument("--enable-expert-parallel", action="store_const", const="rank", dest="experts", default=SUPPRESS,
                       help=SUPPRESS)  # vLLM's name


def descriptions() -> dict[str, str]:
    """Option -> its description in EngineConfig's docstring."""
    texts = defaultdict(str)
    for names, text in re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", EngineConfig.__doc__ or "", re.MULTILINE):
        for name in names.split(", "):
            texts[name] = re.sub(r"\s+", " ", text).replace("%", "%%")
    return texts


def engine_options(chosen: Namespace) -> dict[str, Any]:
    """The engine options given on the command line."""
    return {field.name: getattr(chosen, field.name) for field in fields(EngineConfig) if _is_given(chosen, field.name)}


def _is_given(chosen: Namespace, name: str) -> bool:
    return name not in LEFT_OUT and hasattr(chosen, name)
