"""A program as plain data, and the class that writes it: numbered values, operations and weights."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, NotRequired, Protocol, TypedDict

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from .config import ModelConfig
from .pieces import Part, Piece, flat, whole
from .rope import Floats, Rope
from .source import Order, Source

Operands = TypedDict("Operands", {"in": list[int], "out": list[int], "weights": list[int], "attributes": dict[str, Any]})
"""Numbers of values and weights, and attributes by their names in csrc/program/operations.def. A missing attribute is 0, or
the first of its choices."""


_PACKED = ("int4_g", "int8_g", "nf4", "fp4", "table4")
"""How the names of types start that packed numbers of a checkpoint get."""


class Weight(TypedDict):
    """A matrix [rows, cols] of stacked parts, a vector of parts, or (no parts) a vector of float32 values as bytes.

    unit_rows: the rows of the matrix are divided by their lengths after they are written.
    quantised: type of a matrix that is quantised at load; absent: as in the file.
    lent: number of this weight in the program of the model that lends it; the matrix has no parts then.
    """

    kind: str
    rows: int
    cols: int
    parts: list[Part]
    offset: float
    values: bytes | None
    unit_rows: bool
    quantised: NotRequired[str]
    lent: NotRequired[int]


class RopeSpec(TypedDict):
    """A rotary embedding; its float32 frequencies are bytes, and so are the int32 axes whose positions turn them."""

    inv_freq: bytes
    magnitude: float
    interleaved: bool
    axes: NotRequired[bytes]


class Spec(TypedDict):
    """A program as plain data: the argument of `_core.Model` and of `interpret.run`.

    | Field | Meaning |
    |---|---|
    | values | (width, of, offset): columns `offset...` of value `of`; of = -1: a separate value |
    | layers | (n_heads, n_kv_heads, head_dim, window) |
    | states | (pieces, floats per piece): the state that a recurrent operation keeps for every sequence |
    | ignored | patterns of checkpoint names that have no weight in the program |
    | reordered | the file has rows in another order, or other values, than the checkpoints that updates come from |
    | moved | by name: the order of a matrix in the file, where it is not the checkpoint's |
    | towers | programs that make features of images, by name; their weights are those of this program |
    | rows | of a tower's program alone: for each value the number of its list of rows, and how many of its rows are one |
    | feature_id | of a tower's program alone: the token that stands for a feature |
    | rooms | of a rank's program alone: the largest width of each value over all ranks |
    | equal | of a rank's program alone: 1 for each operation whose outputs are equal on all ranks, else 0 |
    | columns | of a rank's program alone: ranges of columns that its values have of the whole program's values |
    """

    values: list[tuple[int, int, int]]
    ops: list[tuple[str, Operands]]
    weights: list[Weight]
    ropes: list[RopeSpec]
    layers: list[tuple[int, int, int, int]]
    states: list[tuple[int, int]]
    vocab_size: int
    architecture: str
    ignored: list[str]
    reordered: bool
    moved: dict[str, Order]
    towers: NotRequired[dict[str, "Spec"]]
    rows: NotRequired[list[tuple[int, int]]]
    feature_id: NotRequired[int]
    rooms: NotRequired[list[int]]
    equal: NotRequired[list[int]]
    columns: NotRequired[Sequence[Sequence[tuple[int, int]]]]


Tensors = Mapping[str, tuple[str, tuple[int, ...], str]]  # name -> dtype, shape, file
Rows = tuple[int, int]
"""Of a tower's value: a list of rows (0: all rows of a piece, 1: patches, 2: features), and how many of them are one row."""


class Reader(Protocol):
    """What the checks of a scheme need of a checkpoint."""

    def tensors(self) -> Tensors:
        """Types, shapes and files by name."""

    def read(self, name: str, /) -> bytes:
        """A tensor's bytes."""

    def read_float32(self, name: str, /) -> bytes:
        """A tensor's values as float32."""


MOST_DIMS = 5  # of a tensor
NEAR = 3  # most names in the error for a missing tensor

_SCALE = "b.scale(x, [factor]) multiplies a value by a number"


def kinds_of(*arguments: object) -> str:
    """The types of some arguments, for messages."""
    return f"({', '.join('a value' if isinstance(each, Value) else type(each).__name__ for each in arguments)})"


class Value:
    """Rows of activations inside a program. `a + b` adds two of equal width, `a * b` multiplies them."""

    def __init__(self, model: "Writer", index: int, width: int, rows: Rows = (0, 1)) -> None:
        self.model, self.index, self.width, self.rows = model, index, width, rows

    if not TYPE_CHECKING:  # a type checker must report these itself

        def __rmul__(self, other):
            self.model.refuse("product", "", f"wanted x * y of two values, have {kinds_of(other, self)}; {_SCALE}")

        def __radd__(self, other):
            self.model.refuse("add", "", f"wanted x + y of two values, have {kinds_of(other, self)}")

        def __sub__(self, other):
            self.model.refuse("difference", "", "the vocabulary has x + y and x * y; x - y is x + b.scale(y, [-1.0])")

        def __truediv__(self, other):
            self.model.refuse("quotient", "", f"the vocabulary has x + y and x * y; {_SCALE}")

        __rsub__, __rtruediv__ = __sub__, __truediv__

    def __add__(self, other: "Value") -> "Value":
        self.model.expect("add", "", self, other)
        if other.width != self.width:
            self.model.refuse("add", "", f"wanted equal widths, have {self.width} and {other.width}")
        return self.model.emit("add", [self, other], self.width)

    def __mul__(self, other: "Value") -> "Value":
        if isinstance(other, int | float):
            self.model.refuse("product", "", f"wanted x * y of two values, have {kinds_of(self, other)}; {_SCALE}")
        self.model.expect("product", "", self, other)
        if other.width != self.width:
            self.model.refuse("product", "", f"wanted equal widths, have {self.width} and {other.width}")
        return self.model.emit("gated", [self, other], self.width, act="identity")


class Writer:
    """Base class of `Model` that writes and checks the program; architecture functions rarely call it directly.

    Args:
        config: The configuration; its head_dim is the size of a head.
        tensors: The checkpoint's tensors: name to (dtype, shape, file); None: shapes are not checked.
        source: Maps tensor names to places in the file.
        file: Path of the checkpoint, for messages.

        Attributes:
            function: File and name of an architecture function from outside the package, for messages.
            renames: Prefixes of names in the function -> prefixes in the checkpoint.
            scheme: The checkpoint's `quant_method`, for messages.
            orders: For tensors whose columns the core sorts when it reads them: the number in the file of each column.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors | None, source: Source, file: str) -> None:
        self.config, self.head_dim = config, config.head_dim
        self._tensors, self._file = tensors, file
        self.function: str | None = None
        self.source = source
        self._ropes: dict[tuple[bytes, float, bool, bytes], int] = {}
        self.scheme = ""
        self.orders: Mapping[str, Floats] = {}
        self._matrices: dict[tuple[Piece, ...], int] = {}
        self._taken: dict[tuple[int, bytes], Value] = {}
        self._embeddings: dict[str, int] = {}
        self.renames: tuple[tuple[str, str], ...] = ()
        self._used: dict[str, set[int]] = {}  # tensor of the file -> first rows of the pieces used so far
        self._ignored: list[str] = []
        self.spec: Spec = {
            "values": [],
            "ops": [],
            "weights": [],
            "ropes": [],
            "layers": [],
            "states": [],
            "vocab_size": config.vocab_size,
            "architecture": config.architecture,
            "ignored": [],
            "reordered": False,
            "moved": {},
        }

    def named(self, name: str) -> str:
        """The name in the checkpoint of a tensor or module (`renames`)."""
        prefix, target = next(((old, new) for old, new in self.renames if name.startswith(old)), ("", ""))
        return target + name.removeprefix(prefix)

    def leave_out(self, name: str) -> None:
        """Permits NAME.weight and NAME.bias in the checkpoint although the program does not use them."""
        for kind in ("weight", "bias"):
            for place in self.source.places(self.named(f"{name}.{kind}")):
                self._used.setdefault(place, set())

    def constant(self, values: Sequence[float] | Floats) -> int:
        """A weight for `emit` with given values instead of a checkpoint's tensor: ALiBi slopes, for example."""
        weight: Weight = {
            "kind": "vector", "rows": len(values), "cols": 1, "parts": [], "offset": 0.0,
            "values": np.asarray(values, np.float32).tobytes(), "unit_rows": False,
        }  # fmt: skip
        self.spec["weights"].append(weight)
        return len(self.spec["weights"]) - 1

    def ignore(self, *patterns: str) -> None:
        """Adds patterns of tensors that the checkpoint may hold although the program does not use them (as `architecture`)."""
        self._ignored += patterns

    def refuse(self, op: str, name: str, problem: str) -> NoReturn:
        """Raises CheckpointError: the architecture function does not fit the configuration."""
        where = f"{op} {name}".strip(" .")
        place = self.config.file if self.function is None else f"{self.function} (for {self.config.file})"
        raise CheckpointError(f"{place}: {where} of {self.config.architecture}: {problem}", file=self._file)

    def expect(self, op: str, name: str, *values: Value) -> None:
        """Raises unless all arguments are values of this program."""
        for value in values:
            if not isinstance(value, Value):
                self.refuse(op, name, f"wanted a value, have {type(value).__name__}")
            if value.model is not self:
                self.refuse(op, name, "the value belongs to another program")

    def heads(self, op: str, name: str, x: Value) -> int:
        """The number of heads in a row."""
        if x.width % self.head_dim:
            self.refuse(op, name, f"wanted a row of heads of {self.head_dim}, have {x.width}")
        return x.width // self.head_dim

    def value(self, width: int, of: int = -1, offset: int = 0, rows: Rows = (0, 1)) -> Value:
        """A new value, or columns of another."""
        self.spec["values"].append((width, of, offset))
        if "rows" in self.spec:
            self.spec["rows"].append(rows if of < 0 else self.spec["rows"][of])
            rows = self.spec["rows"][-1]
        return Value(self, len(self.spec["values"]) - 1, width, rows)

    def emit(
        self,
        op: str,
        inputs: Sequence[Value],
        width: int,
        *,
        weights: Sequence[int] = (),
        scratch: int = 0,
        **attributes: float | str,
    ) -> Value:
        """Writes an operation with one output and `scratch` columns of scratch memory; attributes as in operations.def."""
        rows = [x.rows for x in inputs] or [(0, 1)]
        if len(set(rows)) > 1:
            self.refuse(op, "", f"wanted inputs with as many rows, have {rows}")
        return self.emit_rows(op, inputs, width, rows[0], weights, scratch, attributes)

    def emit_rows(
        self,
        op: str,
        inputs: Sequence[Value],
        width: int,
        rows: Rows,
        weights: Sequence[int],
        scratch: int,
        attributes: Mapping[str, float | str],
    ) -> Value:
        """As `emit`, for an operation of a tower whose output has other rows than its inputs."""
        out = self.value(width, rows=rows)
        operands: Operands = {
            "in": [x.index for x in inputs],
            "out": [out.index, self.value(scratch).index] if scratch else [out.index],
            "weights": list(weights),
            "attributes": dict(attributes),
        }
        self.spec["ops"].append((op, operands))
        return out

    def emit_pair(self, op: str, a: Value, b: Value, **attributes: float | str) -> tuple[Value, Value]:
        """Writes an operation with two outputs that have the widths of its two inputs."""
        outs = self.value(a.width, rows=a.rows), self.value(b.width, rows=b.rows)
        operands: Operands = {
            "in": [a.index, b.index],
            "out": [out.index for out in outs],
            "weights": [],
            "attributes": attributes,
        }
        self.spec["ops"].append((op, operands))
        return outs

    def state_layer(self, pieces: int, floats: int) -> int:
        """Adds a recurrent state and returns its number: `pieces` pieces per sequence, each of `floats` contiguous floats."""
        self.spec["states"].append((pieces, floats))
        return len(self.spec["states"]) - 1

    def rope_index(self, rope: Rope) -> int:
        """The number of a rope; equal ropes share a number."""
        if rope.axes is not None and "rows" not in self.spec and not self.spec.get("towers"):
            raise UnsupportedError(f"{self.config.file}: mrope_section is not supported by {self.config.architecture}")
        axes = b"" if rope.axes is None else rope.axes.astype(np.int32).tobytes()
        key = (rope.inv_freq.tobytes(), float(rope.magnitude), rope.interleaved, axes)
        if key not in self._ropes:
            self._ropes[key] = len(self.spec["ropes"])
            self.spec["ropes"].append({"inv_freq": key[0], "magnitude": key[1], "interleaved": key[2]})
            if axes:
                self.spec["ropes"][-1]["axes"] = axes
        return self._ropes[key]

    def move(self, name: str, order: Order) -> None:
        """Notes the order of a matrix in the file, where it is not the checkpoint's."""
        self.spec["moved"][name], self.spec["reordered"] = order, True

    def take(self, x: Value, order: Floats | None) -> Value:
        """The columns of x in the order of a matrix's columns (`orders`); None: x itself."""
        if order is None:
            return x
        key = (x.index, order.tobytes())
        if key not in self._taken:
            self._taken[key] = self.emit("take", [x], x.width, weights=[self.constant(order)])
        return self._taken[key]

    def matrix(self, op: str, pieces: Sequence[Piece | tuple[str, int]], cols: int, *, order: Floats | None = None) -> int:
        """A matrix of stacked pieces, or of modules NAME.weight [rows, cols]; a repeated call returns the same weight.

        order: the columns' order of all pieces, as `take` has brought the input into it; None: the file's.
        """
        wholes = [p if isinstance(p, Piece) else whole(f"{p[0]}.weight", p[1], cols) for p in pieces]
        key = tuple(piece._replace(name=self.named(piece.name)) for piece in wholes)
        for piece in key:
            if order is None and piece.name in self.orders:
                file = (self._tensors or {})[piece.name][2]
                raise UnsupportedError(
                    f"{file}: tensor {piece.name} ({self.scheme}): wanted groups of adjacent columns in {op}, have others by "
                    "act-order (desc_act or actorder); use a checkpoint with desc_act=false or actorder 'weight', or GGUF"
                )
            if order is not None:
                self.move(piece.name, Order(columns=order.astype(np.uint32).tobytes()))
        if key not in self._matrices:
            self._matrices[key] = len(self.spec["weights"])
            self._add("matrix", self._parts(op, key), cols)
        return self._matrices[key]

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in the checkpoint; None: the checkpoint does not have it."""
        found = self._find(name)
        return None if found is None else tuple(found[1])

    def is_packed(self, name: str) -> bool:
        """Whether a tensor of the checkpoint was joined from packed numbers, scales and zeros, which have rows of outputs."""
        found = self._find(name)
        return found is not None and found[0].startswith(_PACKED)

    def _find(self, name: str) -> tuple[str, tuple[int, ...], str] | None:
        """Type, shape and file of a tensor in the checkpoint."""
        places = self.source.places(self.named(name))
        return (self._tensors or {}).get(places[0]) if len(places) == 1 else None

    def n_dims(self, name: str, default: int = 2) -> int:
        """The number of dimensions of a tensor in the checkpoint; `default` if the checkpoint does not have it."""
        shape = self.shape_of(name)
        return default if shape is None else len(shape)

    def scalar_shape(self, name: str, n_dims: int) -> tuple[int, ...]:
        """The shape of a one-element tensor in the checkpoint: [1] or []; without a checkpoint it has `n_dims` dimensions."""
        shape = self.shape_of(name)
        return (1,) * (n_dims if shape is None else len(shape))

    def vector(
        self, op: str, pieces: Sequence[Piece | tuple[str, int] | tuple[str, tuple[int, ...]]], offset: float = 0.0
    ) -> int:
        """A vector of pieces, or of whole tensors NAME of any shape, with their elements in memory order."""
        given = [p if isinstance(p, Piece) else flat(*p) for p in pieces]
        whole_ones = [piece._replace(name=self.named(piece.name)) for piece in given]
        values = [self.source.values(piece.name) for piece in whole_ones]
        if any(each is not None for each in values):
            return self._remade(op, whole_ones, [each for each in values if each is not None])
        if offset and self.source.has_offsets:
            offset, self.spec["reordered"] = 0.0, True
        self._add("vector", self._parts(op, whole_ones), 1, offset)
        return len(self.spec["weights"]) - 1

    def flat(self, op: str, name: str, shape: tuple[int, ...]) -> int:
        """A vector of one tensor of any shape, with its elements in memory order; `name` is the tensor's whole name."""
        return self.vector(op, [(name, shape)])

    def _add(self, kind: str, parts: list[Part], cols: int, offset: float = 0.0) -> None:
        rows = sum(part.rows for part in parts)
        weight: Weight = {
            "kind": kind, "rows": rows, "cols": cols, "parts": parts, "offset": offset, "values": None, "unit_rows": False,
        }  # fmt: skip
        self.spec["weights"].append(weight)

    def _remade(self, op: str, pieces: Sequence[Piece], values: Sequence[Floats]) -> int:
        """A vector of tensors that the file stores in another form, such as metadata."""
        made = np.concatenate(values)
        if made.size != sum(piece.rows for piece in pieces):
            self.refuse(op, pieces[0].name, f"wanted {sum(piece.rows for piece in pieces)} values, have {made.size}")
        for piece in pieces:
            self._used.update((place, {0}) for place in self.source.places(piece.name))
        self.spec["reordered"] = True
        return self.constant(made)

    def _parts(self, op: str, pieces: Sequence[Piece]) -> list[Part]:
        """The parts for a weight's pieces."""
        found: list[Piece] = []
        for piece in pieces:
            found += self.source.split(piece)
            order = self.source.order(piece.name)
            if order is not None:
                self.move(piece.name, order)
        return [self._part(op, each) for each in found]

    def _part(self, op: str, piece: Piece) -> Part:
        """The part for a piece; checks the tensor's shape against the checkpoint."""
        if min([*piece.shape, piece.rows]) < 1:
            self.refuse(op, piece.name, f"wanted sizes of at least 1, have {list(piece.shape)}")
        source, shape, base = self._place(op, piece)
        inner = piece.rows if piece.inner is None else piece.inner
        stride = max(piece.stride, inner)
        if base in self._used.setdefault(source, set()):
            self.refuse(op, piece.name, "the tensor is used already")
        self._used[source].add(base)
        return Part(piece.name, source, piece.rows, shape, base, inner, stride, piece.transposed, piece.constant)

    def _place(self, op: str, piece: Piece) -> tuple[str, tuple[int, ...], int]:
        """The place of a piece: a tensor of the file, the tensor's shape, and the first row."""
        places = self.source.places(piece.name)
        if not places:
            raise CheckpointError(f"{self._file}: GGUF has no name for tensor {piece.name}", file=self._file, tensor=piece.name)
        if self._tensors is None:
            return places[0], piece.shape, piece.base
        wanted, base = piece.shape, piece.base
        found = [self._found(op, place, wanted) for place in places]
        if len(places) == 1:
            return places[0], self._checked(op, places[0], wanted, found[0]), base
        self.move(piece.name, Order(is_other=True))
        first, number = 0, 0
        while number + 1 < len(places) and base >= first + found[number][0]:
            first, number = first + found[number][0], number + 1
        rows = found[number][0] if sum(have[0] for have in found) == wanted[0] else wanted[0]
        shape = self._checked(op, places[number], (rows, *wanted[1:]), found[number])
        if base - first + piece.rows > rows:
            self.refuse(op, piece.name, f"wanted rows of one of {', '.join(places)}")
        return places[number], shape, base - first

    def _found(self, op: str, source: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a required tensor."""
        tensors = self._tensors or {}
        if source not in tensors:
            raise CheckpointError(
                f"{self._file}: tensor {source}, needed by {op} of {self.config.architecture}: "
                f"wanted {list(wanted)}, have nothing{self._instead(source)}",
                file=self._file,
                tensor=source,
            )
        return tuple(tensors[source][1])

    def _instead(self, source: str) -> str:
        """End of the error for a missing tensor: the nearest unused names, and the knob."""
        from difflib import get_close_matches

        free = [name for name in self._tensors or {} if name not in self._used]
        near = get_close_matches(source, free, n=NEAR, cutoff=0.7)
        named = f"; nearest in the checkpoint: {', '.join(near)}" if near else ""
        knob = "; hf_overrides can correct the configuration" if self.function is None else f"; {self.function} asks for it"
        return f"{named}{knob}"

    def _checked(self, op: str, source: str, wanted: tuple[int, ...], have: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file if it is the wanted one. For GGUF files dimensions of size 1 do not matter.

        The columns of a matrix may be several dimensions: those of a convolution that patches are multiplied with.
        """
        is_same = [n for n in have if n != 1] == [n for n in wanted if n != 1] if self.source.is_gguf else have == wanted
        if not is_same and len(wanted) == 2 and 3 <= len(have) <= MOST_DIMS:
            is_same = (have[0], prod(have[1:])) == wanted
        if not is_same:
            file = (self._tensors or {})[source][2]
            raise CheckpointError(
                f"{file}: tensor {source}, used by {op} of {self.config.architecture}: "
                f"wanted {list(wanted)}, have {list(have)}; hf_overrides can correct the configuration",
                file=file,
                tensor=source,
            )
        return have

    def finish(self, ignore: Sequence[str]) -> Spec:
        """Completes the program; raises CheckpointError for a tensor that the program does not use and no pattern ignores."""
        for tower in self.spec.get("towers", {}).values():
            if not tower["ops"] or tower["ops"][-1][0] != "features":
                self.refuse("tower", "", "wanted v.features(...) as its last operation")
        last = self.spec["ops"][-1][0] if self.spec["ops"] else "nothing"
        if last != "states":
            self.refuse("logits", "", f"wanted m.logits(...) or m.states(...) as the last operation, have {last}")
        ignore = (*ignore, *self._ignored)
        for source, (_, shape, file) in (self._tensors or {}).items():
            if source not in self._used and not any(fnmatchcase(source, pattern) for pattern in ignore):
                raise CheckpointError(
                    f"{file}: tensor {source} {list(shape)} has no place in {self.config.architecture}; "
                    "hf_overrides can correct the configuration, ignore= of the architecture can name it",
                    file=file,
                    tensor=source,
                )
        self.spec["ignored"] += ignore
        return self.spec
