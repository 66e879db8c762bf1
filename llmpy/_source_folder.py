"""`import llmpy` in a source folder without a built C core: imports the installed llmpy instead, or raises a clear error.

Python searches the working directory first. So in a clone it finds the source folder `llmpy`, even after `pip install .` has
installed a built llmpy elsewhere.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from importlib.util import module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

FOLDER = os.path.dirname(os.path.realpath(__file__))


def give_way(error: ImportError) -> None:
    """Replaces this package by the installed llmpy in `sys.modules`: all modules, so that versions never mix.

    Args:
        error: The error from importing this package's core.

    Raises:
        ImportError: There is no other llmpy, or this package has a core that is broken.
    """
    spec = None if _has_core(FOLDER) else _installed()
    if spec is None or spec.loader is None:
        raise ImportError(_reason(error)) from (error if _has_core(FOLDER) else None)
    package = module_from_spec(spec)
    for name in [name for name in sys.modules if name == "llmpy" or name.startswith("llmpy.")]:
        del sys.modules[name]
    sys.modules["llmpy"] = package
    spec.loader.exec_module(package)
    _warn_of_changes(os.path.dirname(str(spec.origin)))


def _has_core(folder: str) -> bool:
    """Whether a package's folder has a built core for this Python."""
    return any(os.path.exists(os.path.join(folder, "_core" + suffix)) for suffix in EXTENSION_SUFFIXES)


def _installed() -> ModuleSpec | None:
    """The first other llmpy on `sys.path` with a core."""
    for entry in sys.path:
        spec = PathFinder.find_spec("llmpy", [entry or os.getcwd()])
        if spec is not None and spec.origin is not None:
            folder = os.path.dirname(os.path.realpath(spec.origin))
            if folder != FOLDER and _has_core(folder):
                return spec
    return None


def _warn_of_changes(installed: str) -> None:
    """Warns if these sources differ from the installed ones, because edits here have no effect."""
    changed = [name for name in _sources(FOLDER) if _read(FOLDER, name) != _read(installed, name)]
    if changed:
        import warnings

        warnings.warn(
            f"{FOLDER} is a source folder without a built C core, so the llmpy in {installed} runs instead, and it differs: "
            f"{', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}; run `pip install .` again, "
            "or `pip install -e .` to run the source folder itself",
            stacklevel=3,
        )


def _sources(folder: str) -> list[str]:
    """The Python files below a folder, relative to it."""
    found = [os.path.join(base, name) for base, _, names in os.walk(folder) for name in names if name.endswith(".py")]
    return sorted(os.path.relpath(path, folder) for path in found)


def _read(folder: str, name: str) -> bytes | None:
    """A file's content; None if there is no such file."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return file.read()
    except OSError:
        return None


def _reason(error: ImportError) -> str:
    """The error text: the problem, and the remedy."""
    root = os.path.dirname(FOLDER)
    if _has_core(FOLDER):
        return f"the C core in {FOLDER} cannot be loaded: {error}; install llmpy again for this Python and this machine"
    if os.path.exists(os.path.join(root, "setup.py")):
        return (
            f"{FOLDER} is a source folder, its C core is not built, and no other llmpy is installed for {sys.executable}; "
            f"run `pip install {root}` (it compiles), or `pip install -e {root}` to work on the sources"
        )
    return f"{FOLDER} has no C core for {sys.implementation.cache_tag}; install llmpy again with this Python: {sys.executable}"
