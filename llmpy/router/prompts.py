"""The prompt of a request: its ids where it brings them or an engine renders them, else its text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from .policy import Prompt
from .prefixes import salted

if TYPE_CHECKING:
    from .proxy import Passing

RENDERED = ("/v1/completions", "/v1/chat/completions")
"""Paths whose prompts an engine renders at PATH/render."""
CHARS_PER_TOKEN = 4
PARTS = ("tools", "system", "instructions", "messages", "input", "prompt", "features", "token_ids")
"""Fields that make a prompt, in its order."""

Ask = Callable[[str, bytes], Awaitable[bytes | None]]


async def prompt_of(passing: Passing, ask: Ask) -> Prompt:
    """The prompt of a request; of several the first one.

    Args:
        passing: The request.
        ask: Asks an engine.
    """
    fields = passing.fields
    if fields is None:
        return Prompt()
    salt = fields.get("cache_salt")
    salt = salt if isinstance(salt, str) else None
    salt = salted(salt, passing.model if passing.router.is_adapter(passing.model) else None)
    given = fields.get("token_ids", fields.get("prompt"))
    if not fields.get("features") and (ids := _ids(given)):
        return Prompt(ids, salt)
    if passing.path in RENDERED:
        found = await ask(passing.path + "/render", passing.body)
        if found is not None and (ids := _rendered(found)):
            return Prompt(ids, salt)
    parts = [fields[name] for name in PARTS if fields.get(name) is not None]
    return Prompt(msgspec.json.encode(parts) if parts else b"", salt, CHARS_PER_TOKEN, is_told=False)


def _ids(given: Any) -> list[int] | None:
    """Token ids, or the first list of them."""
    if isinstance(given, list) and given and isinstance(given[0], list):
        given = given[0]
    is_ids = isinstance(given, list) and given and all(type(one) is int and -(1 << 63) <= one < 1 << 63 for one in given)
    return given if is_ids else None


def _rendered(body: bytes) -> list[int] | None:
    """The ids in an answer of a render path; completions have one object for each prompt. None also for a prompt with images,
    whose ids do not tell them apart."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    found = found[0] if isinstance(found, list) and found else found
    return _ids(found.get("token_ids")) if isinstance(found, dict) and not found.get("features") else None
