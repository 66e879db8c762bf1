"""The LLMPY_* variables. Only this module reads them, when an engine is made. An option wins over its variable."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "LLMPY_DEVICE": ("a device, as `device=` takes it: `cpu`, `cpu:avx2`, `cuda:1`, a UUID", "cuda:0 if usable, else cpu"),
    "LLMPY_NUM_THREADS": ("threads of an engine on the CPU, 1 to 1024", "the physical cores that the process may use"),
    "LLMPY_CACHE_DIR": (
        "folder of the demo model, converted programs, `llmpy chat`'s history; safe to delete",
        "`~/.cache/llmpy`",
    ),
    "LLMPY_LOG": ("level of the log `llmpy` on stderr: `debug`, `info`, `warning`, `error`", "that of the program"),
    "LLMPY_LIB_PATH": ("folders, joined by `:`, that are searched first for NCCL and cuBLASLt", "none"),
    "LLMPY_HOSTS_TOKEN": ("a secret that all hosts of one model know; a process without it cannot join them", "none"),
    "LLMPY_HOSTS_TIMEOUT": ("seconds that a host waits at its start for the other hosts of its model", "300"),
    "LLMPY_CUDA_KERNELS": (
        "`portable`: also an H100 or H200 runs the kernels of all other GPUs; set it before the process uses CUDA",
        "`auto`",
    ),
    "LLMPY_SYNC": (
        "`1`: wait for every operation of a device, so that a fault names it; `2`: also compare what all ranks compute alike",
        "0",
    ),
}
"""Variables read at run time -> meaning and default. docs/use/environment.md shows this table."""

BUILD_VARIABLES = {
    "LLMPY_CUDA": ("`0`: build without CUDA; `1`: with CUDA if there is nvcc; `require`: fail without nvcc", "1"),
    "LLMPY_CUDA_ARCHS": (
        "GPU architectures to compile for, joined by commas: `90a` is machine code, `compute_80` PTX, `compute_80:sm_89` "
        "machine code of that PTX",
        "90a,compute_80",
    ),
    "LLMPY_GLIBC": ("the oldest glibc that shall load what is built, as `2.28`; wants the package ziglang", "this machine's"),
    "LLMPY_WERROR": ("`1`: warnings of the compilers are errors", "0"),
    "LLMPY_DEBUG": ("`1`: `-O1 -g` and assertions", "0"),
    "LLMPY_SANITIZE": ("list for `-fsanitize=`, as `address,undefined`; preload the sanitizer's library to import", "none"),
}
"""Variables read only by `pip install .` and setup.py -> meaning and default."""
_LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def cache_dir() -> Path:
    """Folder of the demo model; safe to delete."""
    if given := os.environ.get("LLMPY_CACHE_DIR"):
        return Path(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "llmpy"
    try:
        return Path.home() / ".cache/llmpy"
    except RuntimeError:  # some containers have neither HOME nor an entry for the user in /etc/passwd
        from .errors import ConfigError

        message = "LLMPY_CACHE_DIR: the user has no home folder; set LLMPY_CACHE_DIR to a folder that can be written"
        raise ConfigError(message, option="LLMPY_CACHE_DIR") from None


def device() -> str | None:
    """LLMPY_DEVICE, or None."""
    return os.environ.get("LLMPY_DEVICE") or None


def library_folders() -> list[Path]:
    """LLMPY_LIB_PATH: folders to search first for libraries opened at run time."""
    return [Path(entry) for entry in os.environ.get("LLMPY_LIB_PATH", "").split(os.pathsep) if entry]


def num_threads() -> int:
    """LLMPY_NUM_THREADS; 0 = the number of allowed physical cores."""
    text = os.environ.get("LLMPY_NUM_THREADS", "")
    if text and not (text.isdecimal() and 1 <= int(text) <= 1024):
        from .errors import ConfigError

        raise ConfigError(
            f"LLMPY_NUM_THREADS must be an integer from 1 to 1024, got {text!r}.",
            option="LLMPY_NUM_THREADS",
            value=text,
        )
    return int(text) if text else 0


def sync_level() -> int:
    """LLMPY_SYNC: 1: wait for every operation, so that a device fault names it; 2: also compare the ranks; 0: neither."""
    text = os.environ.get("LLMPY_SYNC", "")
    if text not in ("", "0", "1", "2"):
        from .errors import ConfigError

        raise ConfigError(f"LLMPY_SYNC must be 0, 1 or 2, got {text!r}.", option="LLMPY_SYNC", value=text)
    return int(text or "0")


def forces_portable_kernels() -> bool:
    """LLMPY_CUDA_KERNELS: whether every GPU runs the portable kernels.

    They are PTX. On a GPU that the machine code fits, too, the driver translates PTX if its variable CUDA_FORCE_PTX_JIT is set
    when the process begins to use CUDA, so this sets it.
    """
    text = os.environ.get("LLMPY_CUDA_KERNELS", "") or "auto"
    if text not in ("auto", "portable"):
        from .errors import ConfigError

        message = f"LLMPY_CUDA_KERNELS must be auto or portable, got {text!r}."
        raise ConfigError(message, option="LLMPY_CUDA_KERNELS", value=text)
    if text == "portable":
        os.environ["CUDA_FORCE_PTX_JIT"] = "1"
    return text == "portable"


def hosts_token() -> str:
    """LLMPY_HOSTS_TOKEN; "": none."""
    return os.environ.get("LLMPY_HOSTS_TOKEN", "")


def hosts_timeout() -> float:
    """LLMPY_HOSTS_TIMEOUT: seconds that a host waits for the others to come."""
    text = os.environ.get("LLMPY_HOSTS_TIMEOUT", "") or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e9:
        from .errors import ConfigError

        message = f"LLMPY_HOSTS_TIMEOUT must be a number of seconds above 0, got {text!r}."
        raise ConfigError(message, option="LLMPY_HOSTS_TIMEOUT", value=text)
    return seconds


def torchrun_rank() -> tuple[int, int]:
    """RANK and WORLD_SIZE; (-1, 0) without them."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else (-1, 0)


def torchrun_address() -> str | None:
    """MASTER_ADDR, or None."""
    return os.environ.get("MASTER_ADDR") or None


def torchrun_port() -> int | None:
    """The port behind MASTER_PORT, where torchrun itself listens; None without it."""
    text = os.environ.get("MASTER_PORT", "")
    return int(text) + 1 if text.isdecimal() and int(text) < 65535 else None


def start() -> None:
    """Sets up the log, and warns about unknown LLMPY_* variables."""
    import logging
    import warnings

    logger = logging.getLogger("llmpy")
    level = os.environ.get("LLMPY_LOG", "").lower()
    if level and level not in _LOG_LEVELS:
        warnings.warn(f"LLMPY_LOG is {level!r}; it must be one of {', '.join(_LOG_LEVELS)}", stacklevel=2)
    elif level:
        logger.setLevel(_LOG_LEVELS[level])
    if not logger.handlers:
        # A user who sets the level expects output even if the program does not configure logging.
        logger.addHandler(logging.StreamHandler() if level and not logging.root.handlers else logging.NullHandler())
    for name in sorted(os.environ):
        if name.startswith("LLMPY_") and name not in VARIABLES and name not in BUILD_VARIABLES:
            from difflib import get_close_matches

            nearest = get_close_matches(name, VARIABLES, 1, 0)[0]
            message = f"environment variable {name} is unknown and has no effect; the nearest is {nearest}"
            warnings.warn(message, stacklevel=2)
