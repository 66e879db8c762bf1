"""llmpy: large-language-model inference with a C core and a Python interface.

    from llmpy import LLM, SamplingParams
    llm = LLM("demo")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
        print(output.text)

Names are loaded on first use, so the import itself is short and touches no device.
"""

from typing import TYPE_CHECKING

try:
    from . import _core
except ImportError as error:
    from ._source_folder import give_way

    give_way(error)

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .config import EngineConfig
    from .errors import (
        ChatTemplateError,
        CheckpointError,
        ConfigError,
        DeviceError,
        DeviceMemoryError,
        EngineAsleepError,
        EngineBusyError,
        EngineClosedError,
        EngineDeadError,
        EngineStuckError,
        GenerationInterrupted,
        InvalidRequestError,
        LlmpyError,
        ModelNotFoundError,
        NoAllowedTokenError,
        NonFiniteLogitsError,
        QueueFullError,
        RequestFailedError,
        UnsupportedError,
        WeightsMissingError,
        WeightUpdateError,
    )
    from .hardware import build_info, devices, get_include
    from .inputs import PromptType, TextPrompt, TokensPrompt
    from .llm import LLM
    from .logprobs import Logprob, Logprobs, PromptLogprobs
    from .lora import LoRARequest
    from .models import architecture
    from .outputs import Chunk, CompletionOutput, EngineStats, RequestOutput, RequestOutputs, ScoreOutput, ScoreOutputs
    from .pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutputs,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from .pooling_params import PoolingParams
    from .results.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .results.replies import Reply, ToolCall
    from .sampling_params import RequestOutputKind, SamplingParams
    from .structured.params import StructuredOutputsParams
    from .text.tokenizer import Tokenizer

    __version__: str

_MODULES = {
    "results.beam_search": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    "lora": "LoRARequest",
    "async_engine": "AsyncEngine",
    "config": "EngineConfig",
    "hardware": "build_info devices get_include",
    "errors": "ChatTemplateError CheckpointError ConfigError DeviceError DeviceMemoryError EngineAsleepError "
    "EngineBusyError EngineClosedError EngineDeadError EngineStuckError GenerationInterrupted InvalidRequestError LlmpyError "
    "ModelNotFoundError NoAllowedTokenError NonFiniteLogitsError QueueFullError RequestFailedError UnsupportedError "
    "WeightsMissingError WeightUpdateError",
    "inputs": "PromptType TextPrompt TokensPrompt",
    "llm": "LLM",
    "logprobs": "Logprob Logprobs PromptLogprobs",
    "models": "architecture",
    "outputs": "Chunk CompletionOutput EngineStats RequestOutput RequestOutputs ScoreOutput ScoreOutputs",
    "pooling_outputs": "ClassificationRequestOutput EmbeddingRequestOutput PoolingOutputs PoolingRequestOutput "
    "ScoringRequestOutput",
    "pooling_params": "PoolingParams",
    "results.replies": "Reply ToolCall",
    "sampling_params": "RequestOutputKind SamplingParams",
    "structured.params": "StructuredOutputsParams",
    "text.tokenizer": "Tokenizer",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatTemplateError",
    "CheckpointError",
    "Chunk",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "DeviceMemoryError",
    "EmbeddingRequestOutput",
    "EngineAsleepError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "EngineStuckError",
    "GenerationInterrupted",
    "InvalidRequestError",
    "LlmpyError",
    "LoRARequest",
    "Logprob",
    "Logprobs",
    "ModelNotFoundError",
    "NoAllowedTokenError",
    "NonFiniteLogitsError",
    "PoolingOutputs",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptLogprobs",
    "PromptType",
    "QueueFullError",
    "Reply",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "RequestOutputs",
    "SamplingParams",
    "ScoreOutput",
    "ScoreOutputs",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "Tokenizer",
    "TokensPrompt",
    "ToolCall",
    "UnsupportedError",
    "WeightUpdateError",
    "WeightsMissingError",
    "__version__",
    "architecture",
    "build_info",
    "devices",
    "get_include",
]


def _load(name: str) -> object:
    """Loads a public name on first use."""
    if name == "__version__":
        value: object = _core.build_info()["version"]
    else:
        from .advice import lazy

        value = lazy(__name__, _HOME, name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name
    __getattr__ = _load


def __dir__() -> list[str]:
    """Public names, whether loaded or not."""
    return sorted({*globals(), *__all__})
