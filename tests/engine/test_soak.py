"""The short form of benchmarks/soak.py: chats that do not fit, random aborts, tiers of every kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks/soak.py"


@pytest.mark.slow
def test_chats_in_tiers_of_every_kind(device: str) -> None:
    """In a process of its own, so that memory, threads and descriptors are only its own."""
    command = [sys.executable, SOAK, "--minutes", 0.3, "--round", 1.5, "--device", device]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["done"]
    assert found["aborted"] > 20 and found["ended"] > 100 and found["compared"] > 50
    for kind in ("private disk", "shared disk", "large pages", "memory", "library", "peer"):
        assert found[f"{kind}: disk_cache_hits"] > 0, kind
