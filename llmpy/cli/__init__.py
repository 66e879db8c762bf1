"""The command line: `llmpy demo`, `generate`, `chat`, `score`, `serve`, `bench`, `run-batch`, `inspect`, ..."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__

if TYPE_CHECKING:
    import argparse
    from types import ModuleType

    from .parser import Parser

VERSION = f"llmpy {__version__}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Words of the command line; None = the process's arguments.

        Returns:
            The exit status: 0; 1 after a reported error; 2 for a wrong command line; 130 after Ctrl-C.

        Raises:
            KeyboardInterrupt: After Ctrl-C if `arguments` is None, so that the process ends by SIGINT.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the descriptor was closed before the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:  # before the parser, because its imports take most of the time
        print(VERSION)
        return 0
    try:
        parser = _parser(words[0] if words else "")
        if not words:
            parser.print_help(sys.stderr)
            return 2
        chosen = parser.parse_args(words)
        if getattr(chosen, "name", None) and any(word.partition("=")[0] == "--model" for word in words):
            parser.error(f"the model is named twice, as {chosen.name!r} and by --model; leave one out")
        from importlib import import_module

        return _run(import_module(f"{__name__}.{chosen.module}"), chosen)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        if arguments is None:
            _end_by_interrupt()
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has closed the pipe; the interpreter would report that at exit
        return 1
    except (OSError, ImportError) as error:
        print(f"llmpy: {error}", file=sys.stderr)
        return 1


def _end_by_interrupt() -> NoReturn:
    """Ends the process by SIGINT, so that a shell ends its loop, too; the interpreter still cleans up."""
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt


def _run(module: ModuleType, chosen: argparse.Namespace) -> int:
    """Runs the chosen command; prints a LlmpyError in one line."""
    from ..errors import LlmpyError
    from .imports import run_imports

    try:
        run_imports(chosen)
        return int(module.run(chosen) or 0)
    except LlmpyError as error:
        print(f"llmpy: {error}", file=sys.stderr)
        return 1


def _parser(word: str) -> argparse.ArgumentParser:
    """The parser of all commands with their options.

    Args:
        word: First word of the command line. Options that are slow to build are added only to the command of this name.
    """
    from .parser import Parser, count, count_or_zero, length

    parser = Parser(prog="llmpy", description="Large-language-model inference, exact and small.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, module: str, text: str) -> Parser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(module=module, command=name)
        return made

    demo = command("demo", "demo", "Fetch a small model once and answer a few prompts with it.")
    demo.add_argument("--model", metavar="MODEL", help="directory, .gguf file or hub id (default: the demo model)")
    _add_device(demo)
    demo.add_argument("--max-tokens", type=count, default=128, metavar="N", help="longest answer (default 128)")
    demo.add_argument("prompts", nargs="*", metavar="PROMPT", help="your own questions instead")

    generate = command("generate", "text", "Continue prompts: those given, else one per line of standard input.")
    _add_name(generate)
    _add_device(generate)
    _add_texts(generate)
    generate.add_argument("-n", type=count, metavar="N", help="samples per prompt (default 1)")
    generate.add_argument("--json-schema", metavar="JSON", help="a JSON schema that the text follows: a file, or its text")
    generate.add_argument("--chat", action="store_true", help="prompts are messages of a user, answered as a chat")
    generate.add_argument("--logprobs", type=count_or_zero, metavar="K", help="logprobs of tokens and of K others, in --jsonl")
    generate.add_argument("--jsonl", action="store_true", help="one JSON object per prompt: ids, text, times, logprobs")

    chat = command("chat", "chat", "Talk to a model, in this process or of a running server.")
    _add_name(chat)
    _add_device(chat)
    _add_server(chat, None)
    chat.add_argument("--system", metavar="TEXT", help="system message")

    complete = command("complete", "complete", "Continue prompts at a running server.")
    complete.add_argument("words", nargs="*", metavar="PROMPT", help="texts to go on with")
    complete.add_argument("--model", metavar="NAME", help="the server's name of the model (default: its first)")
    _add_server(complete, "http://127.0.0.1:8000")
    _add_texts(complete)

    score = command("score", "text", "Log-probability and perplexity of texts: those given, else one per line of input.")
    _add_name(score)
    _add_device(score)
    _add_texts(score)
    score.add_argument("--jsonl", action="store_true", help="one JSON object per text: ids, logprobs, ranks")

    serve = command("serve", "serve", "Serve a model over HTTP, in the protocols of OpenAI and Anthropic.")
    route = command("route", "route", "Share requests out to servers: each to the one that holds its prompt's beginning.")
    bench = command("bench", "bench", "Measure an engine here, or a running server.")
    batch = command("run-batch", "batch", "Answer an OpenAI batch file offline; run again, it goes on where it stopped.")
    chosen = {"serve": serve, "route": route, "bench": bench, "run-batch": batch}.get(word)
    if chosen is not None:
        from . import engine_options

        engine_options.add_options(word, chosen)
    max_tokens = {"generate": 128, "chat": 512, "complete": 128}
    if word in max_tokens:
        _add_sampling(commands.choices[word], max_tokens[word])

    inspect = command("inspect", "inspect", "What a model is: program, weights, cache, memory; nothing is loaded.")
    _add_name(inspect)
    inspect.add_argument("--max-model-len", type=length, metavar="N", help="longest sequence")
    inspect.add_argument("--weights", action="store_true", help="list every weight")
    inspect.add_argument("--all", action="store_true", help="show every layer, those that look alike too")
    inspect.add_argument("--config-only", action="store_true", help="read config.json alone: no weights need be there")

    compare = command("compare", "compare", "Walk a model beside transformers and say where they first differ.")
    _add_name(compare)
    compare.add_argument("--device", help="cpu, cuda:0, ... (default: LLMPY_DEVICE, else the best there is)")
    compare.add_argument("--dtype", default="float32", help="auto, float32 (default), float16, bfloat16")
    compare.add_argument("--activation-dtype", default="float", help="float (default), int8, auto: of quantised weights")
    compare.add_argument("--max-model-len", type=length, metavar="N", help="longest sequence")
    compare.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog. 1, 2, 3", metavar="TEXT")
    compare.add_argument("--ids", metavar="LIST", help="token ids instead of a prompt")
    compare.add_argument("--tolerance", type=float, metavar="X", help="of the largest value (float32: 1e-4)")
    compare.add_argument("--all", action="store_true", help="show every module, not the layers alone")

    convert = command("convert", "convert", "Write a quantised copy of a model, as compressed-tensors or GGUF.")
    convert.add_argument("name", metavar="MODEL", help="directory, .gguf file, hub id, or demo")
    convert.add_argument("out", metavar="OUT", help="new directory, or new .gguf file")
    convert.add_argument("--to", required=True, metavar="TYPE", help="fp8, int8, int4, int4_g32; of GGUF: gguf-q8_0, ...")

    export = command("export", "export", "Write the architecture function of a class that transformers has, or its program.")
    _add_export(export)
    pull = command("pull", "models", "Download a model of the Hugging Face hub, or the demo model.")
    pull.add_argument("name", metavar="MODEL", help="hub id, a file in one (org/name/file.gguf), or demo")
    pull.add_argument("--revision", metavar="NAME", help="branch, tag or commit")
    command("list", "models", "Models that are on this machine, in the caches of the hub and of llmpy.")
    remove = command("rm", "models", "Delete a downloaded model.")
    remove.add_argument("name", metavar="MODEL", help="hub id, or demo")
    _add_tasks(command("eval", "evaluate", "Score a model on small built-in tasks, or on those of lm-evaluation-harness."))
    machine = command("devices", "machine", "Devices of this machine, and why one cannot be used.")
    machine.add_argument("--operations", action="store_true", help="where the backend of each kind runs each operation")
    command("version", "machine", "Version and build.")
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `export`."""
    _add_name(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="FILE.py: the function; FILE.json: the program (default: print)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--skeleton", action="store_true", help="the function, as far as the class is understood (default)")
    only.add_argument("--graph", action="store_true", help="the traced graph: nodes and their modules")
    only.add_argument("--check", action="store_true", help="convert, compare with the class, and write nothing")


def _add_name(parser: argparse.ArgumentParser) -> None:
    """Adds the model, as a word or an option, and --import."""
    from .imports import add_import

    add_import(parser)
    parser.add_argument("name", nargs="?", metavar="MODEL", help="directory, .gguf file or hub id (default: the demo model)")
    parser.add_argument("--model", metavar="MODEL", help="the same")


def _add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the options of device, dtype and length."""
    from .parser import length

    parser.add_argument("--device", help="cpu, cuda:0, ... (default: LLMPY_DEVICE, else the best there is)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    parser.add_argument("--max-model-len", type=length, metavar="N", help="longest sequence")


def _add_server(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Adds the options of a running server. The key is not an argument: every user of the machine can read arguments."""
    parser.add_argument("--url", default=default, metavar="URL", help=f"address of a running server (default {default})")
    parser.add_argument("--api-key-file", metavar="FILE", help="the server's key (default: OPENAI_API_KEY of the environment)")


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `eval`."""
    from .parser import count, count_or_zero

    _add_name(parser)
    _add_device(parser)
    parser.add_argument("--tasks", default="arithmetic,copying,json,choice", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--limit", type=count, metavar="N", help="ask the first N items of each task")
    parser.add_argument("--num-fewshot", type=count_or_zero, metavar="N", help="examples of the harness's tasks")
    parser.add_argument("--json", action="store_true", help="one JSON object per score")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds the options for input texts."""
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("-f", "--file", metavar="FILE", help="one text per line; - = standard input")


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Adds the sampling options; the defaults come from the model's generation config."""
    from ..sampling_params import FLAGS, SamplingParams
    from .parser import count, reader

    special: dict[str, dict[str, Any]] = {
        "max_tokens": {"type": count, "default": max_tokens, "help": f"default {max_tokens}"},
        "temperature": {"help": "0 = greedy"},
        "stop": {"action": "append", "help": "stop string; may be given several times"},
    }
    for name, metavar in FLAGS.items():
        options = {"type": reader(str(SamplingParams.__dataclass_fields__[name].type)), **special.get(name, {})}
        parser.add_argument("--" + name.replace("_", "-"), metavar=metavar, **options)
