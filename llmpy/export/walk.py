"""Walks a traced graph and writes the program that computes the same. Every node gets one of the values of columns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..models.blocks import Model
from ..models.program import Value
from . import columns as kinds
from .columns import WIDEST, Columns, Lazy, Parameter, Symbol, columns_of
from .names import Names
from .refusal import refuse

LINEARS = ("linear", "addmm", "mm", "matmul")
PENDING = 1 << 30  # numbers of linears whose rows are not chosen yet

Rule = Callable[..., object]
RULES: dict[str, Rule] = {}
"""Name of an aten or llmpy operation without its overload -> function (walk, node, *args, **kwargs) -> value."""

FORCES: dict[type, Callable[[Any, Any, Any], Columns]] = {}
"""Class of an unfinished formula -> function (walk, node, formula) that writes it as it is."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the function for operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Pending:
    """A linear whose output columns are not all read, or not in order: the reader decides which rows it has."""

    def __init__(self, x: Value, weight: Parameter, bias: Parameter | None, node: Any) -> None:
        self.x, self.weight, self.bias, self.node = x, weight, bias, node

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        rows, cols = self.weight.shape[::-1] if self.weight.is_transposed else self.weight.shape
        return rows, cols


class Walk:
    """The walk over one graph.

    Args:
        exported: The traced graph.
        model: The module that was traced.
        m: The program to write.
        names: The places of the module's tensors in checkpoints.
    """

    def __init__(self, exported: Any, model: Any, m: Model, names: Names) -> None:
        self.exported, self.model, self.m, self.names = exported, model, m, names
        self.values: dict[Any, object] = {}
        self.pending: list[Pending] = []
        self.parameters: dict[str, Parameter] = {}  # those that the graph reads
        self.all_parameters = {name: Parameter(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        self.routers: dict[Any, str] = {}
        self._made: dict[tuple[object, ...], Value] = {}
        self._forced: dict[int, tuple[Lazy, Columns]] = {}
        self.paths: dict[int, str] = {}  # operation -> path of its module

    # ---- the graph ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Writes the program; Refusal names the first node that has no operation."""
        graph = self.exported.graph
        (output,) = (node for node in graph.nodes if node.op == "output")
        last = output.args[0][0]
        live = needed([last])
        for node in graph.nodes:
            if node.op == "call_function" and node in live and str(node.target).startswith("llmpy.experts"):
                self._hide_routing(node)
        self._read_placeholders(graph)
        for node in graph.nodes:
            if node.op == "call_function" and node in live and node not in self.values:
                self.values[node] = self._call(node)
        from .ends import write_logits

        write_logits(self, last, self.values[last])

    def _hide_routing(self, node: Any) -> None:
        """Leaves the nodes between a router's linear and its experts to the rule for experts."""
        ends = list(node.args[1:3])
        between = needed(ends, LINEARS)
        found = [each for each in between if name_of(each.target) in LINEARS]
        if len(found) != 1:
            refuse(node, f"wanted one linear before the choice of experts, have {len(found)}")
        self.routers[found[0]] = node.args[3]
        for each in between - set(found):
            if each.op == "call_function":
                self.values[each] = None

    def _read_placeholders(self, graph: Any) -> None:
        signature = self.exported.graph_signature
        saved = {name: tensor for name, tensor in self.model.state_dict().items()}
        buffers = dict(self.model.named_buffers())
        constants = self.exported.constants
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            full = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
            name = str(full or "").removeprefix("model.")
            if full is None and node.name in signature.inputs_to_lifted_tensor_constants:
                self.values[node] = constants[signature.inputs_to_lifted_tensor_constants[node.name]]
            elif full is None:
                self.values[node] = kinds.Ones() if "mask" in node.name else node.name
            elif name in saved and saved[name].is_floating_point():
                name = self.names.tied.get(name, name)
                self.values[node] = self.parameters[name] = Parameter(name, tuple(saved[name].shape))
            else:
                self.values[node] = buffers[name].detach()

    def _call(self, node: Any) -> object:
        """The value of one node."""
        name = name_of(node.target)
        args = tuple(self._argument(each) for each in node.args)
        given = {name: self._argument(each) for name, each in node.kwargs.items()}
        result = node.meta.get("val")
        if name == "_assert_tensor_metadata" or result is None:
            return None
        if not isinstance(result, torch.Tensor | tuple | list):
            return kinds.SYMBOL
        if all(map(_is_plain, [*args, *given.values()])) and not name.startswith("llmpy."):
            return node.target(*args, **given)
        if name not in RULES:
            refuse(node, "the vocabulary has no such operation")
        before = len(self.m.spec["ops"])
        value = RULES[name](self, node, *args, **given)
        path = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())[-1][0]
        self.paths.update(dict.fromkeys(range(before, len(self.m.spec["ops"])), path.removeprefix("model.")))
        if isinstance(value, Columns) and value.shape != self.shape(node):
            refuse(node, f"wanted columns of shape {list(self.shape(node))}, have {list(value.shape)}")
        return value

    def _argument(self, given: Any) -> Any:
        if isinstance(given, torch.fx.Node):
            return self.values[given]
        if isinstance(given, list | tuple):
            return [self._argument(each) for each in given]
        return given

    def shape(self, node: Any) -> tuple[int, ...]:
        """The shape of a node's tensor, with 1 for every size that depends on the number of rows."""
        return tuple(size if isinstance(size, int) else 1 for size in node.meta["val"].shape)

    # ---- values of the program ---------------------------------------------------------------------------------------------

    def force(self, node: Any, x: object) -> Columns:
        """The columns of a value; an unfinished formula is written as it is."""
        if isinstance(x, Columns):
            return x
        if not isinstance(x, Lazy):
            refuse(node, f"wanted rows of activations, have {told(x)}")
        if id(x) not in self._forced:
            if type(x) not in FORCES:
                refuse(node, f"a formula that no operation completes: {told(x)}")
            self._forced[id(x)] = (x, FORCES[type(x)](self, node, x))
        return self._forced[id(x)][1]

    def value(self, node: Any, x: object) -> Value:
        """A value of the program that has these columns, in order."""
        found = self.force(node, x)
        if found.is_turned:
            from .attention import settle

            found = settle(self, node, found)
        if len(found.terms) != 1:
            refuse(node, "a sum of terms that no operation has")
        term = found.terms[0]
        source, factor = term.source.ravel(), term.factor.ravel()
        if (source < 0).any():
            refuse(node, "columns without a value")
        key = ("columns", source.tobytes(), factor.tobytes())
        if key not in self._made:
            whole = self._gathered(node, source)
            self._made[key] = self.m.scale(whole, factor.tolist() if (factor != factor[0]).any() else [float(factor[0])])
        return self._made[key]

    def _gathered(self, node: Any, source: Any) -> Value:
        """The columns of one value, in any order."""
        index, column = source // WIDEST, source % WIDEST
        if (index != index[0]).any():
            refuse(node, "columns of several values side by side")
        first = int(index[0])
        if first >= PENDING:
            if (made := self._rows_of(node, self.pending[first - PENDING], column)) is not None:
                return made
            return self.take(self._whole(node, self.pending[first - PENDING]), column)
        width = self.m.spec["values"][first][0]
        whole = Value(self.m, first, width)
        if np.array_equal(column, column[0] + np.arange(column.size)):
            return whole if column.size == width else self.m.value(column.size, first, int(column[0]))
        return self.take(whole, column)

    def take(self, x: Value, column: Any) -> Value:
        """Columns of a value in another order."""
        key = ("take", x.index, column.tobytes())
        if key not in self._made:
            weight = self.m.constant(column.astype(np.float32))
            self._made[key] = self.m.emit("take", [x], int(column.size), weights=[weight])
        return self._made[key]

    def _whole(self, node: Any, linear: Pending) -> Value:
        made = self._rows_of(node, linear, np.arange(linear.sizes[0]))
        assert made is not None
        return made

    def _rows_of(self, node: Any, linear: Pending, rows: Any) -> Value | None:
        """The linear with these rows of its matrix; None if the rows are in an order that a matrix cannot have."""
        key = ("linear", id(linear), rows.tobytes())
        if key in self._made:
            return self._made[key]
        if (np.diff(rows) < 1).any():
            return None
        weight, bias = linear.weight, linear.bias
        pieces = self.names.matrix(weight, rows)
        if pieces is None:
            return None
        weights = [self.m.matrix("linear", pieces, linear.sizes[1])]
        if bias is not None:
            weights.append(self.vector(node, "linear", bias, rows))
        self._made[key] = self.m.emit("linear", [linear.x], len(rows), weights=weights)
        return self._made[key]

    def vector(self, node: Any, op: str, x: Parameter, elements: Any = None) -> int:
        """A weight of elements of a parameter."""
        if x.factor != 1:
            refuse(node, f"{x.name} times {x.factor:g}: weights have an offset but no factor")
        pieces = self.names.vector(x, np.arange(x.size) if elements is None else elements)
        return self.m.vector(op, pieces, x.offset)

    def linear(self, node: Any, x: object, weight: object, bias: object = None) -> Columns:
        """The columns of a linear, which is written when they are read."""
        if not isinstance(weight, Parameter) or not (bias is None or isinstance(bias, Parameter)):
            refuse(node, f"wanted a matrix of the checkpoint, have {told(weight)}, {told(bias)}")
        if weight.offset or weight.factor != 1 or len(weight.shape) != 2:
            refuse(node, f"{weight.name}: a matrix with an offset or a factor, or of {len(weight.shape)} dimensions")
        linear = Pending(self.value(node, x), weight, bias, node)
        if linear.sizes[1] != linear.x.width:
            refuse(node, f"{weight.name}: wanted {linear.x.width} columns, have {linear.sizes[1]}")
        self.pending.append(linear)
        return columns_of(PENDING + len(self.pending) - 1, self.shape(node))


def name_of(target: Any) -> str:
    """The name of an operation in RULES: "view", "getitem", "llmpy.attention"."""
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    space, name = target._schema.name.split("::")
    return name if space == "aten" else f"{space}.{name}"


def told(x: object) -> str:
    """A value in words."""
    if isinstance(x, Parameter):
        return f"the tensor {x.name}"
    if isinstance(x, torch.Tensor):
        return f"a constant {list(x.shape)}"
    return type(x).__name__.lower() if not isinstance(x, int | float | str) else repr(x)


def _is_plain(given: object) -> bool:
    """Whether an argument is a number or a tensor that is known."""
    if isinstance(given, list | tuple):
        return all(map(_is_plain, given))
    if isinstance(given, Symbol | Columns | Lazy | Parameter | str):
        return False
    plain = (int, float, bool, type(None), torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return isinstance(given, plain)


def needed(ends: Iterable[Any], stops: Sequence[str] = ()) -> set[Any]:
    """The nodes from which the ends are computed; what operations of the names `stops` read is not followed."""
    found: set[Any] = set()
    todo = [node for node in ends if isinstance(node, torch.fx.Node)]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if name_of(node.target) not in stops:
            todo += node.all_input_nodes[: 1 if name_of(node.target) == "type_as" else None]
    return found
