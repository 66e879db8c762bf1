"""Where a file has the tensors that a program asks for under the names of Hugging Face checkpoints."""

from collections.abc import Sequence

from .pieces import Piece
from .rope import Floats


class Source:
    """A checkpoint of safetensors: everything as it is, under its own name.

    Attributes:
        is_gguf: Whether the file is one of GGUF, which stacks experts and sorts the rows of heads.
        has_offsets: Whether the weights of norms have their offsets already.
    """

    is_gguf = False
    has_offsets = False

    def places(self, name: str) -> Sequence[str]:
        """The tensors of the file that are this one, below each other; none: the format has no name for it."""
        return (name,)

    def values(self, name: str) -> Floats | None:
        """The values of a tensor that the file keeps as something else; None: they are in its places."""
        return None

    def split(self, piece: Piece) -> Sequence[Piece]:
        """A piece, as pieces below each other where the file has its rows in another order."""
        return (piece,)

    def keeps_groups(self, name: str) -> bool:
        """Whether rows of this module that go head by head do so in the file, too."""
        return True
