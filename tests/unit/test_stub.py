"""The stub of the C core equals the built module."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = """[mypy]
strict = True
follow_imports = skip
[mypy-llmpy._core,llmpy.errors]
follow_imports = normal
"""


def test_the_stub_matches_the_built_core(tmp_path: Path) -> None:
    aliases = re.findall(r"^(\w+) = ", (ROOT / "llmpy/_core.pyi").read_text(), re.MULTILINE)
    allowed = tmp_path / "allowed"
    allowed.write_text("".join(f"llmpy._core.{alias}\n" for alias in aliases))
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy.stubtest", "llmpy._core", "--concise", "--allowlist", str(allowed)]
    command += ["--mypy-config-file", str(settings)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
