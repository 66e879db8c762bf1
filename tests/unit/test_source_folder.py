"""`import llmpy` in a clone without a built C core: the installed llmpy runs, or the error names the remedy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llmpy
from llmpy import _core

PACKAGE = Path(llmpy.__file__).parent
SHOW = "import llmpy, pickle; from llmpy.sampling_params import SamplingParams as S; pickle.loads(pickle.dumps(S())); "
SHOW += "assert S is llmpy.SamplingParams; print(llmpy.__file__, llmpy._core.__file__, sep='\\n')"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A source folder: the package without what a build makes."""
    folder = tmp_path / "clone"
    shutil.copytree(PACKAGE, folder / "llmpy", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "setup.py").touch()
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for `sys.path` that holds the package and its core."""
    folder = tmp_path / "site"
    shutil.copytree(PACKAGE, folder / "llmpy", ignore=shutil.ignore_patterns("_core*.so", "_backends", "__pycache__"))
    (folder / "llmpy" / Path(_core.__file__).name).symlink_to(_core.__file__)
    return folder


def run(folder: Path, *words: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Python in a folder; of the environment's llmpy it sees nothing, only what `path` holds."""
    away = {"PYTHONSAFEPATH", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in away}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run([sys.executable, "-S", *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_installed_package_runs(clone: Path, installed: Path) -> None:
    done = run(clone, "-W", "error", "-c", SHOW, path=installed)
    assert done.returncode == 0, done.stderr
    home = installed / "llmpy"
    assert done.stdout.splitlines() == [str(home / "__init__.py"), str(home / Path(_core.__file__).name)]
    done = run(clone, "-W", "error", "-m", "llmpy", "--version", path=installed)
    assert done.returncode == 0 and done.stdout == f"llmpy {llmpy.__version__}\n", done.stderr


FORMS = ["from llmpy import SamplingParams", "from llmpy.sampling_params import SamplingParams", "import llmpy.cli"]


@pytest.mark.parametrize("code", FORMS)
def test_every_form_of_import_gets_it(clone: Path, installed: Path, code: str) -> None:
    script = f"{code}; import sys; print([one.__file__ for name, one in sys.modules.items() if name[:5] == 'llmpy'])"
    done = run(clone, "-c", script, path=installed)
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout and str(clone) not in done.stdout


def test_an_edited_clone_is_told(clone: Path, installed: Path) -> None:
    with (clone / "llmpy/text/sample_text.py").open("a") as file:
        file.write("# edited\n")
    done = run(clone, "-c", SHOW, path=installed)
    assert done.returncode == 0 and str(installed) in done.stdout
    assert "it differs: text/sample_text.py; run `pip install .` again" in done.stderr


def test_nothing_installed(clone: Path) -> None:
    done = run(clone, "-c", "import llmpy")
    assert done.returncode == 1 and "circular" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and f"`pip install {clone}`" in last and f"`pip install -e {clone}`" in last


def test_a_broken_core_is_not_passed_over(clone: Path, installed: Path) -> None:
    (clone / "llmpy" / Path(_core.__file__).name).write_bytes(b"no library")
    done = run(clone, "-c", "import llmpy", path=installed)
    assert done.returncode == 1
    assert f"the C core in {clone}/llmpy cannot be loaded: " in done.stderr.splitlines()[-1]


def test_an_installation_without_a_core(clone: Path) -> None:
    (clone / "setup.py").unlink()
    done = run(clone, "-c", "import llmpy")
    assert done.returncode == 1 and "install llmpy again with this Python" in done.stderr.splitlines()[-1]


def test_bench_startup_measures_what_runs(clone: Path, installed: Path, tmp_path: Path) -> None:
    """Processes that `llmpy bench startup` starts do not look for llmpy in the working directory."""
    shutil.rmtree(clone / "llmpy")
    (clone / "llmpy.py").write_text("raise SystemExit('the working directory was looked into')")
    code = "import sys; sys.path[:1] = [sys.argv.pop(1)]; sys.path += sys.argv.pop(1).split(':')\n"
    code += "from llmpy.cli import main; main()"
    site = ":".join(entry for entry in sys.path if "site-packages" in entry)
    words = ["bench", "startup", "--runs", "1", str(tmp_path / "no-model")]
    done = run(clone, "-c", code, str(installed), site, *words)
    assert "no-model is neither a file nor a directory" in done.stderr, done.stderr
