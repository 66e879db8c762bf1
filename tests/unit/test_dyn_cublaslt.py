"""Our declarations of cuBLASLt against its own header, where a wheel or a toolkit brings one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    "LT_TYPE_F32": "CUDA_R_32F", "LT_TYPE_F16": "CUDA_R_16F", "LT_TYPE_BF16": "CUDA_R_16BF",
    "LT_COMPUTE_F32": "CUBLAS_COMPUTE_32F", "LT_TRANSPOSED": "CUBLAS_OP_T",
    "LT_DESC_TRANSPOSE_A": "CUBLASLT_MATMUL_DESC_TRANSA",
    "LT_LAYOUT_TYPE": "CUBLASLT_MATRIX_LAYOUT_TYPE", "LT_LAYOUT_ROWS": "CUBLASLT_MATRIX_LAYOUT_ROWS",
    "LT_LAYOUT_COLS": "CUBLASLT_MATRIX_LAYOUT_COLS", "LT_LAYOUT_LD": "CUBLASLT_MATRIX_LAYOUT_LD",
    "LT_PREF_WORKSPACE_BYTES": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
    "LT_PREF_REDUCTION_MASK": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
    "LT_PREF_ALIGNMENT_A": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES",
    "LT_PREF_ALIGNMENT_A + 3": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES",
    "LT_CONFIG_SPLIT_K": "CUBLASLT_ALGO_CONFIG_SPLITK_NUM", "LT_CONFIG_REDUCTION": "CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME",
    "sizeof(struct lt_algorithm)": "sizeof(cublasLtMatmulAlgo_t)",
    "sizeof(struct lt_found)": "sizeof(cublasLtMatmulHeuristicResult_t)",
    "offsetof(struct lt_found, workspace_bytes)": "offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize)",
    "offsetof(struct lt_found, status)": "offsetof(cublasLtMatmulHeuristicResult_t, state)",
    "0": "CUBLASLT_REDUCTION_SCHEME_NONE",
}  # fmt: skip


def includes() -> list[Path]:
    """The folders of the first cublasLt.h, and of the runtime's headers that it wants."""
    wheels = [Path(entry) / "nvidia" / name / "include" for entry in sys.path for name in ("cu13", "cublas")]
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    found = [folder for folder in (*wheels, toolkit) if (folder / "cublasLt.h").exists()][:1]
    return found + [folder for folder in (*wheels, toolkit) if found and (folder / "cuda_runtime_api.h").exists()]


def test_constants_and_sizes(tmp_path: Path) -> None:
    folders = includes()
    if len(folders) < 2:
        pytest.skip("no cublasLt.h")
    source = tmp_path / "check.c"
    checks = [f'_Static_assert((size_t)({ours}) == (size_t)({theirs}), "{theirs}");' for ours, theirs in PAIRS.items()]
    header = ROOT / "kernels/cuda/linear/dyn_cublaslt.h"
    source.write_text("\n".join(["#include <stddef.h>", "#include <cublasLt.h>", f'#include "{header}"', *checks, ""]))
    options = [option for folder in folders for option in ("-isystem", str(folder))]
    result = subprocess.run(["cc", "-std=c11", "-fsyntax-only", *options, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
