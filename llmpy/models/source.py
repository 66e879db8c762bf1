"""Maps tensor names of Hugging Face checkpoints to tensors of a file."""

from collections.abc import Sequence
from typing import NamedTuple

from .pieces import Piece
from .rope import Floats


class Order(NamedTuple):
    """The order of a matrix in a file, compared with the checkpoint.

    Attributes:
        heads: Size of heads if rows alternate between the halves of each head; 0: rows are in order.
        columns: uint32: the checkpoint's column of each column; b"": columns are in order.
        is_other: Whether the matrix has another order than these, or other values than the checkpoint's.
    """

    heads: int = 0
    columns: bytes = b""
    is_other: bool = False


class Source:
    """A safetensors checkpoint: names and tensors are used unchanged.

    Attributes:
        is_gguf: Whether the file is a GGUF file; GGUF stacks experts and reorders the rows of heads.
        has_offsets: Whether the offsets are already added to the weights of norms.
    """

    is_gguf = False
    has_offsets = False

    def places(self, name: str) -> Sequence[str]:
        """The tensors of the file that form this tensor when stacked; empty: the format has no name for it."""
        return (name,)

    def values(self, name: str) -> Floats | None:
        """The values of a tensor that the file stores in another form; None: they are in `places`."""
        return None

    def split(self, piece: Piece) -> Sequence[Piece]:
        """Splits a piece into several if the file has its rows in another order."""
        return (piece,)

    def order(self, name: str) -> Order | None:
        """The order of a matrix in the file; None: the checkpoint's."""
        return None

    def keeps_groups(self, name: str) -> bool:
        """Whether the file, like the checkpoint, packs the rows of this module by heads."""
        return True
