"""The built-in tasks. Their items come from a generator with a fixed seed, so every machine asks the same questions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import NamedTuple

NUM_ITEMS = 100
"""Items of a task."""


class Item(NamedTuple):
    """One question.

    Attributes:
        prompt: What the model continues.
        answer: The right continuation; with `choices` one of them.
        choices: Continuations, the most probable of which is the model's answer; empty: the model writes its answer.
    """

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()


class Task(NamedTuple):
    """One built-in task.

    Attributes:
        about: What it asks for.
        make: Makes its items from a generator of random numbers.
        is_right: Compares a written answer, up to its first line break, with the right one.
        max_tokens: Longest written answer.
    """

    about: str
    make: Callable[[random.Random], list[Item]]
    is_right: Callable[[str, str], bool]
    max_tokens: int = 0

    def items(self, limit: int | None = None) -> list[Item]:
        """The items, the same in every process.

        Args:
            limit: Take the first so many; None = all.
        """
        return self.make(random.Random(20260101))[:limit]


def _arithmetic(numbers: random.Random) -> list[Item]:
    """Sums and differences of small numbers, behind three examples."""
    examples = "Question: 4 + 5\nAnswer: 9\n\nQuestion: 12 - 3\nAnswer: 9\n\nQuestion: 8 + 6\nAnswer: 14\n\n"
    found = []
    for index in range(NUM_ITEMS):
        first, second = numbers.randint(1, 20), numbers.randint(1, 9)
        sign, result = ("+", first + second) if index % 2 == 0 else ("-", first - second)
        found.append(Item(f"{examples}Question: {first} {sign} {second}\nAnswer:", f" {result}"))
    return found


def _words(text: str) -> list[str]:
    return text.split()


_WORDS = _words("""apple river stone cloud green seven table horse paper winter silver garden music bread window yellow ocean
candle forest bridge mountain pencil orange spoon""")


def _copying(numbers: random.Random) -> list[Item]:
    """Lists of words to repeat, behind two examples."""
    examples = "Input: dog house tree\nOutput: dog house tree\n\nInput: red moon sun cat\nOutput: red moon sun cat\n\n"
    lists = [" ".join(numbers.sample(_WORDS, numbers.randint(3, 10))) for _ in range(NUM_ITEMS)]
    return [Item(f"{examples}Input: {words}\nOutput:", f" {words}") for words in lists]


_NAMES = _words("Ada Ben Clara David Emma Felix Grace Henry Iris Jack Kate Liam")
_CITIES = _words("Paris London Rome Berlin Madrid Vienna Oslo Dublin Athens Lisbon")


def _json(numbers: random.Random) -> list[Item]:
    """Sentences to write as JSON objects, behind two examples."""

    def example(name: str, age: int, city: str) -> tuple[str, str]:
        answer = json.dumps({"name": name, "age": age, "city": city})
        return f"Sentence: {name} is {age} years old and lives in {city}.\nJSON:", f" {answer}"

    shown = [example("Tom", 31, "Prague"), example("Lena", 8, "Cairo")]
    examples = "".join(f"{prompt}{answer}\n\n" for prompt, answer in shown)
    asked = [example(numbers.choice(_NAMES), numbers.randint(5, 90), numbers.choice(_CITIES)) for _ in range(NUM_ITEMS)]
    return [Item(examples + prompt, answer) for prompt, answer in asked]


_PAIRS = """France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Greece:Athens Austria:Vienna Norway:Oslo
Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Hungary:Budapest Ireland:Dublin Russia:Moscow Turkey:Ankara
Egypt:Cairo Kenya:Nairobi Japan:Tokyo China:Beijing Thailand:Bangkok Cuba:Havana Peru:Lima Chile:Santiago Canada:Ottawa
Iran:Tehran Iraq:Baghdad Belgium:Brussels Netherlands:Amsterdam Ukraine:Kyiv Bulgaria:Sofia Romania:Bucharest"""
_CAPITALS = dict(pair.split(":") for pair in _words(_PAIRS))
_LETTERS = (" A", " B", " C", " D")


def _choice(numbers: random.Random) -> list[Item]:
    """Questions with four answers, in the form of MMLU; the model's answer is the most probable letter."""

    def question(land: str) -> tuple[str, int]:
        others = sorted(set(_CAPITALS.values()) - {_CAPITALS[land]})
        answers = [_CAPITALS[land], *numbers.sample(others, 3)]
        numbers.shuffle(answers)
        lines = "".join(f"{letter.strip()}. {answer}\n" for letter, answer in zip(_LETTERS, answers, strict=True))
        return f"What is the capital of {land}?\n{lines}Answer:", answers.index(_CAPITALS[land])

    begin = "The following are multiple choice questions (with answers) about geography.\n\n"
    lands = sorted(_CAPITALS)
    found = []
    for _ in range(NUM_ITEMS):
        *shown, asked = numbers.sample(lands, 4)
        examples = "".join(f"{text}{_LETTERS[right]}\n\n" for text, right in map(question, shown))
        text, right = question(asked)
        found.append(Item(begin + examples + text, _LETTERS[right], _LETTERS))
    return found


def _same_number(given: str, wanted: str) -> bool:
    number = re.match(r"\s*(-?\d+)", given)
    return number is not None and int(number[1]) == int(wanted)


def _same_text(given: str, wanted: str) -> bool:
    return given.strip() == wanted.strip()


def _same_json(given: str, wanted: str) -> bool:
    try:
        return bool(json.loads(given) == json.loads(wanted))
    except ValueError:
        return False


TASKS = {
    "arithmetic": Task("sums and differences of numbers up to 29", _arithmetic, _same_number, 6),
    "copying": Task("lists of 3 to 10 words, repeated", _copying, _same_text, 32),
    "json": Task("sentences, written as JSON objects", _json, _same_json, 48),
    "choice": Task("capitals, one of four answers, by the logprob of its letter", _choice, _same_text),
}
"""The built-in tasks by their names."""
