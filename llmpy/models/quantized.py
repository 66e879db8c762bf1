"""Which schemes of `quantization_config` load, and the checks of their tensors (docs/use/quantization.md)."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NoReturn

from ..errors import ConfigError, UnsupportedError
from . import cache_scales, packed, tables
from .config import Raw
from .packed import FLOATS, Options, fail
from .program import Reader, Tensors

BLOCK = 128
"""Rows and columns of a weight that share one scale."""
GROUPS = (-1, 32, 64, 128, 256, 512, 1024)
"""Columns of a row that share one scale; -1: all."""

_SCALES = ("_scale_inv", "_scale")
_OF_INPUTS = (".input_scale", ".activation_scale", ".input_zero_point", ".input_scale_ub")
"""Endings of static scales of activations. They are checked and not used: activations are rounded less, or not at all."""
_FORMATS = {"float-quantized": "float", "naive-quantized": "float", "pack-quantized": "packed", "int-quantized": "int"}
_STRATEGIES = {
    "float": ("tensor", "channel", "group", "block"),
    "packed": ("channel", "group"),
    "int": ("tensor", "channel", "group"),
}
_NUMBERS = {"float": ("float", (8,)), "packed": ("int", (4, 8)), "int": ("int", (8,))}


def method_of(raw: Raw) -> str:
    """The `quant_method` of a configuration; "" for none."""
    scheme = raw.get("quantization_config")
    return str(scheme.get("quant_method") or "") if isinstance(scheme, Mapping) else ""


def scheme_of(raw: Raw) -> str:
    """The scheme by which the core joins packed tensors; "" for none."""
    scheme = raw.get("quantization_config")
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else None
    if method == "gptq" and isinstance(scheme, Mapping):
        return "gptq_v2" if scheme.get("checkpoint_format") == "gptq_v2" else "gptq"
    return method if method in ("awq", "compressed-tensors", "squeezellm") else ""


def check(raw: Raw, reader: Reader | None, source: str) -> tuple[str, ...]:
    """Checks the quantisation scheme of a configuration and the tensors that the scheme stores.

    Args:
        raw: The configuration.
        reader: The checkpoint; None: there are no tensors to check.
        source: The configuration's file, for messages.

    Returns:
        Patterns of names of scales and packed numbers, which are no weights of the model.

    Raises:
        UnsupportedError: the scheme, or one of its options, is not supported.
        CheckpointError: a quantised weight has no scale, or a scale of another shape, or a scale has no weight.
    """
    scheme = raw.get("quantization_config")
    if not scheme:
        return ()
    method = scheme.get("quant_method", scheme) if isinstance(scheme, Mapping) else scheme
    if method == "mxfp4" and str(raw.get("architectures")).startswith("['GptOss"):
        return ()  # the checkpoint's reader joins blocks and scales
    if not isinstance(scheme, Mapping) or not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        raise UnsupportedError(
            f"{source}: quantization_config with quant_method {method!r} is not supported; {known} and GGUF files are"
        )
    where = f"{source}: quantization_config ({method})"
    _METHODS[method](scheme, where)
    if reader is None:
        return ()
    if method == "bitsandbytes":
        tables.check(reader)
        return tables.PATTERNS
    if method in ("gptq", "awq", "squeezellm"):
        return _check_columns(scheme, packed.TABLES if method == "squeezellm" else packed.COLUMNS, method, reader)
    tensors = reader.tensors()
    if method == "compressed-tensors":
        packed.check(packed.ROWS, method, lambda module: _group_of(scheme, module, where), tensors, reader.read)
    _check_scales(tensors, method)
    for name in tensors:
        if name.endswith((".input_scale", ".activation_scale")):
            cache_scales.read_scale(name, tensors, reader)
    scales = (f".weight{scale}" for scale in _SCALES)
    bare = [f"{name}{ending}" for name in tensors if _is_bare(name, tensors) for ending in _SCALES]
    return (*(f"*{ending}" for ending in (*packed.ROWS.endings, *scales, *_OF_INPUTS)), *bare, *cache_scales.PATTERNS)


def require(raw: Raw, wanted: str, source: str) -> None:
    """Checks that a configuration has the scheme that `quantization` names.

    Args:
        raw: The configuration.
        wanted: A value of `quantization` that is a `quant_method`.
        source: The configuration's file, for messages.

    Raises:
        ConfigError: it has another scheme, or none.
    """
    have = method_of(raw)
    if have != wanted:
        raise ConfigError(
            f"quantization={wanted!r} needs a checkpoint of that scheme; {source} has {have or 'no quantization_config'}. "
            "Leave quantization out.",
            option="quantization",
            value=wanted,
        )


def dummies_are_mxfp4(raw: Raw) -> bool:
    """Whether dummy weights of experts are MXFP4."""
    return method_of(raw) == "mxfp4"


def type_of(raw: Raw, source: str) -> Callable[[str], str] | None:
    """The type that the scheme of a configuration gives to a module's weight, for dummies; "": floats.

    Args:
        raw: A configuration that `check` has accepted.
        source: The configuration's file, for messages.

    Returns:
        A function from a module's name to the name of a type, or None: there is no scheme.

    Raises:
        UnsupportedError: dummies do not have the scheme's types.
    """
    scheme = raw.get("quantization_config")
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else None
    if not isinstance(scheme, Mapping) or method not in _METHODS:
        return None
    if method in ("bitsandbytes", "squeezellm"):
        raise UnsupportedError(
            f"{source}: load_format='dummy' cannot make weights of quant_method {method!r}; remove quantization_config "
            "with hf_overrides, or set quantization"
        )
    excluded = [str(each) for key in _EXCLUDED for each in scheme.get(key) or ()]
    dynamic = scheme.get("dynamic")
    excluded += [f"re:{each[2:]}" for each in (dynamic if isinstance(dynamic, Mapping) else ()) if each.startswith("-:")]

    def choose(module: str) -> str:
        if any(packed.matches(each, module) or f".{each}." in f".{module}." or fnmatchcase(module, each) for each in excluded):
            return ""
        if method in ("gptq", "awq"):
            options: Options | None = _gptq_options(scheme, module)
        else:
            options = _find_group(scheme, module) if method == "compressed-tensors" else {"type": "float"}
        if options is None:
            return ""
        if options.get("type") == "float":
            return "fp8"
        group = options.get("group_size")
        return f"int{options.get('bits')}_g{32 if group in (32, 64) else 128}"

    return choose


_EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def _refuse(where: str, option: str, value: object, wanted: str) -> NoReturn:
    raise UnsupportedError(f"{where}: {option} {value!r} is not supported; wanted {wanted}")


def _among(scheme: Options, where: str, option: str, wanted: tuple[object, ...], default: object = None) -> None:
    value = default if scheme.get(option) is None else scheme[option]
    if value not in wanted:
        _refuse(where, option, value, " or ".join(repr(each) for each in wanted))


# ---- the schemes' options


def _check_fp8(scheme: Options, where: str) -> None:
    """Options of quant_method "fp8"."""
    _among(scheme, where, "activation_scheme", ("dynamic", "static"), "dynamic")
    if scheme.get("weight_block_size") not in (None, [BLOCK, BLOCK]):
        _refuse(where, "weight_block_size", scheme["weight_block_size"], f"[{BLOCK}, {BLOCK}] or none")
    if scheme.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse(where, "fmt", scheme["fmt"], "'e4m3'")


def _check_gptq(scheme: Options, where: str) -> None:
    """Options of quant_method "gptq"; `dynamic` may change bits and group_size of some modules."""
    _among(scheme, where, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    _among(scheme, where, "is_marlin_format", (False,), False)
    dynamic = scheme.get("dynamic")
    changes = dynamic if isinstance(dynamic, Mapping) else {}
    for pattern, change in ({"": {}} | dict(changes)).items():
        if isinstance(change, Mapping) and not pattern.startswith("-:"):
            at = f"{where}: dynamic[{pattern!r}]" if pattern else where
            options = {**scheme, **change}
            _among(options, at, "bits", (4, 8))
            _among(options, at, "group_size", GROUPS)
            if options["bits"] == 8:
                _among(options, f"{at}: 8 bits", "sym", (True,), True)


def _check_awq(scheme: Options, where: str) -> None:
    """Options of quant_method "awq"."""
    _among(scheme, where, "bits", (4,))
    _among(scheme, where, "group_size", GROUPS)
    if str(scheme.get("version", "gemm")).lower() != "gemm":
        _refuse(where, "version", scheme.get("version"), "'gemm'")
    _among(scheme, where, "zero_point", (True,), True)
    _among(scheme, where, "backend", ("autoawq",), "autoawq")


def _check_squeezellm(scheme: Options, where: str) -> None:
    """Options of quant_method "squeezellm"."""
    _among(scheme, where, "wbits", (4,), scheme.get("bits"))


def _check_compressed(scheme: Options, where: str) -> None:
    """Options of quant_method "compressed-tensors"."""
    if scheme.get("format") != "mixed-precision":
        _among(scheme, where, "format", tuple(_FORMATS))
    sparsity = scheme.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        _refuse(where, "sparsity_config format", sparsity["format"], "'dense'")
    for name, group in _groups(scheme).items():
        _check_group(group, str(group.get("format") or scheme.get("format")), f"{where}: config_groups[{name!r}]")


def _groups(scheme: Options) -> dict[str, Options]:
    groups = scheme.get("config_groups")
    found = groups.items() if isinstance(groups, Mapping) else ()
    return {name: group if isinstance(group, Mapping) else {} for name, group in found}


def _check_group(group: Options, stored: str, where: str) -> None:
    if stored not in _FORMATS:
        _refuse(where, "format", stored, " or ".join(map(repr, _FORMATS)))
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    kind, bits = _NUMBERS[_FORMATS[stored]]
    if weights.get("type", "int") != kind or weights.get("num_bits") not in bits:
        wanted = f"type {kind!r}, num_bits {' or '.join(map(str, bits))} for format {stored!r}"
        _refuse(where, "weights", {key: weights.get(key) for key in ("type", "num_bits")}, wanted)
    strategies = _STRATEGIES[_FORMATS[stored]]
    if weights.get("strategy") not in strategies:
        _refuse(where, "strategy of weights", weights.get("strategy"), " or ".join(map(repr, strategies)))
    if weights.get("strategy") == "group":
        _among(weights, f"{where}: weights", "group_size", GROUPS if _FORMATS[stored] == "packed" else (BLOCK,))
    if weights.get("num_bits") == 8 and kind == "int":
        _among(weights, f"{where}: weights of 8 bits", "symmetric", (True,), True)
    if weights.get("block_structure") not in (None, [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        _refuse(where, "block_structure of weights", weights["block_structure"], f"[{BLOCK}, {BLOCK}]")


def _check_modelopt(scheme: Options, where: str) -> None:
    """Options of quant_method "modelopt": one FP8 scale a tensor."""
    inner = scheme.get("quantization")
    _among(inner if isinstance(inner, Mapping) else scheme, where, "quant_algo", ("FP8",))


_METHODS = {
    "fp8": _check_fp8, "fbgemm_fp8": _check_fp8, "modelopt": _check_modelopt, "gptq": _check_gptq,
    "bitsandbytes": tables.check_options, "awq": _check_awq, "compressed-tensors": _check_compressed,
    "squeezellm": _check_squeezellm,
}  # fmt: skip


# ---- the options of one module


def _gptq_options(scheme: Options, module: str) -> Options:
    dynamic = scheme.get("dynamic")
    for pattern, change in dynamic.items() if isinstance(dynamic, Mapping) else ():
        is_meant = packed.matches(f"re:{pattern.removeprefix('+:').removeprefix('-:')}", module)
        if is_meant and isinstance(change, Mapping) and not pattern.startswith("-:"):
            return {**scheme, **change}
    return scheme


def _find_group(scheme: Options, module: str) -> Options | None:
    """Type, bits, columns of a group and symmetry of a module: of the group that names it, or of the one for all linears."""
    groups = _groups(scheme)
    for is_class in (False, True):
        for group in groups.values():
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else ():
                is_meant = target == "Linear" if is_class else packed.matches(str(target), module)
                weights = group.get("weights")
                if is_meant and isinstance(weights, Mapping):
                    group_size = weights.get("group_size") if weights.get("strategy") == "group" else -1
                    found = {"type": weights.get("type"), "bits": weights.get("num_bits"), "group_size": group_size}
                    return {**found, "symmetric": weights.get("symmetric", True)}
    return None


def _group_of(scheme: Options, module: str, where: str) -> Options:
    """`_find_group` of a packed module."""
    found = _find_group(scheme, module)
    if found is None:
        raise UnsupportedError(f"{where}: no target of config_groups names the packed module {module}; wanted one that does")
    return found


# ---- the tensors


def _check_columns(scheme: Options, way: packed.Way, method: str, reader: Reader) -> tuple[str, ...]:
    """The tensors of GPTQ, AWQ and SqueezeLLM. Files of GPTQ may have biases of zeros for linears that have no bias."""
    tensors = reader.tensors()
    packed.check(way, method, lambda module: _gptq_options(scheme, module), tensors, reader.read)
    biases = [f"{module}.bias" for module in packed.modules_of(way, tensors)]
    empty = [name for name in biases if name in tensors and not any(reader.read(name))]
    return (*(f"*{ending}" for ending in way.endings), *empty)


def _check_scales(tensors: Tensors, method: str) -> None:
    """The reader has joined numbers and scales that fit ("fp8", "int8_g128"); finds why others did not fit."""
    unjoined = ("f8_e4m3", "int8") if method == "compressed-tensors" else ("f8_e4m3",)
    for name, (dtype, _, file) in tensors.items():
        if dtype in unjoined and (name.endswith(".weight") or f"{name}_scale" in tensors):
            _explain(name, method, tensors)
        for ending in _SCALES:
            weight = name.removesuffix(ending)
            is_packed = f"{weight}_packed" in tensors
            if name.endswith(f".weight{ending}") and not is_packed and _type_of(weight, tensors) not in _SCALED:
                _fail_scale(name, weight, file, method, tensors)


_SCALED = ("fp8", "int8_g128", "f8_e4m3", "int8")


def _is_bare(name: str, tensors: Tensors) -> bool:
    """Whether a tensor is a quantised weight without the ending .weight, as stacked experts may be."""
    return tensors[name][0] in _SCALED and not name.endswith(".weight")


def _type_of(name: str, tensors: Tensors) -> str:
    return tensors[name][0] if name in tensors else "none"


def _fail_scale(name: str, weight: str, file: str, method: str, tensors: Tensors) -> NoReturn:
    have = _type_of(weight, tensors)
    fail(name, file, f"wanted a weight {weight} of type f8_e4m3 or int8 that it scales, have {have}", method)


def _explain(name: str, method: str, tensors: Tensors) -> NoReturn:
    """Raises the error for a weight that the reader could not join with its scale."""
    kind, shape, file = tensors[name]
    if len(shape) < 2:
        fail(name, file, f"wanted 2 or 3 dimensions of {kind} weights, have {len(shape)}", method)
    if len(shape) > 3:
        packed.refuse(name, tensors, method, f"{kind} weights of {len(shape)} dimensions are not supported; wanted 2 or 3")
    endings = _SCALES if kind == "f8_e4m3" else _SCALES[1:]
    scales = [f"{name}{ending}" for ending in endings]
    found = [scale for scale in scales if scale in tensors]
    if not found:
        fail(name, file, f"wanted a tensor {' or '.join(scales)}, have none", method)
    dtype, have, file = tensors[found[0]]
    if dtype not in FLOATS:
        packed.refuse(found[0], tensors, method, f"scales of type {dtype} are not supported; wanted {', '.join(FLOATS)}")
    blocks = [*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:])]
    rows = [*shape[:-1], 1]
    groups = f"{[shape[0], blocks[-1]]}, " if len(shape) == 2 else ""
    stack = f", {[*shape[:-2], 1, shape[-1]]}, {[shape[0]]}" if len(shape) == 3 else ""
    wanted = f"{blocks}, {groups}{rows}{stack} or [1] for the weight of {list(shape)}"
    fail(found[0], file, f"wanted a shape of {wanted}, have {list(have)}", method)
