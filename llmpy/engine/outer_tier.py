"""The options `disk_cache` and `kv_connector`: files of the prefix cache, and the fingerprint of what their bytes depend on."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import refuse_names
from ..errors import ConfigError, UnsupportedError
from ..kv import Connector, Memory
from ..options import parse_size, refuse

if TYPE_CHECKING:
    from hashlib import blake2b

    from ..config import EngineConfig
    from .loading import Loaded

SAMPLES, SAMPLE_BYTES = 32, 1 << 16
"""Places at which a file of weights is read for the fingerprint."""


def disk_cache(name: str, value: object) -> dict[str, Any]:
    """A dict with `path`, absolute, and `bytes`.

    Raises:
        ConfigError: A key is unknown or missing, or a value is bad.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, but is of type {type(value).__name__}")
    refuse_names(name, [key for key in value if key not in ("path", "bytes")], ["path", "bytes"])
    path, size = value.get("path"), value.get("bytes")
    if not isinstance(path, str | Path) or not str(path) or size is None:
        refuse(name, "a dict with 'path', a folder, and 'bytes', the most that its files take", dict(value))
    return {"path": os.path.abspath(Path(path).expanduser()), "bytes": parse_size(f"{name}: bytes", size)}


DEVICE = "device"
"""Name of the connector without a store: engines of one process copy from pool to pool."""
GROUP = "llmpy.connectors"
"""Entry points of packages that bring connectors: functions that return the absolute path of a library."""


def _named(name: str, value: Mapping[Any, Any]) -> Connector | dict[str, Any]:
    """What a dict names: a store in memory, or a connector in C with "name", "deadline_s", and its own options."""
    chosen = value.get("name")
    if not isinstance(chosen, str) or not chosen or not all(isinstance(key, str) for key in value):
        wanted = "a dict with 'name': 'peer', 'device', 'memory', an entry point of llmpy.connectors, or the path of a library"
        refuse(name, wanted, dict(value))
    if chosen == "file":
        refuse(name, "another name; files are the option disk_cache={'path': FOLDER, 'bytes': '100GiB'}", dict(value))
    if chosen == "memory":
        refuse_names(name, [key for key in value if key not in ("name", "bytes")], ["name", "bytes"])
        size = parse_size(f"{name}: bytes", value.get("bytes", 0))
        return Memory(size) if size else refuse(f"{name}: bytes", "above 0 with 'memory', the most that its blocks take", size)
    if chosen == DEVICE:
        refuse_names(name, [key for key in value if key != "name"], ["name"])
        return {"name": DEVICE}
    deadline = value.get("deadline_s", 10.0)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= 3600:
        refuse(f"{name}: deadline_s", "a number of seconds above 0", deadline)
    given = {key: item for key, item in value.items() if key not in ("name", "deadline_s")}
    if "bytes" in given:
        given["bytes"] = parse_size(f"{name}: bytes", given["bytes"])
    return {"name": chosen, "deadline_s": float(deadline), **given}


def _path(name: str) -> str:
    """Path of a connector's library, or "peer".

    Raises:
        ConfigError: No package brings it, several do, or the function fails.
    """
    from importlib.metadata import entry_points  # slow to import

    if name == "peer" or os.path.isabs(name):
        return name
    points = list(entry_points(group=GROUP, name=name))
    reason = "no package brings it" if not points else "several packages bring it"
    if len(points) == 1:
        try:
            path = points[0].load()()
        except Exception as error:
            path, reason = None, str(error) or type(error).__name__
        else:
            reason = f"wanted an absolute path from {points[0].value}, got {path!r}"
        if isinstance(path, str | os.PathLike) and os.path.isabs(path):
            return os.fspath(path)
    raise ConfigError(f"kv_connector {name!r}: {reason}.", option="kv_connector", value=name)


def _text(value: object) -> str:
    """An option as the library gets it; those of a list are joined by commas."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def connector(name: str, value: object) -> Connector | dict[str, Any]:
    """A connector, what the callable "module:name" makes, or the dict of a connector in C.

    Raises:
        ConfigError: The name cannot be imported, or the dict is bad.
    """
    if isinstance(value, Mapping):
        return _named(name, value)
    if isinstance(value, str):
        module, _, attribute = value.partition(":")
        try:
            value = getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            wanted = f"a Connector, or 'module:name' of a callable that makes one ({error})"
            raise ConfigError(f"{name} must be {wanted}, got {value!r}.", option=name, value=value) from error
    if not isinstance(value, Connector):
        raise TypeError(f"{name} must be a llmpy.kv.Connector, a dict or a str, but is of type {type(value).__name__}")
    return value


def is_device(config: EngineConfig) -> bool:
    """Whether prompts are handed over from pool to pool, without a store."""
    return isinstance(config.kv_connector, Mapping) and config.kv_connector["name"] == DEVICE


def check(config: EngineConfig) -> None:
    """Refuses a disk cache or a connector without the caches before it, and a host cache where the engine cannot have one."""
    if config.host_cache_bytes and config.nnodes > 1:
        given = f"host_cache_bytes={config.host_cache_bytes}"
        raise UnsupportedError(f"{given} is not supported yet with nnodes={config.nnodes}; use host_cache_bytes=0")
    name = "disk_cache" if config.disk_cache is not None else "kv_connector"
    if config.disk_cache is None and config.kv_connector is None:
        return
    if config.disk_cache is not None and config.kv_connector is not None:
        refuse("kv_connector", "None with disk_cache, there is one tier behind host memory", config.kv_connector)
    if is_device(config) and config.data_parallel_size > 1:
        raise UnsupportedError(f"kv_connector={{'name': {DEVICE!r}}} is not supported yet with data_parallel_size above 1")
    if not config.host_cache_bytes:
        refuse("host_cache_bytes", f"above 0 with {name}, whose blocks pass through host memory", config.host_cache_bytes)
    if not config.enable_prefix_caching:
        refuse("enable_prefix_caching", f"True with {name}", config.enable_prefix_caching)


def _feed(digest: blake2b, value: Any) -> None:
    """Adds plain data to a digest; equal data gives equal digests in every process."""
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        digest.update(b"(%d" % len(value))
        for item in value:
            _feed(digest, item)
    elif hasattr(value, "tobytes"):
        digest.update(repr((value.dtype.str, value.shape)).encode() + value.tobytes())
    else:
        digest.update(repr(value).encode() + b",")


def _feed_file(digest: blake2b, path: str | Path) -> None:
    """Adds size and time of a file, its beginning and samples of the rest."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        _feed(digest, (status.st_size, status.st_mtime_ns))
        for i in range(SAMPLES):
            file.seek(i * max(status.st_size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def _fingerprint(loaded: Loaded, weights: Iterable[str | Path], library: str) -> bytes:
    """Digest of all that the bytes of a block depend on but its tokens: code, device, program, types and weights."""
    import hashlib

    from .. import _core

    digest, chosen = hashlib.blake2b(digest_size=16), loaded.model.describe()
    config = loaded.config
    # Equal devices with the same kernels have equal bytes. cuBLASLt is chosen by its speed alone.
    device = re.sub(r":\d+\b", "", str(chosen["device"]).split(", cuBLASLt")[0], count=1)
    _feed(digest, (device, *(chosen[key] for key in ("kv_dtype", "activation_dtype", "page_bytes", "state_bytes"))))
    seed = config.seed if config.load_format == "dummy" else None
    _feed(digest, (config.dtype, config.quantization, config.block_size, config.tensor_parallel_size, seed))
    _feed(digest, loaded.spec)
    for path in (_core.__file__, *([library] if library else []), *weights):
        _feed_file(digest, path)
    return digest.digest()


def core_option(loaded: Loaded, weights: Iterable[str | Path], library: str) -> dict[str, Any]:
    """The option of the core's engine: the disk or the connector.

    Args:
        loaded: The engine's parts, with its model.
        weights: Files of the weights; none for dummies.
        library: Library of the backend; "" = the CPU's, which is part of the core.
    """
    chosen, store = loaded.config.disk_cache, loaded.config.kv_connector
    is_shared = loaded.config.prefix_cache_seed is not None
    if is_device(loaded.config):
        loaded.fingerprint = _fingerprint(loaded, weights, library)
        return {}
    if isinstance(store, Connector):
        return {"kv_connector": (store, _fingerprint(loaded, weights, library), is_shared, float(store.deadline_s))}
    if isinstance(store, Mapping):
        own = {key: item for key, item in store.items() if key not in ("name", "deadline_s")}
        words = [os.fsencode(_text(word)) for pair in own.items() for word in pair]
        path = os.fsencode(_path(store["name"]))
        given = (path, _fingerprint(loaded, weights, library), is_shared, store["deadline_s"], tuple(words))
        return {"kv_connector": given}
    if chosen is None:
        return {}
    os.makedirs(chosen["path"], exist_ok=True)
    return {"disk_cache": (os.fsencode(chosen["path"]), chosen["bytes"], _fingerprint(loaded, weights, library), is_shared)}
