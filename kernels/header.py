"""Parses backend.h into ctypes structures, for tests and benchmarks that call a backend's functions."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCALARS: dict[str, Any] = {
    "uint8_t": ctypes.c_uint8, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double,
    "bool": ctypes.c_bool, "char": ctypes.c_char, "int": ctypes.c_int,
}  # fmt: skip


class Header:
    """Structures and enums of the headers that a backend includes.

    A pointer field is a `c_void_p`, so its value is an address. A function pointer is too; `functions` holds its prototype by
    the names of the structure and of the field.
    """

    def __init__(self) -> None:
        self.structs: dict[str, Any] = {}
        self.enums: dict[str, int] = {}
        self.functions: dict[tuple[str, str], Any] = {}
        for name in ("csrc/base/dtype.h", "csrc/base/status.h", "kernels/backend.h"):
            self._read(_plain(ROOT / name))

    def _read(self, text: str) -> None:
        for kind, name, body in re.findall(r"^(struct|enum) (\w+) \{(.*?)\};", text, re.M | re.S):
            if kind == "enum":
                self._add_enum(body)
            else:
                fields = [field for line in body.split(";") for field in self._fields(name, " ".join(line.split()))]
                self.structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})

    def _add_enum(self, body: str) -> None:
        number = -1
        for entry in body.split(","):
            name, _, value = (part.strip() for part in entry.partition("="))
            if name:
                number = int(value, 0) if value else number + 1
                self.enums[name] = number

    def _fields(self, struct: str, line: str) -> Iterator[tuple[str, Any]]:
        """The (name, ctypes type) pairs of one declaration; a function's prototype is added to `functions`."""
        if function := re.fullmatch(r"(.*?)\(\*(\w+)\)\((.*)\)", line):
            result, name, arguments = function.groups()
            kinds = [self._type(one) for one in _arguments(arguments)]
            self.functions[struct, name] = ctypes.CFUNCTYPE(self._type(result), *kinds)
            yield name, ctypes.c_void_p
            return
        if not line:
            return
        base, names = re.fullmatch(r"((?:const )?(?:struct |enum )?\w+ )(.*)", line).groups()  # type: ignore[union-attr]
        for declared in names.split(","):
            stars, name, length = re.fullmatch(r"\s*((?:\*|const )*)(\w+)(?:\[(\w+)\])?", declared).groups()  # type: ignore[union-attr]
            kind = self._type(base + stars)
            yield name, kind * int(length) if length else kind

    def _type(self, text: str) -> Any:
        words = text.replace("const ", "").replace("const", "").strip()
        if "*" in words:
            return ctypes.c_char_p if words == "char *" else ctypes.c_void_p
        if words.split()[0] == "enum":
            return ctypes.c_int
        if words.split()[0] == "struct":
            return self.structs[words.split()[1]]
        return None if words == "void" else SCALARS[words.split()[0]]


def _arguments(text: str) -> list[str]:
    """Types of a prototype's parameters, which may have names or not; those of an ellipsis are left out."""
    given = [one for one in text.split(",") if one.strip() != "..."]
    return [re.sub(r"\w+$", "", one.strip()) if "*" in one or " " in one.strip() else one for one in given]


def _plain(path: Path) -> str:
    """The text of a header without comments, with its parts and with entries.def expanded."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    if '#include "entries.def"' not in text:
        return text
    text = re.sub(r'^#include "(\w+\.h)"', lambda match: _plain(path.parent / match[1]), text, flags=re.M)
    rows = re.findall(r"^(?:HOST_|RANK_|OPTION_|OWN_)?(ENTRY|TABLE)\((\w+)\)", (path.parent / "entries.def").read_text(), re.M)
    shapes = {
        "ENTRY": "enum rc (*{0})(void *ctx, const struct {0}_args *args, struct err *err);",
        "TABLE": "const struct {0} *{0};",
    }
    text = re.sub(r"^#define (?:HOST_|RANK_|OPTION_|OWN_)?(?:ENTRY|TABLE)\(name\).*\n", "", text, flags=re.M)
    return text.replace('#include "entries.def"', "\n".join(shapes[kind].format(row) for kind, row in rows))
