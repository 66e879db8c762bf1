"""A client of servers with OpenAI's protocol, for `llmpy chat --url` and `llmpy complete`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .http_client import address, reason
from .serve import read_keys
from .terminal import plain

KEY_NAME = "OPENAI_API_KEY"


class Server:
    """A running server.

    Args:
        url: Address of the server, with or without /v1 at the end.
        key: API key; None = send no key.
        model: Name of the model; None = the server's first model.

    Raises:
        ConfigError: The URL is not an address.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        try:
            parts = address(url)
        except ValueError as error:
            raise ConfigError(f"--url: {error}", option="url", value=url) from None
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self.model = model or self._first_model()
        """Name of the model in requests."""
        self.dropped = 0
        """Number of messages that the server left out of the last conversation."""

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[http.client.HTTPConnection, Any]:
        connection = self._kind(self._place, timeout=600)
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            told = reason(error) if isinstance(error, OSError) else type(error).__name__
            raise OSError(f"{self.url}: {told}") from None
        if answer.status != 200:
            with contextlib.closing(connection):
                raise OSError(f"{self.url}: {answer.status}: {_message(answer.read())}")
        return connection, answer

    @cached_property
    def _models(self) -> list[dict[str, Any]]:
        """The server's list of models; at least one."""
        connection, answer = self._ask("GET", "/models")
        try:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]
            _ = found[0]["id"]
            return found
        except (ValueError, LookupError, TypeError):
            raise OSError(f"{self.url}: the answer to /v1/models is no list of models") from None
        finally:
            connection.close()

    def _first_model(self) -> str:
        return plain(str(self._models[0]["id"]))

    @cached_property
    def is_llmpy(self) -> bool:
        """Whether the server is llmpy, which accepts further fields."""
        try:
            return self._models[0].get("owned_by") == "llmpy"
        except OSError:
            return False

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The objects of a streamed answer; closing the iterator aborts the request.

        Args:
            path: Path after /v1.
            body: Fields of the request, without `model` and streaming fields.

        Raises:
            OSError: The server cannot be reached, refuses, or closes the connection early.
        """
        asked = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        connection, answer = self._ask("POST", path, json.dumps(asked).encode())
        dropped = answer.headers.get("x-llmpy-dropped-messages", "")
        self.dropped = int(dropped) if dropped.isdecimal() else 0
        try:
            for line in answer:
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    made: dict[str, Any] = json.loads(line[6:])
                    if "error" in made:
                        raise OSError(f"{self.url}: {plain(str(made['error'].get('message')))}")
                    yield made
            raise OSError(f"{self.url}: the answer was cut off")
        except (ValueError, http.client.HTTPException) as error:
            raise OSError(f"{self.url}: the answer was cut off ({type(error).__name__})") from None
        finally:
            connection.close()


def open_server(chosen: Namespace) -> Server:
    """The server of the options, with the key from the file or from the environment."""
    path: str | None = chosen.api_key_file
    key = read_keys(Path(path))[0] if path else os.environ.get(KEY_NAME)
    return Server(chosen.url, key, getattr(chosen, "name", None) or chosen.model)


def _message(body: bytes) -> str:
    """The message of an error answer in any format."""
    try:
        return plain(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return plain(body[:200].decode(errors="replace")) or "no reason given"
