"""Loads Python files that are not on the path, since importlib mode does not put the folders of tests there."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path, name: str | None = None) -> ModuleType:
    """Runs a file as a new module and registers it in `sys.modules`.

    Args:
        path: The file.
        name: Name of the module; None = the file's.
    """
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
