"""One backend's functions on NumPy arrays, for kernel tests and benchmarks: `Backend` calls the table of backend.h by ctypes.

Views are two-dimensional arrays of the activations' type (any two-byte items for two-byte types) with rows that may lie apart;
other arrays are contiguous float32 or int32. A batch is (positions, row_seq, seq_first_row), a table int32 [n_seqs, pages].
Outputs are written in place.
"""

from __future__ import annotations

from staging import Matrix

from .attention import Attention
from .mixtures import Mixtures
from .recurrent import Recurrent
from .rows import RowOperations
from .steps import Steps
from .updates import WeightUpdates

__all__ = ["Backend", "Matrix"]


class Backend(RowOperations, Mixtures, Attention, Recurrent, WeightUpdates, Steps):
    """An opened backend with all its operations; `Opened` has the arguments."""
