"""The guides for developers: their code is inserted into a copy of the tree, which is built and passes the guides' checks.

The text after a fence's language:

    new FILE              the whole of a new file
    in FILE behind TEXT   lines to insert right after the only line of the file with this text
    in FILE before TEXT   ... right before it
    check                 a Python program that must run in the changed tree
    check sh              commands, run in the changed tree before the next check
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?:c|python|sh|text) (?P<note>(?:new|in|check)\b[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"in (\S+) (behind|before) (.+)")
PAGES = sorted((ROOT / "docs/develop").glob("adding-a*.md"))
GUIDES = {page.stem: FENCE.findall(page.read_text()) for page in PAGES if FENCE.search(page.read_text())}
COPIED = ("csrc", "kernels", "llmpy", "tests", "benchmarks", "docs", "examples")
COPIED += ("setup.py", "pyproject.toml", "README.md", "LICENSE")
NOT_COPIED = shutil.ignore_patterns("*.so", "__pycache__", "_backends", "include", "build")
# Tests of the tree that the guides extend
TESTS = {
    "adding-an-option": ["tests/api/test_sampling_params.py", "tests/api/test_typing.py", "tests/api/test_config.py", "-k",
                         "documentation or keywords or signature or effect"],
    "adding-an-operation": [
        "tests/kernels/test_shrink.py", "tests/docs/test_vocabulary.py", "tests/engine/test_operations.py",
        "tests/unit/test_header.py",
    ],
    "adding-a-weight-type": ["tests/unit/test_checkpoint.py", "tests/kernels/test_linear.py", "-k", "nvfp4 or NVFP4"],
}


def apply(tree: Path, note: str, text: str) -> None:
    """Inserts a fence's text at its place."""
    if note.startswith("new "):
        path = tree / note.removeprefix("new ")
        assert not path.exists(), note
        path.write_text(text)
        return
    place = PLACE.fullmatch(note)
    assert place, note
    path, (_, where, anchor) = tree / place[1], place.groups()
    lines = path.read_text().splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if anchor in line]
    assert len(found) == 1, f"{note}: {len(found)} lines have it"
    lines.insert(found[0] + (where == "behind"), text)
    path.write_text("".join(lines))


def run(tree: Path, *command: str) -> None:
    """Runs a command in the changed tree, with the tree's llmpy and kernels/binding first on the path."""
    env = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/kernels", "LLMPY_CUDA": "0", "LLMPY_DEBUG": "1", "LLMPY_WERROR": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with the code of all guides, built."""
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("guides")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=NOT_COPIED)
        else:
            shutil.copy(source, folder)
    for fences in GUIDES.values():
        for note, text in fences:
            if not note.startswith("check"):
                apply(folder, note, text)
    run(folder, sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    return folder


@pytest.mark.parametrize("guide", GUIDES)
def test_checks_of_a_guide(guide: str, tree: Path) -> None:
    checks = [(note, text) for note, text in GUIDES[guide] if note.startswith("check")]
    assert checks
    for note, text in checks:
        command = ("sh", "-ec", text) if note == "check sh" else (sys.executable, "-c", text)
        run(tree, *command)


def test_cuda_code_compiles(tree: Path, tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    places = [PLACE.fullmatch(note) for fences in GUIDES.values() for note, _ in fences]
    files = {place[1] for place in places if place and place[1].endswith(".cu")}
    assert files
    for name in files:
        options = ["-std=c++17", "-O3", "-fmad=false", "-gencode", "arch=compute_90a,code=sm_90a", "-Werror", "all-warnings"]
        run(tree, "nvcc", *options, "-c", name, "-o", str(tmp_path / "object.o"))


@pytest.mark.parametrize("guide", TESTS)
def test_tests_that_a_guide_extends(guide: str, tree: Path) -> None:
    run(tree, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS[guide])
