"""Reads the JSON files of a checkpoint; every problem is a CheckpointError with the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import CheckpointError

MAX_DEPTH = 100  # of objects in objects; real files have 5
MAX_TOKEN_ID = 1 << 20  # or four times the number of tokens, whichever is more; real vocabularies have few gaps


def damaged(path: Path | str, problem: str) -> CheckpointError:
    """The error for a file."""
    return CheckpointError(f"{path}: {problem}", file=str(path))


def read_json(path: Path, kind: type = dict, absent: Callable[[], Any] | None = None) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.
        kind: Required type of the content: dict or list.
        absent: Makes the result if the file is missing; None: a missing file is an error.

    Raises:
        CheckpointError: The file cannot be read, is not JSON, is nested too deeply, has a lone surrogate, or holds another
            type.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"), path, kind)
    except FileNotFoundError:
        if absent is None:
            raise damaged(path, "there is no such file; download it again") from None
        return absent()
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}; download it again") from error
    except UnicodeDecodeError as error:
        raise damaged(path, f"not valid JSON: {error}; download it again") from error


def parse_json(text: str, path: Path | str, kind: type = dict) -> Any:
    """Parses a JSON text with the checks of `read_json`; `path` is for messages."""
    try:
        found = json.loads(text)
        _check_depth(found, 0)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise damaged(path, "holds half a surrogate pair, which is no text; correct it") from None
    except (ValueError, RecursionError) as error:
        why = f"nested deeper than {MAX_DEPTH}" if isinstance(error, RecursionError) else str(error)
        raise damaged(path, f"not valid JSON: {why}; download it again") from error
    if not isinstance(found, kind):
        raise damaged(path, f"wanted a JSON {'object' if kind is dict else 'array'}, have {type(found).__name__}")
    return found


def _check_depth(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(part, dict | list):
            _check_depth(part, depth + 1)


def check_token_ids(path: Path | str, vocabulary: dict[str, int]) -> None:
    """Refuses ids so large that tables by id would take far more memory than the file.

    Args:
        path: File with the ids, for the message.
        vocabulary: Token -> id.

        Raises:
            CheckpointError: An id is beyond MAX_TOKEN_ID and four times the number of tokens.
    """
    most = max(MAX_TOKEN_ID, 4 * len(vocabulary))
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= most:
        raise damaged(path, f"token {token!r}: wanted an id below {most}, have {largest}; correct it")
