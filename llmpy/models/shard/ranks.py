"""The programs of all ranks while they are written."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from math import gcd
from typing import Any

from ...errors import UnsupportedError
from ..program import Operands, Spec
from .columns import Columns, Cut, Place
from .equal import equal_operations
from .weights import Ranges, rows_of

Attributes = Callable[[int], dict[str, Any]]
"""The attributes of an operation on a rank."""

ELEMENT_BYTES = 2
"""Size of a weight's element for `replicate_bytes`: that of bfloat16."""


class Ranks:
    """Writes each operation of a program for every rank, and a gather where an operation wants all columns.

    A segment is cut, or it is whole: all ranks have all of its columns. Values of the program keep their numbers; new ones are
    appended.

    Args:
        spec: The program.
        columns: The cuts of its values.
        n_ranks: Number of ranks.
        replicate_bytes: As in `shard`.
        experts: As in `shard`.
    """

    def __init__(self, spec: Spec, columns: Columns, n_ranks: int, replicate_bytes: int, experts: str) -> None:
        self.spec, self.columns, self.n_ranks, self.replicate_bytes = spec, columns, n_ranks, replicate_bytes
        self.experts = experts
        self._is_cut: dict[Place, bool] = {}
        self._gathered: dict[Place, int] = {}
        self._own: dict[Place, int] = {}
        self._all_rows: dict[int, int] = {}
        self._rows: dict[int, list[Ranges]] = {}
        self._views: dict[int, list[int]] = defaultdict(list)  # root -> the values that are columns of it
        for number, place in enumerate(columns.places):
            self._views[place.root].append(number)
        self._specs: list[Spec] = [
            {**spec, "values": list(spec["values"]), "ops": [], "weights": list(spec["weights"]),
             "layers": list(spec["layers"]), "states": list(spec["states"])}
            for _ in range(n_ranks)
        ]  # fmt: skip

    def finish(self) -> list[Spec]:
        """The programs, with the room of every value and its columns on each rank."""
        widths = zip(*([width for width, _, _ in spec["values"]] for spec in self._specs), strict=True)
        rooms = [max(each) for each in widths]
        equal = equal_operations(self._specs)
        return [self._finished(spec, rank, rooms, equal) for rank, spec in enumerate(self._specs)]

    def _finished(self, spec: Spec, rank: int, rooms: list[int], equal: list[int]) -> Spec:
        """A rank's program; every rank computes all of a tower, by whole weights."""
        made: Spec = {**spec, "rooms": rooms, "equal": equal, "columns": self._columns_on(rank)}
        if "towers" in spec:
            made["towers"] = {name: {**tower, "weights": spec["weights"]} for name, tower in spec["towers"].items()}
        return made

    def _columns_on(self, rank: int) -> list[Ranges]:
        """The columns of the program's values that a rank has."""
        found: list[Ranges] = []
        for place in self.columns.places:
            parts = [(part, self._columns_of(part, rank)) for part in self.columns.segments_of(place)]
            found.append([(part.start - place.start + a, part.start - place.start + b) for part, (a, b) in parts])
        return found

    def emit(
        self, name: str, op: Operands, inputs: Sequence[int], attributes: Attributes | None = None, out: list[int] | None = None
    ) -> None:
        """Writes an operation for every rank.

        Args:
            name: The operation.
            op: Its operands in the whole program; weights and outputs have the same numbers on all ranks.
            inputs: Numbers of its inputs.
            attributes: A rank's attributes that differ from those of the whole program.
            out: Numbers of its outputs if they differ.
        """
        for rank, spec in enumerate(self._specs):
            given = {**op["attributes"], **(attributes(rank) if attributes else {})}
            outs = list(op["out"]) if out is None else out
            spec["ops"].append((name, {"in": list(inputs), "out": outs, "weights": list(op["weights"]), "attributes": given}))

    def emit_new(
        self, name: str, inputs: Sequence[int], out: Sequence[int], attributes: Attributes, weights: Sequence[int] = ()
    ) -> None:
        """Writes an operation that the whole program does not have."""
        self.emit(name, {"in": [], "out": list(out), "weights": list(weights), "attributes": {}}, inputs, attributes)

    def copy(self, name: str, op: Operands) -> None:
        """Writes an operation that every rank computes alone from whole values and weights."""
        self.keep(op["weights"])
        self.emit(name, op, [self.whole(value) for value in op["in"]])

    def is_cut(self, value: int) -> list[bool]:
        """Whether each segment of a value is cut, leaving gathers aside."""
        return [self._is_cut.get(segment, False) for segment in self.columns.segments(value)]

    def has_whole(self, value: int) -> bool:
        """Whether all ranks have all columns of a value, maybe by an earlier gather."""
        return self.columns.places[value] in self._gathered or not any(self.is_cut(value))

    def whole(self, value: int) -> int:
        """The number of a value with all columns; writes a gather where there is none yet."""
        place = self.columns.places[value]
        if not any(self.is_cut(value)):
            return value
        if place not in self._gathered:
            self._gathered[place] = self._gather(value, place)
        return self._gathered[place]

    def rows(self, value: int) -> int:
        """The number of a value with the rows of all ranks, each of which has rows of its own."""
        if value not in self._all_rows:
            self._all_rows[value] = self.new_root(self.columns.places[value].width)
            self.emit_new("gather", [value], [self._all_rows[value]], lambda rank: {
                "kind": "rows", "first": rank, "end": rank + 1, "by_rank": True,
            })  # fmt: skip
        return self._all_rows[value]

    def own(self, value: int) -> int:
        """The number of a value with a rank's own columns: the value itself if it is cut, else a range of the whole one."""
        segment = self.columns.segment(value)
        if self._is_cut.get(segment, False) and segment not in self._gathered:
            return value
        if segment not in self._own:
            of = self.whole(value)
            ranges = [self.own_columns(segment, rank) for rank in range(self.n_ranks)]
            self._own[segment] = self._new_value([(end - first, of, first) for first, end in ranges])
        return self._own[segment]

    def own_columns(self, segment: Place, rank: int) -> tuple[int, int]:
        """A rank's columns of a segment, from the segment's first."""
        return self._cut_of(segment).of(segment.width, rank)

    def share(self, value: int, rank: int, n: int) -> int:
        """How many of a value's n heads a rank has as its own, also if the value is whole."""
        segment = self.columns.segment(value)
        first, end = self.own_columns(segment, rank)
        return n * (end - first) // segment.width

    def count(self, value: int, rank: int, n: int) -> int:
        """How many of a value's n heads a rank has."""
        place = self.columns.places[value]
        return n * self._width(place, rank) // place.width

    def put(self, value: int, is_cut: Sequence[bool]) -> None:
        """Says which segments of an operation's output are cut; this sets the widths of the output and of its views."""
        place = self.columns.places[value]
        self._is_cut.update(zip(self.columns.segments(value), is_cut, strict=True))
        for number in self._views[place.root]:
            each, of = self.columns.places[number], self.spec["values"][number][1]
            start = 0 if of < 0 else self.columns.places[of].start
            for rank, spec in enumerate(self._specs):
                offset = self._width(Place(each.root, start, each.start), rank)
                spec["values"][number] = (self._width(each, rank), of, offset)

    def cut_like(self, weight: int, value: int) -> None:
        """Cuts a weight like a value, of which each column (or head) has equally many rows (or elements) of the weight."""
        if weight >= 0:
            place, rows = self.columns.places[value], self.spec["weights"][weight]["rows"]
            self.cut_rows(weight, [self._rows_like(place, rows, rank) for rank in range(self.n_ranks)])

    def keep(self, weights: Sequence[int]) -> None:
        """Leaves all rows of weights on each rank."""
        for weight in weights:
            if weight >= 0:
                self.cut_rows(weight, [[(0, self.spec["weights"][weight]["rows"])]] * self.n_ranks)

    def cut_rows(self, weight: int, ranges: list[Ranges]) -> None:
        """Keeps ranges of a weight's rows on each rank."""
        if self._rows.setdefault(weight, ranges) != ranges:
            name = ", ".join(part.name for part in self.spec["weights"][weight]["parts"])
            raise UnsupportedError(f"tensor_parallel_size={self.n_ranks}: operations cut {name} in different ways; set it to 1")
        for spec, own in zip(self._specs, ranges, strict=True):
            spec["weights"][weight] = rows_of(self.spec["weights"][weight], own)

    def set_layer(self, layer: int, of: Callable[[int], tuple[int, int]]) -> None:
        """Gives a layer of the cache a rank's heads and kv heads."""
        for rank, spec in enumerate(self._specs):
            spec["layers"][layer] = (*of(rank), *self.spec["layers"][layer][2:])

    def cut_state(self, state: int, value: int) -> None:
        """Cuts the pieces of a recurrent state like a value."""
        pieces, floats = self.spec["states"][state]
        for rank, spec in enumerate(self._specs):
            ranges = self._rows_like(self.columns.places[value], pieces, rank)
            spec["states"][state] = (sum(end - first for first, end in ranges), floats)

    def new_root(self, width: int) -> int:
        """A new separate value of one width on all ranks."""
        return self._new_value([(width, -1, 0)] * self.n_ranks)

    def _new_value(self, of_ranks: Sequence[tuple[int, int, int]]) -> int:
        for spec, value in zip(self._specs, of_ranks, strict=True):
            spec["values"].append(value)
        return len(self._specs[0]["values"]) - 1

    def _cut_of(self, segment: Place) -> Cut:
        cut = self.columns.cut(segment)
        if cut is None:
            raise AssertionError(f"a cut of {segment.width} columns that have fewer units than ranks")
        return cut

    def _width(self, place: Place, rank: int) -> int:
        """The columns of a place that a rank has."""
        ranges = [self._columns_of(segment, rank) for segment in self.columns.segments_of(place)]
        return sum(end - first for first, end in ranges)

    def _columns_of(self, segment: Place, rank: int) -> tuple[int, int]:
        return self.own_columns(segment, rank) if self._is_cut.get(segment, False) else (0, segment.width)

    def rows_like(self, value: int, rows: int, rank: int) -> Ranges:
        """A rank's rows of a weight that has equally many for each column of a value."""
        return self._rows_like(self.columns.places[value], rows, rank)

    def _rows_like(self, place: Place, rows: int, rank: int) -> Ranges:
        ranges: list[tuple[int, int]] = []
        for segment in self.columns.segments_of(place):
            before = segment.start - place.start
            first, end = ((before + x) * rows // place.width for x in self._columns_of(segment, rank))
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((first, end))
        return ranges

    def _gather(self, value: int, place: Place) -> int:
        """Writes a gather for each segment, into the columns of one new value."""
        segments, out = self.columns.segments_of(place), self.new_root(place.width)
        if len(segments) == 1:
            self._emit_gather(value, out, segments[0])
            return out
        for segment in segments:
            at = segment.start - place.start
            ranks = range(self.n_ranks)
            widths = [self._columns_of(segment, rank) for rank in ranks]
            offsets = [self._width(Place(place.root, place.start, segment.start), rank) for rank in ranks]
            part = self._new_value([(end - a, value, offset) for (a, end), offset in zip(widths, offsets, strict=True)])
            self._emit_gather(part, self._new_value([(segment.width, out, at)] * self.n_ranks), segment)
        return out

    def _emit_gather(self, value: int, out: int, segment: Place) -> None:
        columns = [self._columns_of(segment, rank) for rank in range(self.n_ranks)]
        unit = gcd(*chain(*columns))
        self.emit_new("gather", [value], [out], lambda rank: {"kind": "columns", "first": columns[rank][0], "unit": unit})
