"""EngineConfig: the options of an engine, checked, and after loading resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from . import options as rules
from .checks import as_bool, refuse_names
from .engine import outer_tier
from .engine.speculation import speculation
from .hub import DEMO
from .options import Rule, choice, integer, only, optional, refuse
from .sampling_checks import LATER_MODES, LOGPROBS_MODES

if TYPE_CHECKING:
    from typing import Unpack

    from .keywords import ConfigChanges
    from .kv import Connector


def option(rule: Rule) -> dict[str, Rule]:
    """A row of the table of options, as metadata of a dataclass field."""
    return {"rule": rule}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of an engine; `llm.config` holds the resolved ones. `LLM.from_config(config)` builds an equal engine.

    Args:
        model: Hub id, local directory or .gguf file; "demo" is the demo model, SmolLM2-135M-Instruct, fetched once.
        tokenizer: Another tokenizer's hub id, directory or .gguf file; None = the model's.
        skip_tokenizer_init: No tokenizer: prompts must be ids and `text` is "".
        revision, tokenizer_revision: Hub branch, tag or commit.
        hf_token: Hub token; kept out of `repr` and `to_dict`.
        hf_overrides: Merged into, or applied to, the model's config before it is compiled.
        model_impl: Where the program comes from: "auto" = a function of llmpy, else `llmpy_program.json` in the model's folder,
            else transformers' class, converted once; "llmpy" = a function alone; "transformers" = the class, also of a model
            that has a function.
        program: A file of `llmpy export MODEL -o FILE.json`; None = as `model_impl` says.
        dtype: "auto" (the checkpoint's own; quantised: float32), "bfloat16", "float16" ("half", "fp16"), "float32".
        quantization: Rounds the linears of a checkpoint of floats at load: "fp8", "int8", "int4", "int4_g32", "nf4", or a type
            of GGUF: "q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0"; None = what the checkpoint says. The name of the
            checkpoint's scheme, such as "awq" or "gptq", changes nothing.
        load_format: "auto", "safetensors", "gguf", or "dummy" (seeded random weights).
        device: "cuda:1", 1, a GPU's UUID, "cpu"; None = `LLMPY_DEVICE`, else cuda:0, else cpu.
        tensor_parallel_size: Number of ranks that share the model's matrices. Never changes a result. On the CPU ranks are
            threads.
        enable_dp_attention: Whether each rank has sequences and a cache of its own; the ranks share the experts of a mixture
            alone. Never changes a result. On the CPU only, so far.
        experts: How the ranks share a mixture: "rank" = each has whole experts; "width" = a part of every expert;
            "auto" = "width" with fewer than 8 experts a rank, else "rank". Never changes a result.
        data_parallel_size: Number of replicas: engines that serve the requests together. Never changes a result. Each has the
            cache and the limits of one engine; on the CPU they share the threads.
        device_ids: Numbers of the ranks' devices, such as (2, 3), replica by replica; None = `device` and the next ones of the
            same name.
        step_timeout_s: Seconds that a rank waits for another one in a step before the engine fails.
        nnodes: Number of hosts that share the ranks, one process a host. Every process makes an engine with equal options;
            those from host 1 on compute for host 0 until it closes its engine. Never changes a result.
        node_rank: Number of this host; None = the variable RANK, as torchrun sets it.
        master_addr, master_port: Where host 0 listens for the others; None = the variables MASTER_ADDR, and MASTER_PORT + 1.
        pipeline_parallel_size: One stage so far.
        max_model_len: Most tokens of prompt and output; None = the model's, or what the cache can hold; "auto" = the
            latter without a warning; text such as "4k" (4000) or "4K" (4096) is understood.
        max_num_seqs: Most running sequences; None = 64 on the CPU, 256 on CUDA.
        max_num_batched_tokens: Tokens of a step; None = 512 on the CPU, 8192 on CUDA. Never changes a result.
        gpu_memory_utilization: Share of a GPU's memory for this engine.
        kv_cache_memory_bytes: Size of the cache of each rank of each replica, in bytes or as "4GiB"; None on the CPU: all of
            them share a quarter of the memory, at most 4 GiB.
        host_cache_bytes: Host memory of each replica for prefixes that the cache evicts, in bytes or as "4GiB"; 0 = none. Never
            changes a result.
        disk_cache: Files for prefixes that `host_cache_bytes` evicts: {"path": FOLDER, "bytes": "100GiB"}; None = none. With
            `prefix_cache_seed` they outlive the engine, and engines share them. Never changes a result.
        kv_connector: A store for prefixes that `host_cache_bytes` evicts, instead of `disk_cache`: an `llmpy.kv.Connector`,
            "module:name" of what makes one, {"name": "memory", "bytes": "1GiB"}, {"name": "peer", ...} = the stores of other
            engines, {"name": NAME, ...} = a library of another package, by entry point or path; None = none. Never changes a
            result.
        cache_loads: Whether a prefix that only these have is loaded: "auto" = if that takes less time than to compute it, by
            measured times; "always". Never changes a result.
        kv_cache_dtype: "auto" = `dtype`, "float32", "float16", "bfloat16"; "fp8" or "fp8_e4m3" = e4m3 with the
            checkpoint's scales or 1; "int8" = a scale for each token and head.
        activation_dtype: Arithmetic of quantised weights: "auto", "int8", "fp8" (CUDA), "float".
        block_size: Tokens of a cache block: 16, 32 or 64. Never changes a result.
        enable_prefix_caching: Whether equal prefixes are computed once. Never changes a result.
        prefix_cache_seed: Makes the hashes of `kv_events` the same in every process with this seed, from 0 to 2**64 - 1; None =
            random. Who knows the seed can look for prompts whose hashes collide, so keep it secret. Never changes a result.
        max_encoder_rows: Most patches of a piece of an image, and patches that a step computes before it puts off the next
            image; None = 4096, at least max_num_batched_tokens. Never changes a result.
        encoder_cache_tokens: Features of images that device memory holds for later prompts; None = twice the larger of
            max_num_batched_tokens and max_encoder_rows. Never changes a result.
        enforce_eager: No captured graphs (GPU). Never changes a result.
        scheduling_policy: "fcfs" or "priority".
        preemption: How a sample goes on that had to give its cache up: "recompute" computes it again, "swap" copies it to
            `host_cache_bytes` and back where there is room, "auto" does what takes less time. Never changes a result.
        seed: Root for requests without a seed, from 0 to 2**64 - 1; None or -1 draws one.
        logprobs_mode: Default of `SamplingParams.logprobs_mode`.
        max_logprobs: Most alternatives a request may ask for.
        generation_config: "auto" = the model's file, "none" or "vllm" = ignore it, or a directory.
        override_generation_config: On top of that.
        chat_template: Jinja text or a file with it; None = the tokenizer's.
        vocab_limit: Ids from here on are never sampled; None = the tokenizer's last id + 1.
        banned_token_ids: Ids that are never sampled.
        enable_return_routed_experts: Not supported yet.
        enable_lora: Whether requests may have adapters (`lora_request`).
        max_loras: Most adapters whose requests run at the same time; those of other adapters wait.
        max_lora_rank: Largest rank of an adapter.
        lora_dtype: Type to which the factors of adapters are rounded: "auto" or "float32" = float32, which loses no bit of
            them; "bfloat16".
        lora_experts: Whether adapters may change the experts of a mixture; a slot then has room for every expert.
        lora_embeddings: Whether adapters may change the embeddings of tokens and the head (`lm_head`).
        speculative_config: Drafts, which make several tokens of a sample in one step: {"method": "ngram", "k": 4, "min": 2,
            "max": 4}, {"method": "suffix", "k": "auto", "shared": True} or {"method": "draft", "model": "PATH", "k": 4}; None =
            none. Never changes a result.
        limit_mm_per_prompt: Most images of a prompt; None = {"image": 16}; 0 = the tower for images is not loaded.
        max_image_pixels, max_image_side: Most pixels of an image, and its longest side, before it is resized.
        mm_processor_kwargs: Sizes to which images are resized, in place of those of the model's file: min_pixels, max_pixels,
            size, do_image_splitting, min_patches, max_patches, do_pan_and_scan.
        allowed_image_folder: Folder in which the files of images must lie; None = every file that the process can read.
        max_queued_requests: Most samples that may wait in an AsyncEngine; None = no limit.
        kv_event_capacity: Events of the prefix cache that are kept for `kv_events`; 0 = none are noted.
    """

    # fmt: off
    # The table of options: a row has all that Python checks of one. The text is above, the type that the constructors take is
    # in keywords.py.
    model: str = field(default=DEMO, metadata=option(rules.path))
    tokenizer: str | None = field(default=None, metadata=option(optional(rules.tokenizer)))
    skip_tokenizer_init: bool = field(default=False, metadata=option(as_bool))
    revision: str | None = field(default=None, metadata=option(optional(rules.text)))
    tokenizer_revision: str | None = field(default=None, metadata=option(optional(rules.text)))
    hf_token: str | None = field(default=None, repr=False, metadata=option(optional(rules.text)))
    hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None = field(default=None, metadata=option(
        optional(rules.overrides)))
    model_impl: str = field(default="auto", metadata=option(choice("auto", "llmpy", "transformers")))
    program: str | None = field(default=None, metadata=option(optional(rules.path)))
    dtype: str = field(default="auto", metadata=option(rules.data_type))
    quantization: str | None = field(default=None, metadata=option(optional(choice(
        "fp8", "int8", "int4", "int4_g32", "nf4", "q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0", *rules.METHODS))))
    load_format: str = field(default="auto", metadata=option(choice(
        "auto", "safetensors", "gguf", "dummy", not_yet=("borrow",), knob="use 'auto'")))
    device: str | int | None = field(default=None, metadata=option(rules.device))
    tensor_parallel_size: int = field(default=1, metadata=option(integer(1, 64)))
    enable_dp_attention: bool = field(default=False, metadata=option(as_bool))
    experts: str = field(default="auto", metadata=option(choice("auto", "rank", "width")))
    data_parallel_size: int = field(default=1, metadata=option(integer(1, 64)))
    device_ids: tuple[int, ...] | None = field(default=None, metadata=option(optional(rules.device_ids)))
    step_timeout_s: float = field(default=30.0, metadata=option(rules.seconds))
    nnodes: int = field(default=1, metadata=option(integer(1, 64)))
    node_rank: int | None = field(default=None, metadata=option(optional(integer(0, 63))))
    master_addr: str | None = field(default=None, metadata=option(optional(rules.text)))
    master_port: int | None = field(default=None, metadata=option(optional(integer(1, 65535))))
    max_model_len: int | str | None = field(default=None, metadata=option(optional(rules.model_length)))
    max_num_seqs: int | None = field(default=None, metadata=option(optional(integer(1, 65536))))
    max_num_batched_tokens: int | None = field(default=None, metadata=option(optional(integer(1, 1 << 20))))
    gpu_memory_utilization: float = field(default=0.92, metadata=option(rules.share))
    kv_cache_memory_bytes: int | str | None = field(default=None, metadata=option(optional(rules.parse_size)))
    host_cache_bytes: int | str = field(default=0, metadata=option(rules.parse_size))
    disk_cache: Mapping[str, Any] | None = field(default=None, metadata=option(optional(outer_tier.disk_cache)))
    kv_connector: Connector | Mapping[str, Any] | str | None = field(default=None, metadata=option(
        optional(outer_tier.connector)))
    cache_loads: str = field(default="auto", metadata=option(choice("auto", "always")))
    kv_cache_dtype: str = field(default="auto", metadata=option(choice(
        "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8", not_yet=("fp8_e5m2",), knob="use 'fp8'")))
    activation_dtype: str = field(default="auto", metadata=option(choice("auto", "int8", "fp8", "float")))
    block_size: int = field(default=16, metadata=option(choice(16, 32, 64)))
    enable_prefix_caching: bool = field(default=True, metadata=option(as_bool))
    prefix_cache_seed: int | None = field(default=None, metadata=option(optional(integer(0, 2**64 - 1))))
    max_encoder_rows: int | None = field(default=None, metadata=option(optional(integer(1))))
    encoder_cache_tokens: int | None = field(default=None, metadata=option(optional(integer(16))))
    enforce_eager: bool = field(default=False, metadata=option(as_bool))
    scheduling_policy: str = field(default="fcfs", metadata=option(choice("fcfs", "priority")))
    preemption: str = field(default="auto", metadata=option(choice("auto", "recompute", "swap")))
    seed: int | None = field(default=0, metadata=option(rules.root_seed))
    logprobs_mode: str = field(default="raw_logprobs", metadata=option(choice(
        *LOGPROBS_MODES, not_yet=LATER_MODES, knob="use 'raw_logprobs'")))
    max_logprobs: int = field(default=20, metadata=option(rules.max_logprobs))
    generation_config: str = field(default="auto", metadata=option(rules.path))
    override_generation_config: Mapping[str, Any] = field(default_factory=dict, metadata=option(rules.generation_overrides))
    chat_template: str | None = field(default=None, metadata=option(optional(rules.path)))
    vocab_limit: int | None = field(default=None, metadata=option(optional(integer(1))))
    banned_token_ids: tuple[int, ...] = field(default=(), metadata=option(rules.token_ids))
    enable_return_routed_experts: bool = field(default=False, metadata=option(only(False, "leave it out")))
    enable_lora: bool = field(default=False, metadata=option(as_bool))
    max_loras: int = field(default=1, metadata=option(integer(1, 1024)))
    max_lora_rank: int = field(default=16, metadata=option(integer(1, 1024)))
    lora_dtype: str = field(default="auto", metadata=option(choice(
        "auto", "float32", "bfloat16", not_yet=("float16",), knob="use 'bfloat16', or 'auto', which is float32")))
    lora_experts: bool = field(default=False, metadata=option(as_bool))
    lora_embeddings: bool = field(default=False, metadata=option(as_bool))
    limit_mm_per_prompt: Mapping[str, int] | None = field(default=None, metadata=option(rules.media_limits))
    max_image_pixels: int = field(default=50_000_000, metadata=option(integer(1, 1 << 31)))
    max_image_side: int = field(default=16384, metadata=option(integer(1, 65535)))
    mm_processor_kwargs: Mapping[str, Any] | None = field(default=None, metadata=option(optional(rules.mapping)))
    allowed_image_folder: str | None = field(default=None, metadata=option(optional(rules.path)))
    max_queued_requests: int | None = field(default=None, metadata=option(optional(integer(1, 1 << 31))))
    kv_event_capacity: int = field(default=0, metadata=option(integer(0, 1 << 24)))
    pipeline_parallel_size: int = field(default=1, metadata=option(only(1, "it has to be 1")))
    speculative_config: Mapping[str, Any] | None = field(default=None, metadata=option(optional(speculation)))
    # fmt: on

    def __post_init__(self) -> None:
        values = self.__dict__
        for name, rule in RULES.items():
            values[name] = rule(name, values[name])
        seqs, tokens = values["max_num_seqs"], values["max_num_batched_tokens"]
        if seqs is not None and tokens is not None and tokens < seqs:
            refuse("max_num_batched_tokens", f"at least max_num_seqs={seqs}", tokens)
        if values["program"] is not None and values["model_impl"] == "llmpy":
            refuse("model_impl", "'auto' or 'transformers' with program", values["model_impl"])
        if values["enable_dp_attention"] and values["tensor_parallel_size"] == 1:
            refuse("tensor_parallel_size", "above 1 with enable_dp_attention=True", 1)
        if values["enable_dp_attention"] and values["experts"] == "width":
            refuse("experts", "'auto' or 'rank' with enable_dp_attention=True", "width")
        hosts, host = values["nnodes"], values["node_rank"]
        if host is not None and host >= hosts:
            refuse("node_rank", f"below nnodes={hosts}", host)
        if values["tensor_parallel_size"] < hosts:
            refuse("tensor_parallel_size", f"at least nnodes={hosts}, a rank for each host", values["tensor_parallel_size"])
        if values["preemption"] == "swap" and not values["host_cache_bytes"]:
            refuse("host_cache_bytes", "above 0 with preemption='swap'", values["host_cache_bytes"])
        outer_tier.check(self)
        replicas, queued = values["data_parallel_size"], values["max_queued_requests"]
        if queued is not None and queued < replicas:
            refuse("max_queued_requests", f"at least data_parallel_size={replicas}", queued)

    def replace(self, **changes: Unpack[ConfigChanges]) -> EngineConfig:
        """A copy with some options changed, checked again."""
        values: Mapping[str, Any] = changes
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """All options but `hf_token` by name."""
        values = {name: getattr(self, name) for name in RULES}
        del values["hf_token"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """The config that `to_dict` gave."""
        refuse_names("EngineConfig", [name for name in values if name not in RULES], RULES)
        return cls(**values)


RULES: dict[str, Rule] = {one.name: one.metadata["rule"] for one in fields(EngineConfig)}
"""The options and their rules."""


def constructor_signature() -> Signature:
    """What `help` and editors show of an engine's constructor: the options by name, with their types and defaults."""
    from .keywords import AlwaysSo, EngineKeywords

    defaults = {one.name: None if one.default is MISSING else one.default for one in fields(EngineConfig)}
    kinds = {name: getattr(kind, "__forward_arg__", kind) for name, kind in EngineKeywords.__annotations__.items()}
    return Signature(
        [
            Parameter("self", Parameter.POSITIONAL_ONLY),
            Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=DEMO, annotation="str | Path"),
            *(
                Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind)
                for name, kind in kinds.items()
                if name not in AlwaysSo.__annotations__
            ),
            Parameter("others", Parameter.VAR_KEYWORD, annotation="Unpack[AlwaysSo]"),
        ],
        return_annotation=None,
    )
