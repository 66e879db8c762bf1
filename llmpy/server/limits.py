"""The table of all limits on clients: the amount, its scope, the option that changes it, and the answer beyond it.

All code that enforces a limit reads the number from this table. `check` enforces the limits on fields of bodies.
docs/use/server.md shows `table()`; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..engine.frontend import too_long
from .errors import HttpError

KIB, MIB = 1 << 10, 1 << 20


class Limit(NamedTuple):
    """A limit: a row of the table.

    Args:
        what: The thing that is counted.
        most: Largest allowed amount: a number, or a text if it depends on an option or on the model.
        unit: Unit of the number.
        answer: Answer beyond the limit: a status, or a text.
        scope: Scope of the count: "request", "connection" or "server".
        knob: The option that changes the limit; "" = none.
        paths: Paths with this limit; "" = all.
    """

    what: str
    most: float | str
    unit: str
    answer: int | str
    scope: str = "request"
    knob: str = ""
    paths: str = ""


CLOSED = "closed"
TEXT = "paths that take a text prompt, `/tokenize`, `count_tokens`"
SAMPLED = "paths that generate"
KEPT = "`/v1/responses`"
SEEING = "paths that take a conversation"

LIMITS: dict[str, Limit] = {
    "connections": Limit("connections, TLS handshakes included", "`--max-connections` (16384)", "", 503, "server",
                         "--max-connections"),
    "head_s": Limit("time to the end of a head, TLS handshake included", 10, "s", CLOSED, "connection"),
    "head_bytes": Limit("a head", 64 * KIB, "bytes", CLOSED, "connection"),
    "unread_s": Limit("time that an answer stays unread", "`--stream-timeout` (60)", "s", CLOSED, "connection",
                      "--stream-timeout"),
    "linger_s": Limit("time to give out the rest of an answer behind the end", 10, "s", CLOSED, "connection"),
    "rest_bytes": Limit("the rest of a body that was refused", 4 * MIB, "bytes", CLOSED, "connection"),
    "body_bytes": Limit("a body", "`--max-body-bytes` (16 MiB)", "bytes", 413, knob="--max-body-bytes"),
    "progress_s": Limit("time in which the next 64 KiB of a body, or its end, must come", 10, "s", 408),
    "body_s": Limit("time in which a body must come", 600, "s", 408),
    "bodies": Limit("bodies of over 64 KiB that are held at once", "8 x `--max-body-bytes`", "bytes", 429, "server",
                    "--max-body-bytes"),
    "queue": Limit("requests that run or wait", "`--max-queued-requests` + `--max-num-seqs`", "", 429, "server",
                   "--max-queued-requests"),
    "commas": Limit("commas in a body of over 64 KiB", 2 * MIB, "", 413),
    "lists": Limit("lists in a body of over 64 KiB", 100_000, "", 413),
    "objects": Limit("objects in a body of over 64 KiB", 100_000, "", 413),
    "fields": Limit("fields of objects in a body of over 64 KiB", 100_000, "", 413),
    "prompt_text": Limit("a text", "`--max-model-len` x the longest token", "bytes", 400, knob="--max-model-len", paths=TEXT),
    "prompt_ids": Limit("ids of a prompt", "`--max-model-len`", "", 400, knob="--max-model-len", paths=TEXT),
    "prompts": Limit("prompts, or texts to compare", 1024, "", 400),
    "n": Limit("`n`", 128, "", 400, paths=SAMPLED),
    "stop": Limit("`stop`, `stop_sequences`", 16, "strings", 400, paths=SAMPLED),
    "stop_bytes": Limit("one of them", 256, "bytes", 400, paths=SAMPLED),
    "bad_words": Limit("`bad_words`, `bad_token_ids`", 128, "strings", 400, paths=SAMPLED),
    "bad_word_bytes": Limit("one of them", 256, "bytes", 400, paths=SAMPLED),
    "token_ids": Limit("`stop_token_ids`, `allowed_token_ids`, `logit_bias`", "the vocabulary", "ids", 400, paths=SAMPLED),
    "grammar_bytes": Limit("a schema or a grammar", 256 * KIB, "bytes", 400, paths=SAMPLED),
    "name_chars": Limit("`model`, `request_id`, `cache_salt`, `user` and other names", 1024, "characters", 400),
    "detokenize": Limit("`tokens`", MIB, "ids", 400, paths="`/detokenize`"),
    "template_bytes": Limit("`chat_template`", 64 * KIB, "characters", 400, knob="--allow-request-template"),
    "template_s": Limit("processor time of a template from a request", 2, "s", 400, knob="--allow-request-template"),
    "template_steps": Limit("steps of one: iterations, calls, operators", 200_000, "", 400, knob="--allow-request-template"),
    "template_chars": Limit("a value or the text that one makes, beside 4 x the messages", MIB, "characters", 400,
                            knob="--allow-request-template"),
    "template_memory": Limit("all values that one makes, beside 256 x the messages", 64 * MIB, "bytes", 400,
                             knob="--allow-request-template"),
    "images": Limit("images of a conversation", "`--limit-mm-per-prompt` (16)", "", 400, knob="--limit-mm-per-prompt",
                    paths=SEEING),
    "image_pixels": Limit("an image", "`--max-image-pixels` (50,000,000)", "pixels", 400, knob="--max-image-pixels",
                          paths=SEEING),
    "image_side": Limit("a side of it", "`--max-image-side` (16,384)", "pixels", 400, knob="--max-image-side", paths=SEEING),
    "image_bytes": Limit("an image behind a URL", 20 * MIB, "bytes", 400, knob="--allow-image-urls", paths=SEEING),
    "image_connect_s": Limit("time to reach it", 5, "s", 400, knob="--allow-image-urls", paths=SEEING),
    "image_s": Limit("time to fetch it", 10, "s", 400, knob="--allow-image-urls", paths=SEEING),
    "metadata": Limit("`metadata`", 16, "pairs", 400, paths=KEPT),
    "metadata_key": Limit("a key of it", 64, "characters", 400, paths=KEPT),
    "metadata_value": Limit("a value of it", 512, "characters", 400, paths=KEPT),
    "kept": Limit("responses that are kept", "`--keep-responses` (0)", "", "the oldest go", "server", "--keep-responses",
                  KEPT),
    "kept_bytes": Limit("bodies and answers of responses that are kept", 64 * MIB, "bytes", "the oldest go", "server",
                        "--keep-responses", KEPT),
}  # fmt: skip
LONG_BYTES = 64 * KIB
"""Bodies up to this size are parsed on the event loop and do not count as long bodies."""
FIELD = b'":'
MARKS = {b",": "commas", b"[": "lists", b"{": "objects", FIELD: "fields"}
"""Bytes to count in a body -> name of the limit."""
BODIES = 8
"""Most bodies of the greatest length that are held at once."""


def most(name: str) -> int:
    """The number of a limit."""
    number = LIMITS[name].most
    assert isinstance(number, int | float)
    return int(number)


def seconds(name: str) -> float:
    """The number of a limit in seconds."""
    return float(most(name))


def table() -> str:
    """The limits as the Markdown table of docs/use/server.md."""
    rows = ["| what | at most | of one | beyond it | where |", "| --- | --- | --- | --- | --- |"]
    for limit in LIMITS.values():
        number = limit.most if isinstance(limit.most, str) else _shown(int(limit.most))
        amount = f"{number} {limit.unit}".strip()
        rows.append(f"| {limit.what} | {amount} | {limit.scope} | {limit.answer} | {limit.paths} |")
    return "\n".join(rows)


def _shown(number: int) -> str:
    """A number in Mi or Ki if it is a multiple of one."""
    for unit, name in ((MIB, "Mi"), (KIB, "Ki")):
        if number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number:,}"


# ---- fields of bodies ----------------------------------------------------------------------------------------------------

Measure = Callable[[Any], int]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else int(value is not None)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _chars(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _longest(size: Measure) -> Measure:
    """Measures the longest item of a list, or a single item."""
    return lambda value: max(map(size, value if isinstance(value, list) else [value]), default=0)


def _bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    return 4 * len(value) if isinstance(value, list) else 0  # token ids count 4 bytes each


def _json(value: Any) -> int:
    return len(msgspec.json.encode(value))


def _keys(value: Any) -> int:
    return max(map(_chars, value), default=0) if isinstance(value, dict) else 0


def _values(value: Any) -> int:
    if not isinstance(value, dict):
        return 0
    return max((_chars(item) if isinstance(item, str) else _json(item) for item in value.values()), default=0)


STOPS = (("stop", _count), ("stop_bytes", _longest(_bytes)))
BAD = (("bad_words", _count), ("bad_word_bytes", _longest(_bytes)))
NAME = (("name_chars", _chars),)
IDS = (("token_ids", _count),)
FIELDS: dict[str, tuple[tuple[str, Measure], ...]] = {
    "n": (("n", _number),),
    "stop": STOPS,
    "stop_sequences": STOPS,
    "bad_words": BAD,
    "bad_token_ids": BAD,
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "logit_bias": IDS,
    "chat_template": (("template_bytes", _chars),),
    "tokens": (("detokenize", _count),),
    "metadata": (("metadata", _count), ("metadata_key", _keys), ("metadata_value", _values)),
    **dict.fromkeys(
        ("model", "user", "request_id", "cache_salt", "previous_response_id", "prompt_cache_key", "safety_identifier",
         "service_tier", "reasoning_effort"), NAME),
}  # fmt: skip
"""Field -> its limits, each with the function that measures the value."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, on which some limits depend.

    Args:
        vocabulary: Number of the model's token ids.
        max_model_len: Longest sequence, in tokens.
    """

    vocabulary: int
    max_model_len: int

    def of(self, name: str) -> int:
        """The number of a limit for this model."""
        return {"token_ids": self.vocabulary, "prompt_ids": self.max_model_len}.get(name) or most(name)


def check(fields: Mapping[str, Any], sizes: Sizes, prefix: str = "") -> None:
    """Refuses a body with a field beyond its limit.

    Args:
        fields: Values by field; values of a wrong type are checked elsewhere.
        sizes: Sizes of the model.
        prefix: Prefix of the field's name in the message.

    Raises:
        HttpError: 400 with the field, the limit and the given amount.
    """
    for field, rows in FIELDS.items():
        value = fields.get(field)
        if value is None:
            continue
        for row, measure in rows:
            have, allowed = measure(value), sizes.of(row)
            if have > allowed:
                raise HttpError(400, f"{prefix}{field}: wanted at most {allowed} {_noun(row)}, have {have}", prefix + field)


def _noun(row: str) -> str:
    """The unit of a limit in a message."""
    limit = LIMITS[row]
    words = {
        "n": "samples",
        "stop_bytes": "bytes a string",
        "bad_word_bytes": "bytes a string",
        "metadata_key": "characters a key",
        "metadata_value": "characters a value",
    }
    return words.get(row) or limit.unit


class PartCounter:
    """Counts the parts that make a body slow to parse, piece by piece as the body arrives.

    Counting holds the GIL: one mark in 30 MiB takes 10 to 25 ms. So the body is counted in pieces.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(MARKS, 0)
        self._size = 0
        self._ends_in_quote = False

    def add(self, piece: bytes) -> None:
        """Counts the next piece.

        Raises:
            HttpError: 413, the body is long and has too many parts.
        """
        self._size += len(piece)
        for mark in MARKS:
            self._counts[mark] += piece.count(mark)
        self._counts[FIELD] += self._ends_in_quote and piece.startswith(b":")
        self._ends_in_quote = piece.endswith(b'"')
        if self._size <= LONG_BYTES:
            return
        for mark, row in MARKS.items():
            if self._counts[mark] > most(row):
                raise HttpError(413, f"the body has too many parts: wanted at most {most(row)} {mark.decode()!r}")


def check_prompts(prompts: Iterable[Any], sizes: Sizes) -> None:
    """Refuses prompts with more ids than the model supports, before they are processed.

    Raises:
        InvalidRequestError: The engine's error for such a prompt.
    """
    for prompt in prompts:
        if isinstance(prompt, list) and len(prompt) > sizes.max_model_len:
            raise too_long(f"length {len(prompt)}", len(prompt), sizes.max_model_len)


# ---- options -------------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Valid values of an option.

    Args:
        least: Smallest valid value.
        unit: Unit of the value.
    """

    least: float
    unit: str


RANGES = {
    "max_body_bytes": Range(1, "bytes"),
    "max_connections": Range(1, "connections"),
    "stream_timeout": Range(0.01, "seconds"),
    "shutdown_timeout": Range(0, "seconds"),
    "stuck_timeout": Range(0.01, "seconds"),
    "keep_responses": Range(0, "responses"),
}


def option_problem(name: str, value: float) -> str | None:
    """The error message for an option's value; None if the value is valid."""
    wanted = RANGES[name]
    if math.isfinite(value) and value >= wanted.least:
        return None
    return f"{name}: wanted {wanted.least:g} or more {wanted.unit}, have {value}"
