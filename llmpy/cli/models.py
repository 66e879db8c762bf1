"""`llmpy pull`, `llmpy list`, `llmpy rm`: models in the cache of the Hugging Face hub, and the demo model."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from .. import demo
from ..environment import cache_dir
from ..errors import ModelNotFoundError
from ..hub import DEMO, resolve


class _Model(NamedTuple):
    """A model on this machine."""

    name: str
    size_bytes: int
    path: Path


def run(chosen: Namespace) -> int:
    """Runs `pull`, `list` or `rm`."""
    return {"pull": _pull, "list": _list, "rm": _remove}[chosen.command](chosen)


def _pull(chosen: Namespace) -> int:
    """Downloads the missing files of a model and prints its path."""
    files = resolve(chosen.name, chosen.revision)
    size = sum(path.stat().st_size for path in files.weights)
    print(f"{chosen.name}: {_size(size)} of weights at {files.directory or files.weights[0]}")
    return 0


def _list(chosen: Namespace) -> int:
    """Prints one line per model: name, size, path."""
    models = [*_demo_models(), *_hub_models()]
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        print(f"{model.name:{width}}  {_size(model.size_bytes):>9}  {model.path}")
    if not models:
        print("no models here; `llmpy pull MODEL` downloads one")
    return 0


def _remove(chosen: Namespace) -> int:
    """Deletes a model from the cache."""
    removed = [model for model in (_demo_models() if chosen.name == DEMO else _hub_models()) if model.name == chosen.name]
    for model in removed:  # delete the folder, not revisions: copies of a repository share revision ids
        try:
            model.path.unlink() if model.path.is_file() else shutil.rmtree(model.path)
        except OSError as error:
            raise type(error)(f"{chosen.name}: {model.path} cannot be deleted ({error.strerror}); run as its owner") from None
    if not removed:
        known = ", ".join(model.name for model in (*_demo_models(), *_hub_models())) or "none"
        raise ModelNotFoundError(f"{chosen.name}: not among the downloaded models ({known}); other files are yours to delete")
    print(f"{chosen.name}: {_size(sum(model.size_bytes for model in removed))} freed")
    return 0


def _demo_models() -> list[_Model]:
    path = cache_dir() / demo.NAME
    return [_Model(DEMO, path.stat().st_size, path)] if path.is_file() else []


def _cache() -> Any:
    """The content of the Hugging Face hub's cache; None if there is no cache."""
    try:
        from huggingface_hub import errors, scan_cache_dir
    except ImportError as error:
        message = f"the cache of the Hugging Face hub needs huggingface_hub ({error}): pip install huggingface_hub"
        raise ImportError(message) from error
    try:
        return scan_cache_dir()
    except errors.CacheNotFound:
        return None


def _hub_models() -> list[_Model]:
    cache = _cache()
    found = [] if cache is None else [one for one in cache.repos if one.repo_type == "model"]
    return sorted(_Model(one.repo_id, one.size_on_disk, Path(one.repo_path)) for one in found)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
