"""Builds a loadable library, packages that contain one, and the packages of examples/."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import llmpy

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRARY = """
#include <llmpy_backend.h>
#include <string.h>

static void nothing(void) {}
#define SOME(name) .name = (void *)nothing,

static struct device_traits traits = {.size_bytes = sizeof traits, .default_tokens = 77, .default_seqs = 5};

/* The table, with room behind it for the fields of a newer header. */
static struct {
    struct backend table;
    void *newer[4];
} grown = {.table = {
    .abi = BACKEND_ABI, .size_bytes = sizeof grown.table, .name = "fake", .traits = &traits,
    SOME(open) SOME(close) SOME(describe) SOME(fusions) SOME(supports) SOME(activations) SOME(buffer_create)
    SOME(buffer_destroy) SOME(upload) SOME(download) SOME(synchronize) SOME(matrix_create) SOME(matrix_destroy)
    SOME(matrix_bytes) SOME(matrix_arithmetic) SOME(matrix_write) SOME(matrix_read) SOME(kv_layer_bytes) SOME(embed)
    SOME(linear) SOME(rms_norm) SOME(gated) SOME(add) SOME(select) SOME(rope) SOME(kv_write) SOME(attention)
}};

__attribute__((visibility("default"))) const struct backend *ENTRY_NAME(const struct backend_host *host)
{
    (void)host;
    CHANGE
    return &grown.table;
}
"""


@pytest.fixture(scope="session")
def install_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a package of examples/ by pip, in a new folder; a function may change its copied source first."""

    def install(name: str, change: Callable[[Path], None] = lambda source: None) -> Path:
        source, target = tmp_path_factory.mktemp("source") / name, tmp_path_factory.mktemp("site")
        shutil.copytree(EXAMPLES / name, source, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info", "__pycache__"))
        change(source)
        options = ["-q", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=target)
        assert done.returncode == 0, done.stdout + done.stderr
        return target

    return install


@pytest.fixture
def build_library(tmp_path: Path) -> Callable[..., str]:
    """Builds a library against the installed header; a line of C may change its table before it is handed out."""

    def build(change: str = "", entry: str = "llmpy_backend") -> str:
        source, library = tmp_path / "fake.c", tmp_path / "fake.so"
        source.write_text(LIBRARY.replace("CHANGE", change).replace("ENTRY_NAME", entry))
        flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{llmpy.get_include()}"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        return str(library)

    return build


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with an entry point of a kind, visible to importlib; `code` is the code of its function."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def bring(kind: str, code: str, package: str = "llmpy_fake", version: str = "1.2") -> None:
        monkeypatch.delitem(sys.modules, package, raising=False)
        (site / f"{package}.py").write_text(f"def library():\n    {code}\n")
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[llmpy.backends]\n{kind} = {package}:library\n")

    return bring
