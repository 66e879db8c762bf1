"""Keyword arguments as types: a type checker and an editor know the fields of calls that take them by name.

The fields repeat those of SamplingParams, PoolingParams and EngineConfig, and the arguments of LLM's updates, because a type
checker cannot read them there; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from .engine.progress import UseTqdm
    from .kv import Connector
    from .sampling_params import RequestOutputKind
    from .structured.params import StructuredOutputsParams
    from .weights.updates import Rename


class SamplingKeywords(TypedDict, total=False):
    """Fields of SamplingParams."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    include_stop_str_in_output: bool
    seed: int | None
    sample_index: int
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    logprobs_mode: Literal["raw_logprobs", "full_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] | None
    logprob_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    bad_token_ids: Sequence[Sequence[int]] | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    output_kind: RequestOutputKind
    stream_interval: int
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None
    speculative: bool
    routed_experts: bool
    repetition_detection: object
    thinking_token_budget: object
    extra_args: object


class PoolingKeywords(TypedDict, total=False):
    """Fields of PoolingParams."""

    pooling: Literal["last", "mean", "cls", "all"] | None
    normalize: bool | None
    dimensions: int | None
    use_activation: bool | None


class UpdateOptions(TypedDict, total=False):
    """Options of update_weights."""

    version: int | str | None
    partial: bool
    rename: Rename
    on_running: str
    check_finite: bool
    borrow: bool


class BeginOptions(UpdateOptions, total=False):
    """Options of begin_update."""

    staging: str
    bucket_bytes: int | str


class AlwaysSo(TypedDict, total=False):
    """Options of other engines that are true here anyway."""

    trust_remote_code: object
    enable_sleep_mode: object
    disable_log_stats: object
    disable_custom_all_reduce: bool | None
    async_scheduling: object
    enable_chunked_prefill: bool | None
    tokenizer_mode: str
    runner: str
    distributed_executor_backend: str | None
    cpu_offload_gb: float
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    enable_expert_parallel: bool | None
    enable_eplb: bool | None
    eplb_config: None
    num_redundant_experts: int
    tp_sums: str
    kv_load_failure_policy: str | None
    mm_processor_cache_gb: object
    disable_mm_preprocessor_cache: object


class EngineOptions(TypedDict, total=False):
    """Fields of EngineConfig, but its model."""

    tokenizer: str | Path | None
    skip_tokenizer_init: bool
    revision: str | None
    tokenizer_revision: str | None
    hf_token: str | None
    hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None
    model_impl: str
    program: str | Path | None
    dtype: str
    quantization: str | None
    load_format: str
    device: str | int | None
    tensor_parallel_size: int
    enable_dp_attention: bool
    experts: str
    data_parallel_size: int
    device_ids: Sequence[int] | None
    step_timeout_s: float
    nnodes: int
    node_rank: int | None
    master_addr: str | None
    master_port: int | None
    max_model_len: int | str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | str | None
    host_cache_bytes: int | str
    disk_cache: Mapping[str, Any] | None
    kv_connector: Connector | Mapping[str, Any] | str | None
    cache_loads: str
    kv_cache_dtype: str
    activation_dtype: str
    block_size: int
    enable_prefix_caching: bool
    prefix_cache_seed: int | None
    max_encoder_rows: int | None
    encoder_cache_tokens: int | None
    enforce_eager: bool
    scheduling_policy: str
    preemption: str
    seed: int | None
    logprobs_mode: str
    max_logprobs: int
    generation_config: str | Path
    override_generation_config: Mapping[str, Any] | None
    chat_template: str | Path | None
    vocab_limit: int | None
    banned_token_ids: Sequence[int]
    enable_return_routed_experts: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_dtype: str
    lora_experts: bool
    lora_embeddings: bool
    limit_mm_per_prompt: Mapping[str, int] | None
    max_image_pixels: int
    max_image_side: int
    mm_processor_kwargs: Mapping[str, Any] | None
    allowed_image_folder: str | Path | None
    max_queued_requests: int | None
    kv_event_capacity: int
    pipeline_parallel_size: int
    speculative_config: Mapping[str, Any] | None


class ConfigChanges(EngineOptions, total=False):
    """Fields of EngineConfig."""

    model: str


class EngineKeywords(EngineOptions, AlwaysSo, total=False):
    """What the constructor of an engine takes, but its model."""

    use_tqdm_on_load: UseTqdm
