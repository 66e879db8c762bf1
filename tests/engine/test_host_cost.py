"""Host time of a step without a model: at most 50 us for 1 sequence and 150 us for 256, or more on a slow machine. A host tier
that nothing comes back from adds at most 10 us, drafts from text at most 2 us for a sequence of a step."""

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS_US = {"1": 50.0, "256": 150.0, "ngram": 2.0, "suffix": 2.0}
LIMITS_US |= {f"tier-{what}-{n}": LIMITS_US[n] for what in ("off", "host", "off-again") for n in ("1", "256")}
TIER_US = 10.0


def slowness() -> float:
    """How many times slower this machine is than the limits' machine, which counts to 1,000,000 in 20 ms."""
    times = []
    for _ in range(20):
        start = time.process_time()
        sum(range(1_000_000))
        times.append(time.process_time() - start)
    return max(1.0, min(times) / 0.02)


def test_host_cost_of_a_step(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(compiler[0]):
        pytest.skip(f"no C compiler: {compiler[0]}")
    parts = [path for part in ("base", "step", "engine") for path in (ROOT / "csrc" / part).glob("*.c")]
    sources = [ROOT / "tests/c/bench_step.c", *parts]
    program = tmp_path / "bench_step"
    subprocess.run([*compiler, "-std=c11", "-O3", "-DNDEBUG", "-pthread", *sources, "-lm", "-o", program], check=True)
    measured = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(measured) == 12
    factor = slowness()
    for line in measured:
        what, _, minimum, median = line.split()
        # The median may be a busy machine's.
        assert float(minimum) <= factor * LIMITS_US[what], line
        assert float(median) <= factor * 3 * LIMITS_US[what], line
    medians = {line.split()[0]: float(line.split()[3]) for line in measured if line.startswith("tier")}
    for n in ("1", "256"):  # their steps take turns
        assert medians[f"tier-host-{n}"] - medians[f"tier-off-{n}"] <= factor * TIER_US, medians
