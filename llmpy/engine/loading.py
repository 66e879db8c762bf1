"""Loads an engine from options: files, program, tokenizer, weights, cache. Resolves the options on the way."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import _core, environment, hardware
from ..distributed import _hosts
from ..errors import ChatTemplateError, ConfigError, DeviceMemoryError, LlmpyError, ModelNotFoundError, UnsupportedError
from ..json_files import damaged, read_json
from ..options import refuse
from ..sampling_params import SamplingParams, sampling_fields
from . import by_data, cores, images, outer_tier, speculation
from .drafter import Drafter

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..hub import ModelFiles
    from ..models import ModelConfig, Spec
    from ..text.tokenizer import Tokenizer
    from ..vision.images import Images
    from .pooling import Pooler

logger = logging.getLogger("llmpy")

MAX_CPU_POOL_BYTES = 4 << 30
DUMMY_VERSION = "dummy"
GENERATION_FILE = "generation_config.json"


class Loaded:
    """The parts of a loaded engine: core objects, tokenizer, and their sources.

    Args:
        config: Resolved options.
        name: Short name of the model.
        model, engine: Objects of the core.
        drafter: The models that propose drafts; () = there are none.
        tokenizer: The tokenizer; None if it was not wanted.
        token_bytes: Text bytes of every token; None if a text is not the concatenation of its tokens' bytes.
        eos_token_ids: End-of-sequence ids of generation config, config and tokenizer together.
        vocab_size: Rows of the vocabulary.
        generation_defaults: The values of generation_config.json and its overrides.
        pooler: The pooling tasks of the model.
        images: Prepares the images of prompts; None: the model has no tower for images.
        spec: The program of operations.
        fingerprint: What the bytes of a block depend on; b"" where no other engine copies them.
        programs: The program of each rank; `spec` itself if there is one rank.
    """

    __slots__ = (
        "config",
        "drafter",
        "engine",
        "eos_token_ids",
        "fingerprint",
        "generation_defaults",
        "images",
        "model",
        "name",
        "pooler",
        "programs",
        "spec",
        "token_bytes",
        "tokenizer",
        "vocab_size",
        "weight_type",
    )

    config: EngineConfig
    name: str
    weight_type: str
    model: _core.Model
    engine: _core.Engine
    drafter: tuple[_core.Model, ...]
    tokenizer: Tokenizer | None
    token_bytes: list[bytes] | None
    eos_token_ids: list[int]
    vocab_size: int
    generation_defaults: dict[str, Any]
    pooler: Pooler
    images: Images | None
    fingerprint: bytes
    spec: Spec
    programs: list[Spec]


def load(config: EngineConfig, on_progress: Callable[[int, int], None] | None = None) -> Loaded:
    """Loads an engine.

    Args:
        config: Checked options.
        on_progress: Called with the bytes of weights loaded so far and the total.

    Returns:
        A ready engine and the resolved options.

    Raises:
        DeviceMemoryError: Memory is short; the message names the cache's size and its option.
        Followed: This is a host from 1 on, and host 0 has closed its engine.
    """
    environment.start()
    device: str | int | None = config.device
    if device is None and config.device_ids:
        device = config.device_ids[0]
    config = _resolve_sizes(_hosts.resolve(config.replace(device=hardware.choose(device))))
    try:
        return _load(config, on_progress)
    except MemoryError as error:
        if isinstance(error, LlmpyError):
            raise
        wanted = int(config.kv_cache_memory_bytes or 0)
        message = f"{config.model}: out of memory while the engine was made"
        if wanted:
            message += f"; the cache alone wants {wanted} bytes: lower kv_cache_memory_bytes (256MiB serve a small model)"
        message += ", raise the process's limit (ulimit -v, the container's memory), or close() another engine"
        raise DeviceMemoryError(message, wanted_bytes=wanted or None) from error


def _load(config: EngineConfig, on_progress: Callable[[int, int], None] | None) -> Loaded:
    """Like `load`, with options whose sizes are resolved except those that depend on the weights."""
    from .. import hub, models
    from ..vision.images import most_images
    from . import pooling

    result = Loaded()
    files = hub.resolve(config.model, config.revision, config.hf_token, weights=config.load_format != "dummy")
    _check_format(config, files)
    result.name = files.name
    result.generation_defaults = _generation_defaults(config, files)
    dummy = config.load_format == "dummy"
    checkpoint = None if dummy and files.kind != "gguf" else models.open_checkpoint(files, config.hf_overrides)
    wanted = config.max_model_len if isinstance(config.max_model_len, int) else None
    compiled = models.load(
        files, checkpoint, hf_overrides=config.hf_overrides, max_model_len=wanted, quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype, takes_images=most_images(config) > 0, program=config.program,
        model_impl=config.model_impl,
    )  # fmt: skip
    result.tokenizer = None if config.skip_tokenizer_init else _load_tokenizer(config, files, checkpoint)
    _check_adapters(config, compiled.spec)
    _check_cache_seed(config)
    result.pooler = pooling.pooler_of(files, compiled)
    result.images = _images(config, files, compiled.spec, result.tokenizer)
    result.spec = compiled.spec
    result.vocab_size = compiled.spec["vocab_size"]
    result.eos_token_ids = _eos_ids(result, compiled.config.eos_token_ids)
    if result.tokenizer is not None:
        result.tokenizer.eos_token_ids = result.eos_token_ids
    result.weight_type = compiled.config.dtype
    config = _resolve_dtypes(config, compiled.config.dtype).replace(vocab_limit=_vocab_limit(config, result))
    options = _model_options(config, compiled.config)
    drafts = None
    if speculation.has_model(config):
        drafts = Drafter(config, options, compiled.spec, result.tokenizer, files, checkpoint)
    result.programs = _programs(config, compiled.spec)
    options["encoder"] = images.encoder_sizes(
        compiled.spec, config.max_encoder_rows, config.encoder_cache_tokens, config.max_num_batched_tokens or 0
    )
    options["hosts"] = _hosts.core_option(config, options, result.programs, [] if dummy else files.weights)
    if options["hosts"] is not None:
        options["all_programs"] = result.programs
    options["beside"] = None if drafts is None else drafts.beside
    weights, own = None if dummy else checkpoint, _hosts.ranks_here(config)
    _hosts.announce(config)
    result.model = cores.make_model(config, result.programs[own.start : own.stop], weights, options, on_progress)
    if config.node_rank:
        _follow(result.model)
    result.drafter = () if drafts is None else drafts.open(result.model, on_progress)
    try:
        hardware.check_kernels(result.model.describe()["device"])
    except LlmpyError:
        result.model.close()
        raise
    result.config = _resolved(config, options, result.model.describe())
    result.token_bytes = result.tokenizer.token_bytes() if result.tokenizer is not None else None
    result.fingerprint = b""
    outer = outer_tier.core_option(result, [] if dummy else files.weights, options["library"])
    result.engine = cores.make_engine(result.model, _engine_options(result) | outer)
    chosen = result.model.describe()
    logger.debug("%s: %s", result.name, {"ranks": result.model.memory(), **chosen})
    if chosen["on_host"]:
        logger.warning("%s: %s run on the host, which is slow; the backend of %s has none", result.name, chosen["on_host"],
                       config.device)  # fmt: skip
    if chosen["cache_padding"] > 0.1:
        logger.warning("%s: %.0f %% of the cache's pages is padding", result.name, 100 * chosen["cache_padding"])
    return result


def _follow(model: _core.Model) -> NoReturn:
    """Computes the ranks of this host for host 0 until that one closes its engine."""
    try:
        model.follow()
    finally:
        model.close()
    raise _hosts.Followed


def _programs(config: EngineConfig, spec: Spec) -> list[Spec]:
    """The program of each rank."""
    from ..models.shard import shard

    if config.enable_dp_attention:
        return by_data.programs(config, spec)
    return shard(spec, config.tensor_parallel_size, experts=config.experts)


def _images(config: EngineConfig, files: ModelFiles, spec: Spec, tokenizer: Tokenizer | None) -> Images | None:
    """What prepares images, if the program has a tower for them."""
    towers: Mapping[str, Any] = spec.get("towers") or {}
    if "image" not in towers or files.directory is None:
        return None
    from ..vision.images import Images

    return Images(config, files.config, files.directory, tokenizer)


def _adapters(config: EngineConfig) -> tuple[int, int, bool, bool, bool] | None:
    """The core's option `adapters`."""
    if not config.enable_lora:
        return None
    is_bfloat16 = config.lora_dtype == "bfloat16"
    return config.max_loras, config.max_lora_rank, config.lora_experts, config.lora_embeddings, is_bfloat16


def _check_adapters(config: EngineConfig, spec: Spec) -> None:
    """Refuses adapters where the engine cannot serve them."""
    if not config.enable_lora:
        return
    where = f"nnodes={config.nnodes}" if config.nnodes > 1 else ""
    if config.lora_experts and config.enable_dp_attention:
        where = "lora_experts=True and enable_dp_attention=True"
    if where:
        raise UnsupportedError(f"enable_lora=True is not supported yet with {where}; merge the adapter into the checkpoint")


def _check_cache_seed(config: EngineConfig) -> None:
    """Refuses equal hashes in the events of several caches, whose blocks a reader could not tell apart."""
    several = f"data_parallel_size={config.data_parallel_size}" if config.data_parallel_size > 1 else ""
    several = "enable_dp_attention=True" if config.enable_dp_attention else several
    if config.prefix_cache_seed is not None and config.kv_event_capacity and several:
        raise UnsupportedError(
            f"prefix_cache_seed={config.prefix_cache_seed} is not supported yet with kv_event_capacity and {several}; "
            "use prefix_cache_seed=None"
        )


def _resolve_sizes(config: EngineConfig) -> EngineConfig:
    """Fills in the sizes that depend on the machine alone."""
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    device = str(config.device)
    traits = hardware.traits(device)
    most_tokens, most_seqs = traits["default_tokens"], traits["default_seqs"]
    total, free = hardware.memory_bytes(device) if traits["has_host_memory"] else (0, 0)
    if seqs is None:
        seqs = most_seqs if tokens is None else min(most_seqs, tokens)
    if tokens is None:
        tokens = max(most_tokens, seqs)
    pool, n_ranks = config.kv_cache_memory_bytes, len(_hosts.ranks_here(config)) * config.data_parallel_size
    if pool is None:  # 0: sized by gpu_memory_utilization after the weights are loaded
        pool = min(total // 4, MAX_CPU_POOL_BYTES) // n_ranks if traits["has_host_memory"] else 0
    elif isinstance(pool, int) and (wanted := pool * n_ranks) > free and traits["has_host_memory"]:
        raise DeviceMemoryError(
            f"kv_cache_memory_bytes: wanted {wanted} bytes, have {free} free of {total}; lower it, or close() another engine",
            wanted_bytes=wanted,
            free_bytes=free,
        )
    return config.replace(max_num_seqs=seqs, max_num_batched_tokens=tokens, kv_cache_memory_bytes=pool)


def _check_format(config: EngineConfig, files: ModelFiles) -> None:
    """Refuses a load_format that does not match the files."""
    have = "gguf" if files.kind == "gguf" else "safetensors"
    if config.load_format in ("gguf", "safetensors") and config.load_format != have:
        refuse("load_format", f"'auto' or {have!r} for {config.model}", config.load_format)


def _generation_defaults(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """The generation config that the options choose, with the overrides applied and checked like SamplingParams."""
    path = None if files.directory is None else files.directory / GENERATION_FILE
    if config.generation_config in ("none", "vllm"):
        found: dict[str, Any] = {}
    elif config.generation_config == "auto":
        found = files.generation_config
    else:
        path = Path(config.generation_config).expanduser() / GENERATION_FILE
        if not path.is_file():
            raise ModelNotFoundError(f"generation_config: {path} does not exist; give its directory, 'auto' or 'none'")
        found = read_json(path)
    merged = {**found, **config.override_generation_config}
    if problem := _wrong_default(merged):
        if path is not None and _wrong_default(found):
            raise damaged(path, f"{problem} generation_config='none' leaves the file aside.")
        raise ConfigError(f"override_generation_config: {problem}", option="override_generation_config", value=merged)
    return merged


def _wrong_default(found: Mapping[str, Any]) -> str:
    """The error message of a generation config; "" if it is valid."""
    given = found.get("eos_token_id")
    if any(type(token) is not int for token in (given if isinstance(given, list) else [] if given is None else [given])):
        return f"eos_token_id must be an id or a list of ids, got {repr(given)[:80]}."
    try:
        SamplingParams(**{"max_tokens": None, **sampling_fields(found)})
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{error}".removesuffix(".") + "."
    return ""


def _load_tokenizer(config: EngineConfig, files: ModelFiles, checkpoint: _core.Checkpoint | None) -> Tokenizer:
    from ..text.tokenizer import load_tokenizer

    template = _template_text(config.chat_template)
    if config.tokenizer is None or config.tokenizer == config.model:
        return load_tokenizer(files, checkpoint, template)
    return open_tokenizer(config.tokenizer, config.tokenizer_revision, config.hf_token, template)


def load_renderer(config: EngineConfig) -> tuple[EngineConfig, Tokenizer, Images | None]:
    """Loads only what renders and tokenises prompts, without weights or a device.

    Args:
        config: Checked options.

    Returns:
        The options with the longest sequence, the tokenizer, and what prepares images; None: the model takes none.
    """
    from .. import hub, models

    files = hub.resolve(config.model, config.revision, config.hf_token, weights=False)
    checkpoint = _core.Checkpoint([str(path) for path in files.weights]) if files.kind == "gguf" else None
    from ..vision.images import most_images

    wanted = config.max_model_len if isinstance(config.max_model_len, int) else None
    compiled = models.load(
        files, checkpoint, hf_overrides=config.hf_overrides, max_model_len=wanted, takes_images=most_images(config) > 0
    )
    tokenizer = _load_tokenizer(config, files, checkpoint)
    images = _images(config, files, compiled.spec, tokenizer)
    return config.replace(max_model_len=wanted or compiled.config.max_position_embeddings), tokenizer, images


def open_tokenizer(
    name: str, revision: str | None = None, token: str | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Loads a tokenizer from a hub id, a directory or a .gguf file.

    Args:
        name, revision, token: As in EngineConfig.
        chat_template: As in `load_tokenizer`.
    """
    from .. import hub
    from ..text.tokenizer import load_tokenizer

    files = hub.resolve(name, revision, token, weights=False)
    checkpoint = _core.Checkpoint([str(path) for path in files.weights]) if files.kind == "gguf" else None
    return load_tokenizer(files, checkpoint, chat_template)


def _template_text(template: str | None) -> str | None:
    """The Jinja text of a template option, which is the text itself or a file's path."""
    if template is None or "{" in template or "\n" in template:
        return template
    try:
        from ..text.tokenizer import TemplateText

        path = Path(template).expanduser()
        return TemplateText(path.read_text(encoding="utf-8"), path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ChatTemplateError(
            f"chat_template: {template!r} is neither jinja text nor a readable file ({why})",
            parameter="chat_template",
            value=template,
        ) from error


def _eos_ids(loaded: Loaded, of_config: list[int]) -> list[int]:
    """End-of-sequence ids of all sources, each once."""
    given = loaded.generation_defaults.get("eos_token_id")
    ids: list[int] = given if isinstance(given, list) else [] if given is None else [given]
    of_tokenizer = [] if loaded.tokenizer is None else loaded.tokenizer.eos_token_ids
    merged = dict.fromkeys((*ids, *of_config, *of_tokenizer))
    return [token for token in merged if 0 <= token < loaded.vocab_size]


def _resolve_dtypes(config: EngineConfig, stored: str) -> EngineConfig:
    dtype = config.dtype
    if dtype == "auto" and stored == "quantized":
        dtype = hardware.traits(str(config.device))["quantised_dtype"]
    elif dtype == "auto":
        dtype = stored
    kv_dtype = {"auto": dtype, "fp8_e4m3": "fp8"}.get(config.kv_cache_dtype, config.kv_cache_dtype)
    return config.replace(dtype=dtype, kv_cache_dtype=kv_dtype)


def _model_options(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """The options of the core's model."""
    from ..models import quantized

    longest = model.max_position_embeddings
    length = config.max_model_len
    device = str(config.device)
    is_cpu, most_own_rows = hardware.kind_of(device) == "cpu", hardware.traits(device)["library_rows"]
    needs_library = 0 < most_own_rows < (config.max_num_batched_tokens or 0)
    if isinstance(length, int) and length > longest:
        raise ConfigError(
            f"max_model_len must be at most {longest}, the model's max_position_embeddings, got {length}. "
            f"hf_overrides={{'max_position_embeddings': {length}}} raises that.",
            option="max_model_len",
            value=length,
        )
    return {
        "device": "cpu" if is_cpu else device,
        "devices": hardware.devices_of(config),
        "step_timeout_s": config.step_timeout_s,
        "library": hardware.library(device),
        "cublaslt": hardware.cublaslt_library() if needs_library else "",
        "memory_share": config.gpu_memory_utilization,
        "isa": (device.partition(":")[2] if is_cpu else "") or "auto",
        "num_threads": environment.num_threads(),
        "dtype": config.dtype,
        "kv_dtype": config.kv_cache_dtype,
        "activation_dtype": config.activation_dtype,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": length if isinstance(length, int) else longest,
        "fit_model_len": not isinstance(length, int),
        "max_draft_rows": speculation.most_draft_rows(config),
        "enforce_eager": config.enforce_eager,
        "adapters": _adapters(config),
        "synchronous": environment.sync_level() > 0,
        "checks_ranks": environment.sync_level() > 1,
        "kv_cache_bytes": config.kv_cache_memory_bytes,
        "host_cache_bytes": config.host_cache_bytes,
        "dummy_seed": (config.seed or 0) if config.load_format == "dummy" else None,
        "dummy_mxfp4": config.load_format == "dummy" and quantized.dummies_are_mxfp4(model.raw),
    }


def _vocab_limit(config: EngineConfig, loaded: Loaded) -> int:
    """The limit of sampled ids: ids >= it are never sampled."""
    limit = config.vocab_limit
    if limit is None and loaded.tokenizer is not None:
        limit = loaded.tokenizer.max_token_id + 1
    return min(limit or loaded.vocab_size, loaded.vocab_size)


def _resolved(config: EngineConfig, options: Mapping[str, Any], chosen: Mapping[str, Any]) -> EngineConfig:
    """The options with the values that loading has resolved."""
    length = int(chosen["max_model_len"])
    if config.max_model_len is None and length < options["max_model_len"]:
        warnings.warn(
            f"max_model_len is {length}, not the model's {options['max_model_len']}: the KV cache of "
            f"{config.kv_cache_memory_bytes or 'few'} bytes holds no more; raise kv_cache_memory_bytes",
            stacklevel=4,
        )
    activation = str(chosen["activation_dtype"])
    return config.replace(
        max_model_len=length,
        kv_cache_dtype=str(chosen["kv_dtype"]),
        activation_dtype=config.activation_dtype if activation == "auto" else activation,
    )


def _engine_options(loaded: Loaded) -> dict[str, Any]:
    """The options of the core's engine."""
    config = loaded.config
    return {
        "max_logprobs": min(config.max_logprobs, loaded.vocab_size),
        "enable_prefix_caching": config.enable_prefix_caching,
        "policy": config.scheduling_policy,
        "preemption": config.preemption,
        "loads_by_cost": config.cache_loads == "auto",
        "prefix_cache_seed": config.prefix_cache_seed,
        "kv_event_capacity": config.kv_event_capacity,
        "eos_token_ids": loaded.eos_token_ids,
        "token_bytes": loaded.token_bytes,
        "vocab_limit": config.vocab_limit,
        "banned_token_ids": [token for token in config.banned_token_ids if token < loaded.vocab_size],
        "special_token_ids": [] if loaded.tokenizer is None else loaded.tokenizer.special_ids,
        **speculation.core_options(config.speculative_config),
        **({"drafter": loaded.drafter} if loaded.drafter else {}),
    }
