"""Prints a program as an architecture function in our words: the beginning of a hand-written one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..models.blocks import ACTIVATIONS
from ..models.config import ModelConfig
from ..models.pieces import Part, pieces_of
from ..models.program import Operands, Spec, Weight

HEAD = '''"""{name}, as transformers' class was understood."""

{imports}

@architecture("{name}")
def {function}(cfg: ModelConfig, m: Model) -> None:
'''
_IMPORTS = {
    "from dataclasses import replace\n": "replace(", "import numpy as np\n": "np.", "from llmpy import architecture": "",
    "from llmpy.models import Model, ModelConfig, Rope": "Rope(", "from llmpy.models import Model, ModelConfig": "",
    "from llmpy.models.pieces import Piece": "Piece(",
}  # line -> the text that needs it
_LAYER = re.compile(r"^(.*?\.)(\d+)\.")
_ACTS = {act: name for name, act in reversed(ACTIVATIONS.items())}
_FIELDS = ("hidden_size", "intermediate_size")


def skeleton(spec: Spec, fields: dict[str, object], problem: str = "") -> str:
    """The source of an architecture function.

    Args:
        spec: A program, or its beginning.
        fields: The fields of the configuration under llmpy's names.
        problem: Where and why the conversion stopped; "": the program is complete.

    Returns:
        Python source. The function of a complete program writes the same operations.
    """
    name = spec["architecture"]
    function = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")).lower()
    writer = _Writer(spec, ModelConfig(dict(fields), "config.json"))
    body = [f"    {line}" for line in writer.lines()]
    if problem:
        body += ["    # The conversion stopped here:", f"    # {problem}", "    raise NotImplementedError"]
    text = "\n".join(body) + "\n"
    lines = [line for line, needs in _IMPORTS.items() if needs in text]
    if "Rope(" in text:
        lines.remove("from llmpy.models import Model, ModelConfig")
    return HEAD.format(name=name, function=function or "model", imports="\n".join(lines) + "\n") + text


class _Operations:
    """Writes single operations of one program."""

    def __init__(self, spec: Spec, config: ModelConfig) -> None:
        self.spec, self.config = spec, config
        self.names: dict[int, str] = {}
        self.block, self.prefix = "m", ""
        self.taken: set[str] = set()

    # ---- names of values ---------------------------------------------------------------------------------------------------

    def _views(self, value: int) -> list[int]:
        """The columns of a value that are values of their own, if they divide it in order; else the value itself."""
        own = [(start, number, width) for number, (width, of, start) in enumerate(self.spec["values"]) if of == value]
        ends = 0
        for start, _, width in sorted(own):
            if start != ends:
                return [value]
            ends += width
        read = any(value in op["in"] for _, op in self.spec["ops"])
        return [value] if read or ends != self.spec["values"][value][0] else [number for _, number, _ in sorted(own)]

    def _outputs(self, op: Operands) -> list[int]:
        return [view for out in op["out"] for view in self._views(out)]

    def _named(self, name: str, op: Operands, goes_on: Sequence[int]) -> list[str]:
        """Names for the outputs of an operation."""
        outs = self._outputs(op) if name == "linear" else op["out"][:1] if name in ("route", "experts") else op["out"]
        found = self._tensors_of(op)
        for i, out in enumerate(outs):
            base = {"rms_norm": "h", "layer_norm": "h", "attention": "a", "rope": "qk"[i % 2], "route": "routes"}.get(name, "y")
            if name == "linear" and len(found) == len(outs):
                base = re.sub(r"\W", "_", found[i].rsplit(".", 1)[-1].removesuffix("_proj")) or "y"
            self.names[out] = "x" if list(goes_on) == [out] else self._free(base)
        return [self.names[out] for out in outs]

    def _free(self, base: str) -> str:
        name, number = base, 1
        while name in self.taken:
            number += 1
            name = f"{base}{number}"
        self.taken.add(name)
        return name

    def _value(self, number: int) -> str:
        """An expression for a value."""
        if number in self.names:
            return self.names[number]
        width, of, start = self.spec["values"][number]
        return f"m.value({width}, {self._value(of)}.index, {start})"

    def _inputs(self, op: Operands) -> list[str]:
        return [self._value(value) for value in op["in"]]

    # ---- weights -----------------------------------------------------------------------------------------------------------

    def _tensors_of(self, op: Operands) -> list[str]:
        """Module names of the first weight of an operation, each once, without the layer's prefix."""
        if not op["weights"] or op["weights"][0] < 0:
            return []
        parts = self.spec["weights"][op["weights"][0]]["parts"]
        return list(dict.fromkeys(self._module(part.name) for part in parts))

    def _module(self, name: str) -> str:
        return name.removeprefix(self.prefix).removesuffix(".weight").removesuffix(".bias")

    def _size(self, width: int) -> str:
        """A width, as the configuration's field if one has it."""
        return next((f"cfg.{field}" for field in _FIELDS if self.config.raw.get(field) == width), str(width))

    def _piece(self, part: Part) -> str:
        name = part.name.removeprefix(self.prefix)
        text = f'f"{{layer.prefix}}{name}"' if self.prefix and name != part.name else f'"{name}"'
        rest = (part.rows, part.base, part.inner, part.stride, part.transposed)
        return f"Piece({text}, {tuple(part.shape)}, {', '.join(map(str, rest))})"

    def _weight(self, op: str, number: int) -> str:
        if number < 0:
            return "-1"
        weight: Weight = self.spec["weights"][number]
        if weight["values"] is not None:
            return f"m.constant({_numbers(weight['values'])})"
        pieces = f"[{', '.join(self._piece(part) for part in weight['parts'])}]"
        if weight["kind"] == "matrix":
            return f'm.matrix("{op}", {pieces}, {weight["cols"]})'
        return f'm.vector("{op}", {pieces}{_given("", weight["offset"], 0.0)})'

    # ---- operations --------------------------------------------------------------------------------------------------------

    def _raw(self, op: Operands) -> str:
        """An operation without a method that fits."""
        name = next(name for name, own in self.spec["ops"] if own is op)
        weights = ", ".join(self._weight(name, number) for number in op["weights"])
        given = "".join(f", {key}={value!r}" for key, value in op["attributes"].items())
        if name == "rope":
            return f'm.emit_pair("rope", {", ".join(self._inputs(op))}{given})'
        scratch = f", scratch={self.spec['values'][op['out'][1]][0]}" if len(op["out"]) > 1 else ""
        inputs, width = ", ".join(self._inputs(op)), self.spec["values"][op["out"][0]][0]
        return f'm.emit("{name}", [{inputs}], {width}, weights=[{weights}]{scratch}{given})'

    def _embed(self, op: Operands) -> str:
        (part,) = self.spec["weights"][op["weights"][0]]["parts"]
        given, name = op["attributes"], self._module(part.name)
        if given["source"] == "positions":
            if given["scale"] != 1 or part.shape[1] != self.config.hidden_size:
                return self._raw(op)
            return f'm.embed_positions("{name}", {part.rows}{_given("first", given["first_row"], 0)})'
        if part.rows != self.config.vocab_size:
            return self._raw(op)
        width = part.shape[1] if part.shape[1] != self.config.hidden_size else None
        return f'm.embed("{name}"{_given("scale", given["scale"], 1.0)}{_given("width", width, None)})'

    def _linear(self, op: Operands) -> str:
        parts = self.spec["weights"][op["weights"][0]]["parts"]
        widths = [self.spec["values"][out][0] for out in self._outputs(op)]
        names = [self._module(part.name) for part in parts]
        (x,) = self._inputs(op)
        bias = ", bias=True" if len(op["weights"]) > 1 else ""
        is_whole = all(part.rows == _rows(part) and part.base == 0 and not part.transposed for part in parts)
        if is_whole and len(parts) == len(widths):
            if len(parts) == 1:
                return f'{self.block}.linear({x}, "{names[0]}", {self._size(widths[0])}{bias})'
            listed = ", ".join(f'"{name}"' for name in names)
            return f"{self.block}.linear({x}, [{listed}], [{', '.join(map(self._size, widths))}]{bias})"
        first = parts[0]
        groups = first.rows // first.inner if first.stride > first.inner else 1
        wanted = [(p.base, p.inner, p.rows) for p in pieces_of(first.name, first.shape, widths, groups, first.transposed)]
        if len(set(names)) == 1 and sum(widths) == _rows(first) and wanted == [(p.base, p.inner, p.rows) for p in parts]:
            given = _given("groups", groups, 1) + _given("transposed", first.transposed, False)
            sizes = self._size(widths[0]) if len(widths) == 1 else f"[{', '.join(map(self._size, widths))}]"
            return f'{self.block}.linear({x}, "{names[0]}", {sizes}{bias}{given})'
        return self._raw(op)

    def _norm(self, kind: str, op: Operands) -> str:
        given, weights = op["attributes"], [self.spec["weights"][number] for number in op["weights"]]
        heads, width = given["n_heads"], self.spec["values"][op["in"][0]][0]
        name, own = "None", False
        if weights:
            part = weights[0]["parts"][0]
            name, own = f'"{self._module(part.name)}"', heads > 1 and weights[0]["rows"] == width
            if len(weights[0]["parts"]) > 1 or not part.name.endswith("weight") or part.rows != np.prod(part.shape):
                return self._raw(op)
        eps = "cfg.rms_norm_eps" if self.config.raw.get("rms_norm_eps") == given["eps"] else repr(given["eps"])
        extra = _given("per_head", width // heads if heads > 1 else False, False) + _given("own_weights", own, False)
        extra += _given("offset", weights[0]["offset"] if weights else 0.0, 0.0)
        if kind == "layer_norm" and len(weights) == 1:
            extra += ", bias=False"
        return f"{self.block}.{kind}({self._inputs(op)[0]}, {name}, {eps}{extra})"

    def _rms_norm(self, op: Operands) -> str:
        return self._norm("rms_norm", op)

    def _layer_norm(self, op: Operands) -> str:
        return self._norm("layer_norm", op)

    def _rope(self, op: Operands) -> str:
        given, rope = op["attributes"], self.spec["ropes"][op["attributes"]["rope"]]
        frequencies = np.frombuffer(rope["inv_freq"], np.float32)
        made = f"Rope(np.array({_numbers(rope['inv_freq'])}, np.float32)"
        made += _given("magnitude", rope["magnitude"], 1.0) + _given("interleaved", rope["interleaved"], False) + ")"
        try:
            usual = self.config.rope
            if usual.inv_freq.tobytes() == frequencies.tobytes() and usual.magnitude == rope["magnitude"]:
                changed = f"replace(cfg.rope, interleaved={rope['interleaved']})"
                made = "cfg.rope" if usual.interleaved == rope["interleaved"] else changed
        except (ValueError, NotImplementedError):  # the configuration has no rope of a known kind
            pass
        q, k = self._inputs(op)
        if given.get("is_tail") or given["head_dim"] != max(layer[2] for layer in self.spec["layers"]):
            attributes = f"head_dim={given['head_dim']}{_given('is_tail', given.get('is_tail', 0), 0)}"
            return f'm.emit_pair("rope", {q}, {k}, rope=m.rope_index({made}), {attributes})'
        return f"{self.block}.rope({q}, {k}, {made})"

    def _attention(self, op: Operands) -> str:
        given = op["attributes"]
        _, _, head_dim, window = self.spec["layers"][given["layer"]]
        extra = _given("window", 0 if given["chunk"] else window, 0) + _given("chunk", given["chunk"], 0)
        extra += _given("scale", given["scale"], head_dim**-0.5) + _given("softcap", given["softcap"], 0.0)
        if len(op["weights"]) > 1:
            sinks = self.spec["weights"][op["weights"][1]]["parts"][0].name.removeprefix(self.prefix)
            extra += f', sinks="{sinks}"'
        return f"{self.block}.attention({', '.join(self._inputs(op))}{extra})"

    def _act(self, op: Operands) -> str:
        act, (x,) = op["attributes"]["act"], self._inputs(op)
        if act in _ACTS:
            return f'{self.block}.act({x}, "{_ACTS[act]}")'
        values = self.spec["weights"][op["weights"][0]]["values"] if op["weights"] else None
        return f"{self.block}.scale({x}, {_numbers(values)})" if act == "scale" and values is not None else self._raw(op)

    def _gated(self, op: Operands) -> str:
        act, (gate, up) = op["attributes"]["act"], self._inputs(op)
        return f"{gate} * {up}" if act == "identity" else f'{self.block}.gated({gate}, {up}, "{_ACTS[act]}")'

    def _add(self, op: Operands) -> str:
        return " + ".join(self._inputs(op))

    def _route(self, op: Operands) -> str:
        weight, bias, selection = op["weights"]
        (part,), given = self.spec["weights"][weight]["parts"], op["attributes"]
        extra = f', score="{given["score"]}"' + (", bias=True" if bias >= 0 else "")
        if selection >= 0:
            extra += f', selection_bias="{self.spec["weights"][selection]["parts"][0].name.removeprefix(self.prefix)}"'
        groups = (given["n_groups"], given["chosen_groups"])
        extra += _given("groups", groups, (1, 1)) + _given("sums_two", bool(given["sums_two"]), False)
        extra += _given("normalised", bool(given["is_normalised"]), False) + _given("sum_eps", given["sum_eps"], 0.0)
        extra += _given("scale", given["scale"], 1.0)
        x = self._inputs(op)[0]
        return f'{self.block}.route({x}, "{self._module(part.name)}", {part.rows}, {given["n_chosen"]}{extra})'

    def _experts(self, op: Operands) -> str:
        given, n = op["attributes"], op["attributes"]["n_experts"]
        up, down = (self.spec["weights"][number]["parts"] for number in op["weights"][:2])
        each = len(up) // n
        is_stacked, is_interleaved = len(up[0].shape) == 3, len(up[0].shape) == 3 and each == 2
        if is_stacked:
            names = [up[0].name.removeprefix(self.prefix)]
            last = down[0].name.removeprefix(self.prefix)
        else:
            number = re.compile(r"\.0\.(?!.*\.0\.)")
            names = [number.sub(".#.", self._module(part.name)) for part in up[:each]]
            last = number.sub(".#.", self._module(down[0].name))
        stacked = ("columns" if up[0].transposed else "rows") if is_stacked else ""
        extra = f', act="{_ACTS[given["act"]]}"' + _given("form", given["form"], "gated") + _given("limit", given["limit"], 0.0)
        extra += _given("bias", len(op["weights"]) > 2, False) + _given("stacked", stacked, "")
        extra += _given("interleaved", is_interleaved, False)
        x, routes = self._inputs(op)
        listed, width = ", ".join(f'"{name}"' for name in names), self.spec["weights"][op["weights"][1]]["cols"]
        return f'{self.block}.experts({x}, {routes}, [{listed}], "{last}", {self._size(width)}{extra})'

    def _end(self, op: Operands) -> str:
        (part,), given = self.spec["weights"][op["weights"][0]]["parts"], op["attributes"]
        embeds = [(own["weights"][0], self._module(self._name_of(own))) for name, own in self.spec["ops"] if name == "embed"]
        tied = next((name for number, name in embeds if number == op["weights"][0]), embeds[0][1])
        name = "lm_head" if op["weights"][0] in [number for number, _ in embeds] else self._module(part.name)
        extra = _given("scale", given["scale"], 1.0) + _given("softcap", given["softcap"], 0.0)
        extra += ", bias=True" if len(op["weights"]) > 1 else ""
        return f'm.logits({self._inputs(op)[0]}, "{name}", tied_to="{tied}"{extra})'

    def _name_of(self, op: Operands) -> str:
        return self.spec["weights"][op["weights"][0]]["parts"][0].name


class _Writer(_Operations):
    """Writes the lines of one program."""

    def lines(self) -> Iterator[str]:
        """All lines; equal layers become a loop."""
        head_dims = {layer[2] for layer in self.spec["layers"]}
        if head_dims and head_dims != {self.config.head_dim}:
            yield f"m.head_dim = {max(head_dims)}"
        groups = list(self._groups())
        at = 0
        while at < len(groups):
            prefix, _ = groups[at]
            end = at + 1
            while prefix and end < len(groups) and groups[end][0] == prefix:
                end += 1
            if not prefix:
                yield from self._group("", groups[at][1])
            else:
                yield from self._loop(prefix, [ops for _, ops in groups[at:end]])
            at = end

    def _groups(self) -> Iterator[tuple[str, list[int]]]:
        """Operations that belong together: those of a layer with the prefix of its number, others with ""."""
        last: tuple[str, str] = ("", "")
        members: list[int] = []
        for number, (name, op) in enumerate(self.spec["ops"]):
            parts = [part.name for weight in op["weights"] if weight >= 0 for part in self.spec["weights"][weight]["parts"]]
            found = _LAYER.match(parts[0]) if parts else None
            own = (found[1], found[2]) if found else last if not parts and name != "logits" else ("", "")
            if own != last and members:
                yield last[0], members
                members = []
            last = own
            members.append(number)
        if members:
            yield last[0], members

    def _loop(self, prefix: str, layers: list[list[int]]) -> Iterator[str]:
        """Layers as a loop; unlike layers as branches of it."""
        texts: list[tuple[str, ...]] = []
        for ops in layers:
            found = _LAYER.match(self._tensors(ops)[0])
            assert found
            texts.append(tuple(self._group(found[0], ops)))
        kinds = list(dict.fromkeys(texts))
        stem, n = prefix.rstrip("."), len(layers)
        count = "cfg.num_layers" if n == self.config.raw.get("num_hidden_layers") else str(n)
        if len(kinds) == 1:
            yield f'for layer in m.layers("{stem}", {count}):'
            yield from (f"    {line}" for line in kinds[0])
            return
        yield f'for i, layer in enumerate(m.layers("{stem}", {count})):'
        for number, kind in enumerate(kinds):
            own = [i for i, text in enumerate(texts) if text == kind]
            yield f"    {'el' * (number > 0)}if i in {tuple(own)}:"
            yield from (f"        {line}" for line in kind)

    def _tensors(self, ops: Sequence[int]) -> list[str]:
        weights = [weight for op in ops for weight in self.spec["ops"][op][1]["weights"] if weight >= 0]
        return [part.name for weight in weights for part in self.spec["weights"][weight]["parts"]]

    def _group(self, prefix: str, ops: Sequence[int]) -> Iterator[str]:
        """The lines of a layer, or of operations outside of layers. The value that goes on is x."""
        self.prefix, self.block = prefix, "layer" if prefix else "m"
        self.taken = {"x", "m", "cfg", "i", "layer", "np"}
        outside = {value for op in self.spec["ops"][ops[-1] + 1 :] for value in op[1]["in"]}
        for number in ops:
            name, op = self.spec["ops"][number]
            if name == "states":
                continue
            goes_on = [value for value in self._outputs(op) if value in outside]
            text = getattr(self, f"_{name}", self._raw)(op) if name != "logits" else self._end(op)
            if name != "logits":
                text = f"{', '.join(self._named(name, op, goes_on))} = {text}"
            yield text


def _rows(part: Part) -> int:
    """Rows of a part's whole tensor."""
    return part.shape[-1] if part.transposed else part.shape[0]


def _given(name: str, value: object, usual: object) -> str:
    """An argument that differs from its default; "" if it does not."""
    return "" if value == usual else f", {name}={value!r}" if name else f", {value!r}"


def _numbers(values: bytes | None) -> str:
    """Float32 numbers as a list; one number if all are equal."""
    found: Any = np.frombuffer(values or b"", np.float32)
    shown = [float(value) for value in (found[:1] if (found == found[:1]).all() else found)]
    return repr(shown)
