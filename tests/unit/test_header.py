"""kernels/header.py reads backend.h as the C compiler does; and tests/c/test_abi.c knows all of it."""

import ctypes
import re
import subprocess
from pathlib import Path

from header import Header

ROOT = Path(__file__).parents[2]


def test_layouts_are_the_compilers(tmp_path: Path) -> None:
    header = Header()
    asked = ['#include "kernels/backend.h"', "#include <stddef.h>"]
    for name, struct in header.structs.items():
        asked.append(f'_Static_assert(sizeof(struct {name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, *_ in struct._fields_:
            place = getattr(struct, field).offset
            asked.append(f'_Static_assert(offsetof(struct {name}, {field}) == {place}, "{name}.{field}");')
    asked += [f'_Static_assert({name} == {number}, "{name}");' for name, number in header.enums.items()]
    source = tmp_path / "layouts.c"
    source.write_text("\n".join(asked))
    subprocess.run(["gcc", "-fsyntax-only", f"-I{ROOT}", str(source)], check=True)
    assert {"linear_args", "sample_task", "backend"} <= set(header.structs)
    assert {("backend", "linear"), ("backend", "open"), ("comm", "open"), ("comm", "gather")} <= set(header.functions)


def test_the_offset_of_every_field_is_held() -> None:
    """tests/c/test_abi.c names every field in order: a new field belongs at the end of its struct, and there."""
    groups = re.findall(r"#define OF (\w+)\n(.*?)#undef OF", (ROOT / "tests/c/test_abi.c").read_text(), re.S)
    held = {name: re.findall(r"AT\((\w+),", text) for name, text in groups}
    assert held == {name: [field for field, *_ in struct._fields_] for name, struct in Header().structs.items()}
