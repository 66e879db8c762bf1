"""llmpy in the released verl: verl's registries, manager and client, in a local Ray on the CPU."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.9.1"
NEEDED = ["ray", "tensordict", "hydra", "codetiming", "cachetools", "fastapi", "uvicorn"]

FAKE_VERL = """
import sys, types
for name in ("verl", "verl.workers", "verl.workers.rollout", "verl.workers.rollout.base", "verl.workers.rollout.replica"):
    sys.modules[name] = types.ModuleType(name)
class Registry:
    loaders = {}
    register = classmethod(lambda cls, name, loader: cls.loaders.update({name: loader}))
sys.modules["verl.workers.rollout.base"]._ROLLOUT_REGISTRY = entries = {}
sys.modules["verl.workers.rollout.replica"].RolloutReplicaRegistry = Registry
import llmpy.rl.verl
assert entries == {("llmpy", "async"): "llmpy.rl._verl_adapter.ServerAdapter"}, entries
assert list(Registry.loaders) == ["llmpy"]
heavy = {"torch", "ray", "numpy", "transformers"} & set(sys.modules)
assert not heavy, heavy
try:
    Registry.loaders["llmpy"]()
except ImportError:
    print("refused")
"""


def run(*arguments: str, cwd: str | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    command, values = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, env=values, cwd=cwd)


def test_registering_imports_nothing_heavy() -> None:
    """Every process of verl imports the module, so it is light; a failed load is logged, because verl would hide it."""
    found = run("-c", FAKE_VERL)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "refused\n" and "llmpy's replica for verl cannot be loaded" in found.stderr


def test_errors_are_logged() -> None:
    found = run("-c", "import sys; sys.modules['verl'] = None; import llmpy.rl.verl")
    assert found.returncode == 0, found.stderr
    assert "llmpy cannot enter itself into verl's registries" in found.stderr and "ModuleNotFoundError" in found.stderr


def test_entry_point() -> None:
    """An installed llmpy is found by verl without any setting."""
    try:
        files = importlib.metadata.distribution("llmpy")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llmpy is not installed")
    (entry,) = files.entry_points.select(group="verl.plugins")
    assert (entry.name, entry.value) == ("llmpy", "llmpy.rl.verl")


@pytest.fixture(scope="module")
def verl_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the released package. It wants an older transformers than the other tests, so it comes alone."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if request.config.getoption("--without-demo-model"):
        pytest.skip("run without a network")
    folder = tmp_path_factory.mktemp("verl")
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"verl=={VERSION}"]
    found = run(*command)
    assert found.returncode == 0, found.stderr
    return str(folder)


def test_released_verl(verl_path: str, device: str, qwen3: Path) -> None:
    environment = {
        "PYTHONPATH": os.pathsep.join([verl_path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    if not any(entry.name == "llmpy" for entry in importlib.metadata.entry_points(group="verl.plugins")):
        environment["VERL_USE_EXTERNAL_MODULES"] = "llmpy.rl.verl"  # a clone that is not installed
    # The names of Ray's sockets must be short; and its workers look for modules where it was started: not in a clone.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        found = run(str(Path(__file__).with_name("verl_run.py")), str(qwen3), device, folder, cwd=folder, **environment)
    assert found.returncode == 0, found.stdout + found.stderr
    facts: dict[str, Any] = {}
    for line in found.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    print(json.dumps(facts, indent=1))
    assert facts["replica"] == "LlmpyReplica" and facts["mode"] == "hybrid" and facts["adapter"] == [0, True, 2, False]
    assert facts["asleep"] and facts["awake"] and facts["equal"]
    assert facts["kinds"] == [True] and facts["lengths"] == [24] * 4 and facts["steps"] == [1] * 4
    assert facts["reasons"] == ["completed"] * 4
    assert facts["gap"] < 1e-4  # float32 on both sides
    assert facts["with_adapter"] == [1, True, True, 7]
    assert facts["long"] == facts["logprobs"] == 4000 and facts["long_steps"] == [1, 2]
