"""Every example runs on the demo model and prints the documented output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from modules import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(device: str, *arguments: str) -> str:
    environment = {**os.environ, "LLMPY_DEVICE": device}
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=1200, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("generate.py", "Paris"),
        ("chat.py", "Rome"),
        ("score.py", "boil the water"),
        ("logprobs.py", "Madrid"),
        ("embed.py", "closest: Bees make honey."),
        ("own_architecture.py", "30 layers: ' Paris"),
        ("speculation.py", "suffix   again  story"),
        ("async_stream.py", "> What do bees make?"),
        ("async_rollouts.py", "same as uninterrupted: True"),
        ("route.py", "after a kill: the other one answers"),
    ],
)
def test_example(name: str, wanted: str, device: str, demo_model: Path) -> None:
    assert wanted in run(device, str(EXAMPLES / name), str(demo_model))


def test_images(device: str, tmp_path: Path) -> None:
    """A tiny random model: images that are asked about again are not computed again."""
    pytest.importorskip("PIL")
    tiny = load(Path(__file__).parents[1] / "helpers/tiny_llava.py")
    images = [str(tiny.photo(tmp_path / f"{seed}.png", seed)) for seed in range(2)]
    lines = run(device, str(EXAMPLES / "images.py"), str(tiny.write(tmp_path / "llava")), *images).splitlines()
    assert lines[0].startswith(f"{images[0]}: 9 features: ") and lines[2].startswith("all together: ")
    assert lines[3] == "2 images encoded, 2 found"


@pytest.mark.slow
def test_rl_adapter(device: str) -> None:
    """The reward rises, and clients of the server see the adapter learn while the model stays."""
    pytest.importorskip("peft")
    lines = run(device, str(EXAMPLES / "rl_adapter.py"), "--device", device).splitlines()
    found = {line.partition(":")[0]: [float(word) for word in line.split() if word.startswith("0.")] for line in lines[-3:]}
    assert found["reward"][0] < 0.1 and found["reward"][1] > 0.5, lines
    assert found["base"][0] == found["base"][1] < 0.1 and found["policy"][1] > 0.5, lines


@pytest.mark.parametrize("exact", [False, True])
def test_rl_grpo(device: str, exact: bool) -> None:
    """The reward of a tiny random model rises, and the engine has the weights of every step."""
    pytest.importorskip("transformers")
    options = ["--exact"] if exact else []
    lines = run(device, str(EXAMPLES / "rl_grpo.py"), "--device", device, *options).splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 20 and "tokens/s" in steps[-1] and " ms, " in steps[-1]
    first, last = map(float, lines[-1].removeprefix("reward: ").split(" -> "))
    assert first < 0.1 and last > 0.5, lines  # what does not learn says the word once in 64 tokens
    gaps = [float(line.split("difference| ")[1].split(",")[0]) for line in steps]
    # float32 on both sides; a step of the optimizer moves the logprobs by 1e-3 and more
    assert max(gaps) == 0 if exact else 0 < max(gaps) < 1e-5
