"""The dependencies of the package and its server have no known vulnerability, by pip-audit if its database is available."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pip_audit", reason="needs the package pip-audit")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("structured", "server", "fast", "kvevents")
HOLED = "jinja2==2.11.2"  # CVE-2020-28493


def audit(requirements: list[str], folder: Path) -> list[dict[str, Any]]:
    """pip-audit's result for each package that these requirements install."""
    path = folder / "requirements.txt"
    path.write_text("\n".join(requirements))
    command = [sys.executable, "-m", "pip_audit", "-r", str(path), "-f", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout) if done.stdout else {"dependencies": []}
    return list(found["dependencies"])


@pytest.mark.slow
def test_no_known_holes(tmp_path: Path) -> None:
    known = audit([HOLED], tmp_path)
    if not any(package.get("vulns") for package in known):
        pytest.skip(f"no advisories to be had here: {HOLED} is not reported")
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = project["dependencies"] + [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    found = audit(wanted, tmp_path)
    names = {re.sub(r"[-_.]+", "-", package["name"]).lower() for package in found if "skip_reason" not in package}
    assert {"jinja2", "starlette", "uvicorn", "numpy"} <= names
    assert not [package for package in found if package.get("vulns")]
