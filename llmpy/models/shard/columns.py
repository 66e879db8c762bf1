"""Where the columns of values may be cut, and which columns a rank owns."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import NamedTuple, NoReturn

from ...errors import ConfigError, UnsupportedError
from ..program import Spec

BLOCKS = (64, 16)
"""Rows of a matrix that stay together where no operation asks for heads; MXFP4 packs rows by 8. The first that gives every
rank a block is taken."""


class Place(NamedTuple):
    """Columns start to end of a separate value. Views are resolved to the value that holds their columns."""

    root: int
    start: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.start


class Cut(NamedTuple):
    """A row of equal units, and the range of units of each rank."""

    units: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, length: int, rank: int) -> tuple[int, int]:
        """A rank's range of `length` columns (or rows), which form the units."""
        first, end = self.ranges[rank]
        if first * length % self.units or end * length % self.units:
            raise AssertionError(f"a cut of {length} columns within one of {self.units} units")
        return first * length // self.units, end * length // self.units


def even(units: int, n_ranks: int) -> Cut:
    """Shares that differ by at most one unit; the first ranks have the larger ones."""
    return Cut(units, tuple(_shares(0, units, n_ranks)))


def blocks(length: int, n_ranks: int) -> Cut | None:
    """A cut at multiples of a block; None: there are fewer blocks than ranks."""
    for size in BLOCKS:
        n_blocks = -(-length // size)
        if n_blocks >= n_ranks:
            return Cut(length, tuple((a * size, min(b * size, length)) for a, b in _shares(0, n_blocks, n_ranks)))
    return None


def _shares(first: int, end: int, n: int) -> list[tuple[int, int]]:
    each, more = divmod(end - first, n)
    starts = [first + i * each + min(i, more) for i in range(n + 1)]
    return list(pairwise(starts))


class Asked(NamedTuple):
    """Values that an operation wants (and gives) by head.

    Attributes:
        what: The heads in words, for the error.
        many: Values of n_many heads; n_many 0: values of channels, which are cut by blocks.
        few: Values of n_few heads or groups, each of which serves adjacent heads of `many`.
        has_copies: Whether ranks may hold copies of one head of `few` if there are fewer of them than ranks.
    """

    what: str
    many: tuple[int, ...]
    n_many: int
    few: tuple[int, ...] = ()
    n_few: int = 0
    has_copies: bool = False


@dataclass
class Links:
    """What operations say of the columns that they read and write, by numbers of values.

    Args:
        n_ranks: Number of ranks.
        experts: As in `shard`.

    Attributes:
        alike: Pairs of values of equal width: a rank has the same columns of both.
        heads: (value, n): a cut must not divide one of the value's n equal parts.
        asked: Values that must be cut by head.
        counted: (what, n): units of weights alone, such as experts, of which every rank must have one.
    """

    n_ranks: int
    experts: str
    alike: list[tuple[int, int]] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    counted: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class _Group:
    """Segments that are cut alike.

    Attributes:
        units: Number of equal units; 0: there are none, cut by blocks.
        what: The heads that an operation asks for; "": no operation asks for heads.
        shared: Not 0: the units are heads that belong to so many shared heads; ranks with a copy of one share its heads.
        copied: Not 0: the units are so many shared heads: every rank has one, and several ranks may have a copy of the same.
    """

    width: int
    units: int = 0
    what: str = ""
    shared: int = 0
    copied: int = 0


class Columns:
    """The segments of all values, and their cuts.

    A segment is a range of a separate value's columns that is cut as one.

    Args:
        spec: The program.
        links: What its operations say of columns.
        n_ranks: Number of ranks.

    Raises:
        ConfigError: a rank would have no head, group or block of channels.
        UnsupportedError: operations ask for cuts that exclude each other.
    """

    def __init__(self, spec: Spec, links: Links, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self.places = _places(spec)
        self._bounds = self._refined(links.alike)
        self._parents: dict[Place, Place] = {}
        self._groups: dict[Place, _Group] = {}
        for a, b in links.alike:
            for pair in zip(self.segments(a), self.segments(b), strict=True):
                self._join(*pair)
        for value, n in links.heads:
            self._keep_heads(value, n)
        for asked in links.asked:
            self._ask(asked)
        self._check(links.counted)

    def segments(self, value: int) -> list[Place]:
        """The segments of a value's columns, in order."""
        return self.segments_of(self.places[value])

    def segment(self, value: int) -> Place:
        """The one segment of a value that an operation takes by head."""
        found = self.segments(value)
        if len(found) > 1:
            self._refuse(f"an operation takes heads of value {value}, of which {len(found)} ranges are cut apart")
        return found[0]

    def segments_of(self, place: Place) -> list[Place]:
        """The segments of columns that begin and end where segments do."""
        inside = [bound for bound in self._bounds[place.root] if place.start <= bound <= place.end]
        return [Place(place.root, a, b) for a, b in pairwise(inside)]

    def is_asked(self, segment: Place) -> bool:
        """Whether an operation asks for the segment by head."""
        return bool(self._group(segment).what)

    def cut(self, segment: Place) -> Cut | None:
        """How a segment is cut; None: it has fewer units than there are ranks."""
        group, n = self._group(segment), self._n_ranks
        if group.copied:
            heads = [_shared_head(rank, group.copied, n) for rank in range(n)]
            return Cut(group.copied, tuple((head, head + 1) for head in heads))
        if group.shared:
            return _shared(group.units, group.shared, n)
        if group.units:
            return even(group.units, n) if group.units >= n else None
        return blocks(segment.width, n)

    def _refined(self, alike: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
        """The bounds of segments: the ends of views, carried over to all values that are cut alike."""
        bounds: dict[int, set[int]] = defaultdict(set)
        for place in self.places:
            bounds[place.root] |= {place.start, place.end}
        is_done = False
        while not is_done:
            is_done = True
            for a, b in (*alike, *reversed(alike)):
                one, other = self.places[a], self.places[b]
                for source, target in ((one, other), (other, one)):
                    inside = {x for x in bounds[source.root] if source.start < x < source.end}
                    carried = {x - source.start + target.start for x in inside}
                    is_done &= carried <= bounds[target.root]
                    bounds[target.root] |= carried
        return {root: sorted(each) for root, each in bounds.items()}

    def _root(self, segment: Place) -> Place:
        parent = self._parents.setdefault(segment, segment)
        while parent != self._parents[parent]:
            parent = self._parents[parent]
        self._parents[segment] = parent
        return parent

    def _group(self, segment: Place) -> _Group:
        return self._groups.setdefault(self._root(segment), _Group(segment.width))

    def _join(self, a: Place, b: Place) -> None:
        one, other, root = self._group(a), self._group(b), self._root(a)
        if one is other:
            return
        self._parents[self._root(b)] = root
        shared, copied = max(one.shared, other.shared), max(one.copied, other.copied)
        self._groups[root] = _Group(one.width, gcd(one.units, other.units), one.what or other.what, shared, copied)

    def _keep_heads(self, value: int, n: int) -> None:
        size = self.places[value].width // n
        for segment in self.segments(value):
            group = self._group(segment)
            group.units = gcd(group.units, segment.width // size if segment.width % size == 0 else 1)

    def _ask(self, asked: Asked) -> None:
        has_copies = asked.has_copies and asked.n_few < self._n_ranks
        if has_copies:
            self._ask_of(asked.few, asked.n_few, asked.what, copied=asked.n_few)
            self._ask_of(asked.many, asked.n_many, asked.what, shared=asked.n_few)
        else:
            self._ask_of((*asked.many, *asked.few), asked.n_few or asked.n_many, asked.what)

    def _ask_of(self, values: Iterable[int], units: int, what: str, shared: int = 0, copied: int = 0) -> None:
        """Values that are cut alike, by the same number of units."""
        first: Place | None = None
        for value in values:
            segment = self.segment(value)
            group = self._group(segment)
            if group.what and (group.shared, group.copied) != (shared, copied):
                self._refuse(f"value {value} has {group.what} for one operation and {what} for another")
            group.units, group.shared, group.copied = gcd(group.units, units), shared, copied
            group.what = group.what or what
            first = first or segment
            self._join(first, segment)

    def _check(self, counted: Sequence[tuple[str, int]]) -> None:
        """Refuses more ranks than the least number of units that is asked for."""
        groups = [group for root, group in self._groups.items() if self._root(root) == root and group.what]
        for group in groups:
            if group.copied not in (0, group.units) or (group.shared and group.units % group.shared):
                self._refuse(f"{group.what}: a norm or a rope joins heads, so that {group.units} parts are left")
        asked = [*((group.what, self._most(group)) for group in groups), *counted]
        what, most = min(asked, key=lambda each: each[1], default=("", self._n_ranks))
        if most < self._n_ranks:
            counts = [str(n) for n in range(1, most + 1)]
            listed = " or ".join([*([", ".join(counts[:-1])] if counts[:-1] else []), counts[-1]])
            raise ConfigError(
                f"tensor_parallel_size={self._n_ranks}: {what} cannot be shared by {self._n_ranks} ranks; {listed} can",
                option="tensor_parallel_size",
                value=self._n_ranks,
            )

    def _refuse(self, problem: str) -> NoReturn:
        raise UnsupportedError(f"tensor_parallel_size={self._n_ranks}: {problem}; set tensor_parallel_size=1")

    def _most(self, group: _Group) -> int:
        """The most ranks that can share a group."""
        if group.copied:
            return self._n_ranks  # as many as there are heads, which the group of the heads says
        return group.units or -(-group.width // BLOCKS[-1])


def _places(spec: Spec) -> list[Place]:
    places: list[Place] = []
    for number, (width, of, offset) in enumerate(spec["values"]):
        root, start = (number, 0) if of < 0 else (places[of].root, places[of].start + offset)
        places.append(Place(root, start, start + width))
    return places


def _shared_head(rank: int, n_shared: int, n_ranks: int) -> int:
    return rank * n_shared // n_ranks


def _shared(units: int, n_shared: int, n_ranks: int) -> Cut:
    """Heads of which the ranks with a copy of the same shared head divide those of this head among them."""
    each = units // n_shared
    ranges: list[tuple[int, int]] = []
    for head in range(n_shared):
        sharers = sum(_shared_head(rank, n_shared, n_ranks) == head for rank in range(n_ranks))
        ranges += _shares(head * each, (head + 1) * each, sharers)
    return Cut(units, tuple(ranges))
