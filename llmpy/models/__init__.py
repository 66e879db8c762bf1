"""Architectures: short Python functions that write a model's program once, at load (docs/develop/adding-an-architecture.md)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, UnsupportedError
from ..options import METHODS
from . import cache_scales, gguf, quantise, quantized, registry, towers
from .blocks import Block, Model
from .config import ModelConfig, Raw
from .program import Spec, Tensors, Value
from .registry import architecture
from .rope import Rope
from .source import Source

if TYPE_CHECKING:
    from .. import _core
    from ..hub import ModelFiles

__all__ = [
    "Block", "Compiled", "Model", "ModelConfig", "Overrides", "Rope", "Spec", "Value", "architecture", "load",
    "open_checkpoint",
]  # fmt: skip

logger = logging.getLogger("llmpy")

Overrides = Mapping[str, object] | Callable[[Raw], Mapping[str, object]]

_FAMILIES = """
    apertus arcee bert cohere exaone4 gemma glm granite internlm3 llama mimo minicpm mistral nemotron olmo olmo2 phi phi3 plamo3
    qwen2 qwen3 seed_oss smollm3 stablelm
    bamba falcon_h1 granite_hybrid jamba lfm2 mamba mamba2 nemotron_h plamo2 qwen3_next
    deepseek deepseek_ocr ernie glm4_moe gpt_oss llama4 mixtral olmoe qwen_moe
    idefics3 internvl llava mistral3 qwen2_vl qwen3_vl
    baichuan bloom chatglm falcon mpt gpt2 gpt_neox gptj internlm2 opt qwen starcoder2
"""
for _family in _FAMILIES.split():
    import_module(f"{__name__}.{_family}")

_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Compiled:
    """A model's program and the configuration from which it was written.

    Args:
        spec: The program.
        config: The configuration.
        generates: Whether the program ends with logits.
        tasks, pooling: Uses of the program's states, as in `Model.states`.
    """

    spec: Spec
    config: ModelConfig
    generates: bool = True
    tasks: tuple[str, ...] = ()
    pooling: str = "last"


def open_checkpoint(files: ModelFiles, hf_overrides: Overrides | None = None) -> _core.Checkpoint:
    """Opens a model's files, with the packed weights that its configuration names joined.

    Args:
        files: The model's files and its config.json.
        hf_overrides: As of `load`.

    Returns:
        The tensors.

    Raises:
        CheckpointError: a file is malformed.
    """
    from .. import _core

    scheme = quantized.scheme_of(_overridden(dict(files.config), hf_overrides)) if files.kind != "gguf" else ""
    return _core.Checkpoint([str(path) for path in files.weights], scheme=scheme)


def load(
    files: ModelFiles,
    checkpoint: _core.Checkpoint | None,
    *,
    hf_overrides: Overrides | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    takes_images: bool = True,
    program: str | None = None,
    model_impl: str = "auto",
) -> Compiled:
    """Writes the program of a model.

    Args:
        files: The model's files and its config.json.
        checkpoint: The checkpoint's tensors; None for dummy weights: no shape is checked.
        hf_overrides: Fields that replace those of the configuration, or a function from the old configuration to the new one.
        max_model_len: Longest sequence to serve, in tokens; None: the model's own limit.
        quantization, kv_cache_dtype, program, model_impl: As in EngineConfig.
        takes_images: Whether the program has the model's towers.

    Returns:
        The program and the configuration.

    Raises:
        UnsupportedError: the architecture, or a field of its configuration, is not supported.
        CheckpointError: a field or a tensor is missing, of the wrong type or shape, or has no place in the model.
    """
    file = str(files.weights[0]) if files.weights else str(files.directory)
    tensors = None if checkpoint is None else checkpoint.tensors()
    if files.kind == "gguf":
        if checkpoint is None:
            raise UnsupportedError("load_format='dummy' needs a config.json, a GGUF file has none; give a directory")
        raw, source, unused = gguf.read(checkpoint.metadata, tensors or {}, checkpoint.read_float32, file)
    else:
        raw, source, unused = dict(files.config), Source(), ()
    where = file if source.is_gguf else f"{files.directory}/config.json"
    raw = _overridden(raw, hf_overrides)
    scales = quantized.check(raw, checkpoint, where)
    if quantization in METHODS:
        quantized.require(raw, quantization, where)
        quantization = None
    if source.is_gguf and (program is not None or model_impl == "transformers"):
        raise UnsupportedError("program and model_impl='transformers' need a config.json; a GGUF file has none")
    found = _architecture(files, raw, where, program, model_impl)
    config = ModelConfig(found.fields(raw), where, max_model_len)
    if found.texts:
        config.processor = _processor_of(files)
    model = Model(config, tensors, source, file)
    if not found.build.__module__.startswith(f"{__name__}."):
        code = getattr(found.build, "__code__", None)
        model.function = f"{code.co_filename if code else found.build.__module__}: {getattr(found.build, '__name__', '')}"
    model.scheme, model.orders = quantized.method_of(raw), {} if checkpoint is None else _orders(checkpoint)
    if checkpoint is not None and kv_cache_dtype.startswith("fp8"):
        model.cache_scales = cache_scales.read(raw.get("quantization_config"), checkpoint, where)
    found.build(config, model)
    model.cache_scales.finish()
    spec = model.finish((*found.ignore, *unused, *scales))
    types = quantized.type_of(raw, where) if checkpoint is None and quantization is None else None
    if quantization is not None:
        quantise.mark(spec, tensors, quantization, quantized.method_of(raw))
    elif types is not None:
        quantise.mark_dummies(spec, types)
    config.dtype = "quantized" if quantization or types else _stored_dtype(spec, tensors, config)
    if spec.get("towers") and not takes_images:
        towers.leave_out(spec)
    return Compiled(spec, config, model.generates, model.tasks, model.pooling)


def _processor_of(files: ModelFiles) -> Mapping[str, Any]:
    """The fields of a model's image processor; empty if there are none."""
    from ..vision import processors

    found = None if files.directory is None else processors.stored(files.directory, files.config)
    return found[1] if found else {}


def _architecture(files: ModelFiles, raw: Raw, where: str, program: str | None, model_impl: str) -> registry.Architecture:
    """The function of an architecture, or the converted program of a class that only transformers knows."""
    name = ModelConfig(raw, where).architecture
    if program is None and model_impl != "transformers" and (found := registry.lookup(name)) is not None:
        logger.info("%s: the function of %s", name, found.build.__module__)
        return found
    if files.kind == "gguf":
        raise registry.unknown(name)
    if model_impl == "llmpy":
        raise registry.unknown(name, "model_impl='llmpy' leaves transformers' classes aside.")
    from .. import export

    own = None if files.directory is None else files.directory / export.FILE
    if program is not None:
        return export.opened(program, raw)
    return export.opened(own, raw) if model_impl == "auto" and own is not None and own.is_file() else export.find(raw, where)


def _orders(checkpoint: _core.Checkpoint) -> dict[str, np.ndarray]:
    """The columns' order of the tensors whose columns the core sorts."""
    orders = {name: np.frombuffer(checkpoint.column_order(name), np.uint32) for name in checkpoint.tensors()}
    return {name: order.astype(np.float32) for name, order in orders.items() if order.size}


def _overridden(raw: Raw, overrides: Overrides | None) -> Raw:
    """Applies the user's changes to the configuration."""
    if overrides is None:
        return raw
    if not callable(overrides):
        return {**raw, **overrides}
    changed = overrides(raw)
    if not isinstance(changed, Mapping):
        raise ConfigError(
            f"hf_overrides must return the configuration as a dict, got {type(changed).__name__}.",
            option="hf_overrides",
        )
    return dict(changed)


def _stored_dtype(spec: Spec, tensors: Tensors | None, config: ModelConfig) -> str:
    """The dtype in which most elements of matrices are stored; "quantized" if any matrix is quantized."""
    if tensors is None:
        given = str(config.raw.get("dtype") or config.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if given not in _DTYPES:
            raise UnsupportedError(f"{config.file}: dtype {given!r} is not supported; known: {', '.join(_DTYPES)}")
        return _DTYPES[given]
    elements: Counter[str] = Counter()
    for weight in spec["weights"]:
        if weight["kind"] == "matrix":
            for part in weight["parts"]:
                elements[_DTYPES.get(tensors[part.source][0].lower(), "quantized")] += part.rows * weight["cols"]
    return "quantized" if "quantized" in elements else elements.most_common(1)[0][0]
