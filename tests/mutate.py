"""Breaks the code in many small ways, one at a time, and checks that the tests fail.

    python tests/mutate.py [--only NAME ...] [--area AREA ...] [--jobs N] [--list]

Each file of tests/mutations is an area; each of its tables is one mutation:

    [window-early]                              its name
    file = "csrc/engine/scheduler.c"            the file to break
    rule = "A block is kept until ..."          the rule that the break violates
    old = 'position + 1 > window'               text that occurs exactly once in the file
    new = 'position > window'                   what takes its place
    tests = "tests/c/test_scheduler.c"          what must fail: programs of tests/c, arguments of pytest

The tree is copied to a temporary folder and built there; the tree itself is only read. The named tests must pass on the
unbroken copy first. A mutation is caught if a test fails, crashes or takes ten times as long as on the unbroken copy.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST_CAUGHT = 0.95  # share of the mutations
LEAST_TIMEOUT = 120.0  # seconds
SLOWDOWN = 10  # a test that takes this many times as long as on the unbroken copy counts as hanging
C_PARTS = ("base", "step", "program", "engine")  # folders of csrc that the programs of tests/c are linked with


class Mutation(NamedTuple):
    """One deliberate break; this file's docstring explains the fields."""

    name: str
    area: str
    file: str
    rule: str
    old: str
    new: str
    tests: str

    def broken(self, root: Path) -> str:
        """The text of the file below `root`, broken.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: wanted the old text exactly once in {self.file}, found it {n} times: {self.old!r}")
        return text.replace(self.old, self.new)


class Result(NamedTuple):
    """The result of the tests for one mutation, or for the unbroken copy."""

    verdict: str  # "caught", "survived" or "invalid"
    seconds: float
    why: str


def mutations() -> list[Mutation]:
    """All mutations, in the order of their files."""
    found = []
    for path in sorted((ROOT / "tests/mutations").glob("*.toml")):
        rows: dict[str, dict[str, str]] = tomllib.loads(path.read_text())
        found += [Mutation(name=name, area=path.stem, **row) for name, row in rows.items()]
    return found


def call(command: list[str | Path], folder: Path, env: dict[str, str], timeout: float | None = None) -> tuple[int | None, str]:
    """Exit status (None: it took longer than `timeout` and was ended) and output of a command."""
    pipe: Any = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Tree:
    """A copy of the tree in a temporary folder, built and ready to be broken.

    Args:
        root: Folder of the copy.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("LLMPY_")}
        self.env |= {"LLMPY_CUDA": "0", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}

    @cached_property
    def c_flags(self) -> list[str]:
        """The compiler and the flags of tests/unit/test_c.py; a break may leave a variable unused."""
        spec = importlib.util.spec_from_file_location("test_c", ROOT / "tests/unit/test_c.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return [*module.COMPILER, *(flag for flag in module.FLAGS if flag != "-Werror"), "-w"]

    @classmethod
    def copy(cls, root: Path, jobs: int) -> "Tree":
        """Copies the files that git tracks or would add, and built files, and builds the copy."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        if (ROOT / "build").is_dir():
            shutil.copytree(ROOT / "build", root / "build", symlinks=True)
        tree = cls(root)
        tree.must(tree.build_extension(jobs), "the unbroken copy does not build")
        status, origin = call([sys.executable, "-c", "import llmpy._core as core; print(core.__file__)"], root, tree.env)
        tree.must((status, origin), "the copy's core does not load")
        if Path(origin.strip()).resolve().parents[1] != root.resolve():
            raise SystemExit(f"mutate: wanted the core of the copy, {root}, python imports {origin}")
        tree.build_c_objects(jobs)
        return tree

    def clone(self, root: Path) -> "Tree":
        """Another copy, for another worker."""
        shutil.copytree(self.root, root, symlinks=True)
        return Tree(root)

    def must(self, done: tuple[int | None, str], what: str) -> None:
        if done[0] != 0:
            raise SystemExit(f"mutate: {what}\n{done[1]}")

    def build_extension(self, jobs: int = 1) -> tuple[int | None, str]:
        """Compiles changed files and links the core; setup.py detects changes by content."""
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return call(command, self.root, self.env | {"MAX_JOBS": str(jobs)})

    def compile_c(self, source: Path) -> tuple[int | None, str]:
        """Compiles one file of csrc for the programs of tests/c."""
        target = self.root / "build/c" / f"{source.parent.name}_{source.stem}.o"
        return call([*self.c_flags, "-c", source, "-o", target], self.root, self.env)

    def build_c_objects(self, jobs: int) -> None:
        """Builds the objects for the programs of tests/c."""
        (self.root / "build/c").mkdir(exist_ok=True)
        sources = [path for part in C_PARTS for path in sorted((self.root / "csrc" / part).glob("*.c"))]
        with ThreadPoolExecutor(jobs) as pool:
            for done in pool.map(self.compile_c, sources):
                self.must(done, "the objects of tests/c do not build")

    def build_for(self, mutation: Mutation) -> tuple[int | None, str]:
        """Builds what the mutation's tests need of the broken file."""
        programs, arguments = split_tests(mutation.tests)
        done: tuple[int | None, str] = (0, "")
        if arguments and mutation.file.endswith((".c", ".h")):
            done = self.build_extension()
        if done[0] == 0 and programs:
            path = self.root / mutation.file
            users = [path] if path.suffix == ".c" else []
            if path.suffix == ".h":
                users = [source for part in C_PARTS for source in (self.root / "csrc" / part).glob("*.c")]
            for source in users:
                done = self.compile_c(source)
                if done[0] != 0:
                    return done
        return done

    def run_program(self, name: str, timeout: float | None) -> tuple[int | None, str]:
        """Builds and runs a program of tests/c."""
        program, library = self.root / "build/c" / Path(name).stem, self.root / "build/c/core.a"
        library.unlink(missing_ok=True)
        done = call(["ar", "rcs", library, *sorted((self.root / "build/c").glob("*.o"))], self.root, self.env)
        self.must(done, "ar failed")
        done = call([*self.c_flags, self.root / name, library, "-lm", "-o", program], self.root, self.env)
        self.must(done, f"{name} does not build")
        return call([program], self.root, self.env | {"ASAN_OPTIONS": "allocator_may_return_null=1"}, timeout)

    def run_tests(self, tests: str, timeout: float | None = None) -> Result:
        """Runs programs and pytest until one fails."""
        begun = time.monotonic()
        programs, arguments = split_tests(tests)
        result = Result("survived", 0, "")
        for program in programs:
            status, output = self.run_program(program, timeout)
            if status != 0:
                result = Result("caught", 0, f"{program}: {'took too long' if status is None else reason(output)}")
                break
        if result.verdict == "survived" and arguments:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
            status, output = call([*command, *arguments], self.root, self.env, timeout)
            if status is None:
                result = Result("caught", 0, "pytest: took too long")
            elif status == 1 or status < 0 or status > 128:
                result = Result("caught", 0, reason(output))
            elif status:
                result = Result("invalid", 0, f"pytest ended with status {status}\n{output}")
        return result._replace(seconds=time.monotonic() - begun)

    def try_mutation(self, mutation: Mutation, timeout: float, unbroken: "Tree") -> Result:
        """Breaks the copy, runs the tests, mends the copy."""
        path = self.root / mutation.file
        text = mutation.broken(self.root)
        try:
            path.write_text(text)
            status, output = self.build_for(mutation)
            return self.run_tests(mutation.tests, timeout) if status == 0 else Result("invalid", 0, output)
        finally:
            shutil.copy2(unbroken.root / mutation.file, path)
            self.mend(unbroken)

    def mend(self, unbroken: "Tree") -> None:
        """Restores the files of the unbroken build that differ."""
        kept = [path for path in (unbroken.root / "build").rglob("*") if path.is_file()]
        for source in [*kept, *(unbroken.root / "llmpy").glob("_core*.so")]:
            target = self.root / source.relative_to(unbroken.root)
            if not target.exists() or target.stat().st_mtime_ns != source.stat().st_mtime_ns:
                shutil.copy2(source, target)


def split_tests(tests: str) -> tuple[list[str], list[str]]:
    """Programs of tests/c, and arguments of pytest."""
    words = shlex.split(tests)
    return [word for word in words if word.endswith(".c")], [word for word in words if not word.endswith(".c")]


def reason(output: str) -> str:
    """The line of a test's output that names the failure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for mark in ("FAILED", "ERROR", "check failed", "AddressSanitizer", "runtime error", "failed"):
        for line in lines:
            if mark in line:
                return line
    return lines[-1] if lines else "no output"


def run(chosen: list[Mutation], jobs: int, tell: Callable[[Mutation, Result], None]) -> dict[str, Result]:
    """Tries mutations.

    Args:
        chosen: The mutations.
        jobs: Copies of the tree that are broken at the same time.
        tell: Called with each result as it comes.

    Returns:
        Results by the mutations' names.

    Raises:
        ValueError: A mutation's old text does not occur exactly once.
        SystemExit: The unbroken copy does not build, or its tests do not pass.
    """
    for mutation in chosen:
        mutation.broken(ROOT)
    with tempfile.TemporaryDirectory(prefix="llmpy_mutate_") as folder, ThreadPoolExecutor(jobs) as pool:
        unbroken = Tree.copy(Path(folder) / "unbroken", jobs)
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            trees.put(unbroken.clone(Path(folder) / f"broken_{number}"))

        def with_tree(work: Callable[[Tree], Result]) -> Result:
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        def seconds_unbroken(tests: str) -> float:
            result = with_tree(lambda tree: tree.run_tests(tests))
            if result.verdict != "survived":
                raise SystemExit(f"mutate: wanted tests that pass on the unbroken copy: {tests}\n{result.why}")
            print(f"{'passes':9}{result.seconds:7.0f} s  {tests}", flush=True)
            return result.seconds

        def attempt(mutation: Mutation) -> Result:
            timeout = max(LEAST_TIMEOUT, SLOWDOWN * seconds[mutation.tests])
            result = with_tree(lambda tree: tree.try_mutation(mutation, timeout, unbroken))
            tell(mutation, result)
            return result

        selections = list(dict.fromkeys(mutation.tests for mutation in chosen))
        seconds = dict(zip(selections, pool.map(seconds_unbroken, selections), strict=True))
        return dict(zip((mutation.name for mutation in chosen), pool.map(attempt, chosen), strict=True))


def show(mutation: Mutation, result: Result) -> None:
    """One line of the table; for a survivor, with the command to try it again."""
    why = result.why.splitlines()[0] if result.why else ""
    print(f"{result.verdict:9}{result.seconds:7.0f} s  {mutation.name}: {why}"[:200])
    if result.verdict != "caught":
        print(f"    rule: {mutation.rule}\n    tests: {mutation.tests}")
        print(f"    again: python tests/mutate.py --only {mutation.name}")
    if result.verdict == "invalid":
        print(result.why)
    sys.stdout.flush()


def summary(results: dict[str, Result]) -> tuple[bool, str]:
    """Whether enough are caught and none is invalid, and a sentence about it."""
    count = {verdict: [name for name, result in results.items() if result.verdict == verdict] for verdict in
             ("caught", "survived", "invalid")}  # fmt: skip
    share = len(count["caught"]) / len(results)
    text = f"{len(count['caught'])} of {len(results)} mutations caught ({share:.1%}, wanted at least {LEAST_CAUGHT:.0%})"
    for verdict in ("survived", "invalid"):
        text += f"; {verdict}: {', '.join(sorted(count[verdict]))}" if count[verdict] else ""
    return share >= LEAST_CAUGHT and not count["invalid"], text


def choose(only: list[str], areas: list[str]) -> list[Mutation]:
    """The mutations with these names and of these areas; all without either."""
    found = mutations()
    unknown = {*only} - {m.name for m in found} | {*areas} - {m.area for m in found}
    if unknown:
        raise SystemExit(f"mutate: no mutation and no area of that name: {', '.join(sorted(unknown))}; see --list")
    return [m for m in found if not (only or areas) or m.name in only or m.area in areas]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="extend", nargs="+", default=[], metavar="NAME", help="only these mutations")
    parser.add_argument("--area", action="extend", nargs="+", default=[], metavar="AREA", help="only these areas")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies that are broken at the same time (2)")
    parser.add_argument("--list", action="store_true", help="show the mutations and do nothing")
    options = parser.parse_args()
    chosen = choose(options.only, options.area)
    if options.list:
        for mutation in chosen:
            print(f"{mutation.area}/{mutation.name}  {mutation.file}\n    {mutation.rule}\n    {mutation.tests}")
        return 0
    is_enough, text = summary(run(chosen, options.jobs, show))
    print(text)
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main())
