"""The installed headers for backends and connectors of other packages: complete, self-contained, in C and C++, equal to the
core's."""

import re
import subprocess
from pathlib import Path

import pytest

import llmpy

ROOT = Path(__file__).parents[2]
HEADER = Path(llmpy.get_include()) / "llmpy_backend.h"
CONNECTOR = HEADER.with_name("llmpy_connector.h")
PEDANTIC = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", f"-I{HEADER.parent}"]
COMPILERS = {"c": ["cc", "-std=c11"], "cpp": ["c++", "-std=c++17", "-D_Static_assert=static_assert"]}


@pytest.mark.parametrize("language", COMPILERS)
def test_the_header_is_the_cores(language: str, tmp_path: Path) -> None:
    """Every offset that tests/c/test_abi.c holds of the core's header."""
    check(language, "llmpy_backend.h", (ROOT / "tests/c/test_abi.c").read_text(), tmp_path)


@pytest.mark.parametrize("language", COMPILERS)
def test_the_header_of_connectors_is_the_cores(language: str, tmp_path: Path) -> None:
    """Every offset that tests/c/test_connector_abi.c holds, beside the other header."""
    tests = (ROOT / "tests/c/test_connector_abi.c").read_text().partition("TEST(")[0]
    check(language, "llmpy_connector.h", tests + "#include <llmpy_backend.h>\n", tmp_path)
    assert not re.findall(r'^#include "', CONNECTOR.read_text(), re.M) and "__attribute__((format" not in CONNECTOR.read_text()


def check(language: str, header: str, tests: str, tmp_path: Path) -> None:
    asserts = re.sub(r"^TEST\(.*?^}\n", "", tests.partition("#include <stddef.h>")[2], flags=re.M | re.S)
    source = tmp_path / f"alone.{language}"
    source.write_text(f"#include <{header}>\n#include <stddef.h>\n#include <{header}>\n" + asserts)
    flags = [flag for flag in PEDANTIC if flag != "-Wpedantic"]  # C has no empty declarations between the offsets' lines
    subprocess.run([*COMPILERS[language], *flags, str(source)], check=True)
    source.write_text(f"#include <{header}>\n")
    subprocess.run([*COMPILERS[language], *PEDANTIC, str(source)], check=True)


def test_it_includes_nothing_of_the_core_and_declares_no_function_of_it(tmp_path: Path) -> None:
    text = HEADER.read_text()
    assert not re.findall(r'^#include "', text, re.M)
    source = tmp_path / "own.c"
    names = ("err_set", "err_name", "dtype_to_float", "dtype_from_float", "dtype_from_name", "backend_cpu")
    source.write_text("#include <llmpy_backend.h>\n" + "".join(f"double {name};\n" for name in names))
    subprocess.run([*COMPILERS["c"], *PEDANTIC, str(source)], check=True)
