"""The house rules that a machine can check: sizes of files and functions, calls, exports."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from modules import load

ROOT = Path(__file__).parents[2]
SUFFIXES = {".c", ".h", ".def", ".cu", ".cuh"}
C_FILES = sorted(p for part in ("csrc", "kernels") for p in (ROOT / part).rglob("*") if p.suffix in SUFFIXES)
C_TESTS = sorted((ROOT / "tests/c").glob("*.[ch]"))
PYTHON_FILES = sorted((ROOT / "llmpy").rglob("*.py"))
HEAP_OWNER = ROOT / "csrc/base/mem.c"
FORBIDDEN = ["printf", "fprintf", "vprintf", "vfprintf", "dprintf", "puts", "fputs", "putchar", "perror"]
FORBIDDEN += ["abort", "exit", "_exit", "_Exit", "quick_exit"]
HEAP = ["malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign", "strdup", "asprintf"]
NO_FAMILY = {"backend_cpu", "kernels", "matrix", "pool"}  # files of kernels/cpu that hold no operation


parser = load(Path(__file__).with_name("c_source.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path, names: list[str]) -> list[str]:
    """Places where one of these functions is called (or taken) by the code, comments and texts aside."""
    pattern = re.compile(rf"(?<![\w.])(?<!->)({'|'.join(names)})\s*\(")
    text = parser.blank(path.read_text())
    return [f"{name(path)}:{text.count(chr(10), 0, m.start()) + 1}: {m[1]}" for m in pattern.finditer(text)]


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name(path)}:{node.lineno}: {node.name}", (node.end_lineno or 0) - node.lineno + 1


def test_the_parser_finds_functions() -> None:
    source = r'''
/* int comment(void) { */
#define MACRO(x) \
    do { x; } while (0)
struct point { int x; };
static const int TABLE[] = {1, 2}; enum { A, B };
static const struct { int a; } LIST[] = {[0] = {f(3)}};
static char open = '{', *text = "}{\"";
#ifdef WIDE
static int either(void) {
#else
static int either(long x) {
#endif
    struct point p = {.x = '\''};
    return p.x;
}
__attribute__((format(printf, 1, 2)))
static enum rc
two_lines(const char *format, ...)
{
    for (;;) { if (1) { } }
} // }
extern "C" {
namespace {
template <int N> __global__ void __launch_bounds__(256) kernel(float *x) { x[0] = N; }
}
}
'''
    assert parser.functions(source) == [("either", 10, 16), ("two_lines", 17, 22), ("kernel", 25, 25)]
    assert parser.macros(source) == [("MACRO", 3, 4)]
    long = "static void f(void)\n{\n" + "    x();\n" * 98 + "}\n"
    assert parser.functions(long) == [("f", 1, 101)]


def test_file_sizes() -> None:
    over = []
    for path in [*C_FILES, *C_TESTS, *PYTHON_FILES, *(ROOT / "tests").rglob("*.py")]:
        limit = 1000 if ROOT / "kernels" in path.parents else 800
        n = len(path.read_text().splitlines())
        if n > limit:
            over.append(f"{name(path)}: wanted at most {limit} lines, have {n}")
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 200
    assert not over, "\n".join(over)


def test_the_top_level_of_the_package_is_short() -> None:
    """A top-level module is public by its path or shared by packages; modules of internal packages have no underscores."""
    assert len(list((ROOT / "llmpy").glob("*.py"))) <= 25
    internal = ("engine", "results", "structured", "text", "weights")
    files = [path for path in PYTHON_FILES if path.parent.name in internal and path.parents[1].name == "llmpy"]
    assert len(files) > 40
    assert not [name(path) for path in files if path.name.startswith("_") and path.name != "__init__.py"]


def test_function_sizes() -> None:
    over, seen = [], 0
    for path in [*C_FILES, *C_TESTS]:
        source = path.read_text()
        lines = source.splitlines()
        for function in [*parser.functions(source), *parser.macros(source)]:
            seen += 1
            n = function.last - function.first + 1
            body = "\n".join(lines[max(0, function.first - 2) : function.last])
            excused = ROOT / "kernels" in path.parents and re.search(r"/\* long: \w", body)
            if n > 100 and not excused:
                over.append(f"{name(path)}:{function.first}: {function.name}: wanted at most 100 lines, have {n}")
    for path in PYTHON_FILES:
        over += [f"{place}: wanted at most 100 lines, have {n}" for place, n in python_functions(path) if n > 100]
    assert seen > 200
    assert not over, "\n".join(over)


def test_line_widths() -> None:
    over = [
        f"{name(path)}:{number}: wanted at most 128 columns, have {len(line)}"
        for path in C_FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 128 or "\t" in line or line != line.rstrip()
    ]
    assert not over, "\n".join(over)


def test_python_is_known_in_csrc_python_only() -> None:
    found = [
        name(path)
        for path in C_FILES
        if re.search(r'#\s*include\s*[<"](Python|numpy/.*)\.h[>"]', path.read_text()) and path.parent.name != "python"
    ]
    assert not found


def test_nothing_prints_or_ends_the_process() -> None:
    found = [place for path in C_FILES for place in calls(path, FORBIDDEN)]
    assert not found, "\n".join(found)


def test_the_environment_is_read_in_one_place() -> None:
    found = {place.split(":")[0] for path in C_FILES for place in calls(path, ["getenv", "secure_getenv"])}
    assert len(found) <= 1, found
    from llmpy import environment

    texts = {name(path): path.read_text() for path in PYTHON_FILES}
    names = {match for text in texts.values() for match in re.findall(r"\bLLMPY_[A-Z_]+\b", text)}
    assert names - set(environment.BUILD_VARIABLES) == set(environment.VARIABLES) and len(environment.VARIABLES) <= 9
    readers = {file for file, text in texts.items() if re.search(r"environ.*LLMPY_|getenv\(.LLMPY_", text)}
    assert readers == {"llmpy/environment.py"}


def test_the_heap_has_one_door() -> None:
    found = [place for path in C_FILES if path != HEAP_OWNER for place in calls(path, HEAP)]
    assert not found, "\n".join(found)


def test_headers_open_with_prose() -> None:
    bare = [name(path) for path in C_FILES if path.suffix == ".h" and not path.read_text().startswith("/*")]
    assert not bare


def families() -> list[str]:
    """Operation families of the CPU: linear stands for linear_*.c too."""
    stems = {path.stem for path in (ROOT / "kernels/cpu").glob("*.c")} - NO_FAMILY
    return sorted(stem for stem in stems if not any(stem.startswith(other + "_") for other in stems))


def test_every_family_is_on_the_cpu_and_tested() -> None:
    cpu = {path.stem for path in (ROOT / "kernels/cpu").glob("*.c")}
    own = {"attention_e4m3", "attention_int8", "attention_sync", "backend_cuda", "comm", "comm_nccl", "device", "experts_units"}
    own |= {"ipc", "linear_fp8", "linear_sync", "linear_units", "link", "memory", "moves", "staging", "upload"}
    alone = [name(path) for path in (ROOT / "kernels/cuda").rglob("*.cu") if path.stem not in cpu | own]
    assert not alone, "no kernels/cpu file of the same name"
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests/kernels").glob("test_*.py")}
    untested = [family for family in families() if not any(test.startswith(family) for test in tested)]
    assert not untested, "no tests/kernels/test_<family>.py"


def core_path() -> Path:
    from llmpy import _core

    return Path(_core.__file__)


def run_tool(*command: str | Path) -> str:
    if not shutil.which(str(command[0])):
        pytest.skip(f"no {command[0]} on this machine")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_only_the_init_function_is_exported() -> None:
    symbols = {line.split()[-1] for line in run_tool("nm", "-D", "--defined-only", core_path()).splitlines()}
    assert symbols == {"PyInit__core"}


def test_needed_libraries() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", run_tool("readelf", "-d", core_path())))
    allowed = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert "libc.so.6" in needed and needed <= allowed


PLAIN_OPERATIONS = ("conv", "delta", "head_linear", "latent_attention", "position_scale")  # no fusion knows them
MAX_PLACES = 8


@pytest.mark.parametrize("op", PLAIN_OPERATIONS)
def test_places_of_an_operation(op: str) -> None:
    """Files that know an operation: its rows in operations.def and entries.def, its arguments in backend.h, check and run in
    ops_*.c, both kernels, the block's verb and the interpreter. Tests come on top."""
    knows = re.compile(
        rf'\b(run|check|cuda)_{op}\b|K\({op}\)|struct {op}_args \{{|OPERATION\(\w+, {op},|ENTRY\({op}\)|\bOP_{op.upper()}\b'
        rf'|emit\w*\(\s*"{op}"|(name|kind) == "{op}"'
    )
    sources = [path for folder in ("csrc", "kernels", "llmpy") for path in (ROOT / folder).rglob("*")]
    sources = [path for path in sources if path.parent.name != "binding"]  # for tests
    sources = [path for path in sources if path.name != "llmpy_backend.h"]  # made by setup.py
    texts = {path: path.read_text() for path in sources if path.suffix in {*SUFFIXES, ".py"}}
    places = [str(path.relative_to(ROOT)) for path, text in texts.items() if knows.search(text)]
    assert len(places) <= MAX_PLACES, places
    assert {"csrc/program/operations.def", "kernels/entries.def", "kernels/backend.h"} <= set(places)


NAMES_CUDA = {
    "llmpy/hardware.py": "the one place that knows kinds of devices",
    "llmpy/rl/sender.py": "torch's name of a trainer's device",
    "llmpy/weights/buckets.py": "CUDA's handles of memory",
}


def test_one_file_knows_the_kinds_of_devices() -> None:
    """The properties of a device come from its backend (struct device_traits), not from its name."""
    named = set()
    for path in PYTHON_FILES:
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        if any(isinstance(text, str) and re.fullmatch(r"cuda(:\d*)?", text) for text in texts):
            named.add(name(path))
    assert named == set(NAMES_CUDA)


MAX_CLASS_LINES = 250
LONG_CLASSES = {
    "llmpy/llm.py LLM": "the public calls, each with its docstring",
    "llmpy/async_engine.py AsyncEngine": "the public calls, each with its docstring",
    "llmpy/engine/base.py EngineBase": "the calls that both have",
    "llmpy/models/blocks.py Block": "the vocabulary of architecture functions",
    "llmpy/models/program.py Writer": "the other half of that vocabulary",
    "llmpy/text/tokenizer.py Tokenizer": "the public calls of a tokenizer",
    "llmpy/weights/updates.py WeightUpdate": "one transaction; every method needs its state",
    "kernels/cuda/attention/attention_few.cuh few_worker": "the registers of one warp",
    "kernels/cuda/attention/attention_sync.cuh sync_worker": "the registers of one warp",
    "kernels/cuda/attention/attention_worker.cuh decode_worker": "the registers of one warp",
}


def long_classes() -> Iterator[str]:
    """Classes, and structs with functions in them, that are longer than the limit."""
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= MAX_CLASS_LINES:
                yield f"{name(path)} {node.name}"
    for path in C_FILES:
        opened: tuple[int, str] | None = None
        for number, line in enumerate(path.read_text().splitlines()):
            if match := re.match(r"(?:template .*)?struct (\w+)[^;]*\{$", line):
                opened = number, match[1]
            elif line.startswith("};") and opened:
                if number - opened[0] >= MAX_CLASS_LINES:
                    yield f"{name(path)} {opened[1]}"
                opened = None


def test_class_sizes() -> None:
    assert set(long_classes()) == set(LONG_CLASSES)
