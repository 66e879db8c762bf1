"""Tiny models that several processes can read."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_pairs import BASE, COMMON, MODELS


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> str:
    """Directory of a tiny model with room for long prompts."""
    return str(write_model(tmp_path_factory.mktemp("ray"), max_position_embeddings=32768))


@pytest.fixture(scope="module")
def cut_all() -> Iterator[None]:
    """Cuts every matrix that can be cut; else all matrices of so small a model would be whole on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmpy.models.shard.default_replicate_bytes", lambda n_ranks: 0)
        patch.setenv("LLMPY_HOSTS_TIMEOUT", "30")
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name -> options of a model with dummy weights."""
    found = {}
    for name, config in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps({**BASE, **config}))
        found[name] = {"model": str(folder), **COMMON}
    found["hybrid"]["kv_cache_memory_bytes"] = "192KiB"  # its states take pages, too
    return found
