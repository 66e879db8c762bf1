"""`llmpy inspect`: describes a model from its configuration and the headers of its files, without reading weights."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from .common import model_path

if TYPE_CHECKING:
    from pathlib import Path

    from ..models import Compiled, Spec

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def run(chosen: Namespace) -> int:
    """Prints the description of the model."""
    from .. import hub, models

    files = hub.resolve(model_path(chosen), weights=not chosen.config_only)
    checkpoint = None if chosen.config_only else models.open_checkpoint(files)
    compiled = models.load(files, checkpoint, max_model_len=chosen.max_model_len)
    spec, tensors = compiled.spec, checkpoint.tensors() if checkpoint is not None else {}
    print(f"{files.name}: {spec['architecture']}, {compiled.config.dtype}, {files.directory or files.weights[0]}")
    _print_configuration(compiled)
    print("program")
    for line in program(spec, chosen.all):
        print(f"  {line}")
    for name, tower in spec.get("towers", {}).items():
        print(f"tower {name}, token {tower['feature_id']}")
        for line in program(tower, chosen.all):
            print(f"  {line}")
    _print_weights(spec, tensors, files.weights, compiled.config.dtype, chosen.weights)
    _print_cache(compiled)
    return 0


def _print_configuration(compiled: Compiled) -> None:
    """Prints the fields of the configuration that are numbers, texts or bools."""
    from ..models import gguf

    raw = compiled.config.raw
    if all(name in raw for name in gguf.NORM_EPS):  # a GGUF file's number, copied to the names of all families
        raw = {name: value for name, value in raw.items() if name not in gguf.NORM_EPS[1:]}
    fields = {name: value for name, value in raw.items() if isinstance(value, str | int | float)}
    width = max(map(len, fields), default=0)
    print("configuration")
    for name, value in sorted(fields.items()):
        print(f"  {name:{width}}  {value}")


# ---- the program -------------------------------------------------------------------------------------------------------


def program(spec: Spec, shows_all: bool = False) -> Iterator[str]:
    """A line for each operation: number, name, input and output widths, attributes, tensors.

    Args:
        spec: The program.
        shows_all: Show every layer; otherwise layers equal to the one before are only counted.
    """
    blocks: list[tuple[str, list[str], list[str]]] = []  # layer, its operations without numbers, its operations with numbers
    layer = ""
    for number, (kind, op) in enumerate(spec["ops"]):
        tensors = _tensors(spec, op)
        found = _NUMBER.search(tensors[0]) if tensors else None
        own = tensors[0][: found.end()] if found and tensors else layer if not tensors else ""
        if not blocks or own != layer:
            layer = own
            blocks.append((layer, [], []))
        text = _operation(spec, kind, op, layer)
        blocks[-1][1].append(text)
        blocks[-1][2].append(f"{number:4}  {text}")
    start = 0
    while start < len(blocks):
        end = start + 1
        while not shows_all and end < len(blocks) and blocks[start][0] and blocks[end][1] == blocks[start][1]:
            end += 1
        if end - start > 1:
            yield f"{blocks[start][0]} to {_last(blocks[end - 1][0])}, {end - start} alike:"
        elif blocks[start][0]:
            yield f"{blocks[start][0]}:"
        yield from blocks[start][2]
        start = end


def _tensors(spec: Spec, op: Any) -> list[str]:
    """Names of all tensors of an operation."""
    return [part[0] for weight in op["weights"] if weight >= 0 for part in spec["weights"][weight]["parts"]]


def _last(layer: str) -> str:
    return layer.rsplit(".", 1)[-1]


def _operation(spec: Spec, kind: str, op: Any, layer: str) -> str:
    """One operation as text. Numbers that differ between equal layers (cache layers, ropes) are left out or written out."""
    widths = " ".join(str(spec["values"][value][0]) for value in op["in"])
    outs = " ".join(str(spec["values"][value][0]) for value in op["out"])
    outs = str(spec["vocab_size"]) if kind == "logits" else outs
    told = _told(spec, kind, op)
    names = [tensor.removeprefix(f"{layer}.") for tensor in _tensors(spec, op)]
    shown = ", ".join(dict.fromkeys(names)) if len(names) <= 4 else f"{names[0]} ... ({len(names)} tensors)"
    return f"{kind:16} {widths:>18} -> {outs:12} {told:34} {shown}".rstrip()


def _told(spec: Spec, kind: str, op: Any) -> str:
    """The attributes of an operation as text."""
    given = op["attributes"]
    if kind == "attention":
        layer = spec["layers"][given["layer"]]
        window = f", window {layer[3]}" if layer[3] else ""
        cap = f", cap {given['softcap']:g}" if given["softcap"] else ""
        return f"{layer[0]}/{layer[1]} heads of {layer[2]}{window}{cap}"
    if kind == "rope":
        rope = spec["ropes"][given["rope"]]
        style = "pairs" if rope["interleaved"] else "halves"
        return f"rope {given['rope']}, {len(rope['inv_freq']) // 2} of {given['head_dim']} in {style}"
    if kind in ("gated", "act"):
        return f"{given['act']} {given['limit']:g}" if "limit" in given else str(given["act"])
    if kind in ("rms_norm", "layer_norm"):
        heads = f"{given['n_heads']} heads, " if given["n_heads"] > 1 else ""
        return f"{heads}eps {given['eps']:g}"
    if kind == "logits":
        scale, cap = f"factor {given['scale']:g}", f"cap {given['softcap']:g}"
        return ", ".join([scale] * (given["scale"] != 1) + [cap] * (given["softcap"] != 0))
    places = ("state", "layer")  # numbers in the cache, which differ between layers
    told = {name: value if isinstance(value, str) else f"{value:g}" for name, value in given.items() if name not in places}
    return " ".join(f"{name} {value}" for name, value in told.items())


# ---- weights and cache -------------------------------------------------------------------------------------------------


def _print_weights(spec: Spec, tensors: Any, files: Sequence[Path], dtype: str, shows_all: bool) -> None:
    """Prints the number, size and types of the weights."""
    parts = [(weight, part) for weight in spec["weights"] for part in weight["parts"]]
    n_values = sum(part[2] * weight["cols"] for weight, part in parts)
    kinds: Counter[str] = Counter()
    for weight, part in parts:
        kinds[tensors[part[1]][0] if part[1] in tensors else dtype] += part[2] * weight["cols"]
    by_type = ", ".join(f"{kind} {n:,}" for kind, n in kinds.most_common())
    print(f"weights: {len(parts)} tensors, {n_values:,} parameters: {by_type}")
    for weight, part in parts if shows_all else []:
        stored = tensors.get(part[1])
        shape = list(stored[1]) if stored else [part[2], *([weight["cols"]] if weight["kind"] == "matrix" else [])]
        print(f"  {part[0]}  {shape}  {stored[0] if stored else dtype}")
    if tensors:
        print(f"  {_size(sum(path.stat().st_size for path in files))} in {len(files)} file{'s' * (len(files) > 1)}")
    else:
        print(f"  {_size(sum(n * ITEM_BYTES[kind] for kind, n in kinds.items()))}")


def _print_cache(compiled: Compiled) -> None:
    """Prints the cache groups (layers with equal caches), and the bytes per token and per sequence in the model's dtype."""
    spec, item = compiled.spec, ITEM_BYTES.get(compiled.config.dtype, 2)
    length, groups = compiled.config.max_position_embeddings, Counter(tuple(layer) for layer in spec["layers"])
    per_token = longest = 0
    print(f"cache groups: {len(groups) + bool(spec.get('states'))}")
    for layer, n in groups.items():
        kv_heads, head_dim, window = layer[1], layer[2], layer[3]
        bytes_per_token = n * 2 * kv_heads * head_dim * item if kv_heads else n * head_dim * item
        per_token += 0 if window else bytes_per_token
        longest += bytes_per_token * min(length, window or length)
        kept = f"the last {window} tokens" if window else "all tokens"
        what = f"{kv_heads} heads of {head_dim}" if kv_heads else f"{head_dim} latent values"
        print(f"  {n} layers keep {kept}: {what}, {_size(bytes_per_token)} a token")
    states = sum(prod(state) for state in spec.get("states", ())) * 4
    if states:
        print(f"  {len(spec['states'])} recurrent states: {_size(states)} a sequence")
    print(f"  a token more             {_size(per_token)}")
    print(f"  a sequence of {length:,} tokens: {_size(longest + states)}")


def _size(n_bytes: int) -> str:
    units: Sequence[str] = ("bytes", "KiB", "MiB", "GiB", "TiB")
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {units[unit]}" if unit == 0 else f"{value:,.2f} {units[unit]}"
