"""A tiny model that Ray's workers can read."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> str:
    """Directory of a tiny model with room for long prompts."""
    return str(write_model(tmp_path_factory.mktemp("ray"), max_position_embeddings=32768))
