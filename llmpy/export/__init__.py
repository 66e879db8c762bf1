"""Programs of models that only transformers knows: their class is traced once, and the program is kept in a file.

`find` runs in the engine's process and needs no torch. Conversion runs in a child process (`python -m llmpy.export`), so that
torch and the changes that a trace needs stay out of the engine's process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import environment
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..models.config import ModelConfig
from ..models.registry import Architecture, lookup, unknown
from . import stored

__all__ = ["FILE", "convert", "converted", "find", "graph", "missing_for", "opened", "place", "sketched"]

logger = logging.getLogger("llmpy")

CONVERTER = 1
"""Version of the conversion; a change that gives another program raises it, so that programs in the cache are made again."""

OLDEST = (5, 17)  # transformers
FILE = "llmpy_program.json"
"""A program in a model's folder that is found by itself."""


def convert(cls: Any, config: Any) -> dict[str, object]:
    """Converts a class, for example one of your own package, in this process; torch and transformers stay imported.

    Args:
        cls: The class of a causal language model, with transformers' attention interface.
        config: The fields of its config.json, or its configuration object. Programs of objects do not know their config.json,
            so nobody checks that they belong to it.

    Returns:
        The contents of a program's file: `json.dump` writes it, and `LLM(model, program=FILE)` takes it.

    Raises:
        UnsupportedError: the class cannot be converted; the message names the module and the node.
    """
    from .conversion import Conversion

    is_raw = isinstance(config, Mapping)
    raw = {**(config if is_raw else config.to_dict()), "architectures": [cls.__name__]}
    return Conversion(raw, cls, None if is_raw else config).stored()


def opened(path: str | Path, raw: Mapping[str, object]) -> Architecture:
    """The program of a file that the user names, or that lies in the model's folder.

    Args:
        path: The file.
        raw: The fields of config.json.

    Raises:
        ConfigError: there is no such file.
        CheckpointError: the file is damaged, or it is the program of another config.json.
        UnsupportedError: another version of llmpy wrote it.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"program: {path} does not exist; llmpy export MODEL -o FILE.json writes one", option="program")
    found = stored.read(path, raw)
    logger.info("%s: the program of %s", ModelConfig(dict(raw), "config.json").architecture, path)
    return found


def find(raw: Mapping[str, object], where: str) -> Architecture:
    """The program of a class of transformers: from the cache, else converted and put there.

    Args:
        raw: The fields of config.json.
        where: Path of config.json, for messages.

    Raises:
        UnsupportedError: the class cannot be converted, or torch or transformers is missing.
    """
    name = ModelConfig(dict(raw), where).architecture
    path = place(raw, name)
    if path.is_file():
        try:
            found = stored.read(path)
            logger.info("%s: the program of transformers' class, from %s", name, path)
            return found
        except (CheckpointError, UnsupportedError, OSError) as error:
            logger.warning("%s; it is converted again", error)
    if (missing := missing_for(name)) is not None:
        raise UnsupportedError(f"model_impl='transformers': {missing}") if lookup(name) else unknown(name, missing)
    logger.info("%s: converting transformers' class to a program, once, to %s", name, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
    try:
        part.write_text(json.dumps(converted(raw), separators=(",", ":")), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return stored.read(path)


def place(raw: Mapping[str, object], architecture: str) -> Path:
    """The file of a converted program in the cache; its name has what the program depends on."""
    key = stored.config_key(raw)
    folder = environment.cache_dir() / "programs"
    stem = f"{architecture}-{key}-{CONVERTER}.{stored.FORMAT}"
    try:
        return folder / f"{stem}-{version('transformers')}.json"
    except PackageNotFoundError:  # a program that any version of transformers gave
        return max(folder.glob(f"{stem}-*.json"), default=folder / f"{stem}.json")


def missing_for(name: str) -> str | None:
    """What the conversion of a class lacks, as a sentence; None: nothing. Nothing is imported, because that takes seconds."""
    lacking = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if lacking:
        return (
            f"If transformers has the class, `pip install {' '.join(lacking)}` converts it, once (docs/use/export.md); or "
            "`llmpy export MODEL -o FILE.json` does so on another machine, and program='FILE.json' loads that here."
        )
    have = version("transformers")
    if tuple(int(part) for part in have.split(".")[:2] if part.isdecimal()) < OLDEST:
        return f"transformers {have} is too old to convert classes; `pip install 'transformers>=5.17'`."
    spec = find_spec("transformers")
    table = Path(str(spec.origin if spec else "")).parent / "models/auto/modeling_auto.py"
    if f'"{name}"' not in table.read_text(encoding="utf-8"):
        return f"transformers {have} does not have it either."
    return None


def converted(raw: Mapping[str, object]) -> dict[str, object]:
    """Converts a class in a child process.

    Args:
        raw: The fields of config.json.

    Returns:
        The contents of the program's file.

    Raises:
        UnsupportedError: the class cannot be converted.
    """
    answer = _ask(raw, "program")
    if "error" in answer:
        raise _error(answer)
    program: dict[str, object] = answer["program"]
    return program


def sketched(raw: Mapping[str, object]) -> tuple[str, UnsupportedError | None]:
    """The source of the architecture function of a class, in a child process.

    Args:
        raw: The fields of config.json.

    Returns:
        The source, and why the conversion stopped; None: the source is complete.
    """
    answer = _ask(raw, "skeleton")
    return answer["skeleton"], _error(answer) if "error" in answer else None


def graph(raw: Mapping[str, object]) -> list[str]:
    """The nodes of the traced graph of a class, a line each, in a child process.

    Args:
        raw: The fields of config.json.

    Raises:
        UnsupportedError: the class cannot be traced.
    """
    answer = _ask(raw, "graph")
    if "error" in answer:
        raise _error(answer)
    lines: list[str] = answer["graph"]
    return lines


def _error(answer: Mapping[str, Any]) -> UnsupportedError:
    return UnsupportedError(answer["error"], module=answer["module"], node=answer["node"])


def _ask(raw: Mapping[str, object], wants: str) -> dict[str, Any]:
    """The answer of a child process."""
    if (missing := missing_for(ModelConfig(dict(raw), "config.json").architecture)) is not None:
        raise UnsupportedError(missing)
    search = [entry or os.getcwd() for entry in sys.path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "TRANSFORMERS_VERBOSITY": "error"}
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps({"config": raw, "wants": wants}, default=str),
        env=variables,
        capture_output=True,
        text=True,
    )
    if child.returncode:
        raise UnsupportedError(
            f"the conversion of {raw.get('architectures')} ended with status {child.returncode}: "
            f"{child.stderr.strip()[-2000:] or 'no message'}"
        )
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer
