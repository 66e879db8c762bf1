"""`llmpy demo`, the first command that new users run."""

from pathlib import Path

import pytest

from llmpy import LLM
from llmpy.cli import _parser, main
from llmpy.cli.demo import PROMPTS
from llmpy.demo import SAMPLING

WANTED = ("Paris", "I walked to the market and bought bread.", "Winter", "num % 2 == 0")


def test_answers_are_complete_and_correct(demo_model: Path, each_device: str) -> None:
    max_tokens = _parser("demo").parse_args(["demo"]).max_tokens
    with LLM(demo_model, device=each_device, kv_cache_memory_bytes="64MiB", max_model_len=1024) as llm:
        default = llm.get_default_sampling_params()
        assert {"temperature": default.temperature, "top_p": default.top_p} == SAMPLING
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(conversations, temperature=0, max_tokens=max_tokens)
    assert [output.finish_reason for output in outputs] == ["stop"] * len(PROMPTS)
    assert not [output.text for output, words in zip(outputs, WANTED, strict=True) if words not in output.text]


def test_ready_does_not_count_the_download(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download of an hour, on the clock that the command reads."""
    import time

    from llmpy import demo

    passed = 0.0
    clock = time.perf_counter

    def fetch() -> Path:
        nonlocal passed
        passed += 3600
        return demo_model

    monkeypatch.setattr(demo, "fetch_model", fetch)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed)
    assert main(["demo", "--device", "cpu", "--max-tokens", "1", "--max-model-len", "256", "Hi"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ready after ")]
    assert passed == 3600 and float(line.split()[2]) < 1800
