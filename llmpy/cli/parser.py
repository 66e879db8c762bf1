"""The parser of the command line: errors for unknown words name the nearest known word; --config FILE."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviated options and with helpful errors.

    Args:
        options: Options of ArgumentParser.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def add_config(self) -> None:
        """Adds --config, a TOML file with values for options; options on the command line win."""
        self.add_argument("--config", metavar="FILE", help="TOML file with options: max-model-len = 4096")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Like ArgumentParser's, but unknown arguments end the program with status 2."""
        if "--config" in self._option_string_actions and args is not None:
            args = [*self._config_words(args), *args]
        chosen, left = super().parse_known_args(args, namespace)
        if left:
            name = left[0].partition("=")[0]
            what = "option" if name.startswith("-") else "word"
            known = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            self.error(f"unknown {what} {name!r}{meaning(name) or nearest(name, known)}")
        return chosen, left

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2 and one line."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` says what there is\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = nearest(value, action.choices)
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"unknown word {value!r}{hint}")
        raise argparse.ArgumentError(action, f"unknown: {value!r}{hint or '; wanted ' + ' or '.join(action.choices)}")

    def _config_words(self, words: Sequence[str]) -> list[str]:
        """The options of the file that --config names, as words of the command line."""
        path = None
        for i, word in enumerate(words):
            if word == "--config":
                path = words[i + 1] if i + 1 < len(words) else None
            elif word.startswith("--config="):
                path = word.partition("=")[2]
        if path is None:
            return []
        import tomllib

        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            self.error(f"--config: {error}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self.error(f"--config: {path}: wanted TOML, such as max-model-len = 4096, have another form: {error}")
        if "model" in values:
            self.set_defaults(model=values.pop("model"))
        for name in values:
            flag = "--" + name.replace("_", "-")
            if flag not in self._option_string_actions:
                hint = meaning(flag) or nearest(flag, self._option_string_actions)
                self.error(f"--config: {path}: unknown option {name!r}{hint}")
        words = [word for name, value in values.items() for word in self._words(name, value)]
        return [*words, "--config", path]  # the option ends a list, which would otherwise take the next word

    def _words(self, name: str, value: Any) -> list[str]:
        """An option of the file as words of the command line."""
        flag = "--" + name.replace("_", "-")
        action = self._option_string_actions.get(flag)
        if isinstance(value, bool):
            return [flag if value else flag.replace("--", "--no-", 1)]
        if isinstance(value, dict):
            import json

            return [flag, json.dumps(value)]
        if isinstance(value, list) and action is not None and action.nargs == "+":
            return [flag, *map(str, value)]
        return [f"{flag}={','.join(map(str, value)) if isinstance(value, list) else value}"]


def reader(kind: str) -> Any:
    """What turns a word into a value of an option's annotated type."""
    if "Mapping" in kind:
        import json

        takes_text = "str" in re.sub(r"\[.*?\]", "", kind)
        return lambda text: text if takes_text and not text.lstrip().startswith("{") else json.loads(text)
    if "tuple" in kind:
        return lambda text: tuple(int(part) for part in text.split(","))
    if "float" in kind:
        return float
    if "int" in kind and "str" not in kind:
        return int
    return _number_or_text if "int" in kind else str


def _number_or_text(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def count(word: str, least: int = 1) -> int:
    """Reads an integer of at least `least`."""
    if not word.isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"wanted a number of {least} or more, have {word!r}")
    return int(word)


def length(word: str) -> int:
    """Reads a number of tokens: 4096, 4k (4000) or 4K (4096)."""
    from ..errors import ConfigError
    from ..options import model_length

    try:
        return int(model_length("max_model_len", word))
    except (ConfigError, ValueError):
        raise argparse.ArgumentTypeError(f"wanted a number of 1 or more, such as 4096 or 4k, have {word!r}") from None


def count_or_zero(word: str) -> int:
    """Reads an integer of at least 0."""
    return count(word, 0)


def positive(word: str) -> float:
    """Reads a number above 0."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, have {word!r}")
    return number


def meaning(name: str) -> str:
    """Advice about an option of vLLM's server, as the end of an error; "" for other names."""
    from .vllm_flags import MEANINGS

    return f"; {MEANINGS[name]}" if name in MEANINGS else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The nearest known name, as the end of an error; "" if none is near."""
    from difflib import get_close_matches

    known = sorted(known)
    found = [one for one in known if one.startswith(name)] or get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {found[0]!r}?" if found else ""
