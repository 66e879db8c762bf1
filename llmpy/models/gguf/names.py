"""Maps names of Hugging Face checkpoints to tensors of a GGUF file by a family's table."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import CheckpointError
from ..pieces import Piece
from ..rope import Floats
from ..source import Order, Source
from .family import USUAL, USUAL_OUTER, Family, Names
from .metadata import Metadata

# Tensors that are not weights: the configuration reads the first three, the others repeat metadata.
NO_WEIGHTS = (
    "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "blk.*.attn_rot_embd",
    "blk.*.rope_freqs.weight",
)  # fmt: skip
DECAY = "A_log"  # GGUF files store -exp(A_log)
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
"""A layer's tensor in most checkpoints of Hugging Face: its number, and the name inside."""
HEADS = re.compile(r"(blk\.\d+\.attn_)([qkv])(\.(?:weight|bias))")


class GgufSource(Source):
    """The tensors of a GGUF file.

    Args:
        family: Table of the file's architecture.
        meta: The file's metadata.
        read: Gives a tensor's values as float32 bytes.
        alternating: Size of the heads of q and k whose rows alternate between the two halves of the head; 0: there are none.
        separates: Whether the program separates these rows into halves.
    """

    is_gguf = True

    def __init__(self, family: Family, meta: Metadata, read: Callable[[str], bytes], alternating: int, separates: bool) -> None:
        self.family, self.has_offsets = family, family.has_offsets
        self._alternating, self._separates = alternating, separates
        self._meta, self._read = meta, read
        self._firsts: dict[str, int] = {}  # first rows of q, k and v in joint tensors
        self._taken: dict[str, int] = {}  # rows of a joint tensor that are assigned so far
        self._inner, self._outer = {**USUAL, **family.names}, {**USUAL_OUTER, **family.outer}
        self._layer = re.compile(re.escape(family.layers).replace(r"\#", r"(\d+)") + "(.+)")

    def places(self, name: str) -> Sequence[str]:
        return [self._joined(place) or place for place in self._own_places(name)]

    def _own_places(self, name: str) -> list[str]:
        """The places of a tensor by the family's table."""
        inside = self._layer.fullmatch(name)
        if inside is None:
            return lookup(self._outer, name)
        return [f"blk.{inside[1]}.{place}" for place in lookup(self._inner, inside[2])]

    def _joined(self, place: str) -> str | None:
        """The joint tensor of q, k and v, if the file has it instead of `place`."""
        heads = HEADS.fullmatch(place)
        joined = f"{heads[1]}qkv{heads[3]}" if heads else None
        return joined if joined in self._meta.tensors and place not in self._meta.tensors else None

    def values(self, name: str) -> Floats | None:
        inside = self._layer.fullmatch(name)
        if inside is None:
            return None
        key = self.family.metadata.get(inside[2])
        if key is not None:
            given = self._meta.values.get(key)
            return np.asarray(given[int(inside[1])] if isinstance(given, list) else given, np.float32).reshape(1)
        if not name.endswith(DECAY):
            return None
        with np.errstate(all="ignore"):
            return np.log(-np.frombuffer(self._read(self.places(name)[0]), np.float32))

    def split(self, piece: Piece) -> Sequence[Piece]:
        heads = self._attends(piece.name)
        if heads is None:
            return (piece,)
        joined, size = self._joined(heads[0]), self._alternating
        if joined is not None:
            piece = self._below(piece, joined, is_last=heads[2] == "v")
        if not self._separates or heads[2] == "v":
            return (piece,)
        firsts = [piece.base + head + half for head in range(0, piece.rows, size) for half in (0, 1)]
        return [piece._replace(rows=size // 2, base=first, inner=1, stride=2) for first in firsts]

    def order(self, name: str) -> Order | None:
        found = self._attends(name)
        if self.family.has_factors or (found is not None and self._joined(found[0]) is not None):
            return Order(is_other=True)
        turns = self._alternating > 0 and found is not None and found[2] != "v"
        return Order(heads=self._alternating) if turns else None

    def _attends(self, name: str) -> re.Match[str] | None:
        """The parts of the name in the file, if the tensor is q, k or v."""
        found = [HEADS.fullmatch(place) for place in self._own_places(name)]
        return found[0] if len(found) == 1 else None

    def _below(self, piece: Piece, joined: str, is_last: bool) -> Piece:
        """A piece of a joint tensor, below the pieces that were requested before it."""
        shape = self._meta.tensors[joined][1]
        first = self._firsts.setdefault(piece.name, self._taken.get(joined, 0))
        self._taken[joined] = first + piece.shape[0]
        if is_last and shape[:1] != (self._taken[joined],):
            wanted = [self._taken[joined], *piece.shape[1:]]
            raise CheckpointError(
                f"{self._meta.file}: tensor {joined}: wanted {wanted}, have {list(shape)}", file=self._meta.file, tensor=joined
            )
        return piece._replace(shape=(*shape[:1], *piece.shape[1:]), base=piece.base + first)

    def keeps_groups(self, name: str) -> bool:
        inside = self._layer.fullmatch(name)
        return inside is not None and inside[2] in self.family.grouped


def lookup(table: Names, name: str) -> list[str]:
    """Whole names in the file for a name; the table has the name or its stem."""
    if name in table:
        return list(_several(table[name]))
    stem, _, kind = name.rpartition(".")
    if stem not in table or kind not in ("weight", "bias"):
        return []
    return [f"{place}.{kind}" for place in _several(table[stem])]


def _several(place: str | tuple[str, ...]) -> tuple[str, ...]:
    return (place,) if isinstance(place, str) else place
