"""Which schemes of `quantization_config` load, and the checks of their tensors (docs/use/quantization.md)."""

from collections.abc import Mapping
from typing import NoReturn

from ..errors import CheckpointError, UnsupportedError
from .config import Raw
from .program import Tensors

BLOCK = 128
"""Rows and columns of a weight that share one scale."""

_SCALES = ("_scale_inv", "_scale")
_PLAIN = ("float32", "float16", "bfloat16")
_KEPT = "weights stay in FP8 and activations in float"


def check(raw: Raw, tensors: Tensors | None, source: str) -> tuple[str, ...]:
    """Checks the quantisation scheme of a configuration and the tensors that the scheme stores.

    Args:
        raw: The configuration.
        tensors: The checkpoint's tensors; None: there are none to check.
        source: The configuration's file, for messages.

    Returns:
        Patterns of names of scales, which are no weights of the model.

    Raises:
        UnsupportedError: the scheme, or one of its options, is not supported.
        CheckpointError: an FP8 weight has no scale, or a scale of another shape, or a scale has no FP8 weight.
    """
    scheme = raw.get("quantization_config")
    if not scheme:
        return ()
    method = scheme.get("quant_method", scheme) if isinstance(scheme, Mapping) else scheme
    if method == "mxfp4" and str(raw.get("architectures")).startswith("['GptOss"):
        return ()  # the checkpoint's reader joins blocks and scales
    if not isinstance(scheme, Mapping) or method not in _METHODS:
        raise UnsupportedError(
            f"{source}: quantization_config with quant_method {method!r} is not supported; fp8 and GGUF files are"
        )
    _METHODS[method](scheme, f"{source}: quantization_config ({method})")
    if tensors is not None:
        _check_tensors(tensors)
    return tuple(f"*.weight{scale}" for scale in _SCALES)


def dummies_are_mxfp4(raw: Raw, source: str) -> bool:
    """Whether dummy weights of experts are MXFP4; UnsupportedError for a scheme that dummies do not have."""
    scheme = raw.get("quantization_config")
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else scheme
    if method in _METHODS:
        raise UnsupportedError(
            f"{source}: load_format='dummy' cannot make weights of quant_method {method!r}; remove quantization_config "
            "with hf_overrides"
        )
    return bool(scheme)


def _refuse(where: str, option: str, value: object, wanted: str) -> NoReturn:
    raise UnsupportedError(f"{where}: {option} {value!r} is not supported; wanted {wanted}")


def _check_fp8(scheme: Mapping[str, object], where: str) -> None:
    """Options of quant_method "fp8"."""
    if scheme.get("activation_scheme", "dynamic") != "dynamic":
        _refuse(where, "activation_scheme", scheme["activation_scheme"], f"'dynamic': {_KEPT}")
    if scheme.get("weight_block_size") not in (None, [BLOCK, BLOCK]):
        _refuse(where, "weight_block_size", scheme["weight_block_size"], f"[{BLOCK}, {BLOCK}] or none")
    if scheme.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse(where, "fmt", scheme["fmt"], "'e4m3'")


def _check_compressed(scheme: Mapping[str, object], where: str) -> None:
    """Options of quant_method "compressed-tensors"."""
    if scheme.get("format") not in ("float-quantized", "naive-quantized"):
        _refuse(where, "format", scheme.get("format"), "'float-quantized'")
    if scheme.get("kv_cache_scheme"):
        _refuse(where, "kv_cache_scheme", scheme["kv_cache_scheme"], "null: the KV cache stays in float")
    groups = scheme.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        _check_group(group if isinstance(group, Mapping) else {}, f"{where}: config_groups[{name!r}]")


def _check_group(group: Mapping[str, object], where: str) -> None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    weights = weights if isinstance(weights, Mapping) else {}
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        _refuse(where, "weights", {key: weights.get(key) for key in ("type", "num_bits")}, "type 'float', num_bits 8")
    if weights.get("strategy") not in ("tensor", "channel", "block"):
        _refuse(where, "strategy of weights", weights.get("strategy"), "'tensor', 'channel' or 'block'")
    if weights.get("block_structure") not in (None, [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        _refuse(where, "block_structure of weights", weights["block_structure"], f"[{BLOCK}, {BLOCK}]")
    if isinstance(inputs, Mapping) and not inputs.get("dynamic"):
        _refuse(where, "dynamic of input_activations", inputs.get("dynamic"), f"true: {_KEPT}")


_METHODS = {"fp8": _check_fp8, "compressed-tensors": _check_compressed}


def _check_tensors(tensors: Tensors) -> None:
    """The reader has joined weights and scales that fit ("fp8"); finds why others did not fit."""
    for name, (dtype, shape, file) in tensors.items():
        if dtype == "f8_e4m3":
            _explain(name, shape, file, tensors)
        for ending in _SCALES:
            weight = name.removesuffix(ending)
            if name.endswith(f".weight{ending}") and tensors.get(weight, ("",))[0] not in ("fp8", "f8_e4m3"):
                have = tensors[weight][0] if weight in tensors else "none"
                _fail(name, file, f"wanted a weight {weight} of type f8_e4m3 that it scales, have {have}")
        if name.endswith(".input_scale"):
            raise UnsupportedError(
                f"tensor {name}: a static scale of activations is not supported ({_KEPT}); convert the checkpoint with "
                "dynamic activations"
            )


def _explain(name: str, shape: tuple[int, ...], file: str, tensors: Tensors) -> NoReturn:
    """Raises the error for an FP8 weight that the reader could not join with its scale."""
    if len(shape) != 2:
        raise UnsupportedError(f"tensor {name}: FP8 weights of {len(shape)} dimensions are not supported; wanted 2")
    found = [f"{name}{ending}" for ending in _SCALES if f"{name}{ending}" in tensors]
    if not found:
        _fail(name, file, f"wanted a tensor {name}_scale_inv or {name}_scale, have neither")
    dtype, have, file = tensors[found[0]]
    if dtype not in _PLAIN:
        raise UnsupportedError(f"tensor {found[0]}: scales of type {dtype} are not supported; wanted {', '.join(_PLAIN)}")
    blocks = [-(-size // BLOCK) for size in shape]
    wanted = f"{blocks}, [{shape[0]}, 1] or [1] for the weight of {list(shape)}"
    _fail(found[0], file, f"wanted a shape of {wanted}, have {list(have)}")


def _fail(name: str, file: str, why: str) -> NoReturn:
    raise CheckpointError(f"{file}: tensor {name}: {why}", file=file, tensor=name)
