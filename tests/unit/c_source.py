"""A small reader of C sources for the tests of the house rules: comments and texts blanked, functions measured."""

import re
from typing import NamedTuple

_LITERALS = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(\w+)")
_TRANSPARENT = re.compile(r'\b(namespace\b[^()]*|extern\s*"[^"]*"\s*)$')


class Function(NamedTuple):
    """A function's name and the lines (from 1) of its head and of its closing brace."""

    name: str
    first: int
    last: int


def blank(source: str) -> str:
    """The source with comments and the insides of texts replaced by spaces; every newline stays in its place."""

    def replace(match: re.Match[str]) -> str:
        text = match[0]
        if text[0] == "/":
            return re.sub(r"[^\n]", " ", text)
        return text[0] + " " * (len(text) - 2) + text[-1]

    return _LITERALS.sub(replace, source)


def without_directives(blanked: str) -> str:
    """Also blanks preprocessor lines, and all but the first branch of a conditional (each may open the same brace)."""
    lines, branches, in_directive = [], [], False
    for line in blanked.split("\n"):
        match = None if in_directive else _DIRECTIVE.match(line)
        is_directive = in_directive or match is not None
        in_directive = is_directive and line.rstrip().endswith("\\")
        if match and match[1].startswith("if"):
            branches.append(True)
        elif match and match[1].startswith("el") and branches:
            branches[-1] = False
        elif match and match[1] == "endif" and branches:
            branches.pop()
        lines.append("" if is_directive or not all(branches) else line)
    return "\n".join(lines)


def _head(text: str) -> str | None:
    """The name of the function that opens after this text, or None for a struct, an initialiser or the like."""
    text = re.sub(r"\b(__attribute__|__launch_bounds__|alignas|_Alignas)\s*\(+[^()]*(\([^()]*\)[^()]*)*\)+", " ", text)
    if "=" in text.split("(")[0] or not text.rstrip().endswith(")"):
        return None
    match = re.search(r"([A-Za-z_]\w*)\s*\(", text)
    return match[1] if match else None


def functions(source: str) -> list[Function]:
    """Every function defined at file scope, in order."""
    text = without_directives(blank(source))
    found: list[Function] = []
    opened: list[tuple[str, int]] = []  # the owner of each open brace: "" = transparent, "{" = a block, else a name
    start, depth = 0, 0  # where the text of the next head begins; braces that hide file scope
    for place in re.finditer(r"[{};]", text):
        at = place.start()
        if place[0] == "{":
            head = text[start:at]
            kind = "{"
            if not depth:
                kind = "" if _TRANSPARENT.search(head.rstrip()) else _head(head) or "{"
            first = text.count("\n", 0, start + len(head) - len(head.lstrip())) + 1
            opened.append((kind, first))
            depth += kind != ""
        elif place[0] == "}" and opened:
            kind, first = opened.pop()
            depth -= kind != ""
            if not depth and kind not in ("", "{"):
                found.append(Function(kind, first, text.count("\n", 0, at) + 1))
        if not depth:
            start = at + 1
    return found


def macros(source: str) -> list[Function]:
    """Every #define with the lines that it takes."""
    lines = blank(source).split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        match = re.match(r"[ \t]*#[ \t]*define[ \t]+(\w+)", line)
        if match:
            last = number
            while lines[last - 1].rstrip().endswith("\\") and last < len(lines):
                last += 1
            found.append(Function(match[1], number, last))
    return found
