"""The site builds without a warning, has every page and every public name, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmpy
import llmpy.logprobs
import llmpy.outputs
import llmpy.pooling_outputs
import llmpy.rl

pytest.importorskip("furo")
pytest.importorskip("myst_nb")

ROOT = Path(__file__).parents[2]
PAGE = re.compile(r"(?<![\w/])(?:docs|benchmarks/notebook)/[\w/-]+\\?\.(?:md|py|ipynb)\b")
TEXTS = {".py", ".pyi", ".c", ".h", ".def", ".cu", ".cuh", ".toml", ".sh", ".md"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def build(source: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", f"{site}.trees", str(source), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The build fails for a page without a table of contents, a broken link, or a bad docstring."""
    folder = tmp_path_factory.mktemp("site") / "html"
    found = build(ROOT / "docs", folder)
    assert found.returncode == 0, found.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")]
    assert len(pages) > 15
    assert not [page for page in pages if not (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()]


def test_every_public_name_is_documented(site: Path) -> None:
    text = (site / "use/api.html").read_text()
    names = [(module.__name__, name) for module in (llmpy, llmpy.rl) for name in module.__all__ if name != "__version__"]
    assert not [name for name in names if not any(f'id="{home}.{name[1]}"' in text for home in (name[0], "llmpy.errors"))]


def test_everything_that_a_call_returns_is_documented(site: Path) -> None:
    text = (site / "use/api.html").read_text()
    modules = (llmpy.outputs, llmpy.pooling_outputs, llmpy.logprobs)
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    names = {one.__name__ for one in classes if one.__module__ in {module.__name__ for module in modules}}
    names = {name for name in names if not name.startswith("_")} - {"LogprobsView"}
    names |= {"RequestStream", "RequestHandle", "UpdateReport"}
    assert len(names) > 20 and not [name for name in names if f'.{name}"' not in text]


def test_a_broken_link_would_fail(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text((ROOT / "docs/conf.py").read_text().replace('["_static"]', "[]"))
    (tmp_path / "index.md").write_text("# Title\n\n[nowhere](absent.md), [no heading](index.md#absent)\n")
    found = build(tmp_path, tmp_path / "html")
    assert found.returncode != 0 and "absent.md" in found.stderr and "'absent'" in found.stderr, found.stderr


def test_pages_that_files_name_exist() -> None:
    """Errors, docstrings, comments and scripts name pages by their paths."""
    folders = ("llmpy", "csrc", "kernels", "benchmarks", "examples", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    named = {(page, path) for path in files for page in PAGE.findall(path.read_text())}
    assert len(named) > 30
    assert not [f"{path}: {page}" for page, path in named if not (ROOT / page.replace("\\", "")).exists()]


OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
OUTSIDE += sorted((ROOT / "benchmarks/notebook").glob("*.md"))


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.stem)
def test_links_outside_the_site(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (path.parent / target.partition("#")[0]).exists(), target
