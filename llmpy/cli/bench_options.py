"""The options of `llmpy bench`: three measurements of a local engine, two of a server."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction
from pathlib import Path

from .engine_options import add_engine_options, add_lora_modules, add_model
from .parser import Parser, count, count_or_zero, positive

LOCAL = {
    "throughput": "All requests queued at once.",
    "latency": "One batch after another, nothing cached.",
    "startup": "Fresh processes: import, load, first token.",
}
REMOTE = {
    "serve": "A running server under load; the key, if it wants one, is OPENAI_API_KEY of the environment.",
    "sweep": "The same for rates or concurrencies, until the goals of --goodput break; prints CSV.",
}


def add_bench_options(parser: Parser) -> None:
    """Adds the measurements with their options."""
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="what")
    for name, text in LOCAL.items():
        made = commands.add_parser(name, help=text, description=text)
        add_model(made)
        _local(made)
        if name != "startup":
            add_lora_modules(made, "adapters that the prompts have by turns, with --enable-lora")
        add_engine_options(made)
    for name, text in REMOTE.items():
        made = commands.add_parser(name, help=text, description=text)
        _remote(made)
        _load(made, name)


def _local(parser: ArgumentParser) -> None:
    parser.add_argument("--input-len", type=count, default=32, metavar="N", help="tokens of a prompt (default 32)")
    parser.add_argument("--output-len", type=count, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--num-prompts", type=count, default=256, metavar="N", help="of throughput (default 256)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="of latency (default 8)")
    parser.add_argument("--warmups", type=count_or_zero, default=10, metavar="N", help="runs not counted (default 10)")
    parser.add_argument("--runs", type=count, default=30, metavar="N", help="of latency and startup (default 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _remote(parser: ArgumentParser) -> None:
    """Adds the options of the server and of its requests."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default http://127.0.0.1:8000")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--lora-modules", nargs="+", default=[], metavar="NAME", help="the server's adapters that requests name by turns"
    )
    kinds = ("random", "prefix-repetition", "custom", "sharegpt")
    parser.add_argument("--dataset", choices=kinds, default="random", help="default random")
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help="of custom (JSON lines) and sharegpt")
    parser.add_argument("--num-prompts", type=count, default=1000, metavar="N", help="default 1000")
    parser.add_argument("--input-len", type=count, default=1024, metavar="N", help="of random (default 1024)")
    parser.add_argument("--output-len", type=count, default=128, metavar="N", help="default 128")
    parser.add_argument("--range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share (default 0)")
    parser.add_argument(
        "--prefix-len", type=count_or_zero, default=0, metavar="N", help="of random: ids that all share (default 0)"
    )
    parser.add_argument("--repeated-prefix-len", type=count, default=256, metavar="N", help="of prefix-repetition (256)")
    parser.add_argument("--suffix-len", type=count, default=256, metavar="N", help="of prefix-repetition (256)")
    parser.add_argument("--num-prefixes", type=count, default=10, metavar="N", help="of prefix-repetition (10)")
    parser.add_argument("--tokenizer", metavar="PATH", help="makes text of ids; default: ids are sent")
    parser.add_argument("--vocab-size", type=count, metavar="N", help="ids are below (default: as the server tells)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    parser.add_argument("--ignore-eos", action=BooleanOptionalAction, default=True, help="answers have full length (default)")


def _load(parser: ArgumentParser, name: str) -> None:
    """Adds the options of the load."""
    if name == "sweep":
        lists = parser.add_mutually_exclusive_group(required=True)
        lists.add_argument("--rates", type=positive, nargs="+", default=[], metavar="R", help="requests a second")
        lists.add_argument("--concurrencies", type=count, nargs="+", default=[], metavar="N", help="requests in flight")
    else:
        parser.add_argument("--request-rate", type=positive, default=float("inf"), metavar="R", help="a second (default inf)")
        parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--max-concurrency", type=count, metavar="N", help="most requests in flight (default: no limit)")
    parser.add_argument("--burstiness", type=positive, default=1.0, metavar="B", help="1 = Poisson, less = in bursts")
    parser.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="the rate grows during the run")
    parser.add_argument("--ramp-up-start-rps", type=positive, default=1.0, metavar="R", help="from here (default 1)")
    parser.add_argument("--ramp-up-end-rps", type=positive, default=10.0, metavar="R", help="to here (default 10)")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="goals: ttft:200 tpot:50 e2el:3000")
    parser.add_argument("--seed", type=int, metavar="N", help="default: another one each run, so that no prompt is cached")
