"""Operations of towers, which turn an image's bytes into rows of the text model (docs/use/vision.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from .pieces import Piece, flat
from .rope import Rope

if TYPE_CHECKING:
    from .blocks import Model, Value
    from .program import Rows
    from .rope import Floats

RowList = Literal["class", "patches", "features", "windows", "near", "near_half", "near_quarter", "cells"]
LISTS: tuple[RowList, ...] = (
    "class", "patches", "features", "windows", "near", "near_half", "near_quarter", "cells",
)  # fmt: skip
"""Lists of rows of a piece, in the order of enum row_list in csrc/program/program.h."""


class TowerBlock:
    """Base class of `Block` with the operations that only towers have. A row is a patch."""

    _model: Model
    prefix: str

    def pixels(self, table: Floats, width: int, *, frames: int = 1) -> Value:
        """Numbers of the patches' bytes, in the order channel, frame, y, x: [rows, width].

        Args:
            table: float32 [3, 256]; number of each byte, by channel.
            width: Columns: 3 * frames * patch size^2.
            frames: How often the one frame of an image is repeated.
        """
        m = self._model
        if table.shape != (3, 256) or width % (3 * frames):
            m.refuse("pixels", self.prefix, f"wanted a table [3, 256] and 3 equal channels, have {table.shape} and {width}")
        return m.emit("pixels", [], width, weights=[m.constant(table.reshape(-1))], n_frames=frames)

    def embed_taps(self, name: str, shape: tuple[int, ...], *, taps: int = 1, of_cells: bool = False) -> Value:
        """The weighted sum of rows of a learned table of positions; an image brings rows and weights: [rows, shape[-1]].

        Args:
            name: Whole name of the tensor.
            shape: Shape of the tensor.
            taps: Most rows in a sum.
            of_cells: For the rows of the list "cells".
        """
        m, rows = self._model, (LISTS.index("cells") if of_cells else 0, 1)
        weights = [m.flat("embed_taps", self.prefix + name, shape)]
        given: dict[str, float | str] = {"n_taps": taps, **({"of_cells": 1} if of_cells else {})}
        return m.emit_rows("embed_taps", [], shape[-1], rows, weights, 0, given)

    def rows(
        self, x: Value, chosen: RowList, *, weight: str | Sequence[str] | None = None, shape: tuple[int, ...] = ()
    ) -> Value:
        """Rows of x by a list that an image brings.

        Args:
            x: [rows, n].
            chosen: "class" puts a weight where class rows are or undoes windows, "patches" drops class rows, "features"
                brings features into the order of their tokens; the others are those of enum row_list in
                csrc/program/program.h.
            weight: Whole names of the tensors [n] that the list may name; None: it names none.
            shape: Shape of the tensors; (): [n].
        """
        m = self._model
        m.expect("rows", self.prefix, x)
        names = [weight] if isinstance(weight, str) else weight or ()
        weights = [m.vector("rows", [flat(self.prefix + name, shape or (x.width,)) for name in names])] if names else []
        number = LISTS.index(chosen)
        return m.emit_rows("rows", [x], x.width, (number, 1), weights, 0, {"list": number})

    def group(self, x: Value, n: int) -> Value:
        """n neighbouring rows as one row, [rows / n, n * width], without a copy; the width is a multiple of 16."""
        m = self._model
        m.expect("group", self.prefix, x)
        if x.width % 16:
            m.refuse("group", self.prefix, f"wanted rows of a multiple of 16 columns, have {x.width}")
        return m.emit_rows("group", [x], n * x.width, _joined(x.rows, n), [], 0, {"n": n})

    def around(self, x: Value, chosen: RowList, name: str, width: int) -> Value:
        """A convolution of 3 x 3 without a bias over the rows of the list, [rows of the list / 9, width].

        Args:
            x: [rows, n]; n is a multiple of 16.
            chosen: "near", "near_half" or "near_quarter".
            name: Module name; the tensor is NAME.weight [width, n, 3, 3].
            width: Columns of the result.
        """
        import numpy as np

        m, joined = self._model, self.group(self.rows(x, chosen), 9)
        order = np.arange(joined.width).reshape(9, -1).T.reshape(-1)  # the matrix has the columns channel by channel
        ordered = m.emit_rows("take", [joined], joined.width, joined.rows, [m.constant(order.tolist())], 0, {})
        matrix = Piece(f"{self.prefix}{name}.weight", (width, x.width, 3, 3), width)
        weights = [m.matrix("linear", [matrix], joined.width)]
        return m.emit_rows("linear", [ordered], width, ordered.rows, weights, 0, {})

    def grid_attention(self, q: Value, k: Value, v: Value, lines: str, columns: str, sides: int, *, segments: int) -> Value:
        """`row_attention` within squares of rows, with learned scores of the distances of two rows (SAM).

        Args:
            q, k, v: [rows, n_heads * head_dim].
            lines, columns: Whole names of the tensors of distances, [2 * sides - 1, head_dim].
            sides: Rows along a side of the square that they were made for; an image brings the rows for other squares.
            segments: The table, 0 or 1, of the squares.
        """
        m = self._model
        m.expect("grid_attention", self.prefix, q, k, v)
        n_heads, shape = m.heads("grid_attention", self.prefix, q), (2 * sides - 1, m.head_dim)
        if not q.width == k.width == v.width:
            m.refuse("grid_attention", self.prefix, f"wanted equal widths, have {q.width}, {k.width} and {v.width}")
        weights = [m.flat("grid_attention", self.prefix + name, shape) for name in (lines, columns)]
        given: dict[str, float | str] = {"n_heads": n_heads, "scale": m.head_dim**-0.5, "segments": segments}
        return m.emit_rows("grid_attention", [q, k, v], q.width, q.rows, weights, 0, given)

    def concat(self, first: Value, second: Value) -> Value:
        """All columns of `first`, then those of `second`."""
        return self._model.emit("concat", [first, second], first.width + second.width)

    def mean_rows(self, x: Value, n: int) -> Value:
        """The mean of n neighbouring rows, [rows / n, width]."""
        m = self._model
        m.expect("mean_rows", self.prefix, x)
        return m.emit_rows("mean_rows", [x], x.width, _joined(x.rows, n), [], 0, {"n": n})

    def scale_by(self, x: Value, name: str) -> Value:
        """x times a learned factor of each column; `name` is the tensor's whole name, [n]."""
        m = self._model
        m.expect("scale_by", self.prefix, x)
        return m.emit("act", [x], x.width, weights=[m.flat("scale_by", self.prefix + name, (x.width,))], act="scale")

    def axial_rope(
        self,
        head_dim: int,
        theta: float,
        *,
        axes: tuple[int, int] = (0, 1),
        interleaved: bool = False,
        alternating: bool = False,
    ) -> Rope:
        """A rotation by the row and the column of a patch.

        Args:
            head_dim: Elements of a head.
            theta: Base of the frequencies.
            interleaved: As in `Rope`.
            axes: The axes of the image's positions: rows are 0, columns 1.
            alternating: Rows take the even frequencies of the whole head and columns the odd ones (Pixtral); otherwise both
                take all frequencies of half a head.
        """
        import numpy as np

        from .rope import base_frequencies

        n = head_dim // 4
        every = base_frequencies(theta, head_dim) if alternating else base_frequencies(theta, head_dim // 2)
        parts = (every[0::2], every[1::2]) if alternating else (every, every)
        return Rope(np.concatenate(parts), interleaved=interleaved, axes=np.repeat(np.array(axes, np.int32), n))

    def splice(self, x: Value, first: int = 0, *, is_sum: bool = False) -> Value:
        """Of the text's program: features of images in the rows that stand for them. `Model.embed` calls it.

        Args:
            x: [rows, n]; nothing else may read it.
            first: The feature's first column.
            is_sum: Add the feature to the row instead.
        """
        m = self._model
        m.expect("splice", self.prefix, x)
        return m.emit("splice", [x], x.width, first=first, is_sum=int(is_sum))


def _joined(rows: Rows, n: int) -> Rows:
    return rows[0], rows[1] * n
