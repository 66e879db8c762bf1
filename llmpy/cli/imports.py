"""--import FILE: Python files to import before a command runs, such as files with a user's architectures."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..errors import ConfigError


def add_import(parser: ArgumentParser) -> None:
    """Adds the option --import."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE",
        help="Python file to import first, as one with an @llmpy.architecture; may be given several times",
    )  # fmt: skip


def run_imports(chosen: Namespace) -> None:
    """Imports the named files in order.

    Args:
        chosen: The command line; a command without the option imports nothing.

    Raises:
        ConfigError: A file is missing or raises.
    """
    for name in getattr(chosen, "imports", ()):
        import_file(name)


def import_file(name: str) -> None:
    """Imports a file like `python FILE`: it can import modules in its folder."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = Path(name).expanduser()
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import: wanted a Python file, have {str(path)!r}", option="import", value=str(path))
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        where = _line(error, path)
        raise ConfigError(
            f"--import: {path}{where}: {type(error).__name__}: {error}", option="import", value=str(path)
        ) from error


def _line(error: Exception, path: Path) -> str:
    """The line of the file that raised the error, as text."""
    from traceback import extract_tb

    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return "" if line is None else f", line {line}"
