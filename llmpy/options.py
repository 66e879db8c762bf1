"""Rules of an engine's options: each takes a value, refuses a bad one, and returns its plain form."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from .checks import as_float, as_int, is_int, refuse_names
from .errors import ConfigError, UnsupportedError

Rule = Callable[[str, Any], Any]

METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "gptq", "modelopt", "mxfp4", "squeezellm")
"""Values of `quantization` that name the scheme of a checkpoint (`quant_method`) and change nothing."""

_UNITS = {"": 1, "b": 1} | {
    unit.lower() + suffix: base ** (power + 1)
    for power, unit in enumerate("KMGT")
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1000))
}
_COUNTS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}  # as vLLM reads them


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    """Raises the ConfigError of a bad value."""
    raise ConfigError(f"{name} must be {wanted}, got {value!r}.", option=name, value=value)


def later(name: str, value: object, knob: str) -> NoReturn:
    """Raises the UnsupportedError of a value that may come later."""
    raise UnsupportedError(f"{name}={value!r} is not supported yet; {knob}")


def parse_size(name: str, value: object) -> int:
    """Bytes of a size: an int, or text such as "8GiB" (1024) or "8GB" (1000)."""
    if is_int(value):
        size = operator.index(value)
        return size if size >= 0 else refuse(name, "a size in bytes", value)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be an int or text like '8GiB', but is of type {type(value).__name__}")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if not match or match[2] not in _UNITS:
        refuse(name, "a size such as '8GiB' or '8GB'", value)
    return int(float(match[1]) * _UNITS[match[2]])


def optional(rule: Rule) -> Rule:
    """None, or what the rule takes."""
    return lambda name, value: None if value is None else rule(name, value)


def integer(least: int, most: float = math.inf) -> Rule:
    """An int within bounds."""
    bounds = f"at least {least}" if most == math.inf else f"from {least} to {most}"

    def rule(name: str, value: object) -> int:
        number = as_int(name, value)
        return number if least <= number <= most else refuse(name, bounds, value)

    return rule


def choice(*allowed: object, not_yet: tuple[object, ...] = (), knob: str = "leave it out") -> Rule:
    """One of a few values of one type."""

    def rule(name: str, value: object) -> object:
        if not isinstance(value, type(allowed[0])) or (isinstance(value, bool) and not isinstance(allowed[0], bool)):
            raise TypeError(f"{name} must be of type {type(allowed[0]).__name__}, but is of type {type(value).__name__}")
        if value in not_yet:
            later(name, value, knob)
        return value if value in allowed else refuse(name, "one of " + ", ".join(map(str, allowed)), value)

    return rule


def only(default: object, knob: str) -> Rule:
    """What has one value so far."""
    return lambda name, value: value if value == default else later(name, value, knob)


def text(name: str, value: object) -> str:
    """A str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, but is of type {type(value).__name__}")
    return value


def path(name: str, value: object) -> str:
    """A str or Path, as a str."""
    if not isinstance(value, str | Path):
        raise TypeError(f"{name} must be a str or Path, but is of type {type(value).__name__}")
    return str(value) if str(value) else refuse(name, "a name or a path", value)


def tokenizer(name: str, value: object) -> str:
    """A name or path; an object comes later."""
    if not isinstance(value, str | Path) and hasattr(value, "encode") and hasattr(value, "decode"):
        raise UnsupportedError(f"{name} as an object is not supported yet; pass its directory")
    return path(name, value)


def share(name: str, value: object) -> float:
    """A float in (0, 1]."""
    number = as_float(name, value)
    return number if 0 < number <= 1 else refuse(name, "in (0, 1]", value)


def model_length(name: str, value: object) -> int | str:
    """An int, text such as "4k" (1000) or "4K" (1024), "auto", or -1 for "auto"."""
    if isinstance(value, str):
        if value == "auto":
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)", value)
        value = int(float(match[1]) * _COUNTS[match[2]]) if match else refuse(name, "an int, '4k', '4K' or 'auto'", value)
    number = as_int(name, value)
    return "auto" if number == -1 else number if number >= 1 else refuse(name, "at least 1 or 'auto'", value)


def mapping(name: str, value: object) -> dict[str, Any]:
    """A dict with names as keys."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, but is of type {type(value).__name__}")
    return {text(f"a key of {name}", key): item for key, item in value.items()}


def media_limits(name: str, value: object) -> dict[str, int]:
    """Most images of a prompt; of other kinds of media 0."""
    limits = {"image": 16}
    for kind, most in mapping(name, {} if value is None else value).items():
        if kind in ("video", "audio"):
            most = as_int(f"{name}[{kind!r}]", most)
            if most:
                raise UnsupportedError(f"{name}: {kind} is not supported yet; leave it out, or set it to 0")
        elif kind != "image":
            refuse(name, "of the key 'image'", kind)
        else:
            limits[kind] = integer(0, 1 << 16)(f"{name}['image']", most)
    return limits


def overrides(name: str, value: object) -> object:
    """A dict, or a callable that changes the config."""
    return value if callable(value) else mapping(name, value)


def generation_overrides(name: str, value: object) -> dict[str, Any]:
    """A dict with keys of generation_config.json that mean something here."""
    from .sampling_params import GENERATION_KEYS

    known = (*GENERATION_KEYS, "do_sample", "eos_token_id")
    found = mapping(name, value)
    for key in found:
        if key not in known:
            refuse(name, "a dict with keys among " + ", ".join(known), found)
    return found


def seconds(name: str, value: object) -> float:
    """A time above 0."""
    number = as_float(name, value)
    return number if 0 < number < math.inf else refuse(name, "above 0 seconds", value)


def device_ids(name: str, value: object) -> tuple[int, ...]:
    """Numbers of devices, as a tuple; text such as "2,3" is understood."""
    if isinstance(value, str):
        value = [int(item) if item.strip().isdecimal() else item for item in value.split(",")]
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of ints, but is of type {type(value).__name__}")
    ids = tuple(as_int(f"every number of {name}", item) for item in value)
    return ids if ids and all(item >= 0 for item in ids) else refuse(name, "a list of device numbers", list(ids))


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Ids that are not negative, as a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of ints, but is of type {type(value).__name__}")
    ids = tuple(as_int(f"every id of {name}", item) for item in value)
    return ids if all(item >= 0 for item in ids) else refuse(name, "a list of ids that are not negative", list(ids))


def root_seed(name: str, value: object) -> int:
    """A seed; None or -1 draws one."""
    seed = -1 if value is None else as_int(name, value)
    if seed == -1:
        import os

        return int.from_bytes(os.urandom(8), "little")
    return seed if 0 <= seed < 2**64 else refuse(name, "None, -1 or in [0, 2**64)", value)


_DTYPES = choice("auto", "bfloat16", "float16", "float32")
_SHORT_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def data_type(name: str, value: object) -> object:
    """The name of a type of weights and activations, or a usual short form of it."""
    return _DTYPES(name, _SHORT_DTYPES.get(value, value) if isinstance(value, str) else value)


def max_logprobs(name: str, value: object) -> object:
    """A number; -1, the whole vocabulary, comes later."""
    return later(name, -1, "use a number") if value == -1 else integer(0, 1 << 20)(name, value)


def device(name: str, value: object) -> int | str | None:
    """None, a name, or the number of a CUDA device."""
    return value if value is None or isinstance(value, str) else as_int(name, value)


# Keywords of other engines that are true here anyway, and the values that say so (None: any).
ALWAYS_SO: dict[str, tuple[object, ...] | None] = {
    "trust_remote_code": None,
    "enable_sleep_mode": None,
    "disable_log_stats": None,
    "disable_custom_all_reduce": (False, None),
    "async_scheduling": None,
    "enable_chunked_prefill": (True, None),
    "tokenizer_mode": ("auto",),
    "runner": ("auto", "generate"),
    "distributed_executor_backend": (None, "uni", "mp"),
    "cpu_offload_gb": (0,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "enable_expert_parallel": (False, None),
    "enable_eplb": (False, None),
    "eplb_config": (None,),
    "num_redundant_experts": (0,),
    "tp_sums": ("whole",),
    "kv_load_failure_policy": ("recompute", None),
    "mm_processor_cache_gb": None,
    "disable_mm_preprocessor_cache": None,
}


def take_expert_parallel(options: dict[str, Any]) -> None:
    """Makes `experts="rank"` of another engine's `enable_expert_parallel=True`."""
    if options.get("enable_expert_parallel") is not True:
        return
    del options["enable_expert_parallel"]
    if options.get("experts", "auto") not in ("auto", "rank"):
        refuse("experts", "'rank' with enable_expert_parallel=True", options["experts"])
    options["experts"] = "rank"


def check_keywords(unknown: Mapping[str, object], known: Iterable[str], kind: str = "LLM") -> None:
    """Passes over keywords that are always so, and refuses the others.

    Args:
        unknown: Keywords that are no options.
        known: The options.
        kind: The class, for the error.
    """
    for name, value in unknown.items():
        if name not in ALWAYS_SO:
            refuse_names(kind, [name], known)
        values = ALWAYS_SO[name]
        if values is not None and value not in values:
            later(name, value, f"it is always {' or '.join(map(repr, values))}")
