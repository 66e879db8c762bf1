"""The CUDA backend's tables in the source; needs no device."""

import ctypes
import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmpy import hardware

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "kernels/cuda"
TABLES = {  # as enum way_table has them
    "LINEAR_WAYS": "linear/linear.cu", "EXPERTS_WAYS": "experts/experts.cu", "EXPERTS_LINEAR_WAYS": "experts/experts.cu",
    "ATTENTION_WAYS": "attention/attention.cu", "GATHER_WAYS": "ranks/gather.cu",
}  # fmt: skip


def source(name: str) -> str:
    """A file of kernels/cuda without its comments."""
    return re.sub(r"/\*.*?\*/", "", (CUDA / name).read_text(), flags=re.S)


def test_every_weight_type_has_one_row_and_a_format() -> None:
    table = re.search(r"CUDA_TYPES\[\] = \{(.*?)\n\};", source("core/types.cuh"), re.S)
    assert table
    rows = re.findall(r"\{(DTYPE_\w+),", table[1])
    text = source("core/weight_format.cuh") + source("core/weight_format_iq.cuh")
    formats = re.findall(r"struct weight_format<(DTYPE_\w+)> : \w+<\1, (\w+)(?:, (\w+))?>", text)
    assert rows and sorted(rows) == sorted(set(rows)) == sorted(name for name, _, _ in formats)
    blocks = re.findall(r'\[(DTYPE_\w+)\] = \{\{"\w+", (\d+), (\d+)\}', (ROOT / "csrc/base/dtype.c").read_text())
    quantised = [one for one in formats if one[2]]
    assert len(quantised) == len(rows) - len(["DTYPE_F32", "DTYPE_F16", "DTYPE_BF16"]) and {*quantised} <= {*blocks}


def ways(table: str) -> list[str]:
    """Names of the rows of a table of ways.cuh."""
    rows = re.search(rf"{table}\[\] = \{{(.*?)\n\}};", source(TABLES[table]), re.S)
    assert rows, table
    return re.findall(r'^    \{"(\w+)",', rows[1], re.M)


@pytest.mark.parametrize("table", TABLES)
def test_ways_have_names_of_their_own_and_a_line_in_the_guide(table: str) -> None:
    page = (ROOT / "docs/develop/cuda-backend.md").read_text()
    section = re.search(rf"^`{table}` .*?\n\n(.*?)\n\n", page, re.S | re.M)
    assert section, f"docs/develop/cuda-backend.md: wanted a table behind the line that begins with `{table}`"
    names = ways(table)
    assert len(names) > 2 and len({*names}) == len(names)
    assert re.findall(r"^\| `(\w+)` \|", section[1], re.M) == names


def test_the_library_has_the_ways_of_the_source() -> None:
    if not hardware.cuda_library():
        pytest.skip("no CUDA backend in this build")
    library = ctypes.CDLL(hardware.cuda_library())
    library.llmpy_cuda_way.restype = ctypes.c_char_p
    for number, table in enumerate(TABLES):
        names = ways(table)
        assert [library.llmpy_cuda_way(number, row) for row in range(len(names) + 1)] == [*map(str.encode, names), None]
    assert library.llmpy_cuda_way(len(TABLES), 0) is None


def test_architectures_are_machine_code_or_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    compiling = importlib.import_module("compiling")

    def codes() -> list[str]:
        return [flag for flag in compiling.cuda_flags() if flag.startswith("arch=")]

    monkeypatch.delenv("LLMPY_CUDA_ARCHS", raising=False)
    assert codes() == ["arch=compute_90a,code=sm_90a", "arch=compute_80,code=compute_80"]
    monkeypatch.setenv("LLMPY_CUDA_ARCHS", "86,compute_80:sm_90")
    assert codes() == ["arch=compute_86,code=sm_86", "arch=compute_80,code=sm_90"]


def test_the_code_for_other_devices_has_no_instructions_of_sm_90a() -> None:
    """The PTX in the library is for compute_80, and of the kernels of sm_90a nothing is left in it."""
    reader = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if not hardware.cuda_library() or not reader:
        pytest.skip("no CUDA backend in this build, or no cuobjdump")
    ptx = subprocess.run([reader, "-ptx", hardware.cuda_library()], capture_output=True, text=True, check=True).stdout
    targets = {*re.findall(r"^\.target (\w+)", ptx, re.M)}
    if not targets:
        pytest.skip("a library without PTX")
    assert targets == {"sm_80"}
    newer = r"\b(wgmma|griddepcontrol|setmaxnreg|mapa|multimem|stmatrix|cp\.async\.bulk|barrier\.cluster|mbarrier)\b[^;]*"
    assert not re.search(newer, ptx)
    stubs = re.findall(r"\.entry \w*linear_gemm\w*\(.*?^\}", ptx, re.M | re.S)
    assert stubs and all("trap;" in stub for stub in stubs)


def kernels(name: str) -> list[str]:
    """Names of a file's kernels."""
    text = re.sub(r"__(?:launch_bounds|cluster_dims)__\((?:[^()]|\([^()]*\))*\)", "", source(name))
    return re.findall(r"__global__\s+void\s+(\w+)\(", text)


def test_kernels_have_names_of_their_own_that_begin_with_the_operation() -> None:
    """So a profile tells them apart. anchor_kernel is in every file and never runs."""
    files = sorted(str(path.relative_to(CUDA)) for path in CUDA.rglob("*.cu*"))
    found = {kernel: name for name in files for kernel in kernels(name) if kernel != "anchor_kernel"}
    assert sum(len(kernels(name)) for name in files) == sum(source(name).count("__global__") for name in files)
    assert len(found) == sum(source(name).count("__global__") for name in files) - 1
    entries = re.findall(r"ENTRY\((\w+)\)", re.sub(r"/\*.*?\*/", "", (CUDA.parent / "entries.def").read_text(), flags=re.S))
    operations = {*entries, "gather", "matrix", "meet", "norm"}  # matrix_fill and matrix_write; rms_norm and add_rms_norm
    other = [f"{name}: {kernel}" for kernel, name in found.items() if not kernel.startswith(tuple(operations))]
    assert len(found) > 60 and not other
