"""examples/backend_opencl, installed beside llmpy: OpenCL's devices give the CPU's tokens and pass the tests of all devices.

The common tests run in a process of their own, on the device that TEST_DEVICES names. PoCL makes a device of the processor.
Without a device the tests are skipped, with the reason that `llmpy.devices()` gives.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmpy import LLM, CompletionOutput, UnsupportedError, _core, cli, devices, hardware
from llmpy.engine import backends

ROOT = Path(__file__).parents[2]
KERNELS = [f"tests/kernels/test_{name}.py" for name in (
    "activation", "attention", "attention_extras", "embed", "layer_norm", "linear", "matrix", "norm", "rope")]  # fmt: skip
QUICK = "norm or rotation or later or zeros or embed or made_up or float_rows or products or (values and (24 or 40))"
"""A part of each file, for every run of the tests; a slow test runs them all."""
ONE_RANK = "float32-1 or float16-1 or bfloat16-1 or llama-fp8-1 or gptq-32-1 or asym-1 or llama-int8-1"
"""Models of tests/engine/test_exactness.py; the cache holds floats."""
BREAKS = {
    "a * cosine - b * sine": "a * cosine + b * sine",
    "j >= first && j <= last": "j >= first && j <= last + 1",
    "sum[r] = 0": "sum[r] = ROWS == 1 ? 0 : 1e-6f",
}
"""Breaks of kernels.cl."""
FIND_BREAKS = ["test_rotation and 24-12", "test_later_tokens_cannot_be_seen", "test_float_rows"]
"""The common tests that find them, in the same order."""
PROMPTS = ["Hi", "The capital of France is", "def quicksort(items):\n    if len(items) <= 1:\n"]


def environment(site: Path) -> dict[str, str]:
    """Variables of a process that finds the package in `site`, and whose tests run on its device alone."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TEST_DEVICES": "opencl:0"}


def run_common_tests(site: Path, *arguments: str) -> str:
    """The last lines of pytest, with a line a failure or skip."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "--tb=no", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(site), capture_output=True, text=True).stdout


@pytest.fixture(scope="module", autouse=True)
def site(install_example: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the installed package; PoCL keeps compiled kernels in a folder of the tests."""
    folder = install_example("backend_opencl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POCL_CACHE_DIR", str(tmp_path_factory.mktemp("pocl")))
        patch.syspath_prepend(str(folder))
        backends.library.cache_clear()
        [device, *_] = [one for one in devices() if one["device"].startswith("opencl")]
        if not device["available"]:
            pytest.skip(device["reason"])
        yield folder
    backends.library.cache_clear()


def check_near_tie(ours: CompletionOutput, cpus: CompletionOutput) -> None:
    """Equal tokens up to a place where the CPU gives both tokens nearly the same logprob."""
    mine, theirs = ours.token_ids, cpus.token_ids
    n = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
    assert np.abs(ours.sampled.raw[:n] - cpus.sampled.raw[:n]).max(initial=0) < 1e-3
    if n < len(mine):
        values = dict(zip(cpus.logprobs.ids[n].tolist(), cpus.logprobs.values[n].tolist(), strict=True))
        assert values[theirs[n]] - values[mine[n]] < 1e-3


def test_demo_tokens_are_the_cpus(demo_model: Path) -> None:
    found = []
    for options in ({"device": "opencl"}, {"device": "cpu", "activation_dtype": "float"}):
        with LLM(demo_model, kv_cache_memory_bytes="64MiB", max_model_len=256, **options) as llm:
            about = repr(llm)
            outputs = llm.generate(PROMPTS, temperature=0, max_tokens=12, logprobs=2, ignore_eos=True, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
        assert ("(host: sample)" in about) == (options["device"] == "opencl")
    for ours, cpus in zip(*found, strict=True):
        check_near_tie(ours, cpus)
    assert len({tuple(output.token_ids) for output in found[0]}) == len(PROMPTS)


@pytest.mark.parametrize("chosen", [QUICK, pytest.param("test", marks=pytest.mark.slow)])
def test_common_kernel_tests(chosen: str, site: Path) -> None:
    """Skipped are the tests of operations that the backend does not have, for which the core uses others or the host."""
    report = run_common_tests(site, *KERNELS, "-k", f"opencl and ({chosen})")
    assert re.search(r"\n\d+ passed", report) and "failed" not in report and "error" not in report, report
    assert set(re.findall(r"this backend has no (\w+)", report)) <= {"qkv", "spread_logits"}, report


@pytest.mark.parametrize("models", ["qwen3-bfloat16-1", pytest.param(ONE_RANK, marks=pytest.mark.slow)])
def test_common_exactness_tests(models: str, site: Path) -> None:
    chosen = f"({models}) and not 1-fp8 and not 1-int8 and not share_out"
    report = run_common_tests(site, "tests/engine/test_exactness.py", "-k", chosen)
    assert re.search(r"\n\d+ passed", report) and not re.search("failed|error|skipped", report), report


def test_broken_kernels_are_found(install_example: Callable[..., Path]) -> None:
    def change(source: Path) -> None:
        text = (source / "src/kernels.cl").read_text()
        for right, wrong in BREAKS.items():
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        (source / "src/kernels.cl").write_text(text)

    tests = " or ".join(f"({test})" for test in FIND_BREAKS)
    report = run_common_tests(install_example("backend_opencl", change), *KERNELS, "-k", tests)
    for name in FIND_BREAKS:
        assert re.search(rf"FAILED \S+::{name.split()[0]}", report), report


def test_the_support_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each operation of programs stands in one of three rows."""
    assert cli.main(["devices"]) == 0
    lines = capsys.readouterr().out.partition("\nopencl:0: ")[2].splitlines()[1:]
    rows = {words[0]: " ".join(words[1:]).split(", ") for line in lines if (words := line.split())}
    assert {"attention", "linear", "rope_table", "layer_norm"} <= set(rows["operations"])
    assert rows["on_host"] == ["route", "sample", "spread_logits"]
    assert {"experts", "delta", "gather", "latent_attention"} <= set(rows["refused"])
    names = [name for row in ("operations", "on_host", "refused") for name in rows[row]]
    assert len(names) == len(set(names)) and set(_core.operations()) <= set(names)


def test_what_it_lacks_is_named(write_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the backend opencl cannot store heads of 16 values so"):
        LLM(write_model(tmp_path), device="opencl", kv_cache_dtype="fp8", kv_cache_memory_bytes="4MiB")


@pytest.mark.parametrize("operation", ["experts", "conv", "row_attention", "head_linear", "splice"])
def test_a_model_is_refused_by_the_operation_that_it_needs(operation: str, refusal_of: Callable[[str, str], str]) -> None:
    assert refusal_of("opencl", operation) == f"opencl: wanted the operation {operation}, the backend has none"


def test_kernel_tests_of_what_it_lacks(site: Path) -> None:
    """They are not skipped: they pass where the core refuses the operation, or lets the host compute it."""
    report = run_common_tests(site, *(f"tests/kernels/test_{name}.py" for name in ("conv", "route", "ssm")), "-k", "opencl")
    assert re.search(r"\n\d+ passed", report) and not re.search("failed|error|skipped", report), report


def test_the_page_has_its_operations(page_column: Callable[[str], dict[str, str]]) -> None:
    assert page_column("opencl") == hardware.operations_by_kind()["opencl"]


def test_why_there_is_no_device(site: Path, tmp_path: Path) -> None:
    script = "import llmpy; print(llmpy.devices()[-1]['reason'])"
    env = {**environment(site), "OCL_ICD_VENDORS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "device 'opencl:0': OpenCL's platforms have 0 devices (Debian's package pocl-opencl-icd" in done.stdout, done.stderr
