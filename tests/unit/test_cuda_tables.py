"""The CUDA backend's tables as the source has them, which needs no device."""

import re
from pathlib import Path

CUDA = Path(__file__).parents[2] / "kernels/cuda"


def source(name: str) -> str:
    """A file of kernels/cuda without its comments."""
    return re.sub(r"/\*.*?\*/", "", (CUDA / name).read_text(), flags=re.S)


def test_every_weight_type_has_one_row_and_a_reader() -> None:
    table = re.search(r"CUDA_TYPES\[\] = \{(.*?)\n\};", source("types.cuh"), re.S)
    assert table
    rows = re.findall(r"\{(DTYPE_\w+),", table[1])
    readers = re.findall(r"weight_value\(weight_type<(DTYPE_\w+)>", source("weight.cuh"))
    assert rows and sorted(rows) == sorted(set(rows)) == sorted(readers)
