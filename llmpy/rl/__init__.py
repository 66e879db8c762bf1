"""Tools for reinforcement-learning trainers besides LLM and AsyncEngine. The import loads no trainer and no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..weights.buckets import IpcBucket, IpcItem, ipc_bucket, ipc_from_torch
    from ..weights.calls import WeightComparison
    from ..weights.group import WeightGroup
    from ..weights.updates import AsyncWeightUpdate, UpdateReport, WeightUpdate
    from .compare import LogprobComparison, compare_logprobs
    from .on_policy import OnPolicy
    from .partial import concat
    from .sender import SendReport, WeightSender, weight_metadata

_MODULES = {
    ".weights.buckets": "IpcBucket IpcItem ipc_bucket ipc_from_torch",
    ".weights.updates": "AsyncWeightUpdate UpdateReport WeightUpdate",
    ".weights.group": "WeightGroup",
    ".weights.calls": "WeightComparison",
    "compare": "LogprobComparison compare_logprobs",
    "on_policy": "OnPolicy",
    "partial": "concat",
    "sender": "SendReport WeightSender weight_metadata",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AsyncWeightUpdate",
    "IpcBucket",
    "IpcItem",
    "LogprobComparison",
    "OnPolicy",
    "SendReport",
    "UpdateReport",
    "WeightComparison",
    "WeightGroup",
    "WeightSender",
    "WeightUpdate",
    "compare_logprobs",
    "concat",
    "ipc_bucket",
    "ipc_from_torch",
    "weight_metadata",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
