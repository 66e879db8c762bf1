"""A transaction over the weights of several models of one engine: an object with the calls of the core's WeightUpdate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from .. import _core

Item = TypeVar("Item", bound="tuple[Any, ...]")


class JointUpdate:
    """Writes each tensor to the models that have a weight of its name; the first model refuses a name that none has.

    Args:
        updates: Of the models. The first one's commit begins the epoch.
        num_needed: How many of them, from the first one on, must be complete; the others keep weights that are not written.
    """

    def __init__(self, updates: Sequence[_core.WeightUpdate], num_needed: int) -> None:
        self._updates, self._needed = updates, updates[:num_needed]
        self._others = [(update, frozenset(update.names("missing"))) for update in updates[1:]]
        """The others, with the names of their weights. A model also knows names of its checkpoint that it does not read."""

    def _shares(self, items: list[Item]) -> list[tuple[_core.WeightUpdate, list[Item]]]:
        """The models with tensors to write; if no model has some names, the first one with these, which it refuses."""
        first = self._updates[0]
        if unknown := [item for item in items if not self.knows(item[0])]:
            return [(first, unknown)]
        shares = [(update, [item for item in items if item[0] in names]) for update, names in self._others]
        elsewhere = {item[0] for _, share in shares for item in share}
        mine = [item for item in items if item[0] not in elsewhere or first.knows(item[0])]
        return [(update, share) for update, share in (*shares, (first, mine)) if share]

    def _write(self, items: list[Item], call: Callable[[_core.WeightUpdate, list[Item]], list[str]]) -> list[str]:
        """Names that a model has no separate weights for, if no other model has."""
        shares = self._shares(items)
        skipped = [set(call(update, share)) for update, share in shares]
        written = {item[0] for (_, share), left in zip(shares, skipped, strict=True) for item in share if item[0] not in left}
        return [item[0] for item in items if item[0] not in written]

    def write(
        self, items: list[tuple[str, Any]], stream: int = 0, wants_finite: bool = False, lends: bool = False, /
    ) -> list[str]:
        """Like the core's; only the first model reads a source's tensors in place."""
        first = self._updates[0]
        return self._write(items, lambda update, own: update.write(own, stream, wants_finite, lends and update is first))

    def write_memory(
        self,
        items: list[tuple[str, int, str, Sequence[int], Sequence[int] | None]],
        on_device: bool,
        stream: int = 0,
        wants_finite: bool = False,
        /,
    ) -> list[str]:
        """Like the core's."""
        return self._write(items, lambda update, own: update.write_memory(own, on_device, stream, wants_finite))

    def write_shared(
        self, items: list[tuple[str, int, int, str, Sequence[int], Sequence[int] | None]], wants_finite: bool = False, /
    ) -> list[str]:
        """Like the core's."""
        return self._write(items, lambda update, own: update.write_shared(own, wants_finite))

    def check_memory(self, items: list[tuple[str, int, str, Sequence[int], Sequence[int] | None]], /) -> None:
        """Like the core's."""
        for update, own in self._shares(items):
            update.check_memory(own)

    def finish(self) -> None:
        """Like the core's."""
        for update in self._updates:
            update.finish()

    def commit(self, recompute: bool, /) -> int:
        """Like the core's. All writes have ended before the first model gets its new weights."""
        self.finish()
        first, *others = self._updates
        epoch = first.commit(recompute)
        for update in others:
            if update.progress()[3]:
                update.commit(recompute)
            else:
                update.abort()
        return epoch

    def abort(self) -> None:
        """Like the core's."""
        for update in self._updates:
            update.abort()

    # ---- questions --------------------------------------------------------------------------------------------------

    def names(self, which: Literal["missing", "repeated", "lent"], /) -> list[str]:
        """Like the core's; names that no model needs are not missing."""
        updates = self._needed if which == "missing" else self._updates
        return list(dict.fromkeys(name for update in updates for name in update.names(which)))

    def check_awake(self) -> None:
        """Like the core's."""
        self._updates[0].check_awake()

    def wants_all(self) -> bool:
        """Like the core's."""
        return self._updates[0].wants_all()

    def epoch(self) -> int:
        """Like the core's."""
        return self._updates[0].epoch()

    def knows(self, name: str, /) -> bool:
        """Whether a model has a weight of this name."""
        return self._updates[0].knows(name) or any(name in names for _, names in self._others)

    def progress(self) -> tuple[int, int, int, bool]:
        """Names, names written, bytes read, and whether a weight may have changed, of all models together."""
        names, written, num_bytes, changed = zip(*(update.progress() for update in self._updates), strict=True)
        return sum(names), sum(written), sum(num_bytes), any(changed)

    def has_written_others(self) -> bool:
        """Whether a weight of a model behind the first one may have changed."""
        return any(update.progress()[3] for update in self._updates[1:])
