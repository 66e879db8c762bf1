"""The options of `serve`, `bench` and `run-batch`, apart from the commands, whose help needs none of their imports.

Every option of an engine is a flag: `max_model_len` is --max-model-len.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import EngineConfig

LEFT_OUT = ("model", "hf_token")
"""One is a word of its own, the other comes from the environment: arguments can be read by everybody on the machine."""


def add_options(command: str, parser: ArgumentParser) -> None:
    """The options of one of the commands.

    Args:
        command: Its name.
        parser: Its parser.
    """
    {"serve": _serve, "bench": _bench, "run-batch": _batch}[command](parser)
    _add_engine_options(parser)


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, .gguf file or hub id (default: the demo model)")


def _serve(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port (default 8000; 0 = any free one)")
    parser.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names that requests may use")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one per line; without it none is needed")
    parser.add_argument("--allow-request-template", action="store_true", help="requests may bring a chat template")
    parser.add_argument("--max-body-bytes", type=int, default=32 << 20, metavar="N", help="longest body (default 32 MiB)")
    parser.add_argument("--stream-timeout", type=float, default=60.0, metavar="S", help="seconds a frame may stay unread")
    parser.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S", help="seconds for what runs at the end")
    parser.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="browsers there may call")
    parser.add_argument("--salt-by-key", action="store_true", help="requests of unlike keys share no cached block")


def _bench(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=("throughput", "latency", "startup"))
    _add_model(parser)
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (default 32)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--num-prompts", type=int, default=256, metavar="N", help="of throughput (default 256)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="of latency (default 8)")
    parser.add_argument("--warmups", type=int, default=10, metavar="N", help="runs that are not counted (default 10)")
    parser.add_argument("--runs", type=int, default=30, metavar="N", help="of latency and startup (default 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _batch(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="requests, one JSON object per line; - = stdin")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="answers; those in it are not asked again")
    parser.add_argument("--window", type=int, metavar="N", help="most requests in flight (default 512)")


def _add_engine_options(parser: ArgumentParser) -> None:
    """Adds the flags; what is not given keeps the engine's own default."""
    group = parser.add_argument_group("engine", "see EngineConfig; mappings are given as JSON, lists with commas")
    for field in fields(EngineConfig):
        if field.name in LEFT_OUT:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            group.add_argument(flag, action=BooleanOptionalAction, default=SUPPRESS)
        else:
            group.add_argument(flag, type=_reader(str(field.type)), default=SUPPRESS, metavar="VALUE")


def engine_options(chosen: Namespace) -> dict[str, Any]:
    """The options that were given."""
    return {field.name: getattr(chosen, field.name) for field in fields(EngineConfig) if _is_given(chosen, field.name)}


def _is_given(chosen: Namespace, name: str) -> bool:
    return name not in LEFT_OUT and hasattr(chosen, name)


def _reader(kind: str) -> Any:
    """What turns a word into a value of an option's type."""
    if "Mapping" in kind:
        import json

        return json.loads
    if "tuple" in kind:
        return lambda text: tuple(int(part) for part in text.split(","))
    if "float" in kind:
        return float
    if "int" in kind and "str" not in kind:
        return int
    return _number_or_text if "int" in kind else str


def _number_or_text(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
