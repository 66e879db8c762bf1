"""A program as plain data, and what writes it: values, operations and weights under numbers."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import numpy as np

from ..errors import CheckpointError
from .config import ModelConfig
from .pieces import Part, Piece, flat, whole
from .rope import Floats, Rope
from .source import Source

Operands = TypedDict(
    "Operands", {"in": list[int], "out": list[int], "weights": list[int], "attributes": dict[str, Any]}
)
"""Numbers of values and weights, and attributes as csrc/program/operations.def names them; one that is left out is 0, or the
first of its choices."""


class Weight(TypedDict):
    """A matrix [rows, cols] of parts below each other, or a vector of parts, or (no parts) of float32 values as bytes.

    unit_rows: the rows of the matrix are divided by their lengths once they are written.
    """

    kind: str
    rows: int
    cols: int
    parts: list[Part]
    offset: float
    values: bytes | None
    unit_rows: bool


class RopeSpec(TypedDict):
    """A rotary embedding, its float32 frequencies as bytes."""

    inv_freq: bytes
    magnitude: float
    interleaved: bool


class Spec(TypedDict):
    """A program as plain data: the argument of `_core.Model` and of `interpret.run`.

    values are (width, of, offset), of = -1 for a value of its own; layers are (n_heads, n_kv_heads, head_dim, window);
    states are (pieces, floats of one) of what a recurrent operation keeps for every sequence;
    ignored are patterns of names that a checkpoint may hold without a weight here; reordered says that the file has rows in
    another order, or other values, than the checkpoints that updates come from.
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


Tensors = Mapping[str, tuple[str, tuple[int, ...], str]]  # name -> dtype, shape, file


NEAR = 3  # names of the checkpoint that the error of a missing tensor shows

_SCALE = "b.scale(x, [factor]) multiplies a value by a number"


def kinds_of(*arguments: object) -> str:
    """The types of some arguments, for messages."""
    return f"({', '.join('a value' if isinstance(each, Value) else type(each).__name__ for each in arguments)})"


class Value:
    """Rows of activations inside a program. `a + b` adds two of equal width, `a * b` multiplies them."""

    def __init__(self, model: "Writer", index: int, width: int) -> None:
        self.model, self.index, self.width = model, index, width

    if not TYPE_CHECKING:  # which finds these by itself

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
    """The part of a `Model` that writes and checks; architecture functions rarely have need of it.

    Args:
        config: The configuration; head_dim is taken from it where a row is seen as heads.
        tensors: The checkpoint's tensors: name to (dtype, shape, file); None: shapes are not checked.
        source: Where the file has them.
        file: Path of the checkpoint, for messages.

    Attributes:
        function: File and name of an architecture function that is not the package's own; messages name it.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors | None, source: Source, file: str) -> None:
        self.config, self.head_dim = config, config.head_dim
        self._tensors, self._file = tensors, file
        self.function: str | None = None
        self.source = source
        self._ropes: dict[tuple[bytes, float, bool], int] = {}
        self._matrices: dict[tuple[Piece, ...], int] = {}
        self._embeddings: dict[str, int] = {}
        self._used: dict[str, set[int]] = {}  # tensors of the file: the first rows of their pieces
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
        }

    def leave_out(self, name: str) -> None:
        """Says that the checkpoint may hold NAME.weight and NAME.bias without use."""
        for kind in ("weight", "bias"):
            for place in self.source.places(f"{name}.{kind}"):
                self._used.setdefault(place, set())

    def constant(self, values: Sequence[float] | Floats) -> int:
        """A vector of values that are no tensor of the checkpoint, as a weight of `emit`: slopes of ALiBi, for example."""
        weight: Weight = {
            "kind": "vector", "rows": len(values), "cols": 1, "parts": [], "offset": 0.0,
            "values": np.asarray(values, np.float32).tobytes(), "unit_rows": False,
        }  # fmt: skip
        self.spec["weights"].append(weight)
        return len(self.spec["weights"]) - 1

    def ignore(self, *patterns: str) -> None:
        """Patterns of tensors that the checkpoint may hold without use, as those of `architecture`."""
        self._ignored += patterns

    def refuse(self, op: str, name: str, problem: str) -> NoReturn:
        """CheckpointError: the architecture function and the configuration do not fit together."""
        where = f"{op} {name}".strip(" .")
        place = self.config.file if self.function is None else f"{self.function} (for {self.config.file})"
        raise CheckpointError(f"{place}: {where} of {self.config.architecture}: {problem}", file=self._file)

    def expect(self, op: str, name: str, *values: Value) -> None:
        """Refuses what is no value of this program."""
        for value in values:
            if not isinstance(value, Value):
                self.refuse(op, name, f"wanted a value, have {type(value).__name__}")
            if value.model is not self:
                self.refuse(op, name, "the value belongs to another program")

    def heads(self, op: str, name: str, x: Value) -> int:
        """How many heads a row is."""
        if x.width % self.head_dim:
            self.refuse(op, name, f"wanted a row of heads of {self.head_dim}, have {x.width}")
        return x.width // self.head_dim

    def value(self, width: int, of: int = -1, offset: int = 0) -> Value:
        """A new value, or columns of another."""
        self.spec["values"].append((width, of, offset))
        return Value(self, len(self.spec["values"]) - 1, width)

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
        """Writes an operation with one output, and with so many columns of scratch; attributes as in operations.def."""
        out = self.value(width)
        operands: Operands = {
            "in": [x.index for x in inputs],
            "out": [out.index, self.value(scratch).index] if scratch else [out.index],
            "weights": list(weights),
            "attributes": attributes,
        }
        self.spec["ops"].append((op, operands))
        return out

    def emit_pair(self, op: str, a: Value, b: Value, **attributes: float | str) -> tuple[Value, Value]:
        """Writes an operation that gives both of its inputs anew."""
        outs = self.value(a.width), self.value(b.width)
        operands: Operands = {
            "in": [a.index, b.index],
            "out": [out.index for out in outs],
            "weights": [],
            "attributes": attributes,
        }
        self.spec["ops"].append((op, operands))
        return outs

    def state_layer(self, pieces: int, floats: int) -> int:
        """The number of a new recurrent state: so many pieces for every sequence, each of so many floats that stay together."""
        self.spec["states"].append((pieces, floats))
        return len(self.spec["states"]) - 1

    def rope_index(self, rope: Rope) -> int:
        """The number of a rope; equal ones are one."""
        key = (rope.inv_freq.tobytes(), float(rope.magnitude), rope.interleaved)
        if key not in self._ropes:
            self._ropes[key] = len(self.spec["ropes"])
            self.spec["ropes"].append({"inv_freq": key[0], "magnitude": key[1], "interleaved": key[2]})
        return self._ropes[key]

    def matrix(self, op: str, pieces: Sequence[Piece | tuple[str, int]], cols: int) -> int:
        """A weight of pieces, or modules NAME.weight [rows, cols], below each other; the same ones twice are one weight."""
        key = tuple(p if isinstance(p, Piece) else whole(f"{p[0]}.weight", p[1], cols) for p in pieces)
        if key not in self._matrices:
            self._matrices[key] = len(self.spec["weights"])
            self._add("matrix", self._parts(op, key), cols)
        return self._matrices[key]

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape that a tensor has in the checkpoint; None: there is none."""
        places = self.source.places(name)
        found = (self._tensors or {}).get(places[0]) if len(places) == 1 else None
        return None if found is None else tuple(found[1])

    def n_dims(self, name: str, default: int = 2) -> int:
        """How many dimensions a tensor has in the checkpoint, or so many where there is none."""
        shape = self.shape_of(name)
        return default if shape is None else len(shape)

    def scalar_shape(self, name: str, n_dims: int) -> tuple[int, ...]:
        """The shape of one element as the checkpoint has it: [1] or []; without a checkpoint of so many dimensions."""
        shape = self.shape_of(name)
        return (1,) * (n_dims if shape is None else len(shape))

    def vector(
        self, op: str, pieces: Sequence[Piece | tuple[str, int] | tuple[str, tuple[int, ...]]], offset: float = 0.0
    ) -> int:
        """A weight of pieces, whole tensors NAME [n], or of any other shape, whose elements are taken as they lie."""
        whole_ones = [p if isinstance(p, Piece) else flat(*p) for p in pieces]
        values = [self.source.values(piece.name) for piece in whole_ones]
        if any(each is not None for each in values):
            return self._remade(op, whole_ones, [each for each in values if each is not None])
        if offset and self.source.has_offsets:
            offset, self.spec["reordered"] = 0.0, True
        self._add("vector", self._parts(op, whole_ones), 1, offset)
        return len(self.spec["weights"]) - 1

    def flat(self, op: str, name: str, shape: tuple[int, ...]) -> int:
        """A weight of one tensor of any shape, element after element; `name` is the tensor's whole name."""
        return self.vector(op, [(name, shape)])

    def _add(self, kind: str, parts: list[Part], cols: int, offset: float = 0.0) -> None:
        rows = sum(part.rows for part in parts)
        weight: Weight = {
            "kind": kind, "rows": rows, "cols": cols, "parts": parts, "offset": offset, "values": None, "unit_rows": False,
        }  # fmt: skip
        self.spec["weights"].append(weight)

    def _remade(self, op: str, pieces: Sequence[Piece], values: Sequence[Floats]) -> int:
        """A vector of tensors that the file keeps as something else."""
        made = np.concatenate(values)
        if made.size != sum(piece.rows for piece in pieces):
            self.refuse(op, pieces[0].name, f"wanted {sum(piece.rows for piece in pieces)} values, have {made.size}")
        for piece in pieces:
            self._used.update((place, {0}) for place in self.source.places(piece.name))
        self.spec["reordered"] = True
        return self.constant(made)

    def _parts(self, op: str, pieces: Sequence[Piece]) -> list[Part]:
        """The parts of a weight of pieces."""
        found = [each for piece in pieces for each in self.source.split(piece)]
        self.spec["reordered"] |= found != list(pieces)
        return [self._part(op, each) for each in found]

    def _part(self, op: str, piece: Piece) -> Part:
        """A part of a weight, its tensor's shape compared with the checkpoint's."""
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
        """Where a piece lies: a tensor of the file, its shape, and the first row in it."""
        places = self.source.places(piece.name)
        if not places:
            raise CheckpointError(
                f"{self._file}: GGUF has no name for tensor {piece.name}", file=self._file, tensor=piece.name
            )
        if self._tensors is None:
            return places[0], piece.shape, piece.base
        wanted, base = piece.shape, piece.base
        found = [self._found(op, place, wanted) for place in places]
        if len(places) == 1:
            return places[0], self._checked(op, places[0], wanted, found[0]), base
        self.spec["reordered"] = True
        first, number = 0, 0
        while number + 1 < len(places) and base >= first + found[number][0]:
            first, number = first + found[number][0], number + 1
        rows = found[number][0] if sum(have[0] for have in found) == wanted[0] else wanted[0]
        shape = self._checked(op, places[number], (rows, *wanted[1:]), found[number])
        if base - first + piece.rows > rows:
            self.refuse(op, piece.name, f"wanted rows of one of {', '.join(places)}")
        return places[number], shape, base - first

    def _found(self, op: str, source: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor that must be there."""
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
        """What to say of a tensor that is not there: the nearest unused names that are, and what can be changed."""
        from difflib import get_close_matches

        free = [name for name in self._tensors or {} if name not in self._used]
        near = get_close_matches(source, free, n=NEAR, cutoff=0.7)
        named = f"; nearest in the checkpoint: {', '.join(near)}" if near else ""
        knob = "; hf_overrides can correct the configuration" if self.function is None else f"; {self.function} asks for it"
        return f"{named}{knob}"

    def _checked(self, op: str, source: str, wanted: tuple[int, ...], have: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file, if it is the one that is wanted; GGUF files have ones, or lack them, where they like."""
        is_same = [n for n in have if n != 1] == [n for n in wanted if n != 1] if self.source.is_gguf else have == wanted
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
        """The complete program; CheckpointError for a tensor that it does not use and no pattern ignores."""
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
