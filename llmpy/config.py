"""EngineConfig: the options of an engine, checked, and after loading resolved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .checks import refuse_names
from .hub import DEMO
from .options import RULES, refuse

if TYPE_CHECKING:
    from typing import Unpack

    from .keywords import ConfigChanges


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of an engine; `llm.config` holds the resolved ones. `LLM.from_config(config)` builds an equal engine.

    Args:
        model: Hub id, local directory or .gguf file; "demo" is the demo model, SmolLM2-135M-Instruct, fetched once.
        tokenizer: Another tokenizer's hub id, directory or .gguf file; None = the model's.
        skip_tokenizer_init: No tokenizer: prompts must be ids and `text` is "".
        revision, tokenizer_revision: Hub branch, tag or commit.
        hf_token: Hub token; kept out of `repr` and `to_dict`.
        hf_overrides: Merged into, or applied to, the model's config before it is compiled.
        dtype: "auto" (the checkpoint's own; quantised: float32), "bfloat16", "float16" ("half", "fp16"), "float32".
        quantization: None = what the checkpoint says.
        load_format: "auto", "safetensors", "gguf", or "dummy" (seeded random weights).
        device: "cuda:1", 1, a GPU's UUID, "cpu"; None = `LLMPY_DEVICE`, else cuda:0, else cpu.
        tensor_parallel_size, device_ids, pipeline_parallel_size: One device so far.
        max_model_len: Most tokens of prompt and output; None = the model's, or what the cache can hold; "auto" = the
            latter without a warning; text such as "4k" (4000) or "4K" (4096) is understood.
        max_num_seqs: Most running sequences; None = 64 on the CPU, 256 on CUDA.
        max_num_batched_tokens: Tokens of a step; None = 512 on the CPU, 8192 on CUDA. Never changes a result.
        gpu_memory_utilization: Share of a GPU's memory for this engine.
        kv_cache_memory_bytes: Size of the cache, in bytes or as "4GiB"; None on the CPU: a quarter of the memory, at
            most 4 GiB.
        host_cache_bytes: 0: preempted sequences are recomputed.
        kv_cache_dtype: "auto" = `dtype`, "float32", "float16", "bfloat16".
        activation_dtype: Arithmetic of quantised weights: "auto", "int8", "float".
        block_size: Tokens of a cache block: 16, 32 or 64. Never changes a result.
        enable_prefix_caching: Whether equal prefixes are computed once. Never changes a result.
        enforce_eager: No captured graphs (GPU). Never changes a result.
        scheduling_policy: "fcfs" or "priority".
        seed: Root for requests without a seed, from 0 to 2**64 - 1; None or -1 draws one.
        logprobs_mode: Default of `SamplingParams.logprobs_mode`.
        max_logprobs: Most alternatives a request may ask for.
        generation_config: "auto" = the model's file, "none" or "vllm" = ignore it, or a directory.
        override_generation_config: On top of that.
        chat_template: Jinja text or a file with it; None = the tokenizer's.
        vocab_limit: Ids from here on are never sampled; None = the tokenizer's last id + 1.
        banned_token_ids: Ids that are never sampled.
        enable_return_routed_experts, enable_lora, max_loras, max_lora_rank, speculative_config: Not supported yet.
        max_queued_requests: Most samples that may wait in an AsyncEngine; None = no limit.
        kv_event_capacity: Events of the prefix cache that are kept for `kv_events`; 0 = none are noted.
    """

    model: str = DEMO
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: str | None = dataclasses.field(default=None, repr=False)
    hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    device: str | int | None = None
    tensor_parallel_size: int = 1
    device_ids: tuple[int, ...] | None = None
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | str | None = None
    host_cache_bytes: int | str = 0
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    block_size: int = 16
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    scheduling_policy: str = "fcfs"
    seed: int | None = 0
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None
    vocab_limit: int | None = None
    banned_token_ids: tuple[int, ...] = ()
    enable_return_routed_experts: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_queued_requests: int | None = None
    kv_event_capacity: int = 0
    pipeline_parallel_size: int = 1
    speculative_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        values = self.__dict__
        for name, rule in RULES.items():
            values[name] = rule(name, values[name])
        seqs, tokens = values["max_num_seqs"], values["max_num_batched_tokens"]
        if seqs is not None and tokens is not None and tokens < seqs:
            refuse("max_num_batched_tokens", f"at least max_num_seqs={seqs}", tokens)

    def replace(self, **changes: Unpack[ConfigChanges]) -> EngineConfig:
        """A copy with some options changed, checked again."""
        values: Mapping[str, Any] = changes
        return dataclasses.replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """All options but `hf_token` by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["hf_token"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """The config that `to_dict` gave."""
        known = {field.name for field in dataclasses.fields(cls)}
        refuse_names("EngineConfig", [name for name in values if name not in known], known)
        return cls(**values)
