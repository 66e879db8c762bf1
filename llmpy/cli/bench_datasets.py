"""The requests that `llmpy bench serve` sends: random, or read from a local file."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:
    from .http_client import HttpClient

Ids = list[int]


class Ask(NamedTuple):
    """One request.

    Args:
        prompt: Text, or ids.
        input_tokens: Tokens of the prompt if known, else 0.
        output_tokens: Most new tokens.
    """

    prompt: str | Ids
    input_tokens: int
    output_tokens: int


async def asks_of(chosen: Namespace, client: HttpClient, seed: int) -> list[Ask]:
    """The requests of a run.

    Args:
        chosen: The command line.
        client: Client of the server, to read the size of the vocabulary if no option gives it.
        seed: Seed of lengths, ids and the choice of lines.

        Raises:
            ConfigError: The file does not fit the dataset, or chat has no text.
    """
    rng = random.Random(seed)
    if chosen.dataset in ("custom", "sharegpt"):
        if chosen.dataset_path is None:
            raise ConfigError(f"--dataset {chosen.dataset} needs --dataset-path FILE", option="dataset_path")
        with open(chosen.dataset_path, encoding="utf-8") as file:
            found = (_custom if chosen.dataset == "custom" else _sharegpt)(file.read(), chosen.output_len)
        if not found:
            raise ConfigError(f"{chosen.dataset_path}: wanted prompts, have none", option="dataset_path")
        return rng.sample(found, min(chosen.num_prompts, len(found)))
    from .http_client import HttpFailure

    tokenizer: Any = None
    if chosen.tokenizer is not None:
        from ..engine.loading import open_tokenizer

        tokenizer = open_tokenizer(chosen.tokenizer)
    elif chosen.endpoint == "chat":
        message = f"--dataset {chosen.dataset} makes ids; for chat, --tokenizer PATH writes them as text"
        raise ConfigError(message, option="tokenizer")
    vocabulary = chosen.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocabulary is None:
        try:
            vocabulary = (await client.get("/tokenizer_info"))["vocab_size"]
        except HttpFailure:
            message = "the server does not tell the size of its vocabulary; --vocab-size N, or --tokenizer PATH"
            raise ConfigError(message, option="vocab_size") from None
    rows = (_random if chosen.dataset == "random" else _repeated)(rng, vocabulary, chosen)
    return [Ask(tokenizer.decode(ids) if tokenizer else ids, len(ids), length) for ids, length in rows]


def _ids(rng: random.Random, vocabulary: int, length: int) -> Ids:
    return rng.choices(range(vocabulary), k=length)


def _length(rng: random.Random, middle: int, ratio: float) -> int:
    return rng.randint(max(1, round(middle * (1 - ratio))), max(1, round(middle * (1 + ratio))))


def _random(rng: random.Random, vocabulary: int, chosen: Namespace) -> list[tuple[Ids, int]]:
    """Prompts of random ids with a common prefix."""
    prefix = _ids(rng, vocabulary, chosen.prefix_len)
    ratio = chosen.range_ratio
    return [
        (prefix + _ids(rng, vocabulary, _length(rng, chosen.input_len, ratio)), _length(rng, chosen.output_len, ratio))
        for _ in range(chosen.num_prompts)
    ]


def _repeated(rng: random.Random, vocabulary: int, chosen: Namespace) -> list[tuple[Ids, int]]:
    """Prompts with a few prefixes and random endings, in random order."""
    prefixes = [_ids(rng, vocabulary, chosen.repeated_prefix_len) for _ in range(chosen.num_prefixes)]
    rows = [
        (prefixes[i % chosen.num_prefixes] + _ids(rng, vocabulary, chosen.suffix_len), chosen.output_len)
        for i in range(chosen.num_prompts)
    ]
    rng.shuffle(rows)
    return rows


def _custom(text: str, output_len: int) -> list[Ask]:
    """Requests from JSON lines with `prompt` and optional `output_tokens`."""
    asks = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            asks.append(Ask(item["prompt"], 0, int(item.get("output_tokens") or output_len)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"line {number}: wanted a JSON object with prompt", option="dataset_path") from None
    return asks


def _sharegpt(text: str, output_len: int) -> list[Ask]:
    """Requests from the first turn of each conversation."""
    try:
        conversations: Sequence[Any] = json.loads(text)
        turns = [item.get("conversations") or item.get("conversation") or [] for item in conversations]
        return [Ask(str(found[0]["value"]), 0, output_len) for found in turns if len(found) >= 2 and found[0].get("value")]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("wanted a JSON list of objects with conversations", option="dataset_path") from None
