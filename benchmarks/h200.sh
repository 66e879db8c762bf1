#!/bin/sh
# build | test: the CUDA backend on a bare machine with Python 3.11 or later, gcc, nvcc 13 and an H200, without a network.
# build compiles in place; test runs the kernel tests and the exactness suite on the device. Each takes under 10 minutes.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

need() {
    missing=$("$python" -c "
import importlib.util, sys
print(' '.join(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))" "$@")
    [ -z "$missing" ] || { echo "these Python packages are missing: $missing" >&2; exit 2; }
}

case "${1:-}" in
build)
    need setuptools
    LLMPY_CUDA=require LLMPY_WERROR=1 "$python" setup.py -q build_ext --inplace
    PYTHONPATH=. "$python" -c "from llmpy import _core, hardware; print(_core.device_info('cuda:0', hardware.cuda_library()))"
    ;;
test)
    need numpy pytest ml_dtypes
    export PYTHONPATH=.
    # test_linear.py and test_linear_avx512.py are the CPU's own; the device's linears are in test_linear_cuda.py.
    "$python" -m pytest -q tests/kernels -k cuda --ignore=tests/kernels/test_linear.py \
        --ignore=tests/kernels/test_linear_avx512.py
    need tokenizers jinja2 tqdm safetensors
    "$python" -m pytest -q tests/engine/test_exactness.py -k cuda
    ;;
*)
    echo "usage: benchmarks/h200.sh build|test" >&2
    exit 2
    ;;
esac
