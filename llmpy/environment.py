"""The LLMPY_* variables of a run, read here alone, when an engine is made. An option wins over its variable."""

from __future__ import annotations

import os
from pathlib import Path

_NAMES = ("LLMPY_DEVICE", "LLMPY_LOG", "LLMPY_CACHE_DIR", "LLMPY_NUM_THREADS", "LLMPY_LIB_PATH", "LLMPY_SYNC")
_BUILD_NAMES = ("LLMPY_CUDA", "LLMPY_CUDA_ARCHS", "LLMPY_DEBUG", "LLMPY_SANITIZE", "LLMPY_WERROR")
_LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def cache_dir() -> Path:
    """Where the demo model lies; safe to delete."""
    if given := os.environ.get("LLMPY_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmpy"


def device() -> str | None:
    """LLMPY_DEVICE, or None."""
    return os.environ.get("LLMPY_DEVICE") or None


def library_folders() -> list[Path]:
    """LLMPY_LIB_PATH: folders that are searched first for libraries opened at run time."""
    return [Path(entry) for entry in os.environ.get("LLMPY_LIB_PATH", "").split(os.pathsep) if entry]


def num_threads() -> int:
    """LLMPY_NUM_THREADS; 0 = as many as physical cores are allowed."""
    text = os.environ.get("LLMPY_NUM_THREADS", "")
    if text and not (text.isdecimal() and 1 <= int(text) <= 1024):
        from .errors import ConfigError

        raise ConfigError(
            f"LLMPY_NUM_THREADS must be an integer from 1 to 1024, got {text!r}.",
            option="LLMPY_NUM_THREADS",
            value=text,
        )
    return int(text) if text else 0


def is_synchronous() -> bool:
    """LLMPY_SYNC: whether every operation is waited for, so that a device fault names it."""
    text = os.environ.get("LLMPY_SYNC", "")
    if text not in ("", "0", "1"):
        from .errors import ConfigError

        raise ConfigError(f"LLMPY_SYNC must be 0 or 1, got {text!r}.", option="LLMPY_SYNC", value=text)
    return text == "1"


def start() -> None:
    """Sets up the log, and warns of LLMPY_* names that mean nothing."""
    import logging
    import warnings

    logger = logging.getLogger("llmpy")
    level = os.environ.get("LLMPY_LOG", "").lower()
    if level and level not in _LOG_LEVELS:
        warnings.warn(f"LLMPY_LOG is {level!r}; it must be one of {', '.join(_LOG_LEVELS)}", stacklevel=2)
    elif level:
        logger.setLevel(_LOG_LEVELS[level])
    if not logger.handlers:
        # Whoever sets the level wants to see something, even where the program has no logging of its own.
        logger.addHandler(logging.StreamHandler() if level and not logging.root.handlers else logging.NullHandler())
    for name in sorted(os.environ):
        if name.startswith("LLMPY_") and name not in _NAMES and name not in _BUILD_NAMES:
            from difflib import get_close_matches

            nearest = get_close_matches(name, _NAMES, 1, 0)[0]
            message = f"environment variable {name} is unknown and has no effect; the nearest is {nearest}"
            warnings.warn(message, stacklevel=2)
