"""OpenAI batch files, offline: each line a request, each answer a line, as many at once as the engine likes."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec
from starlette.types import ASGIApp, Message

WINDOW = 512
"""Requests in flight, by default."""
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/classify",
    "/pooling",
)


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, Any]:
    """Status and content of a POST to an application in this process."""
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, []
    ended = asyncio.Event()

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [],
        "server": ("batch", 80),
        "client": None,
    }
    try:
        await app(scope, receive, send)
    finally:
        ended.set()
    return status, msgspec.json.decode(b"".join(parts))


def done_ids(path: Path) -> set[str]:
    """The requests that an output file has answers to. A last line that was cut off is removed."""
    if not path.exists():
        return set()
    done, end = set(), 0
    with path.open("rb") as file:
        for line in file:
            try:
                done.add(str(json.loads(line)["custom_id"]))
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
    with path.open("rb+") as file:
        file.truncate(end)
    return done


def requests(lines: Iterable[str], done: set[str]) -> Iterator[dict[str, Any]]:
    """The requests of an input file that have no answer yet; `problem` says what is wrong with one."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        if not isinstance(item, dict):
            item = {"problem": f"line {number} is not a JSON object"}
        item.setdefault("custom_id", f"line-{number}")
        if item.get("url") not in PATHS:
            item.setdefault("problem", f"url: wanted one of {', '.join(PATHS)}, have {str(item.get('url'))[:60]!r}")
        if str(item["custom_id"]) not in done:
            yield item


async def answer(app: ASGIApp, item: dict[str, Any]) -> dict[str, Any]:
    """The line of an answer."""
    made: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(8)}", "custom_id": item["custom_id"]}
    if "problem" in item:
        return {**made, "response": None, "error": {"code": "invalid_request", "message": item["problem"]}}
    body = {**(item.get("body") or {}), "stream": False}
    status, content = await call(app, item["url"], msgspec.json.encode(body))
    response = {"status_code": status, "request_id": made["id"], "body": content}
    error = None if status == 200 else {"code": str(status), "message": content["error"]["message"]}
    return {**made, "response": response, "error": error}


async def run_batch(
    app: ASGIApp, lines: Iterable[str], output: TextIO, done: set[str], window: int, tell: Callable[[int, int], None]
) -> tuple[int, int]:
    """Answers all lines.

    Args:
        app: The server's application.
        lines: Of the input, read as they are needed.
        output: Where answers go, one line each, in the order in which they come.
        done: Requests to pass over.
        window: Most requests in flight.
        tell: Called with the counts of answers and of errors among them.

    Returns:
        The counts.
    """
    pending: set[asyncio.Task[dict[str, Any]]] = set()
    n = n_errors = 0

    async def settle() -> None:
        nonlocal n, n_errors, pending
        finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            made = task.result()
            n, n_errors = n + 1, n_errors + (made["error"] is not None)
            output.write(json.dumps(made, ensure_ascii=False) + "\n")
        output.flush()
        tell(n, n_errors)

    for item in requests(lines, done):
        pending.add(asyncio.create_task(answer(app, item)))
        if len(pending) >= window:
            await settle()
    while pending:
        await settle()
    return n, n_errors
