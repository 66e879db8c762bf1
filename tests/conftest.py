"""Fixtures that tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, fetched once per machine."""
    from llmpy.demo import fetch_model

    return fetch_model()
