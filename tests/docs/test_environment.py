"""docs/use/environment.md and the code name the same variables, with the same words."""

import re
from pathlib import Path

from llmpy.environment import BUILD_VARIABLES, VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/use/environment.md").read_text()
RUN, BUILD = PAGE.split("## At build time")


def test_the_page_shows_the_tables_of_the_code() -> None:
    for page, table in ((RUN, VARIABLES), (BUILD, BUILD_VARIABLES)):
        rows = re.findall(r"^\| `(LLMPY_\w+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
        assert rows == [(name, meaning, default) for name, (meaning, default) in table.items()]


def test_every_variable_that_is_read_is_on_the_page() -> None:
    """A name in capitals beside `environ`; the build's only file is csrc/compiling.py."""
    for page, files in ((RUN, (ROOT / "llmpy").rglob("*.py")), (BUILD, [ROOT / "csrc/compiling.py"])):
        names = {name for file in files for name in re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', file.read_text())}
        assert len(names) > 4 and not [name for name in names if f"`{name}`" not in page]


def test_the_build_reads_what_its_table_says() -> None:
    read = set(re.findall(r'"(LLMPY_\w+)"', (ROOT / "csrc/compiling.py").read_text()))
    assert read == set(BUILD_VARIABLES)
