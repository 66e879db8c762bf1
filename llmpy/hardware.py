"""Which devices there are, how much memory they have, and how this build was made."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _core, environment
from .engine import backends
from .errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from .config import EngineConfig

NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device nodes of NVIDIA's drivers, the last one under WSL: where there is one a user expects its GPU to be used."""


def build_info() -> dict[str, str]:
    """Version and compiler of this build, and the backends that it and other packages bring."""
    core = _core.build_info()
    kinds = {"cpu": core.pop("isas")} | ({"cuda": ""} if _own_cuda() else {})
    kinds |= {kind: backends.packages(kind) for kind in backends.found() if kind not in kinds}
    return {**core, "backends": ", ".join(kind + (f" ({more})" if more else "") for kind, more in kinds.items())}


def get_include() -> str:
    """The folder of `llmpy_backend.h` and `llmpy_connector.h`, the C headers that backends and stores of other packages are
    compiled with.

    Returns:
        An absolute path, for `-I` of C and C++ compilers.
    """
    return str(Path(__file__).absolute().with_name("include"))


def devices() -> list[dict[str, Any]]:
    """The devices that an engine can be made on, and those that it cannot, with the reason.

    Returns:
        One dict per device with `device`, `name`, `available`; if available `memory_bytes`, `free_bytes` (0: the backend
        does not know), and `isas` (instruction sets that have kernels) or `uuid` and `kernels` (which of the backend's
        kernels the device runs, and whether a device of its generation was ever seen), else `reason`. Devices of other
        packages' backends come last. They also have lists of names of operations: `operations` (the device runs them),
        `on_host` (the processor runs them on copies, slowly) and `refused` (models that need one are refused).
    """
    isas = _core.cpu_isas()
    cpu: dict[str, Any] = {"device": "cpu", "name": cpu_name(), "available": bool(isas)}
    if isas:
        cpu |= {"memory_bytes": total_memory_bytes(), "free_bytes": free_memory_bytes(), "isas": isas}
    else:
        cpu |= {"reason": _NO_ISA}
    others = sorted(backends.found().keys() - (set() if _own_cuda() else {"cuda"}))
    return [cpu, *_cuda_devices(wants_free=True), *(one for kind in others for one in _devices_of(kind))]


_NO_ISA = "the processor has neither AVX2 with FMA nor AVX-512"


def cuda_library() -> str:
    """Path of the CUDA backend: this build's own, else that of the package llmpy-cu13; "" where there is none.

    Raises:
        DeviceError: The package is of another version, or its library is not to be had.
    """
    environment.forces_portable_kernels()  # the driver reads what it sets
    return _own_cuda() or (backends.library("cuda", _core.build_info()["version"]) if "cuda" in backends.found() else "")


def _own_cuda() -> str:
    """Path of the CUDA backend that was built with the core; "": none was."""
    path = Path(__file__).with_name("_backends") / "libllmpy_cuda13.so"
    return str(path) if path.exists() else ""


_CUBLASLT = ("libcublasLt.so.13", "libcublasLt.so.12")
_NCCL = ("libnccl.so.2",)


def cublaslt_library() -> str:
    """Path of a cuBLASLt that linears of many rows may use; "": there is none, or portable kernels are forced."""
    return "" if environment.forces_portable_kernels() else _find_library(_CUBLASLT, ("cu13", "cublas"))


def nccl_library() -> str:
    """Path of an NCCL that weight groups may use; "" where there is none."""
    return _find_library(_NCCL, ("nccl", "cu13"))


def _find_library(names: tuple[str, ...], wheels: tuple[str, ...]) -> str:
    """The first that there is of a library's names.

    In order: LLMPY_LIB_PATH, what the process has loaded already, NVIDIA's wheels on sys.path, the prefix (conda), the
    system's folders, CUDA_HOME.
    """
    found = _in_folders(environment.library_folders(), names) or _in_process(names)
    if found:
        return found
    folders = [Path(entry) / "nvidia" / name / "lib" for entry in sys.path for name in wheels]
    system = [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]
    system += [Path(entry) for entry in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")]
    cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    return _in_folders([*folders, Path(sys.prefix) / "lib", *system, cuda / "lib64"], names)


def _in_folders(folders: Iterable[Path], names: tuple[str, ...]) -> str:
    """The first of the names in the first folder that has one."""
    places = (folder / name for folder in folders for name in names)
    return next((str(path.absolute()) for path in places if path.exists()), "")


def _in_process(names: tuple[str, ...]) -> str:
    """One that somebody, torch perhaps, has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    stems = tuple("/" + name[: name.index(".so.") + 4] for name in names)
    paths = (line[line.index("/") :] for line in maps.splitlines() if any(stem in line for stem in stems))
    return next((path for path in paths if not path.endswith(" (deleted)")), "")


_NO_SUCH_DEVICE, _NO_KERNELS = 101, 209
"""The driver's codes for a number that is too high, and for a device that this build has no kernels for."""


def _cuda_devices(wants_free: bool) -> list[dict[str, Any]]:
    """Every CUDA device that CUDA_VISIBLE_DEVICES shows, or one entry that says why there is none."""
    found: list[dict[str, Any]] = []
    for index in range(64):
        device: dict[str, Any] = {"device": f"cuda:{index}", "name": "CUDA", "available": False}
        try:
            name, uuid, total, free, kernels = _core.device_info(device["device"], cuda_library(), wants_free)
        except DeviceError as error:
            if error.code == _NO_SUCH_DEVICE and found:
                break
            found.append({**device, "reason": str(error)})
            if error.code != _NO_KERNELS:
                break
        else:
            if environment.forces_portable_kernels():
                kernels = _PORTABLE + " by LLMPY_CUDA_KERNELS"
            one = {**device, "name": name, "available": True, "memory_bytes": total, "free_bytes": free, "uuid": uuid}
            found.append({**one, "kernels": kernels})
    return found


_PORTABLE = "portable"
"""What a CUDA device says of its kernels if the driver has translated their PTX."""


def check_kernels(description: str) -> None:
    """Checks that an opened CUDA device runs the kernels that LLMPY_CUDA_KERNELS asks for.

    Args:
        description: What the device says of itself.

    Raises:
        DeviceError: It runs others, because the driver had started before it was told.
    """
    if environment.forces_portable_kernels() and description.startswith("cuda") and _PORTABLE not in description:
        message = "LLMPY_CUDA_KERNELS=portable: something used CUDA in this process before; set CUDA_FORCE_PTX_JIT=1, too"
        raise DeviceError(f"device '{description}': {message}", operation="open")


def _devices_of(kind: str) -> list[dict[str, Any]]:
    """The devices of another package's backend, kind:0, kind:1 and so on, or one entry that says why there is none."""
    found: list[dict[str, Any]] = []
    try:
        if kind in _OWN:
            raise DeviceError(f"device {kind!r}: {backends.packages(kind)}: llmpy brings devices of this kind itself")
        for device in (f"{kind}:{index}" for index in range(64)):
            name, uuid, total, free, _ = _core.device_info(device, library(device), True)
            one = {"device": device, "name": name, "available": True}
            found.append({**one, "memory_bytes": total, "free_bytes": free, "uuid": uuid, **_operations_of(device)})
            if not total:  # a backend that does not describe devices has one
                break
    except DeviceError as error:
        return found or [{"device": kind, "name": kind, "available": False, "reason": str(error)}]
    return found


def operations_by_kind() -> dict[str, dict[str, str]]:
    """Where the backend of each kind of devices runs each operation, from its table; no device is opened.

    Returns:
        Kind -> operation -> "device", "host" (the processor runs it on copies) or "refused" (so are models that need it).
        Kinds whose library cannot be loaded are left out.
    """
    found = {}
    for kind in ("cpu", "cuda", *sorted(backends.found().keys() - _OWN)):
        device = "cpu" if kind == "cpu" else f"{kind}:0"
        with suppress(DeviceError):
            found[kind] = _core.backend_operations(device, library(device))
    return found


def _operations_of(device: str) -> dict[str, list[str]]:
    """Names of operations, by where a backend runs them."""
    places = {"operations": "device", "on_host": "host", "refused": "refused"}
    found = _core.backend_operations(device, library(device))
    return {key: sorted(name for name, where in found.items() if where == place) for key, place in places.items()}


def choose(option: str | int | None) -> str:
    """The device's name, from the option, LLMPY_DEVICE, or what there is; "cpu:avx2" forces a set of instructions.

    Raises:
        ConfigError: It is no device's name.
        DeviceError: It is one that is not there.
    """
    name = environment.device() if option is None else option
    if name is None:
        name = _best()
    if isinstance(name, str) and name.partition(":")[0] == "cpu":
        return _choose_cpu(name)
    if isinstance(name, int) or name.isdecimal():
        name = f"cuda:{name}"
    if name == "cuda":
        name = "cuda:0"
    if name.startswith("cuda:") and name.removeprefix("cuda:").isdecimal():
        _core.device_info(name, cuda_library(), False)  # raises what is missing
        return name
    if name.startswith("GPU-"):
        return _with_uuid(name)
    kinds = backends.found()
    if kind_of(name) in kinds.keys() - _OWN:
        _core.device_info(name, library(name), False)
        return name
    others = "".join(f", {kind!r}" for kind in kinds)
    message = f"device must be 'cpu', 'cuda:N'{others}, a number or a GPU's UUID, got {name!r}."
    raise ConfigError(message, option="device", value=name)


def devices_of(config: EngineConfig) -> list[str]:
    """The device of each rank of this host; with data_parallel_size those of all replicas, one after the other.

    Args:
        config: Options with a chosen device, or with `device_ids`.

    Returns:
        Names such as "cuda:1". Ranks on the CPU share it. Without `device_ids` ranks of a GPU take its device first, then other
        devices of the same name in order. `device_ids` may name one device several times.

    Raises:
        ConfigError: There are fewer devices of one name than ranks, or other numbers of them are given.
    """
    sizes = {name: getattr(config, name) for name in ("data_parallel_size", "tensor_parallel_size")}
    sizes = {name: size for name, size in sizes.items() if size > 1} or {"tensor_parallel_size": 1}
    n_ranks, wanted = math.prod(sizes.values()), " * ".join(f"{name}={size}" for name, size in sizes.items())
    if config.nnodes > 1:
        from .distributed._hosts import ranks_here

        n_ranks, wanted = len(ranks_here(config)), f"tensor_parallel_size / nnodes={config.nnodes}"
    device, ids = str(config.device), config.device_ids
    kind = kind_of(device)
    if ids is not None and len(ids) != n_ranks:
        raise ConfigError(f"device_ids must have {wanted} numbers, got {list(ids)}.", option="device_ids", value=ids)
    if ids is not None and kind != "cpu":
        return [f"{kind}:{number}" for number in ids]
    if kind == "cpu" or n_ranks == 1:
        return ["cpu" if kind == "cpu" else device] * n_ranks
    found = [one for one in (_cuda_devices(False) if kind == "cuda" else _devices_of(kind)) if one["available"]]
    name = next((one["name"] for one in found if one["device"] == device), None)
    others = [str(one["device"]) for one in found if one["name"] == name and one["device"] != device]
    if len(others) + 1 < n_ranks:
        raise ConfigError(
            f"{wanted}: wanted so many devices like {device} ({name}), have {len(others) + 1}; lower it, or name devices in "
            "device_ids",
            option=next(iter(sizes)),
            value=n_ranks,
        )
    return [device, *others[: n_ranks - 1]]


def _best() -> str:
    """The first CUDA device if it can be used, else the CPU."""
    try:
        _core.device_info("cuda:0", cuda_library(), False)
    except DeviceError as error:
        level = logging.INFO if any(os.path.exists(node) for node in NODES) else logging.DEBUG
        logging.getLogger("llmpy").log(level, "using the CPU: %s", error)
        return "cpu"
    return "cuda:0"


def _choose_cpu(name: str) -> str:
    isas = _core.cpu_isas()
    if not isas:
        raise DeviceError(f"device 'cpu': {_NO_ISA}", operation="open")
    if name != "cpu" and name.removeprefix("cpu:") not in isas:
        raise DeviceError(f"device {name!r}: this processor has {', '.join(isas)}", operation="open")
    return name


def _with_uuid(uuid: str) -> str:
    """The device whose UUID begins so."""
    found = _cuda_devices(wants_free=False)
    matching = [str(device["device"]) for device in found if str(device.get("uuid", "")).startswith(uuid)]
    if len(matching) == 1:
        return matching[0]
    have = ", ".join(str(device.get("uuid", device.get("reason"))) for device in found)
    wrong = "several begin so" if matching else "no device has it"
    raise DeviceError(f"device {uuid!r}: {wrong}; have {have}", operation="open")


_OWN = {"cpu", "cuda"}
"""Kinds of devices that are llmpy's own; of other packages llmpy-cu13 alone can bring one of them."""


def kind_of(device: str) -> str:
    """The kind of a device: what stands before the colon of its name."""
    return device.partition(":")[0]


def library(device: str) -> str:
    """Path of the backend's library; "": the core has it, or this build has no CUDA backend.

    Raises:
        DeviceError: The library of another package's backend is not to be had.
    """
    kind = kind_of(device)
    if kind in _OWN:
        return cuda_library() if kind == "cuda" else ""
    return backends.library(kind)


def traits(device: str) -> _core.DeviceTraits:
    """What the devices of a backend are like."""
    return _core.device_traits("cpu" if kind_of(device) == "cpu" else device, library(device))


def ordinal(device: str) -> int:
    """The number of a CUDA device; -1: the device is not one."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else -1


def memory_bytes(device: str) -> tuple[int, int]:
    """Total and free memory of a device; 0: its backend does not know."""
    if traits(device)["has_host_memory"]:
        return total_memory_bytes(), free_memory_bytes()
    return _core.device_info(device, library(device), True)[2:4]


def name_and_uuid(device: str) -> tuple[str, str | None]:
    """What a device calls itself, and the UUID of a GPU."""
    return (cpu_name(), None) if kind_of(device) == "cpu" else _core.device_info(device, library(device), False)[:2]


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def total_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits()])


def free_memory_bytes() -> int:
    """Memory that is free or can be freed, within the total."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return total_memory_bytes()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)
    return min(free, total_memory_bytes())


def _limits() -> list[int]:
    """Memory limits of the process's control groups, of version 2 and 1, up to the root."""
    root = Path("/sys/fs/cgroup")
    places = [(root, "memory.max"), (root / "memory", "memory.limit_in_bytes")]
    try:
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            version1 = "memory" in controllers.split(",")
            if version1 or not controllers:
                base, name = (root / "memory", "memory.limit_in_bytes") if version1 else (root, "memory.max")
                group = base / path.lstrip("/")
                places += [(place, name) for place in (group, *group.parents) if place.is_relative_to(base)]
    except (OSError, ValueError):
        pass
    found = []
    for place, name in places:
        try:
            text = (place / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal():
            found.append(int(text))
    return found
