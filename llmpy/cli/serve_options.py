"""The options of `llmpy serve`, apart from the command so that its help needs none of its imports."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def add_options(parser: ArgumentParser) -> None:
    """The server's own options."""
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
