"""A short soak; the long one is `python tests/rl/soak.py --minutes 30`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def soak(device: str, minutes: float, seconds: float) -> dict[str, object]:
    """Counts of a soak in a separate process, so that memory, threads and descriptors are only its own."""
    command = [
        sys.executable,
        Path(__file__).with_name("soak.py"),
        "--minutes",
        minutes,
        "--round",
        seconds,
        "--device",
        device,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60 * minutes + 1000)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_short_soak(device: str) -> None:
    """Rounds continue until all kinds of events have happened."""
    assert soak(device, 0.15, 2)["rounds"]


@pytest.mark.slow
def test_long_soak(device: str) -> None:
    soak(device, 10, 20)
