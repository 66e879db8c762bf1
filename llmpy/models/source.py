"""Maps tensor names of Hugging Face checkpoints to tensors of a file."""

from collections.abc import Sequence

from .pieces import Piece
from .rope import Floats


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

    def heads(self, name: str) -> int | None:
        """Size of the heads of a matrix if its rows in the file alternate between the halves of each head.

        0: they have another order or other values than the checkpoint's. None: they are the checkpoint's.
        """
        return None

    def keeps_groups(self, name: str) -> bool:
        """Whether the file, like the checkpoint, packs the rows of this module by heads."""
        return True
