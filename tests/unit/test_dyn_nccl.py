"""Our declarations of NCCL against its own header, where a wheel or a toolkit brings one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    "NCCL_OK": "ncclSuccess", "NCCL_IN_PROGRESS": "ncclInProgress", "NCCL_UINT8": "ncclUint8", "NCCL_FLOAT32": "ncclFloat32",
    "NCCL_SUM": "ncclSum", "NCCL_UNDEFINED": "NCCL_CONFIG_UNDEF_INT", "NCCL_OLDEST": "NCCL_VERSION(2, 14, 0)",
    "sizeof(struct nccl_id)": "sizeof(ncclUniqueId)",
    "offsetof(struct nccl_config, magic)": "offsetof(ncclConfig_t, magic)",
    "offsetof(struct nccl_config, version)": "offsetof(ncclConfig_t, version)",
    "offsetof(struct nccl_config, is_blocking)": "offsetof(ncclConfig_t, blocking)",
    "offsetof(struct nccl_config, cluster_size)": "offsetof(ncclConfig_t, cgaClusterSize)",
}  # fmt: skip


def test_constants_and_sizes(tmp_path: Path) -> None:
    wheels = [Path(entry) / "nvidia" / name / "include" for entry in sys.path for name in ("nccl", "cu13")]
    places = [*wheels, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include", Path("/usr/include")]
    header = next((place for place in places if (place / "nccl.h").exists()), None)
    if header is None:
        pytest.skip("no nccl.h")
    (tmp_path / "cuda_runtime.h").write_text("typedef struct CUstream_st *cudaStream_t;\n")  # all that nccl.h wants of it
    (tmp_path / "cuda_fp16.h").touch()
    checks = [f'_Static_assert((long)({ours}) == (long)({theirs}), "{theirs}");' for ours, theirs in PAIRS.items()]
    checks.append("int check(void) { ncclConfig_t c = NCCL_CONFIG_INITIALIZER; return c.magic == NCCL_MAGIC; }")
    ours = ROOT / "kernels/cuda/memory/dyn_nccl.h"
    source = tmp_path / "check.c"
    source.write_text("\n".join(["#include <stddef.h>", "#include <nccl.h>", f'#include "{ours}"', *checks]) + "\n")
    command = ["cc", "-std=c11", "-fsyntax-only", "-I", str(tmp_path), "-isystem", str(header), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
