"""Backends of other packages, found by their entry points.

A package that brings a backend has an entry point in the group `llmpy.backends`. Its name is the kind of the devices. Its value
is a function without arguments that returns the absolute path of the backend's library, or raises with the reason why there is
none.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

from ..errors import DeviceError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "llmpy.backends"
KIND = re.compile(r"[a-z][a-z0-9_]*")


def found() -> dict[str, list[EntryPoint]]:
    """The entry points of the installed packages, by kind."""
    from importlib.metadata import entry_points  # slow to import

    kinds: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, _package(point))):
        kinds.setdefault(point.name, []).append(point)
    return kinds


def packages(kind: str) -> str:
    """Names and versions of the packages that bring a kind."""
    return " and ".join(map(_package, found().get(kind, [])))


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


@functools.cache
def library(kind: str, version: str | None = None) -> str:
    """Path of the library of a kind; a path that was found once is kept.

    Args:
        kind: What stands before the colon of a device's name.
        version: The version that the package must have; None: any.

    Raises:
        DeviceError: No package or more than one brings the kind, it has another version, or its function fails.
    """
    points, name = found().get(kind, []), packages(kind)
    if len(points) > 1:
        raise _error(kind, f"{name} bring this kind; uninstall all but one")
    if not points:
        raise _error(kind, "no package brings this kind")
    if not KIND.fullmatch(kind):
        raise _error(kind, f"{name}: a kind is named by lower-case letters, digits and underscores")
    if version and points[0].dist and points[0].dist.version != version:
        raise _error(kind, f"{name}: llmpy is of version {version}; install the same version of both")
    try:
        path = points[0].load()()
    except Exception as error:
        raise _error(kind, f"{name}: {str(error) or type(error).__name__}") from error
    if not isinstance(path, str | os.PathLike) or not os.path.isabs(path):
        raise _error(kind, f"{name}: wanted an absolute path from {points[0].value}, got {path!r}")
    return os.fspath(path)


def _error(kind: str, reason: str) -> DeviceError:
    return DeviceError(f"device {kind!r}: {reason}", operation="open")
